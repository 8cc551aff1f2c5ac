//! The engines on real files.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::sync::mpsc;
use std::time::Duration;

use crate::common::*;
use ucm_core::ErrorKind;
use ucm_infra::{Lane, MonotonicTime};
use ucm_io::{IoJob, IoOptions, IoPool, PsyncEngine, Publish, Read, ReadMode};

#[test]
fn what_was_published_is_read_back() {
    for io in both() {
        for place in places() {
            let dir = place.path();
            let pool = slots(2, 16384);
            let (slot, mut back) = (filled(&pool, 1), pool.try_acquire().unwrap());
            let meta = publish(&io, dir, "block", slot.as_slice());
            assert_eq!(names(dir), ["block"]);
            let on_disk = std::fs::metadata(dir.join("block")).unwrap();
            assert_eq!(on_disk.permissions().mode() & 0o777, 0o600);
            assert_eq!((meta.len, meta.is_dir), (16384, false));
            assert_eq!((meta.ino, meta.dev), (on_disk.ino(), on_disk.dev()));
            assert_eq!(
                meta.mtime_ns,
                on_disk.mtime() * 1_000_000_000 + on_disk.mtime_nsec()
            );
            for mode in [ReadMode::Default, ReadMode::FreshDirect] {
                back.as_mut_slice().fill(0);
                let read = io.read(&dir.join("block"), 0, 16384, back.as_mut_slice(), mode);
                let whole = Read {
                    bytes: 16384,
                    file_len: 16384,
                };
                assert_eq!(read.unwrap(), whole);
                assert_eq!(back.as_slice(), slot.as_slice());
            }
        }
    }
}

