//! What holds in a bucket besides what holds everywhere: segments as objects, what others find of
//! them and when, a server that is down or silent, damage, the limit, ages, and a server that
//! cannot put only what is not there.

#![allow(clippy::unwrap_used, reason = "tests may fail")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use ucm_core::{BlockId, ErrorKind, crc32c};
use ucm_infra::{Clock, LANE_SPACE, ManualClock, MonotonicTime};
use ucm_io::{IoOptions, IoPool};
use ucm_media::backend::Flush;
use ucm_store::breaker::BreakerConfig;
use ucm_store::engine::Task;

use crate::common::segments::{begin, change, finds, is_over, loads};
use crate::common::servers::{S3, s3, s3_at};
use crate::common::sides::{CUTS, assert_cut, sided};
use crate::common::{Device, Fixture, Medium, Store, directory, eventually, id, ids};

/// A server of this test, and its settings in a store; none where it was not built.
fn started() -> Option<(TempDir, S3, Fixture)> {
    let dir = directory();
    let server = s3(dir.path())?;
    let fixture = Fixture {
        medium: Medium::Kind("object"),
        options: server.options(),
        breaker: BreakerConfig {
            cool_down: Duration::from_millis(50),
            ..BreakerConfig::default()
        },
        ..Fixture::default()
    };
    Some((dir, server, fixture))
}

