//! Reads of one stretch of a file into several buffers, over both engines, their kept descriptors, and their faults.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use common::*;
use ucm_core::{ErrorKind, Result};
use ucm_device::SlotPool;
use ucm_infra::{Clock, ManualClock, Mono};
use ucm_io::{
    Fault, FaultyEngine, Gate, IoBuf, IoDone, IoOp, IoOptions, IoPool, OpKind, PsyncEngine, Rule, errno,
};

const PIECE: usize = 8192;

/// A file of so many bytes that differ from place to place.
fn file(dir: &Path, len: usize) -> (PathBuf, Vec<u8>) {
    let mut bytes = vec![0; len];
    pattern(&mut bytes, 3);
    let path = dir.join("file");
    std::fs::write(&path, &bytes).unwrap();
    (path, bytes)
}

fn op(path: &Path, offset: u64, into: Vec<(IoBuf, usize)>, keep: bool) -> IoOp {
    IoOp::ReadInto {
        path: path.to_owned(),
        offset,
        into,
        keep,
    }
}

/// Slots for so many pieces.
fn pieces(pool: &Arc<SlotPool>, count: usize) -> Vec<(IoBuf, usize)> {
    (0..count)
        .map(|_| (IoBuf::Slot(pool.try_acquire().unwrap()), PIECE))
        .collect()
}

fn brought(answer: Result<IoDone>) -> (Vec<IoBuf>, Result<usize>) {
    match answer {
        Ok(IoDone::ReadInto { bufs, read }) => (bufs, read),
        other => unreachable!("{other:?}"),
    }
}

/// Reads three pieces from the second on: what came, and how much that is.
fn three(engine: &IoPool, pool: &Arc<SlotPool>, path: &Path, keep: bool) -> Result<Vec<u8>> {
    let (bufs, read) = brought(call(engine, op(path, PIECE as u64, pieces(pool, 3), keep)));
    assert_eq!(bufs.len(), 3);
    let mut bytes: Vec<u8> = bufs.iter().flat_map(|buf| buf[..PIECE].to_vec()).collect();
    bytes.truncate(read?);
    Ok(bytes)
}

/// Descriptors of this process that are open on a file.
fn open_on(path: &Path) -> usize {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
    let name = path.to_string_lossy();
    targets
        .filter(|target| target.to_string_lossy().starts_with(&*name))
        .count()
}

#[test]
fn every_buffer_gets_its_part() {
    for engine in [pool(), direct_pool()] {
        for place in places() {
            let (path, bytes) = file(place.path(), 4 * PIECE);
            let pool = slots(4, PIECE);
            for keep in [false, true, true] {
                assert_eq!(three(&*engine, &pool, &path, keep).unwrap(), bytes[PIECE..]);
            }
            // Parts that differ in length, from anywhere, into memory of any kind.
            for (offset, lens) in [(0, [100, 4096, 5]), (4096, [4096, 8192, 3]), (7, [0, 1, 0])] {
                for heap in [false, true] {
                    let into = lens.iter().map(|&len| {
                        let buf = if heap {
                            IoBuf::Heap(vec![0; len])
                        } else {
                            IoBuf::Slot(pool.try_acquire().unwrap())
                        };
                        (buf, len)
                    });
                    let op = op(&path, offset, into.collect(), true);
                    let (bufs, read) = brought(call(&*engine, op));
                    assert_eq!(read.unwrap(), lens.iter().sum::<usize>());
                    let mut at = offset as usize;
                    for (buf, len) in bufs.iter().zip(lens) {
                        assert_eq!(buf[..len], bytes[at..at + len]);
                        at += len;
                    }
                }
            }
            let nothing = brought(call(&*engine, op(&path, 0, Vec::new(), true)));
            assert_eq!((nothing.0.len(), nothing.1.unwrap()), (0, 0));
            assert_eq!(pool.available(), 4);
        }
    }
}

#[test]
fn the_end_of_the_file_is_seen() {
    let place = tempfile::tempdir().unwrap();
    for engine in [pool(), direct_pool()] {
        for (len, keep) in [
            (2 * PIECE + 700, true),
            (3 * PIECE, false),
            (PIECE, true),
            (10, true),
        ] {
            let (path, bytes) = file(place.path(), len);
            let pool = slots(3, PIECE);
            let got = three(&*engine, &pool, &path, keep).unwrap();
            assert_eq!(got, bytes[PIECE.min(len)..], "{len} {keep}");
        }
    }
}

