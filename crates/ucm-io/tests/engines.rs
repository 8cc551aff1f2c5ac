//! The engines on real files.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use common::*;
use ucm_core::ErrorKind;
use ucm_infra::{Lane, Mono};
use ucm_io::{IoBuf, IoDone, IoOp, IoOptions, IoPool, PsyncEngine, ReadMode};

#[test]
fn what_was_published_is_read_back() {
    for engine in [pool(), direct_pool()] {
        for place in places() {
            let dir = place.path();
            let pool = slots(2, 16384);
            let slot = filled(&pool, 1);
            let expected = slot.as_slice().to_vec();
            let meta = publish(&*engine, dir, "block", slot);
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
                let op = IoOp::Read {
                    path: dir.join("block"),
                    offset: 0,
                    len: 16384,
                    buf: pool.try_acquire().unwrap().into(),
                    mode,
                };
                assert_eq!(
                    bytes_of(call(&*engine, op).unwrap()).unwrap(),
                    (expected.clone(), 16384)
                );
            }
            assert_eq!(pool.available(), 2);
        }
    }
}

#[test]
fn reads_are_short_only_at_the_end_of_the_file() {
    let mut bytes = vec![0; 10_000];
    pattern(&mut bytes, 9);
    for engine in [pool(), direct_pool()] {
        for place in places() {
            let path = place.path().join("odd");
            std::fs::write(&path, &bytes).unwrap();
            let pool = slots(1, 16384);
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
                    for buf in [IoBuf::Heap(vec![0; len]), pool.try_acquire().unwrap().into()] {
                        let op = IoOp::Read {
                            path: path.clone(),
                            offset,
                            len,
                            buf,
                            mode,
                        };
                        let (got, file_len) = bytes_of(call(&*engine, op).unwrap()).unwrap();
                        assert_eq!(got, bytes[from..to], "{mode:?} {offset} {len}");
                        assert_eq!(file_len, 10_000);
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
    let engine = pool();
    let read = |path: PathBuf| call(&*engine, read_op(path, 0, 1, vec![0; 1])).unwrap_err();
    assert_eq!(read(dir.join("absent")).kind(), ErrorKind::NotFound);
    std::fs::write(dir.join("file"), b"x").unwrap();
    assert_eq!(read(dir.join("file/below")).kind(), ErrorKind::Io);
    assert_eq!(read(dir.to_path_buf()).kind(), ErrorKind::Foreign);
    std::os::unix::fs::symlink(dir.join("file"), dir.join("link")).unwrap();
    assert_eq!(read(dir.join("link")).kind(), ErrorKind::Io);
    // A pipe in the place of a file hangs nobody.
    let pipe = dir.join("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let error = read(pipe);
    assert!(error.to_string().contains("not a regular file"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Foreign, "no word on the medium");
    for (offset, len) in [(0, 2), (u64::MAX, 1), (i64::MAX as u64, 1)] {
        let op = read_op(dir.join("file"), offset, len, vec![0; 1]);
        assert_eq!(fails(&*engine, op), ErrorKind::InvalidInput);
    }
    assert_eq!(engine.stuck(), 0);
}

#[test]
fn a_publish_gets_its_length_time_and_place() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    for engine in [pool(), direct_pool()] {
        for (len, mtime_ns) in [(0, 0), (5000, 1_234_567_890_123_456_789), (8192, -5)] {
            let pool = slots(1, 8192);
            let slot = filled(&pool, 3);
            let expected = slot.as_slice()[..len].to_vec();
            let op = IoOp::Publish {
                private: dir.join("p"),
                target: dir.join("t"),
                replace: true,
                buf: slot.into(),
                len,
                mode: 0o640,
                mtime_ns: Some(mtime_ns),
                durable: mtime_ns == 0,
            };
            let IoDone::Published { buf, meta } = call(&*engine, op).unwrap() else {
                unreachable!();
            };
            assert_eq!((meta.len, meta.mtime_ns), (len as u64, mtime_ns));
            assert_eq!(buf[..len], expected);
            assert_eq!(std::fs::read(dir.join("t")).unwrap(), expected);
            let mode = std::fs::metadata(dir.join("t")).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o640);
            assert_eq!(names(dir), ["t"]);
        }
    }
}

#[test]
fn publishing_over_a_file_replaces_it_whole_and_leaves_open_readers_the_old_one() {
    use std::io::Read;
    let place = tempfile::tempdir().unwrap();
    let engine = pool();
    publish(&*engine, place.path(), "block", vec![1; 3000]);
    let mut reader = std::fs::File::open(place.path().join("block")).unwrap();
    publish(&*engine, place.path(), "block", vec![2; 2000]);
    assert_eq!(std::fs::read(place.path().join("block")).unwrap(), vec![2; 2000]);
    let mut old = Vec::new();
    reader.read_to_end(&mut old).unwrap();
    assert_eq!(old, vec![1; 3000]);
}

#[test]
fn a_failed_publish_leaves_nothing_behind_and_touches_nothing() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let engine = pool();
    let op = |private: &str, target: &str, len| IoOp::Publish {
        private: dir.join(private),
        target: dir.join(target),
        replace: true,
        buf: vec![7; 100].into(),
        len,
        mode: 0o600,
        mtime_ns: None,
        durable: false,
    };
    // The place of the private file is missing, and that of the target.
    assert_eq!(fails(&*engine, op("no/p", "t", 100)), ErrorKind::NotFound);
    assert_eq!(fails(&*engine, op("p", "no/t", 100)), ErrorKind::NotFound);
    assert_eq!(fails(&*engine, op("p", "t", 101)), ErrorKind::InvalidInput);
    assert!(names(dir).is_empty());
    // A directory stands where the file should be.
    std::fs::create_dir(dir.join("t")).unwrap();
    assert_eq!(fails(&*engine, op("p", "t", 100)), ErrorKind::Io);
    assert_eq!(names(dir), ["t"]);
    // A private name that exists is somebody else's.
    std::fs::write(dir.join("p"), b"theirs").unwrap();
    assert_eq!(fails(&*engine, op("p", "u", 100)), ErrorKind::Io);
    assert_eq!(std::fs::read(dir.join("p")).unwrap(), b"theirs");
    // A link is never followed to write somewhere else.
    std::os::unix::fs::symlink(dir.join("elsewhere"), dir.join("q")).unwrap();
    assert_eq!(fails(&*engine, op("q", "u", 100)), ErrorKind::Io);
    assert_eq!(names(dir), ["p", "q", "t"]);
}

#[test]
fn direct_io_that_does_not_fit_goes_through_the_page_cache_and_is_counted() {
    let place = tempfile::tempdir().unwrap();
    let (counted, engine) = direct();
    publish(&*engine, place.path(), "odd", vec![1; 100]);
    assert_eq!(counted.direct_fallbacks(), 1);
    assert_eq!(
        read(&*engine, place.path().join("odd"), 0, 100).unwrap().0,
        vec![1; 100]
    );
    assert_eq!(counted.direct_fallbacks(), 2);
    let (plain, options) = (PsyncEngine::new(false), IoOptions::with_workers(2));
    let engine = IoPool::new(Arc::clone(&plain) as _, &options).unwrap();
    publish(&engine, place.path(), "odd", vec![1; 100]);
    assert_eq!(plain.direct_fallbacks(), 0);
}

#[test]
fn direct_io_is_used_where_the_file_system_takes_it() {
    for place in places() {
        let (counted, engine) = direct();
        let op = IoOp::Probe {
            dir: place.path().to_path_buf(),
        };
        let IoDone::Probe(found) = call(&*engine, op).unwrap() else {
            unreachable!();
        };
        let pool = slots(1, 8192);
        publish(&*engine, place.path(), "block", filled(&pool, 1));
        let op = read_op(
            place.path().join("block"),
            4096,
            4096,
            pool.try_acquire().unwrap(),
        );
        bytes_of(call(&*engine, op).unwrap()).unwrap();
        let expected = if found.direct.is_some() { 0 } else { 2 };
        assert_eq!(counted.direct_fallbacks(), expected, "{found:?}");
    }
}

#[test]
fn a_full_lane_is_busy_and_gives_the_buffer_free() {
    let place = tempfile::tempdir().unwrap();
    let lane = Lane {
        name: "only",
        capacity: 1,
        max_running: 1,
    };
    let engine = IoPool::psync(
        false,
        &IoOptions {
            lanes: vec![lane],
            ..IoOptions::with_workers(1)
        },
    )
    .unwrap();
    std::fs::write(place.path().join("first"), b"x").unwrap();
    // The only thread that ends operations stands in the callback of the first one.
    let (release, held) = mpsc::channel::<()>();
    let (standing, stands) = mpsc::channel();
    engine.submit(
        0,
        Mono::NEVER,
        read_op(place.path().join("first"), 0, 1, vec![0; 1]),
        Box::new(move |_| {
            standing.send(()).unwrap();
            let _ = held.recv();
        }),
    );
    stands.recv().unwrap();
    let waiting = start(&*engine, 0, Mono::NEVER, publish_op(place.path(), "a", vec![1]));
    let pool = slots(1, 4096);
    let refused = start(
        &*engine,
        0,
        Mono::NEVER,
        publish_op(place.path(), "b", pool.try_acquire().unwrap()),
    );
    assert_eq!(refused.recv().unwrap().unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(pool.available(), 1);
    let wrong_lane = start(&*engine, 7, Mono::NEVER, stat_op(&[], false));
    assert_eq!(
        wrong_lane.recv().unwrap().unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
    drop(release);
    waiting.recv().unwrap().unwrap();
    assert_eq!(names(place.path()), ["a", "first"]);
}

#[test]
fn after_shutdown_everything_is_closed() {
    let engine = pool();
    let place = tempfile::tempdir().unwrap();
    publish(&*engine, place.path(), "a", vec![1]);
    engine.shutdown(Duration::from_secs(60));
    let pool = slots(1, 4096);
    let op = publish_op(place.path(), "b", pool.try_acquire().unwrap());
    assert_eq!(fails(&*engine, op), ErrorKind::Closed);
    assert_eq!((pool.available(), names(place.path())), (1, vec!["a".to_owned()]));
    engine.shutdown(Duration::ZERO);
}

#[test]
fn many_at_once_all_arrive_whole() {
    let place = tempfile::tempdir().unwrap();
    let engine = pool();
    let pool = slots(8, 8192);
    let mut answers = Vec::new();
    for round in 0..64u8 {
        eventually(|| pool.available() > 0);
        let op = publish_op(place.path(), &format!("{round:02}"), filled(&pool, round));
        answers.push(start(&*engine, 2, Mono::NEVER, op));
        if answers.len() == 8 {
            answers
                .drain(..)
                .for_each(|answer| drop(answer.recv().unwrap().unwrap()));
        }
    }
    for round in 0..64u8 {
        let mut expected = vec![0; 8192];
        pattern(&mut expected, round);
        let (got, _) = read(&*engine, place.path().join(format!("{round:02}")), 0, 8192).unwrap();
        assert_eq!(got, expected);
    }
    assert_eq!(pool.available(), 8);
}

#[test]
fn a_name_that_is_taken_stays_and_one_of_many_gets_a_free_one() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let engine = pool();
    let op = |n: u8| IoOp::Publish {
        private: dir.join(format!("p{n}")),
        target: dir.join("t"),
        replace: false,
        buf: vec![n; 10].into(),
        len: 10,
        mode: 0o600,
        mtime_ns: None,
        durable: false,
    };
    let won: Vec<u8> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..8)
            .map(|n| {
                (
                    n,
                    scope.spawn({
                        let (engine, op) = (&engine, op(n));
                        move || call(&**engine, op).unwrap()
                    }),
                )
            })
            .collect();
        let won = all
            .into_iter()
            .filter_map(|(n, answer)| match answer.join().unwrap() {
                IoDone::Published { buf, .. } => {
                    assert_eq!(buf[..], [n; 10]);
                    Some(n)
                }
                IoDone::Taken { buf } => {
                    assert_eq!(buf[..], [n; 10]);
                    None
                }
                _ => unreachable!(),
            });
        won.collect()
    });
    assert_eq!(won.len(), 1, "exactly one");
    assert_eq!(std::fs::read(dir.join("t")).unwrap(), [won[0]; 10]);
    assert_eq!(names(dir), ["t"], "no private file is left");
}
