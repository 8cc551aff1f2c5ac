//! Operations of the ring with answers from a script: what is asked for next, in every order of answers.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;
use rustix::io::Errno;
use ucm_core::{ErrorKind, Result};
use ucm_infra::{Lane, Mono};

use super::hold::Call;
use super::state::{State, Waiting};
use super::work::{Next, Work};
use crate::file::Files;
use crate::op::{IoBuf, IoDone, IoOp, ReadMode};
use crate::window::page_slots;

fn read(path: &Path, len: usize, direct: bool) -> Work {
    let [slot] = page_slots(len).unwrap();
    let op = IoOp::Read {
        path: path.to_owned(),
        offset: 0,
        len,
        buf: IoBuf::Slot(slot),
        mode: ReadMode::Default,
    };
    Work::new(op, &Arc::new(Files::new(direct))).unwrap().unwrap()
}

fn publish(dir: &Path, len: usize, direct: bool) -> Work {
    let [slot] = page_slots(len).unwrap();
    let op = IoOp::Publish {
        private: dir.join("private"),
        target: dir.join("target"),
        replace: true,
        buf: IoBuf::Slot(slot),
        len,
        mode: 0o600,
        mtime_ns: None,
        durable: false,
    };
    Work::new(op, &Arc::new(Files::new(direct))).unwrap().unwrap()
}

fn call(next: Next) -> Call {
    match next {
        Next::Call(call) => call,
        other => unreachable!("{other:?}"),
    }
}

fn done(next: Next) -> Result<IoDone> {
    match next {
        Next::Done(result) => result,
        other => unreachable!("{other:?}"),
    }
}

/// A place with a file of so many bytes in it, and its descriptor as an answer.
fn place(len: usize) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![7; len]).unwrap();
    (dir, path)
}

fn open(path: &Path) -> rustix::io::Result<u32> {
    use std::os::fd::IntoRawFd;
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    Ok(file.into_raw_fd().cast_unsigned())
}

const fn reads(from: usize, len: usize) -> Call {
    Call::Read {
        from,
        len,
        at: from as u64,
    }
}

#[test]
fn interrupted_and_short_reads_are_carried_on() {
    let (_dir, path) = place(10_000);
    let mut work = read(&path, 10_000, false);
    assert!(matches!(call(work.begin()), Call::Open { .. }));
    // Interrupted while it opened: once more.
    assert!(matches!(
        call(work.step(Err(Errno::INTR), true)),
        Call::Open { .. }
    ));
    assert_eq!(call(work.step(open(&path), true)), reads(0, 10_000));
    assert_eq!(call(work.step(Err(Errno::INTR), true)), reads(0, 10_000));
    assert_eq!(call(work.step(Ok(4000), true)), reads(4000, 6000));
    assert_eq!(call(work.step(Ok(1), true)), reads(4001, 5999));
    let Ok(IoDone::Read { read, file_len, .. }) = done(work.step(Ok(5999), true)) else {
        unreachable!();
    };
    assert_eq!((read, file_len), (10_000, 10_000));
}

#[test]
fn a_read_ends_at_the_end_of_the_file_or_at_an_error() {
    let (_dir, path) = place(100);
    let mut work = read(&path, 200, false);
    work.begin();
    work.step(open(&path), true);
    work.step(Ok(100), true);
    let Ok(IoDone::Read {
        read: got, file_len, ..
    }) = done(work.step(Ok(0), true))
    else {
        unreachable!();
    };
    assert_eq!((got, file_len), (100, 100));
    let mut work = read(&path, 200, false);
    work.begin();
    work.step(open(&path), true);
    let error = done(work.step(Err(Errno::IO), true)).unwrap_err();
    assert_eq!((error.kind(), error.os_code()), (ErrorKind::Io, Some(libc::EIO)));
    let mut work = read(&path, 200, false);
    work.begin();
    for (errno, kind) in [
        (Errno::NOENT, ErrorKind::NotFound),
        (Errno::STALE, ErrorKind::NotFound),
    ] {
        let error = done(work.step(Err(errno), true)).unwrap_err();
        assert_eq!(error.kind(), kind);
        work.begin();
    }
}