#[test]
fn a_descriptor_is_kept_and_let_go() {
    for engine in [pool(), direct_pool()] {
        let place = tempfile::tempdir().unwrap();
        let (path, _) = file(place.path(), 4 * PIECE);
        let pool = slots(3, PIECE);
        three(&*engine, &pool, &path, false).unwrap();
        assert_eq!((engine.kept(), open_on(&path)), (0, 0));
        for _ in 0..3 {
            three(&*engine, &pool, &path, true).unwrap();
            assert_eq!((engine.kept(), open_on(&path)), (1, 1));
        }
        // One job of that lane runs at a time, the first the first.
        let kept = || {
            drop(
                start(&engine, 3, Mono::NEVER, stat_op(&[], false))
                    .recv()
                    .unwrap(),
            );
            engine.kept()
        };
        engine.close_kept(vec![place.path().join("another")], true);
        assert_eq!(kept(), 1, "it was used since");
        engine.close_kept(Vec::new(), true);
        assert_eq!(kept(), 0);
        eventually(|| open_on(&path) == 0);
        three(&*engine, &pool, &path, true).unwrap();
        engine.close_kept(vec![path.clone()], false);
        eventually(|| open_on(&path) == 0);
        three(&*engine, &pool, &path, true).unwrap();
        let op = IoOp::Remove {
            paths: vec![path.clone()],
        };
        call(&*engine, op).unwrap();
        assert_eq!(
            (engine.kept(), open_on(&path)),
            (0, 0),
            "who removes it closes it"
        );
    }
}

#[test]
fn a_file_that_lost_its_name_is_not_found() {
    let place = tempfile::tempdir().unwrap();
    let engine = pool();
    let pool = slots(3, PIECE);
    let (path, _) = file(place.path(), 4 * PIECE);
    three(&*engine, &pool, &path, true).unwrap();
    std::fs::remove_file(&path).unwrap();
    let gone = three(&*engine, &pool, &path, true).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound);
    assert_eq!((engine.kept(), open_on(&path), pool.available()), (0, 0, 3));
    let (path, bytes) = file(place.path(), 4 * PIECE);
    assert_eq!(three(&*engine, &pool, &path, true).unwrap(), bytes[PIECE..]);
}

#[test]
fn what_cannot_be_read_brings_every_buffer_back() {
    let place = tempfile::tempdir().unwrap();
    let engine = pool();
    let (path, _) = file(place.path(), 4 * PIECE);
    let read = |path: &Path, offset, len| {
        let into = vec![(IoBuf::Heap(vec![0; 10]), 10), (IoBuf::Heap(vec![0; 10]), len)];
        let (bufs, read) = brought(call(&*engine, op(path, offset, into, true)));
        (bufs.len(), read.map_err(|error| error.kind()))
    };
    assert_eq!(read(&path, 0, 10), (2, Ok(20)));
    assert_eq!(read(&path, 0, 11), (2, Err(ErrorKind::InvalidInput)));
    assert_eq!(read(&path, u64::MAX, 1), (2, Err(ErrorKind::InvalidInput)));
    let absent = place.path().join("absent");
    assert_eq!(read(&absent, 0, 10), (2, Err(ErrorKind::NotFound)));
    assert_eq!(read(place.path(), 0, 10), (2, Err(ErrorKind::Foreign)));
    assert_eq!(engine.kept(), 1);
    engine.shutdown(Duration::from_secs(60));
    let pool = slots(3, PIECE);
    let closed = call(&*engine, op(&path, 0, pieces(&pool, 3), true)).unwrap_err();
    assert_eq!((closed.kind(), pool.available()), (ErrorKind::Closed, 3));
}

#[test]
fn threads_share_a_kept_descriptor() {
    let place = tempfile::tempdir().unwrap();
    let engine = pool();
    let (path, bytes) = file(place.path(), 4 * PIECE);
    let pool = slots(12, PIECE);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (engine, pool, path, bytes) = (&engine, &pool, &path, &bytes);
            scope.spawn(move || {
                for turn in 0..50 {
                    assert_eq!(three(&**engine, pool, path, true).unwrap(), bytes[PIECE..]);
                    if (turn + thread) % 7 == 0 {
                        engine.close_kept(vec![path.clone()], true);
                    }
                }
            });
        }
    });
    assert!(engine.kept() <= 1);
}

/// What a child finds of a descriptor that its parent kept: looked at from outside, while it stands still.
#[test]
fn children_have_no_kept_descriptor() {
    let place = tempfile::tempdir().unwrap();
    let engine = pool();
    let (path, bytes) = file(place.path(), 4 * PIECE);
    let pool = slots(3, PIECE);
    three(&*engine, &pool, &path, true).unwrap();
    let open = |process: &str| {
        let fds = std::fs::read_dir(format!("/proc/{process}/fd"))
            .into_iter()
            .flatten()
            .flatten();
        fds.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|target| target == path))
            .count()
    };
    assert_eq!(open("self"), 1);
    let child = forked::child();
    // Its fork handler may not have run yet.
    eventually(|| open(&child.pid().to_string()) == 0);
    drop(child);
    assert_eq!(three(&*engine, &pool, &path, true).unwrap(), bytes[PIECE..]);
    assert_eq!(open("self"), 1);
}

