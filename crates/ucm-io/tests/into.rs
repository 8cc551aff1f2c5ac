//! Reads of one stretch of a file into several buffers, their kept descriptors, and their faults.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use ucm_core::{ErrorKind, Result};
use ucm_device::{Slot, SlotPool};
use ucm_infra::{Clock, MonotonicTime};
use ucm_io::{Close, IoEngine, IoJob, IoOptions, IoPool, PsyncEngine};
use ucm_testkit::{Fault, FaultyEngine, Gate, OpKind, Rule, errno};

const PIECE: usize = 8192;

/// A file of `len` bytes that differ from position to position.
fn file(dir: &Path, len: usize) -> (PathBuf, Vec<u8>) {
    let bytes = pattern(len, 3);
    let path = dir.join("file");
    std::fs::write(&path, &bytes).unwrap();
    (path, bytes)
}

/// An engine through the page cache or past it, and a job on it.
fn engine(direct: bool) -> (Arc<PsyncEngine>, IoJob) {
    let engine = PsyncEngine::new(direct);
    (Arc::clone(&engine), IoJob::alone(engine))
}

/// All slots of a pool.
fn all(pool: &Arc<SlotPool>) -> Vec<Slot> {
    std::iter::from_fn(|| pool.try_acquire()).collect()
}

/// Reads into the slots from the second piece of the file on; returns the bytes read.
fn read_pieces(io: &IoJob, path: &Path, slots: &mut [Slot], keep: bool) -> Result<usize> {
    let into = slots
        .iter_mut()
        .map(|slot| (slot.as_mut_slice(), PIECE))
        .collect();
    io.read_into(path, PIECE as u64, into, keep)
}

/// Reads three pieces from the second on; returns their bytes.
fn three(io: &IoJob, path: &Path, keep: bool) -> Result<Vec<u8>> {
    let mut slots = all(&slots(3, PIECE));
    let read = read_pieces(io, path, &mut slots, keep)?;
    let mut bytes: Vec<u8> = slots
        .iter()
        .flat_map(|slot| slot.as_slice().to_vec())
        .collect();
    bytes.truncate(read);
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
    for io in both() {
        for place in places() {
            let (path, bytes) = file(place.path(), 4 * PIECE);
            for keep in [false, true, true] {
                assert_eq!(three(&io, &path, keep).unwrap(), bytes[PIECE..]);
            }
            // Parts of different lengths and offsets, into memory of any kind.
            for (offset, lens) in [(0, [100, 4096, 5]), (4096, [4096, 8192, 3]), (7, [0, 1, 0])] {
                let (mut heap, mut slots) = (lens.map(|len| vec![0; len]), all(&slots(3, PIECE)));
                let heap: Vec<_> = heap.iter_mut().map(|buf| &mut buf[..]).collect();
                let slots: Vec<_> = slots.iter_mut().map(Slot::as_mut_slice).collect();
                for mut bufs in [heap, slots] {
                    let into = bufs.iter_mut().map(|buf| &mut **buf).zip(lens).collect();
                    let read = io.read_into(&path, offset, into, true).unwrap();
                    assert_eq!(read, lens.iter().sum::<usize>());
                    let mut at = offset as usize;
                    for (buf, len) in bufs.iter().zip(lens) {
                        assert_eq!(buf[..len], bytes[at..at + len]);
                        at += len;
                    }
                }
            }
            assert_eq!(io.read_into(&path, 0, Vec::new(), true).unwrap(), 0);
        }
    }
}

#[test]
fn the_end_of_the_file_is_seen() {
    let place = tempfile::tempdir().unwrap();
    for io in both() {
        for (len, keep) in [
            (2 * PIECE + 700, true),
            (3 * PIECE, false),
            (PIECE, true),
            (10, true),
        ] {
            let (path, bytes) = file(place.path(), len);
            let got = three(&io, &path, keep).unwrap();
            assert_eq!(got, bytes[PIECE.min(len)..], "{len} {keep}");
        }
    }
}