/// The same with these options beside.
fn with(fixture: &Fixture, options: &[(&'static str, Value)]) -> Fixture {
    let mut fixture = fixture.clone();
    fixture.options.extend(options.iter().cloned());
    fixture
}

/// Segments are put after an hour, or at a flush.
fn patient(fixture: &Fixture) -> Fixture {
    Fixture {
        slots: 64,
        ..with(fixture, &[("object_age", json!(60))])
    }
}

fn dumped(store: &Store, ids: &[BlockId]) {
    for ids in ids.chunks(2) {
        store
            .dump(&Device::filled(&store.fixture, ids), ids)
            .unwrap();
    }
}

/// Begins to dump blocks, which can be read here at once, and puts them together.
fn dumped_together(store: &Store, ids: &[BlockId]) {
    let device = Device::filled(&store.fixture, ids);
    let task = begin(store, &device, ids);
    store.backend.flush(Flush::Now);
    store.outcome(&task).unwrap();
}

/// What lies below a directory.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let below = entries
        .map(|entry| entry.path())
        .flat_map(|path| match path.is_dir() {
            true => files(&path),
            false => vec![path],
        });
    below.collect()
}

/// Bytes of the segments below a directory.
fn bytes_of(dir: &Path) -> u64 {
    let segments = files(dir)
        .into_iter()
        .filter(|path| path.extension().is_some_and(|end| end == "seg"));
    segments
        .map(|path| std::fs::metadata(path).map_or(0, |file| file.len()))
        .sum()
}

fn job() -> ucm_io::IoJob {
    let pool = IoPool::psync(false, &IoOptions::with_workers(2)).unwrap();
    pool.here(LANE_SPACE, MonotonicTime::NEVER)
}

#[test]
fn many_records_are_one_object_that_others_find() {
    let Some((dir, _server, fixture)) = started() else {
        return;
    };
    let store = Store::open(dir.path(), patient(&fixture));
    let other = Store::open(dir.path(), fixture.clone());
    let all = ids(24);
    let device = Device::filled(&store.fixture, &all);
    let task = begin(&store, &device, &all);
    assert!(
        loads(&store, &all),
        "from memory, as long as they were not put"
    );
    assert!(!is_over(&store, &task));
    assert_eq!(store.segments().len(), 0);
    assert_eq!(finds(&other, &all), [false; 24]);
    store.backend.flush(Flush::Now);
    store.outcome(&task).unwrap();
    assert_eq!(store.segments().len(), 1);
    assert!(loads(&store, &all));
    eventually("the other one finds it", || {
        finds(&other, &all) == [true; 24]
    });
    assert!(loads(&other, &all));
    dumped(&other, &all);
    assert_eq!(
        store.segments().len(),
        1,
        "what is there is not written again"
    );
    let mut listed: Vec<BlockId> = other
        .backend
        .list(&job())
        .unwrap()
        .iter()
        .map(|one| one.id)
        .collect();
    listed.sort_unstable();
    let mut expected = all.clone();
    expected.sort_unstable();
    assert_eq!(listed, expected);
}

#[test]
fn what_waits_is_put_when_a_store_closes_and_when_it_is_old() {
    let Some((dir, _server, fixture)) = started() else {
        return;
    };
    let store = Store::open(dir.path(), patient(&fixture));
    let device = Device::filled(&store.fixture, &ids(3));
    let task = begin(&store, &device, &ids(3));
    drop(store);
    drop(task);
    let clock = ManualClock::new();
    let as_clock = Arc::clone(&clock) as Arc<dyn Clock>;
    let store = Store::with_clock_now(dir.path(), patient(&fixture), as_clock);
    assert!(loads(&store, &ids(3)));
    let device = Device::filled(&store.fixture, &[id(7)]);
    let task = begin(&store, &device, &[id(7)]);
    assert!(!is_over(&store, &task));
    // sooner than its age, or no caller would wait for it any more
    clock.advance(fixture.deadlines.dump / 2);
    eventually("it is old enough", || is_over(&store, &task));
    store.outcome(&task).unwrap();
}

#[test]
fn a_long_segment_goes_in_parts() {
    let Some((dir, _server, fixture)) = started() else {
        return;
    };
    let fixture = Fixture {
        tensors: vec![1 << 20, 1 << 20],
        slots: 16,
        ..with(
            &patient(&fixture),
            &[("storage_capacity", json!(8_u64 << 30))],
        )
    };
    let store = Store::open(dir.path(), fixture.clone());
    let blocks = ids(5);
    dumped_together(&store, &blocks);
    let segments = store.segments();
    assert_eq!(segments.len(), 1);
    assert!(std::fs::metadata(&segments[0]).unwrap().len() > 16 << 20);
    let other = Store::open(dir.path(), fixture);
    assert!(loads(&other, &blocks));
}

#[test]
fn a_server_that_is_killed_has_what_was_published() {
    let Some((dir, server, fixture)) = started() else {
        return;
    };
    let store = Store::open(dir.path(), fixture);
    dumped(&store, &ids(4));
    let port = server.server.port;
    drop(server);
    assert!(!loads(&store, &ids(4)));
    assert!(
        store
            .dump(&Device::filled(&store.fixture, &[id(8)]), &[id(8)])
            .is_err()
    );
    let _again = s3_at(port, dir.path()).unwrap();
    eventually("it is used again", || loads(&store, &ids(4)));
    eventually("and written to", || {
        store
            .dump(&Device::filled(&store.fixture, &[id(9)]), &[id(9)])
            .is_ok()
    });
    let other = Store::open(dir.path(), store.fixture.clone());
    assert!(loads(&other, &[id(0), id(1), id(2), id(3), id(9)]));
}

#[test]
fn a_server_that_is_silent_costs_a_deadline_and_no_slot() {
    let Some((dir, server, fixture)) = started() else {
        return;
    };
    let clock = ManualClock::new();
    let fixture = Fixture {
        slots: 4,
        ..fixture
    };
    let store = Store::with_clock(
        dir.path(),
        fixture.clone(),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    dumped(&store, &ids(4));
    server.server.freeze();
    assert_eq!(finds(&store, &ids(4)), [true; 4], "lookups send no request");
    for _ in 0..3 {
        let device = Device::blank(&fixture, &ids(4));
        let load = store
            .engine
            .load(device.rows(&ids(4)), Some(Duration::from_secs(1)))
            .unwrap();
        eventually("the load ends", || {
            clock.advance(Duration::from_millis(100));
            load.check(store.engine.clock(), ucm_store::engine::Until::Published)
        });
        let failures = load.failures();
        let late = |(_, error): &(usize, ucm_core::Error)| error.kind() == ErrorKind::Timeout;
        assert!(failures.iter().any(late), "{failures:?}");
        assert!(
            ids(4).iter().all(|&id| device.is_blank(id)),
            "no late write"
        );
        eventually("every slot and every thread comes back", || {
            store.stat("slots_free") == store.stat("slots") && store.stat("workers_stuck") == 0
        });
    }
    let device = Device::filled(&fixture, &[id(8)]);
    let dump: Task = store.engine.dump(device.rows(&[id(8)])).unwrap();
    eventually("the dump ends", || {
        clock.advance(Duration::from_secs(1));
        is_over(&store, &dump)
    });
    assert_eq!(
        store.outcome(&dump).unwrap_err()[0].1.kind(),
        ErrorKind::Timeout
    );
    eventually("every slot comes back", || {
        store.stat("slots_free") == store.stat("slots")
    });
    server.server.thaw();
    eventually("it is used again", || {
        clock.advance(Duration::from_secs(1));
        loads(&store, &ids(4))
    });
}

#[test]
fn damage_of_an_object_is_a_miss_and_is_replaced() {
    let Some((dir, _server, fixture)) = started() else {
        return;
    };
    let store = Store::open(dir.path(), fixture.clone());
    // Each in an object of its own: two that are dumped at once may share one.
    for block in ids(6) {
        dumped(&store, &[block]);
    }
    let places = store.places();
    let of = |block: BlockId| places.iter().find(|place| place.id == block).unwrap();
    change(&of(id(0)).file, |bytes| bytes[of(id(0)).offset + 300] ^= 1);
    change(&of(id(1)).file, |bytes| {
        bytes.truncate(of(id(1)).offset + 100)
    });
    std::fs::remove_file(&of(id(2)).file).unwrap();
    for n in 0..3 {
        assert!(!loads(&store, &[id(n)]), "block {n}");
    }
    assert!(loads(&store, &ids(6)[3..]));
    eventually("they are written anew", || {
        dumped(&store, &ids(6));
        loads(&store, &ids(6))
    });
    // Who reads the footers anew: a damaged one is no segment, another one's is not believed.
    let (one, other) = (&of(id(3)).file, &of(id(4)).file);
    change(one, |bytes| {
        let last = bytes.len() - 100;
        bytes[last] ^= 1;
    });
    std::fs::copy(&of(id(5)).file, other).unwrap();
    let anew = Store::open(dir.path(), fixture);
    assert_eq!(
        finds(&anew, &ids(6)),
        [true, true, true, false, false, true]
    );
    assert!(loads(&anew, &[id(0), id(1), id(2), id(5)]));
    dumped(&anew, &ids(6));
    assert!(loads(&anew, &ids(6)));
}

#[test]
fn an_object_that_ends_inside_a_header_has_no_side_shard() {
    for len in CUTS {
        let Some((dir, _server, fixture)) = started() else {
            return;
        };
        assert_cut(&Store::open(dir.path(), sided(fixture)), len);
    }
}

#[test]
fn what_others_remove_is_a_miss_here() {
    let Some((dir, _server, fixture)) = started() else {
        return;
    };
    let store = Store::open(dir.path(), fixture);
    dumped(&store, &ids(3));
    let other = Store::open(dir.path(), store.fixture.clone());
    assert!(loads(&other, &ids(3)));
    store
        .segments()
        .iter()
        .for_each(|file| std::fs::remove_file(file).unwrap());
    assert_eq!(finds(&other, &ids(3)), [true; 3], "no index was refreshed");
    assert!(!loads(&other, &ids(3)[..1]));
    dumped(&other, &ids(3)[..1]);
    assert!(loads(&other, &ids(3)[..1]));
}

#[test]
fn names_of_others_are_left_alone() {
    let Some((dir, server, fixture)) = started() else {
        return;
    };
    let store = Store::open(dir.path(), with(&fixture, &[("expire_after", json!(1))]));
    dumped(&store, &ids(1));
    let segment = store.segments().pop().unwrap();
    let beside = [
        segment.with_extension("segx"),
        segment.with_file_name("notes.txt"),
        store.objects().join("notes.txt"),
        server.bucket().join("notes.txt"),
    ];
    for path in &beside {
        std::fs::copy(&segment, path).unwrap();
    }
    let of_others = Fixture {
        weights: "others",
        ..fixture.clone()
    };
    let others = Store::open(dir.path(), of_others);
    assert_eq!(finds(&others, &ids(1)), [false]);
    dumped(&others, &ids(1));
    assert_eq!((store.segments().len(), others.segments().len()), (3, 1));
    drop((store, others));
    eventually("what is old goes", || {
        // Every store that is opened counts at once.
        drop(Store::open(
            dir.path(),
            with(&fixture, &[("expire_after", json!(1))]),
        ));
        !segment.exists()
    });
    assert!(beside.iter().all(|path| path.exists()));
}

#[test]
fn what_gets_old_goes_while_a_store_is_open() {
    let Some((dir, _server, fixture)) = started() else {
        return;
    };
    let clock = ManualClock::new();
    let as_clock = Arc::clone(&clock) as Arc<dyn Clock>;
    let fixture = with(&fixture, &[("expire_after", json!(1))]);
    let store = Store::with_clock_now(dir.path(), fixture, as_clock);
    dumped(&store, &ids(1));
    let segment = store.segments().pop().unwrap();
    // Slowly, so that it reports several times before it counts again.
    eventually("what is old goes", || {
        clock.advance(Duration::from_secs(1));
        !segment.exists()
    });
}

#[test]
fn the_limit_is_kept_by_several_writers() {
    let Some((dir, _server, fixture)) = started() else {
        return;
    };
    let limit: u64 = 1 << 20;
    let fixture = with(&fixture, &[("storage_capacity", json!(limit))]);
    let stores = [(); 2].map(|()| Store::open(dir.path(), fixture.clone()));
    for n in 0..120 {
        for (at, store) in stores.iter().enumerate() {
            let blocks = [id(n * 2 + at as u8)];
            store.keep(&Device::filled(&store.fixture, &blocks), &blocks);
            let there = bytes_of(&store.objects());
            assert!(there <= limit, "{there} bytes");
        }
    }
    // Room was made for all that is new.
    assert_eq!(stores[0].stat("storage_capacity_bytes"), limit);
}

#[test]
fn a_limit_too_small_for_anything_is_refused() {
    let Some((dir, _server, fixture)) = started() else {
        return;
    };
    let small = with(&fixture, &[("storage_capacity", json!(4096))]);
    let error = Store::try_open(dir.path(), small).err().unwrap();
    assert!(error.to_string().contains("storage_capacity"), "{error}");
}

#[test]
fn wrong_keys_are_never_logged() {
    let Some((dir, _server, fixture)) = started() else {
        return;
    };
    let keys = dir.path().join("wrong");
    crate::common::servers::write_secret(
        &keys,
        "[default]\naws_access_key_id=falsch\naws_secret_access_key=geheim\n",
    );
    let store = Store::open(
        dir.path(),
        with(&fixture, &[("object_credentials", json!(keys))]),
    );
    assert_eq!(store.stat("healthy"), 0);
    assert_eq!(finds(&store, &ids(1)), [false]);
    assert!(
        store
            .dump(&Device::filled(&store.fixture, &ids(1)), &ids(1))
            .is_err()
    );
    let said = store.said().join("\n");
    assert!(said.contains("keys"), "{said}");
    assert!(
        !said.contains("geheim") && !said.contains("falsch"),
        "{said}"
    );
}

#[test]
fn a_segment_of_a_clock_that_is_behind_is_found_with_all() {
    let Some((dir, _server, fixture)) = started() else {
        return;
    };
    let clocks = [ManualClock::new(), ManualClock::new()];
    clocks[1].set_wall_ns(1_500_000_000_000_000_000);
    let [store, late] = [0, 1].map(|n| {
        let clock = Arc::clone(&clocks[n]) as Arc<dyn Clock>;
        Store::with_clock_now(dir.path(), fixture.clone(), clock)
    });
    dumped(&store, &ids(1));
    dumped(&late, &ids(2)[1..]);
    eventually("the one that is ahead is found", || {
        clocks[1].advance(Duration::from_secs(1));
        finds(&late, &ids(2)) == [true; 2]
    });
    eventually("and the one that is behind", || {
        clocks[0].advance(Duration::from_secs(1));
        finds(&store, &ids(2)) == [true; 2]
    });
    assert!(loads(&store, &ids(2)) && loads(&late, &ids(2)));
}

/// An id beyond those of [`id`].
fn numbered(n: u16) -> BlockId {
    BlockId(std::array::from_fn(|at| n.to_le_bytes()[at % 2] ^ at as u8))
}

/// Copies a segment of one record, as if a writer had put another one with this id `later` ns after
/// it.
fn copy_with(segment: &Path, block: BlockId, later: u64) {
    let mut bytes = std::fs::read(segment).unwrap();
    let trailer = bytes.len() - 128;
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let (footer, writer) = (number(trailer + 8) as usize, number(trailer + 64));
    // Its writer goes on with the next sequence.
    let (sequence, time) = (
        number(trailer + 72) + 1000 + later,
        number(trailer + 80) + later,
    );
    let mut put = |at: usize, put: &[u8]| bytes[at..at + put.len()].copy_from_slice(put);
    put(footer, &block.0);
    put(trailer + 72, &sequence.to_le_bytes());
    put(trailer + 80, &time.to_le_bytes());
    let entries = crc32c(&bytes[footer..trailer]);
    bytes[trailer + 104..trailer + 108].copy_from_slice(&entries.to_le_bytes());
    let all = crc32c(&bytes[trailer..trailer + 124]);
    bytes[trailer + 124..].copy_from_slice(&all.to_le_bytes());
    let name = format!("{time:016x}-{writer:016x}-{sequence:016x}.seg");
    std::fs::write(segment.with_file_name(name), bytes).unwrap();
}

/// More segments than one turn of a finder reads, and a young one behind them: a restart finds them
/// all.
#[test]
fn a_restart_finds_the_old_segments_too() {
    let Some((dir, _server, fixture)) = started() else {
        return;
    };
    let clock = ManualClock::new();
    let open = || {
        Store::with_clock_now(
            dir.path(),
            fixture.clone(),
            Arc::clone(&clock) as Arc<dyn Clock>,
        )
    };
    let store = open();
    let blocks: Vec<BlockId> = (0..300_u16).map(numbered).collect();
    dumped(&store, &blocks[..1]);
    let first = store.segments().pop().unwrap();
    for (n, block) in blocks.iter().enumerate().skip(1) {
        copy_with(&first, *block, n as u64);
    }
    clock.advance(Duration::from_secs(400));
    dumped(&store, &[numbered(999)]);
    drop(store);
    let anew = open();
    assert_eq!(finds(&anew, &blocks), [true; 300]);
    assert_eq!(finds(&anew, &[numbered(999)]), [true]);
}

/// What a request is refused with: it is given, in small letters.
type Refusal = Box<dyn Fn(&str) -> Option<&'static str> + Send + Sync>;

/// Stands before a server and refuses requests for it.
fn refusing(server: u16, refusal: Refusal) -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let refusal = Arc::new(refusal);
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let refusal = Arc::clone(&refusal);
            std::thread::spawn(move || pass_on(client, server, &refusal));
        }
    });
    port
}