#[test]
fn too_little_of_something_is_waited_for_only_so_long() {
    let (_dir, path) = place(100);
    let mut work = read(&path, 100, false);
    work.begin();
    work.step(open(&path), true);
    let mut repeated = 0;
    let error = loop {
        match work.step(Err(Errno::AGAIN), true) {
            Next::Call(call) => assert_eq!(call, reads(0, 100)),
            other => break done(other).unwrap_err(),
        }
        repeated += 1;
    };
    assert_eq!(error.os_code(), Some(libc::EAGAIN));
    assert!(repeated > 3);
}

#[test]
fn an_open_is_tried_without_what_was_refused() {
    let flags = |next| match call(next) {
        Call::Open { flags, .. } => flags,
        other => unreachable!("{other:?}"),
    };
    let mut work = read(Path::new("/somewhere"), 4096, true);
    let first = flags(work.begin());
    assert!(first.contains(OFlags::DIRECT | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC));
    let second = flags(work.step(Err(Errno::INVAL), true));
    assert_eq!(second, first - OFlags::DIRECT);
    // A lease is taken back.
    let third = flags(work.step(Err(Errno::AGAIN), true));
    assert_eq!(third, second - OFlags::NONBLOCK);
    let error = done(work.step(Err(Errno::LOOP), true)).unwrap_err();
    assert_eq!(
        (error.kind(), error.os_code()),
        (ErrorKind::Io, Some(libc::ELOOP))
    );
}

#[test]
fn a_refused_direct_read_goes_through_the_page_cache() {
    let (_dir, path) = place(8192);
    let mut work = read(&path, 8192, true);
    work.begin();
    // The script's descriptor is no direct one; what counts is what was asked for.
    assert_eq!(call(work.step(open(&path), true)), reads(0, 8192));
    if work.core.hold.file.as_ref().is_some_and(|file| file.is_direct()) {
        assert_eq!(call(work.step(Err(Errno::INVAL), true)), reads(0, 8192));
        assert!(!work.core.hold.file.as_ref().unwrap().is_direct());
    }
    assert!(done(work.step(Err(Errno::INVAL), true)).is_err(), "not twice");
}

#[test]
fn a_read_that_nobody_waits_for_only_closes() {
    let (_dir, path) = place(100);
    let mut work = read(&path, 100, false);
    work.begin();
    assert!(done(work.step(open(&path), false)).is_err());
    assert!(work.core.hold.file.is_none());
    let mut work = read(&path, 100, false);
    work.begin();
    work.step(open(&path), true);
    assert!(done(work.step(Err(Errno::CANCELED), false)).is_err());
    assert!(work.core.hold.file.is_none());
}

#[test]
fn short_writes_are_carried_on_and_the_close_is_seen() {
    let (dir, path) = place(0);
    let mut work = publish(dir.path(), 10_000, false);
    let Call::Open { flags, mode } = call(work.begin()) else {
        unreachable!();
    };
    assert!(flags.contains(OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW) && mode == 0o600);
    let writes = |from: usize, len: usize| Call::Write { from, len };
    assert_eq!(call(work.step(open(&path), true)), writes(0, 10_000));
    assert_eq!(call(work.step(Ok(4096), true)), writes(4096, 5904));
    assert_eq!(call(work.step(Err(Errno::INTR), true)), writes(4096, 5904));
    let mut next = call(work.step(Ok(5904), true));
    if next == Call::Advise {
        next = call(work.step(Err(Errno::NOSYS), true));
    }
    assert_eq!(next, Call::Close);
    assert!(!next.is_cancellable());
    assert!(matches!(work.step(Ok(0), true), Next::Pool));
}

