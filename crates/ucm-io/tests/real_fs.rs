//! The engines on small file systems of its own: full ones, and one that hangs in the kernel. Needs
//! root.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::time::Duration;

use crate::common::*;
use ucm_core::ErrorKind;
use ucm_infra::{Clock, MonotonicTime};
use ucm_io::{IoJob, PsyncEngine};

/// The names that tests left in their file system.
fn left(dir: &Path) -> Vec<String> {
    let mut names = names(dir);
    names.retain(|name| name != "lost+found");
    names
}

/// Fills a file system until a write fails. Then no partial file is left, and after a removal
/// writes succeed again.
fn fill_up(io: &IoJob, dir: &Path) {
    let slots = slots(1, 256 << 10);
    let mut published = Vec::new();
    let refusal = loop {
        let (name, slot) = (
            format!("{:03}", published.len()),
            filled(&slots, published.len() as u8),
        );
        match try_publish(io, dir, &name, slot.as_slice()) {
            Ok(_) => published.push(name),
            Err(error) => break error,
        }
        assert!(published.len() < 1000, "never full");
    };
    assert_eq!(refusal.kind(), ErrorKind::NoSpace, "{refusal}");
    assert!(published.len() > 1);
    assert_eq!(left(dir), published);
    let before = io.space(dir).unwrap().free;
    assert!(before < 256 << 10, "{before}");
    io.remove(&[dir.join("000"), dir.join("001")]).unwrap();
    assert!(io.space(dir).unwrap().free > before);
    publish(io, dir, "000", filled(&slots, 0).as_slice());
    for (i, name) in published.iter().enumerate().filter(|(i, _)| *i != 1) {
        let (got, file_len) = read(io, &dir.join(name), 0, 256 << 10).unwrap();
        assert!(
            got == pattern(256 << 10, i as u8) && file_len == 256 << 10,
            "{name}"
        );
    }
}

#[test]
fn a_full_tmpfs() {
    let Some(place) = or_skip("a_full_tmpfs", Mounted::tmpfs(3 << 20)) else {
        return;
    };
    fill_up(&plain(), &place.dir);
}

#[test]
fn a_full_ext4() {
    for io in both() {
        let Some(place) = or_skip("a_full_ext4", Mounted::ext4(16 << 20)) else {
            return;
        };
        let found = io.probe(&place.dir).unwrap();
        assert_eq!((found.fs.name(), found.fs.maybe_shared()), ("ext4", false));
        fill_up(&io, &place.dir);
    }
}

/// True if a thread of this process is in uninterruptible sleep.
fn hangs_in_the_kernel() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks.flatten().any(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit(") ")
            .next()
            .is_some_and(|rest| rest.starts_with('D'))
    })
}

#[test]
fn a_publish_that_hangs_in_the_kernel() {
    let Some(place) = or_skip(
        "a_publish_that_hangs_in_the_kernel",
        Mounted::ext4(16 << 20),
    ) else {
        return;
    };
    let (pool, clock) = clocked(PsyncEngine::new(false), 1);
    publish(&plain(), &place.dir, "before", &[1; 100]);
    let slots = slots(1, 8192);
    let Some(()) = or_skip("a_publish_that_hangs_in_the_kernel", place.freeze()) else {
        return;
    };
    let mut tries = 0..100;
    let verdict = loop {
        let deadline = clock.now().after(Duration::from_secs(30));
        let hung = start_publish(&pool, 2, deadline, &place.dir, "block", filled(&slots, 1));
        eventually(|| pool.stats().lanes[2].running == 1 && hangs_in_the_kernel());
        clock.advance(Duration::from_secs(30));
        let verdict = hung.recv().unwrap();
        // Its deadline may pass before it begins: then nothing hangs.
        if (slots.out(), pool.stuck()) == (1, 1) || tries.next().is_none() {
            break verdict;
        }
        eventually(|| slots.out() == 0);
    };
    // Reading does not change the file system, and there is a worker for it again.
    let before = place.dir.join("before");
    let read_meanwhile = pool.call(0, MonotonicTime::NEVER, move |io| read(io, &before, 0, 100));
    let (out, stuck) = (slots.out(), pool.stuck());
    // A shutdown does not wait for the kernel.
    pool.shutdown(Duration::ZERO);
    place.thaw().unwrap();
    assert_eq!(fails(verdict), ErrorKind::Timeout);
    assert_eq!(read_meanwhile.unwrap().0, [1; 100]);
    assert_eq!((out, stuck), (1, 1));
    // The call returns, the slot is free again, and the late file is not published.
    eventually(|| slots.out() == 0);
    assert_eq!(left(&place.dir), ["before"]);
}