/// One request of a connection; the next one comes over another.
fn pass_on(mut client: TcpStream, server: u16, refusal: &Refusal) -> Option<()> {
    let (mut request, mut buffer) = (Vec::new(), [0; 1 << 14]);
    let head = loop {
        let len = client.read(&mut buffer).ok().filter(|&len| len > 0)?;
        request.extend_from_slice(&buffer[..len]);
        if let Some(end) = request.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break String::from_utf8(request[..end].to_vec())
                .ok()?
                .to_lowercase();
        }
    };
    let len = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length:"))
        .map_or(0, |len| len.trim().parse().unwrap());
    while request.len() < head.len() + 4 + len {
        let len = client.read(&mut buffer).ok().filter(|&len| len > 0)?;
        request.extend_from_slice(&buffer[..len]);
    }
    if let Some(status) = refusal(&String::from_utf8_lossy(&request).to_lowercase()) {
        let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        return client.write_all(answer.as_bytes()).ok();
    }
    let mut there = TcpStream::connect(("127.0.0.1", server)).ok()?;
    there.write_all(&request[..head.len()]).ok()?;
    there.write_all(b"\r\nconnection: close").ok()?;
    there.write_all(&request[head.len()..]).ok()?;
    std::io::copy(&mut there, &mut client).ok().map(|_| ())
}