#[test]
fn whatever_fails_leaves_no_private_file() {
    let fails = |answers: &[rustix::io::Result<u32>]| {
        let (dir, path) = place(0);
        let mut work = publish(dir.path(), 5000, false);
        work.begin();
        let mut next = work.step(open(&path), true);
        for &answer in answers {
            next = work.step(answer, true);
            if matches!(next, Next::Call(Call::Advise)) {
                next = work.step(Ok(0), true);
            }
        }
        if matches!(next, Next::Call(Call::Close)) {
            // Submitting takes the descriptor; the script does not.
            work.core.hold.file = None;
            next = work.step(Ok(0), true);
        }
        assert_eq!(call(next), Call::Unlink);
        done(work.step(Err(Errno::NOENT), true)).unwrap_err().os_code()
    };
    assert_eq!(fails(&[Ok(0)]), Some(libc::EIO), "no progress");
    assert_eq!(fails(&[Ok(4096), Err(Errno::NOSPC)]), Some(libc::ENOSPC));
    assert_eq!(
        fails(&[Ok(5000), Err(Errno::DQUOT)]),
        Some(libc::EDQUOT),
        "the close"
    );
    // What could not be created is somebody else's.
    let mut work = publish(Path::new("/somewhere"), 1, false);
    work.begin();
    let error = done(work.step(Err(Errno::EXIST), true)).unwrap_err();
    assert_eq!(error.os_code(), Some(libc::EEXIST));
}

#[test]
fn a_publish_that_nobody_waits_for_is_undone_from_anywhere() {
    // Late while it is created, written, closed.
    for late in 0..3 {
        let (dir, path) = place(0);
        let mut work = publish(dir.path(), 100, false);
        work.begin();
        let mut next = work.step(open(&path), late != 0);
        if late > 0 {
            next = work.step(Ok(100), late != 1);
            if matches!(next, Next::Call(Call::Advise)) {
                next = work.step(Ok(0), late != 1);
            }
        }
        assert_eq!(call(next), Call::Close, "{late}");
        work.core.hold.file = None;
        assert_eq!(call(work.step(Ok(0), false)), Call::Unlink, "{late}");
        assert!(done(work.step(Ok(0), false)).is_err());
    }
    // And when the pool gave it back.
    let (dir, _path) = place(0);
    let mut work = publish(dir.path(), 100, false);
    assert_eq!(call(work.abandon()), Call::Unlink);
}

#[test]
fn what_the_ring_does_not_run_is_given_back() {
    let files = Arc::new(Files::new(false));
    let fresh = |buf: IoBuf, offset| IoOp::Read {
        path: "/somewhere".into(),
        offset,
        len: 1,
        buf,
        mode: ReadMode::FreshDirect,
    };
    let [slot] = page_slots(1).unwrap();
    for op in [
        IoOp::List { dir: "/".into() },
        fresh(vec![0; 1].into(), 0),
        fresh(slot.into(), 5),
    ] {
        let kind = op.kind();
        assert_eq!(Work::new(op, &files).err().map(|op| op.kind()), Some(kind));
    }
    let [slot] = page_slots(1).unwrap();
    assert!(Work::new(fresh(slot.into(), 4096), &files).is_ok());
}

/// A read of two pieces of a page each, from the second page on.
fn read_into(files: &Arc<Files>, path: &Path) -> Work {
    let slots: [_; 2] = page_slots(4096).unwrap();
    let op = IoOp::ReadInto {
        path: path.to_owned(),
        offset: 4096,
        into: slots.into_iter().map(|slot| (IoBuf::Slot(slot), 4096)).collect(),
        keep: true,
    };
    Work::new(op, files).unwrap().unwrap()
}

fn filled(next: Next) -> Result<usize> {
    let Ok(IoDone::ReadInto { bufs, read }) = done(next) else {
        unreachable!();
    };
    assert_eq!(bufs.len(), 2, "always");
    read
}