/// A child of this process that does nothing until it is killed.
mod forked {
    #![allow(unsafe_code, reason = "a fork, and a child that only waits")]

    pub(crate) struct Child(libc::pid_t);

    pub(crate) fn child() -> Child {
        // SAFETY: the child calls nothing but pause, which may be called after a fork.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            loop {
                // SAFETY: waits for a signal.
                unsafe { libc::pause() };
            }
        }
        assert!(pid > 0, "fork failed");
        Child(pid)
    }

    impl Child {
        pub(crate) fn pid(&self) -> i32 {
            self.0
        }
    }

    impl Drop for Child {
        fn drop(&mut self) {
            // SAFETY: our own child, not waited for before.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), 0);
            }
        }
    }
}

fn faulty() -> (Arc<FaultyEngine>, Arc<IoPool>, Arc<ManualClock>) {
    let clock = ManualClock::new();
    let faults = FaultyEngine::new(PsyncEngine::new(false), 1);
    let options = IoOptions {
        clock: Arc::clone(&clock) as Arc<dyn Clock>,
        ..IoOptions::with_workers(2)
    };
    let engine = IoPool::new(Arc::clone(&faults) as _, &options).unwrap();
    (faults, engine, clock)
}

#[test]
fn faults_bring_the_buffers_back() {
    let place = tempfile::tempdir().unwrap();
    let (faults, engine, _) = faulty();
    let (path, _) = file(place.path(), 4 * PIECE);
    let pool = slots(3, PIECE);
    for (fault, expected) in [
        (Fault::Errno(errno::EIO), ErrorKind::Io),
        (Fault::Errno(errno::ENOENT), ErrorKind::NotFound),
        (Fault::stale(), ErrorKind::NotFound),
        (Fault::LostReply(errno::EIO), ErrorKind::Io),
    ] {
        faults.add(Rule::on(OpKind::Read, fault).times(1));
        let failed = three(&*engine, &pool, &path, true).unwrap_err();
        assert_eq!((failed.kind(), pool.available()), (expected, 3));
    }
    faults.add(Rule::on(OpKind::Read, Fault::Busy).times(1));
    let busy = call(&*engine, op(&path, 0, pieces(&pool, 3), true)).unwrap_err();
    assert_eq!((busy.kind(), pool.available()), (ErrorKind::Busy, 3));
    faults.add(Rule::on(OpKind::Publish, Fault::LateVisible(1)));
    publish(&*engine, place.path(), "late", vec![1; 4 * PIECE]);
    let late = place.path().join("late");
    let unseen = three(&*engine, &pool, &late, true).unwrap_err();
    assert_eq!(unseen.kind(), ErrorKind::NotFound);
    assert_eq!(three(&*engine, &pool, &late, true).unwrap(), [1; 3 * PIECE]);
    assert_eq!(engine.kept(), 2);
}

#[test]
fn faults_change_what_several_got() {
    let place = tempfile::tempdir().unwrap();
    let (faults, engine, _) = faulty();
    let (path, bytes) = file(place.path(), 4 * PIECE);
    let pool = slots(3, PIECE);
    let read = |fault| {
        faults.add(Rule::on(OpKind::Read, fault).times(1));
        three(&*engine, &pool, &path, true).unwrap()
    };
    assert_eq!(read(Fault::ShortRead(PIECE + 5)), bytes[PIECE..2 * PIECE + 5]);
    let mut flipped = bytes[PIECE..].to_vec();
    flipped[10] ^= 0xff;
    flipped[PIECE + 20] ^= 0xff;
    assert_eq!(read(Fault::Flip(vec![10, PIECE + 20, 9 * PIECE])), flipped);
    let random = read(Fault::FlipRandom(7));
    let differ = random.iter().zip(&bytes[PIECE..]).filter(|(a, b)| a != b).count();
    assert_eq!(differ, 7);
    assert_eq!(read(Fault::Replay), bytes[PIECE..]);
    assert_eq!(
        read(Fault::Killed { keep: 3 }),
        bytes[PIECE..],
        "no sense for a read"
    );
}

#[test]
fn a_late_one_keeps_its_slots_until_the_call_returns() {
    let place = tempfile::tempdir().unwrap();
    let (faults, engine, clock) = faulty();
    let (path, _) = file(place.path(), 4 * PIECE);
    let pool = slots(3, PIECE);
    let gate = Gate::new();
    faults.add(Rule::on(OpKind::Read, Fault::HangBefore(gate.clone())).times(1));
    let deadline = clock.now().after(Duration::from_secs(1));
    let answer = start(&*engine, 0, deadline, op(&path, 0, pieces(&pool, 3), true));
    gate.await_waiting(1);
    clock.advance(Duration::from_secs(2));
    assert_eq!(answer.recv().unwrap().unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(pool.available(), 0, "all three are with the call");
    gate.open();
    eventually(|| pool.available() == 3);
}