/// Whether a request has conditions.
fn is_conditional(head: &str) -> bool {
    head.contains("\r\nif-none-match:") || head.contains("\r\nif-match:")
}

/// A store that talks to what stands before the server.
fn before(fixture: &Fixture, port: u16) -> Fixture {
    let endpoint = format!("http://127.0.0.1:{port}");
    with(
        fixture,
        &[
            ("object_endpoint", json!(endpoint)),
            ("object_retries", json!(0)),
        ],
    )
}

#[test]
fn an_error_that_passes_does_not_switch_the_limit_off() {
    let Some((dir, server, fixture)) = started() else {
        return;
    };
    let limit: u64 = 1 << 20;
    let first = AtomicBool::new(true);
    let once = move |head: &str| {
        let refused = is_conditional(head) && first.swap(false, Ordering::AcqRel);
        refused.then_some("503 Service Unavailable")
    };
    let port = refusing(server.server.port, Box::new(once));
    let fixture = with(
        &before(&fixture, port),
        &[("storage_capacity", json!(limit))],
    );
    let store = Store::open(dir.path(), fixture);
    eventually("it is looked at again", || {
        let blocks = [id(1)];
        store
            .dump(&Device::filled(&store.fixture, &blocks), &blocks)
            .is_ok()
    });
    assert_eq!(store.stat("storage_capacity_bytes"), limit);
    let said = store.said().join("\n");
    assert!(!said.contains("has no conditional writes"), "{said}");
}