#[test]
fn reads_are_short_only_at_the_end_of_the_file() {
    let bytes = pattern(10_000, 9);
    for io in both() {
        for place in places() {
            let path = place.path().join("odd");
            std::fs::write(&path, &bytes).unwrap();
            let mut slot = slots(1, 16384).try_acquire().unwrap();
            for mode in [ReadMode::Default, ReadMode::FreshDirect] {
                for (offset, len) in [
                    (0, 10_000),
                    (0, 10_001),
                    (0, 16384),
                    (0, 1),
                    (4096, 4096),
                    (8192, 4096),
                    (5000, 5000),
                    (4097, 100),
                    (9999, 10),
                    (10_000, 10),
                    (12288, 100),
                    (20_000, 4096),
                    (0, 0),
                ] {
                    let from = (offset as usize).min(bytes.len());
                    let to = (offset as usize + len).min(bytes.len());
                    for buf in [&mut vec![0; len][..], slot.as_mut_slice()] {
                        let read = io.read(&path, offset, len, buf, mode).unwrap();
                        assert_eq!(
                            buf[..read.bytes],
                            bytes[from..to],
                            "{mode:?} {offset} {len}"
                        );
                        assert_eq!(read.file_len, 10_000);
                    }
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_read_says_why() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let io = plain();
    let fails_to_read = |name: &str| read(&io, &dir.join(name), 0, 1).unwrap_err();
    assert_eq!(fails_to_read("absent").kind(), ErrorKind::NotFound);
    std::fs::write(dir.join("file"), b"x").unwrap();
    assert_eq!(fails_to_read("file/below").kind(), ErrorKind::Io);
    assert_eq!(fails_to_read("").kind(), ErrorKind::Foreign);
    std::os::unix::fs::symlink(dir.join("file"), dir.join("link")).unwrap();
    assert_eq!(fails_to_read("link").kind(), ErrorKind::Foreign);
    // A pipe in the place of a file does not block.
    rustix::fs::mknodat(
        rustix::fs::CWD,
        dir.join("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let error = fails_to_read("pipe");
    assert!(error.to_string().contains("not a regular file"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Foreign, "no word on the medium");
    for (offset, len) in [(0, 2), (u64::MAX, 1), (i64::MAX as u64, 1)] {
        let read = io.read(&dir.join("file"), offset, len, &mut [0], ReadMode::Default);
        assert_eq!(fails(read), ErrorKind::InvalidInput);
    }
}

#[test]
fn a_publish_gets_its_length_time_and_place() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let (private, target) = (dir.join("p"), dir.join("t"));
    let slot = filled(&slots(1, 8192), 3);
    for io in both() {
        for (len, mtime_ns) in [(0, 0), (5000, 1_234_567_890_123_456_789), (8192, -5)] {
            let bytes = &slot.as_slice()[..len];
            let job = Publish {
                mode: 0o640,
                mtime_ns: Some(mtime_ns),
                durable: mtime_ns == 0,
                ..to_publish(&private, &target, bytes)
            };
            let meta = io.publish(job).unwrap().unwrap();
            assert_eq!((meta.len, meta.mtime_ns), (len as u64, mtime_ns));
            assert_eq!(std::fs::read(&target).unwrap(), bytes);
            let mode = std::fs::metadata(&target).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o640);
            assert_eq!(names(dir), ["t"]);
        }
    }
}

#[test]
fn publishing_over_a_file_replaces_it_whole_and_leaves_open_readers_the_old_one() {
    use std::io::Read;
    let place = tempfile::tempdir().unwrap();
    let io = plain();
    publish(&io, place.path(), "block", &[1; 3000]);
    let mut reader = std::fs::File::open(place.path().join("block")).unwrap();
    publish(&io, place.path(), "block", &[2; 2000]);
    assert_eq!(
        std::fs::read(place.path().join("block")).unwrap(),
        [2; 2000]
    );
    let mut old = Vec::new();
    reader.read_to_end(&mut old).unwrap();
    assert_eq!(old, [1; 3000]);
}

#[test]
fn a_failed_publish_leaves_nothing_behind_and_touches_nothing() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let io = plain();
    let publish = |private, target| {
        let (private, target) = (dir.join(private), dir.join(target));
        fails(io.publish(to_publish(&private, &target, &[7; 100])))
    };
    // The place of the private file is missing, and that of the target.
    assert_eq!(publish("no/p", "t"), ErrorKind::NotFound);
    assert_eq!(publish("p", "no/t"), ErrorKind::NotFound);
    assert!(names(dir).is_empty());
    // A directory has the name of the file.
    std::fs::create_dir(dir.join("t")).unwrap();
    assert_eq!(publish("p", "t"), ErrorKind::Io);
    assert_eq!(names(dir), ["t"]);
    // An existing private name belongs to another writer.
    std::fs::write(dir.join("p"), b"theirs").unwrap();
    assert_eq!(publish("p", "u"), ErrorKind::Io);
    assert_eq!(std::fs::read(dir.join("p")).unwrap(), b"theirs");
    // A link is never followed to write somewhere else.
    std::os::unix::fs::symlink(dir.join("elsewhere"), dir.join("q")).unwrap();
    assert_eq!(publish("q", "u"), ErrorKind::Io);
    assert_eq!(names(dir), ["p", "q", "t"]);
}

#[test]
fn direct_io_that_does_not_fit_goes_through_the_page_cache_and_is_counted() {
    let place = tempfile::tempdir().unwrap();
    let (counted, io) = direct();
    publish(&io, place.path(), "odd", &[1; 100]);
    assert_eq!(counted.direct_fallbacks(), 1);
    let mut slot = slots(1, 4096).try_acquire().unwrap();
    let off_the_page = &mut slot.as_mut_slice()[1..=100];
    io.read(
        &place.path().join("odd"),
        0,
        100,
        off_the_page,
        ReadMode::Default,
    )
    .unwrap();
    assert_eq!(*off_the_page, [1; 100]);
    assert_eq!(counted.direct_fallbacks(), 2);
    let counted = PsyncEngine::new(false);
    publish(
        &IoJob::alone(counted.clone()),
        place.path(),
        "odd",
        &[1; 100],
    );
    assert_eq!(counted.direct_fallbacks(), 0);
}

#[test]
fn a_read_without_room_for_whole_sectors_spoils_direct_io_for_no_one() {
    for place in places() {
        let (counted, io) = direct();
        let found = io.probe(place.path()).unwrap();
        let mut slot = filled(&slots(1, 8192), 1);
        publish(&io, place.path(), "block", slot.as_slice());
        let (path, few) = (place.path().join("block"), &mut slot.as_mut_slice()[..100]);
        io.read(&path, 0, 100, few, ReadMode::Default).unwrap();
        io.read_into(&path, 0, vec![(few, 100)], false).unwrap();
        let before = counted.direct_fallbacks();
        io.read(&path, 0, 8192, slot.as_mut_slice(), ReadMode::Default)
            .unwrap();
        let past = counted.direct_fallbacks() == before;
        assert_eq!(past, found.direct.is_some(), "{found:?}");
    }
}

#[test]
fn direct_io_is_used_where_the_file_system_takes_it() {
    for place in places() {
        let (counted, io) = direct();
        let found = io.probe(place.path()).unwrap();
        let mut slot = filled(&slots(1, 8192), 1);
        publish(&io, place.path(), "block", slot.as_slice());
        let path = place.path().join("block");
        io.read(&path, 4096, 4096, slot.as_mut_slice(), ReadMode::Default)
            .unwrap();
        let expected = if found.direct.is_some() { 0 } else { 2 };
        assert_eq!(counted.direct_fallbacks(), expected, "{found:?}");
    }
}

#[test]
fn a_full_lane_is_busy_and_gives_the_slot_free() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let lane = Lane {
        name: "only",
        capacity: 1,
        max_running: 1,
    };
    let options = IoOptions {
        lanes: vec![lane],
        ..IoOptions::with_workers(1)
    };
    let pool = IoPool::psync(false, &options).unwrap();
    let slots = slots(2, 4096);
    // The only thread stands in the first job.
    let (release, held) = mpsc::channel::<()>();
    let (standing, stands) = mpsc::channel();
    let first = start(&pool, 0, MonotonicTime::NEVER, move |_| {
        standing.send(()).unwrap();
        let _ = held.recv();
        Ok(())
    });
    stands.recv().unwrap();
    let waiting = start_publish(&pool, 0, MonotonicTime::NEVER, dir, "a", filled(&slots, 1));
    let refused = start_publish(&pool, 0, MonotonicTime::NEVER, dir, "b", filled(&slots, 2));
    assert_eq!(fails(refused.recv().unwrap()), ErrorKind::Busy);
    assert_eq!(slots.available(), 1);
    let wrong_lane = pool.call(7, MonotonicTime::NEVER, |_| Ok(()));
    assert_eq!(fails(wrong_lane), ErrorKind::InvalidInput);
    drop(release);
    first.recv().unwrap().unwrap();
    waiting.recv().unwrap().unwrap();
    assert_eq!(names(dir), ["a"]);
}

#[test]
fn after_shutdown_everything_is_closed() {
    let place = tempfile::tempdir().unwrap();
    let pool = IoPool::psync(false, &IoOptions::with_workers(2)).unwrap();
    let slots = slots(1, 4096);
    let publish = |name| {
        let answer = start_publish(
            &pool,
            0,
            MonotonicTime::NEVER,
            place.path(),
            name,
            filled(&slots, 1),
        );
        answer.recv().unwrap()
    };
    publish("a").unwrap();
    pool.shutdown(Duration::from_secs(60));
    assert_eq!(fails(publish("b")), ErrorKind::Closed);
    assert_eq!(slots.available(), 1);
    assert_eq!(names(place.path()), ["a"]);
    pool.shutdown(Duration::ZERO);
}

#[test]
fn many_at_once_all_arrive_whole() {
    let place = tempfile::tempdir().unwrap();
    let pool = IoPool::psync(false, &IoOptions::with_workers(2)).unwrap();
    let slots = slots(8, 8192);
    let mut answers = Vec::new();
    for round in 0..64u8 {
        eventually(|| slots.available() > 0);
        let (name, slot) = (format!("{round:02}"), filled(&slots, round));
        answers.push(start_publish(
            &pool,
            2,
            MonotonicTime::NEVER,
            place.path(),
            &name,
            slot,
        ));
    }
    for answer in answers {
        answer.recv().unwrap().unwrap();
    }
    for round in 0..64u8 {
        let (got, _) = read(&plain(), &place.path().join(format!("{round:02}")), 0, 8192).unwrap();
        assert_eq!(got, pattern(8192, round));
    }
    assert_eq!(slots.available(), 8);
}

#[test]
fn a_name_that_is_taken_stays_and_one_of_many_gets_a_free_one() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let io = plain();
    let target = dir.join("t");
    let publish = &|n: u8| {
        let (private, bytes) = (dir.join(format!("p{n}")), [n; 10]);
        let job = Publish {
            replace: false,
            ..to_publish(&private, &target, &bytes)
        };
        io.publish(job).unwrap().map(|_| n)
    };
    let won: Vec<u8> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..8).map(|n| scope.spawn(move || publish(n))).collect();
        all.into_iter()
            .filter_map(|one| one.join().unwrap())
            .collect()
    });
    assert_eq!(won.len(), 1, "exactly one");
    assert_eq!(std::fs::read(&target).unwrap(), [won[0]; 10]);
    assert_eq!(names(dir), ["t"], "no private file is left");
}