#[test]
fn a_descriptor_is_kept_and_let_go() {
    for direct in [false, true] {
        let (engine, io) = engine(direct);
        let pool = IoPool::new(engine, &IoOptions::with_workers(2)).unwrap();
        let place = tempfile::tempdir().unwrap();
        let (path, _) = file(place.path(), 4 * PIECE);
        three(&io, &path, false).unwrap();
        assert_eq!((pool.kept(), open_on(&path)), (0, 0));
        for _ in 0..3 {
            three(&io, &path, true).unwrap();
            assert_eq!((pool.kept(), open_on(&path)), (1, 1));
        }
        pool.close_kept(Close::Gone(&[place.path().join("another")]));
        pool.close_kept(Close::Unused);
        assert_eq!(pool.kept(), 1, "it was used since");
        pool.close_kept(Close::Unused);
        assert_eq!(pool.kept(), 0);
        eventually(|| open_on(&path) == 0);
        three(&io, &path, true).unwrap();
        pool.close_kept(Close::Gone(std::slice::from_ref(&path)));
        eventually(|| open_on(&path) == 0);
        three(&io, &path, true).unwrap();
        io.remove(std::slice::from_ref(&path)).unwrap();
        assert_eq!(
            (pool.kept(), open_on(&path)),
            (0, 0),
            "the removal closes it"
        );
    }
}

#[test]
fn a_file_that_lost_its_name_is_not_found() {
    let place = tempfile::tempdir().unwrap();
    let (engine, io) = engine(false);
    let (path, _) = file(place.path(), 4 * PIECE);
    three(&io, &path, true).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(fails(three(&io, &path, true)), ErrorKind::NotFound);
    assert_eq!((engine.kept(), open_on(&path)), (0, 0));
    let (path, bytes) = file(place.path(), 4 * PIECE);
    assert_eq!(three(&io, &path, true).unwrap(), bytes[PIECE..]);
}

#[test]
fn what_cannot_be_read_says_why() {
    let place = tempfile::tempdir().unwrap();
    let (engine, io) = engine(false);
    let (path, _) = file(place.path(), 4 * PIECE);
    let read = |path: &Path, offset, len| {
        let (mut one, mut other) = ([0; 10], [0; 10]);
        let into = vec![(&mut one[..], 10), (&mut other[..], len)];
        io.read_into(path, offset, into, true)
            .map_err(|error| error.kind())
    };
    assert_eq!(read(&path, 0, 10), Ok(20));
    assert_eq!(read(&path, 0, 11), Err(ErrorKind::InvalidInput));
    assert_eq!(read(&path, u64::MAX, 1), Err(ErrorKind::InvalidInput));
    let absent = place.path().join("absent");
    assert_eq!(read(&absent, 0, 10), Err(ErrorKind::NotFound));
    assert_eq!(read(place.path(), 0, 10), Err(ErrorKind::Foreign));
    assert_eq!(engine.kept(), 1);
}

#[test]
fn after_shutdown_nothing_is_kept_or_read_and_the_slots_are_free() {
    let place = tempfile::tempdir().unwrap();
    let (engine, io) = engine(false);
    let pool = IoPool::new(engine, &IoOptions::with_workers(2)).unwrap();
    let (path, _) = file(place.path(), 4 * PIECE);
    three(&io, &path, true).unwrap();
    pool.shutdown(Duration::from_secs(60));
    assert_eq!(pool.kept(), 0);
    let slots = slots(3, PIECE);
    let mut pieces = all(&slots);
    let closed = pool.call(0, MonotonicTime::NEVER, move |io| {
        read_pieces(io, &path, &mut pieces, true)
    });
    assert_eq!((fails(closed), slots.available()), (ErrorKind::Closed, 3));
}