#[test]
fn a_listing_that_is_refused_is_not_repeated_at_once() {
    let Some((dir, server, fixture)) = started() else {
        return;
    };
    let (refuses, refused) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    let (when, count) = (Arc::clone(&refuses), Arc::clone(&refused));
    let refusal = move |head: &str| {
        let line = head.lines().next().unwrap_or_default();
        let refused =
            when.load(Ordering::Acquire) && line.contains("list-type") && line.contains("segments");
        refused.then(|| {
            count.fetch_add(1, Ordering::AcqRel);
            "403 Forbidden"
        })
    };
    let behind = before(&fixture, refusing(server.server.port, Box::new(refusal)));
    let clock = ManualClock::new();
    let store = Store::with_clock_now(dir.path(), behind, Arc::clone(&clock) as Arc<dyn Clock>);
    refuses.store(true, Ordering::Release);
    clock.advance(Duration::from_secs(1));
    eventually("a listing is refused", || {
        refused.load(Ordering::Acquire) > 0
    });
    // As long as its clock stands it does not try again, for any request and however long
    // others take.
    let other = Store::open(dir.path(), fixture);
    dumped(&other, &ids(40));
    assert_eq!(finds(&store, &ids(40)), [false; 40]);
    assert_eq!(refused.load(Ordering::Acquire), 1);
    refuses.store(false, Ordering::Release);
    clock.advance(Duration::from_secs(1));
    eventually("the next one finds what is there", || {
        finds(&store, &ids(40)) == [true; 40]
    });
}