const fn piece(from: usize, len: usize) -> Call {
    Call::Read {
        from,
        len,
        at: 4096 + from as u64,
    }
}

#[test]
fn several_buffers_are_filled_and_the_file_is_kept_open() {
    let (_dir, path) = place(3 * 4096);
    let files = Arc::new(Files::new(false));
    let mut work = read_into(&files, &path);
    assert!(matches!(call(work.begin()), Call::Open { .. }));
    assert_eq!(call(work.step(open(&path), true)), piece(0, 8192));
    assert_eq!(call(work.step(Ok(5000), true)), piece(5000, 3192));
    assert_eq!(filled(work.step(Ok(3192), true)).unwrap(), 8192);
    assert_eq!(files.kept.count(), 1);
    // The next needs no open; the end of the file ends it.
    let mut work = read_into(&files, &path);
    assert_eq!(call(work.begin()), piece(0, 8192));
    assert_eq!(call(work.step(Ok(4096), true)), piece(4096, 4096));
    assert_eq!(filled(work.step(Ok(0), true)).unwrap(), 4096);
    assert_eq!(files.kept.count(), 1);
}

#[test]
fn a_kept_file_that_fails_is_opened_anew_and_one_without_a_name_is_gone() {
    let (_dir, path) = place(3 * 4096);
    let files = Arc::new(Files::new(false));
    let keep = || {
        let mut work = read_into(&files, &path);
        work.begin();
        work.step(open(&path), true);
        filled(work.step(Ok(8192), true)).unwrap();
    };
    keep();
    let mut work = read_into(&files, &path);
    assert_eq!(call(work.begin()), piece(0, 8192));
    assert_eq!(call(work.step(Ok(4096), true)), piece(4096, 4096));
    assert!(matches!(call(work.step(Err(Errno::IO), true)), Call::Open { .. }));
    assert_eq!(files.kept.count(), 0);
    assert_eq!(
        call(work.step(open(&path), true)),
        piece(0, 8192),
        "from the start"
    );
    let error = filled(work.step(Err(Errno::IO), true)).unwrap_err();
    assert_eq!(error.os_code(), Some(libc::EIO));
    assert_eq!(files.kept.count(), 0);
    keep();
    let mut work = read_into(&files, &path);
    work.begin();
    assert!(done(work.step(Ok(4096), false)).is_ok(), "nobody waits");
    assert_eq!(files.kept.count(), 1);
    let mut work = read_into(&files, &path);
    work.begin();
    let error = filled(work.step(Err(Errno::STALE), true)).unwrap_err();
    assert_eq!((error.kind(), files.kept.count()), (ErrorKind::NotFound, 0));
    keep();
    std::fs::remove_file(&path).unwrap();
    let error = filled(read_into(&files, &path).begin()).unwrap_err();
    assert_eq!((error.kind(), files.kept.count()), (ErrorKind::NotFound, 0));
}

#[test]
fn places_are_lost_by_the_worker() {
    let (_dir, path) = place(10);
    let lane = Lane {
        name: "load",
        capacity: 64,
        max_running: 32,
    };
    // As beside four workers of which two are replaced: eight places for each.
    let mut state = State::new(&[lane], 16);
    for _ in 0..17 {
        let waiting = Waiting {
            work: Box::new(read(&path, 10, false)),
            deadline: Mono(1),
            done: Box::new(|_| ()),
        };
        assert!(state.push(0, waiting).is_ok());
    }
    assert_eq!(state.orders(Mono(0)).starts.len(), 17);
    assert_eq!(state.overdue(Mono(1)).len(), 17);
    let mut left = Vec::new();
    for place in 0..17 {
        left.push((state.lost(), state.lost_workers(2)));
        state.ended(place);
    }
    assert_eq!(left.first(), Some(&(17, 2)));
    assert_eq!(
        (left[1], left[2], left[9], left[10]),
        ((16, 2), (15, 1), (8, 1), (7, 0))
    );
}