#[test]
fn threads_share_a_kept_descriptor() {
    let place = tempfile::tempdir().unwrap();
    let (engine, io) = engine(false);
    let (path, bytes) = file(place.path(), 4 * PIECE);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (engine, io, path, bytes) = (&engine, &io, &path, &bytes);
            scope.spawn(move || {
                for turn in 0..50 {
                    assert_eq!(three(io, path, true).unwrap(), bytes[PIECE..]);
                    if (turn + thread) % 7 == 0 {
                        drop(engine.close(Close::Unused));
                        drop(engine.close(Close::Gone(std::slice::from_ref(path))));
                    }
                }
            });
        }
    });
    assert!(engine.kept() <= 1);
}

/// Kept descriptors in a forked child, inspected from outside while it pauses.
#[test]
fn children_have_no_kept_descriptor() {
    let place = tempfile::tempdir().unwrap();
    let io = plain();
    let (path, bytes) = file(place.path(), 4 * PIECE);
    three(&io, &path, true).unwrap();
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
    assert_eq!(three(&io, &path, true).unwrap(), bytes[PIECE..]);
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

fn faulty() -> (Arc<FaultyEngine>, IoJob) {
    let faults = FaultyEngine::new(PsyncEngine::new(false), 1);
    (Arc::clone(&faults), IoJob::alone(faults))
}

#[test]
fn faults_befall_such_reads() {
    let place = tempfile::tempdir().unwrap();
    let (faults, io) = faulty();
    let (path, _) = file(place.path(), 4 * PIECE);
    for (fault, expected) in [
        (Fault::Errno(errno::EIO), ErrorKind::Io),
        (Fault::Errno(errno::ENOENT), ErrorKind::NotFound),
        (Fault::stale(), ErrorKind::NotFound),
        (Fault::LostReply(errno::EIO), ErrorKind::Io),
        (Fault::Busy, ErrorKind::Busy),
    ] {
        faults.add(Rule::on(OpKind::Read, fault).times(1));
        assert_eq!(fails(three(&io, &path, true)), expected);
    }
    faults.add(Rule::on(OpKind::Publish, Fault::LateVisible(1)));
    publish(&io, place.path(), "late", &[1; 4 * PIECE]);
    let late = place.path().join("late");
    assert_eq!(fails(three(&io, &late, true)), ErrorKind::NotFound);
    assert_eq!(three(&io, &late, true).unwrap(), [1; 3 * PIECE]);
    assert_eq!(faults.kept(), 2);
}

#[test]
fn faults_change_what_several_got() {
    let place = tempfile::tempdir().unwrap();
    let (faults, io) = faulty();
    let (path, bytes) = file(place.path(), 4 * PIECE);
    let read = |fault| {
        faults.add(Rule::on(OpKind::Read, fault).times(1));
        three(&io, &path, true).unwrap()
    };
    assert_eq!(
        read(Fault::ShortRead(PIECE + 5)),
        bytes[PIECE..2 * PIECE + 5]
    );
    let mut flipped = bytes[PIECE..].to_vec();
    flipped[10] ^= 0xff;
    flipped[PIECE + 20] ^= 0xff;
    assert_eq!(read(Fault::Flip(vec![10, PIECE + 20, 9 * PIECE])), flipped);
    let random = read(Fault::FlipRandom(7));
    let differ = random
        .iter()
        .zip(&bytes[PIECE..])
        .filter(|(a, b)| a != b)
        .count();
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
    let (faults, _) = faulty();
    let (pool, clock) = clocked(Arc::clone(&faults) as _, 2);
    let (path, _) = file(place.path(), 4 * PIECE);
    let slots = slots(3, PIECE);
    let gate = Gate::new();
    faults.add(Rule::on(OpKind::Read, Fault::HangBefore(gate.clone())).times(1));
    let deadline = clock.now().after(Duration::from_secs(1));
    let mut pieces = all(&slots);
    let answer = start(&pool, 0, deadline, move |io| {
        read_pieces(io, &path, &mut pieces, true)
    });
    gate.await_waiting(1);
    clock.advance(Duration::from_secs(2));
    assert_eq!(fails(answer.recv().unwrap()), ErrorKind::Timeout);
    assert_eq!(slots.available(), 0, "all three are with the call");
    gate.open();
    eventually(|| slots.available() == 3);
}