/// What cannot be removed (the first segment here) counts on, and room is made of the others.
#[test]
fn a_segment_that_cannot_be_removed_does_not_end_a_count() {
    let Some((dir, server, fixture)) = started() else {
        return;
    };
    let kept: Arc<OnceLock<String>> = Arc::default();
    let name = Arc::clone(&kept);
    let refusal = move |head: &str| {
        let kept = name.get().is_some_and(|name| head.contains(name));
        let removes = head.starts_with("delete ") || head.starts_with("post /bucket?delete");
        (removes && kept).then_some("403 Forbidden")
    };
    let limit: u64 = 1 << 20;
    let behind = before(&fixture, refusing(server.server.port, Box::new(refusal)));
    let store = Store::open(
        dir.path(),
        with(&behind, &[("storage_capacity", json!(limit))]),
    );
    dumped(&store, &[id(0)]);
    let first = store.segments().pop().unwrap();
    let file_name = first.file_name().unwrap().to_string_lossy().into_owned();
    kept.set(file_name).unwrap();
    let (mut stored, all) = (0, 200);
    for n in 1..all {
        let ended = store.dump(&Device::filled(&store.fixture, &[id(n)]), &[id(n)]);
        stored += u64::from(ended.is_ok());
        let there = bytes_of(&store.objects());
        assert!(there <= limit, "{there} bytes");
    }
    let one = std::fs::metadata(&first).unwrap().len();
    assert!(
        stored * one > limit + limit / 4,
        "{stored} of {one} bytes: room is made"
    );
    let said = store.said().join("\n");
    assert!(said.contains("cannot be removed"), "{said}");
}

#[test]
fn a_server_without_conditions_keeps_what_is_young() {
    let Some((dir, server, fixture)) = started() else {
        return;
    };
    let refusal = |head: &str| is_conditional(head).then_some("501 Not Implemented");
    let fixture = before(&fixture, refusing(server.server.port, Box::new(refusal)));
    let store = Store::open(dir.path(), fixture.clone());
    let said = store.said().join("\n");
    assert_eq!(store.stat("healthy"), 1, "{said}");
    dumped(&store, &ids(4));
    assert!(loads(&store, &ids(4)));
    assert!(
        said.contains("has no conditional writes") && said.contains("expire_after"),
        "{said}"
    );
    let other = Store::open(dir.path(), fixture);
    assert!(loads(&other, &ids(4)));
}

/// A server whose keys may only read as long as this is true, and how many requests it refused.
fn only_reading(server: u16, when: &Arc<AtomicBool>) -> (u16, Arc<AtomicU64>) {
    let (when, refused) = (Arc::clone(when), Arc::new(AtomicU64::new(0)));
    let count = Arc::clone(&refused);
    let refusal = move |head: &str| {
        let writes = ["put ", "post ", "delete "]
            .iter()
            .any(|verb| head.starts_with(verb));
        (writes && when.load(Ordering::Acquire)).then(|| {
            count.fetch_add(1, Ordering::AcqRel);
            "403 Forbidden"
        })
    };
    (refusing(server, Box::new(refusal)), refused)
}

/// Dumps of these blocks are refused, and what is stored is read.
fn assert_only_read(store: &Store, new: std::ops::Range<u8>, stored: &[BlockId]) {
    for n in new {
        let failed = store.dump(&Device::filled(&store.fixture, &[id(n)]), &[id(n)]);
        assert_eq!(failed.unwrap_err()[0].1.kind(), ErrorKind::Unhealthy, "{n}");
        assert!(loads(store, stored), "what is stored is read");
    }
    let health = (store.stat("healthy"), store.tier(0, "writable"));
    assert_eq!(health, (1, 0));
}

#[test]
fn keys_that_may_only_read_open_a_bucket_and_its_blocks_are_hits() {
    let Some((dir, server, fixture)) = started() else {
        return;
    };
    let owner = Store::open(dir.path(), fixture.clone());
    dumped(&owner, &ids(4));
    let (only_reads, clock) = (Arc::new(AtomicBool::new(true)), ManualClock::new());
    let (port, refused) = only_reading(server.server.port, &only_reads);
    let fixture = Fixture {
        breaker: BreakerConfig::default(),
        ..before(&fixture, port)
    };
    let as_clock = Arc::clone(&clock) as Arc<dyn Clock>;
    let store = Store::with_clock_now(dir.path(), fixture, as_clock);
    assert_eq!(store.stat("healthy"), 1, "{:?}", store.said());
    assert!(loads(&store, &ids(4)));
    assert_only_read(&store, 10..11, &ids(4));
    let before = refused.load(Ordering::Acquire);
    assert_only_read(&store, 11..20, &ids(4));
    assert_eq!(
        refused.load(Ordering::Acquire),
        before,
        "they are not tried"
    );
    let said = store.said();
    let said = said
        .iter()
        .filter(|line| line.contains("takes no blocks for now"));
    assert_eq!(said.count(), 1, "it is logged once");
    // Once the keys may write the next dump that is let through makes it a writer.
    only_reads.store(false, Ordering::Release);
    clock.advance(Duration::from_secs(10));
    dumped(&store, &[id(20)]);
    assert_eq!(store.tier(0, "writable"), 1);
    assert!(store.stat("storage_capacity_bytes") > 0);
    drop(store);
    assert!(loads(
        &Store::open(dir.path(), owner.fixture.clone()),
        &[id(20)]
    ));
}

#[test]
fn keys_that_may_write_and_not_delete_open_a_bucket_and_store() {
    let Some((dir, server, fixture)) = started() else {
        return;
    };
    let refusal = |head: &str| {
        let deletes = head.starts_with("delete ") || head.starts_with("post /bucket?delete");
        deletes.then_some("403 Forbidden")
    };
    let behind = before(&fixture, refusing(server.server.port, Box::new(refusal)));
    let store = Store::open(dir.path(), behind);
    let said = store.said().join("\n");
    assert_eq!(store.stat("healthy"), 1, "{said}");
    assert!(said.contains("not delete there"), "{said}");
    assert!(store.stat("storage_capacity_bytes") > 0, "the limit holds");
    dumped(&store, &ids(4));
    assert!(loads(&Store::open(dir.path(), fixture), &ids(4)));
}

#[test]
fn keys_that_lose_the_right_to_write_read_on_and_what_was_refused_takes_no_room() {
    let Some((dir, server, fixture)) = started() else {
        return;
    };
    let (only_reads, clock) = (Arc::new(AtomicBool::new(false)), ManualClock::new());
    let (port, _) = only_reading(server.server.port, &only_reads);
    let fixture = Fixture {
        breaker: BreakerConfig::default(),
        ..before(&fixture, port)
    };
    let as_clock = Arc::clone(&clock) as Arc<dyn Clock>;
    let store = Store::with_clock(dir.path(), fixture, as_clock);
    dumped(&store, &ids(4));
    let used = store.stat("storage_used_bytes");
    only_reads.store(true, Ordering::Release);
    for n in 0..4 {
        assert_only_read(&store, 10 + n..11 + n, &ids(4));
        clock.advance(Duration::from_secs(10));
    }
    assert_eq!(store.stat("storage_used_bytes"), used);
    only_reads.store(false, Ordering::Release);
    clock.advance(Duration::from_secs(10));
    dumped(&store, &[id(20)]);
    assert!(loads(&store, &[id(20)]));
}

#[test]
fn a_bucket_without_a_store_says_that_its_keys_may_not_write() {
    let Some((dir, server, fixture)) = started() else {
        return;
    };
    let (port, _) = only_reading(server.server.port, &Arc::new(AtomicBool::new(true)));
    let store = Store::open(dir.path(), before(&fixture, port));
    assert_eq!(store.stat("healthy"), 0);
    let said = store.said().join("\n");
    assert!(said.contains("does not let us write"), "{said}");
}
