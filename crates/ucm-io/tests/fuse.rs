//! The engines on a file system that gives short counts, fails closes and stalls: the behaviour of
//! network mounts, by real system calls. Needs root and /dev/fuse.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use crate::common::fuse::{Behaviour, Fuse, op};
use crate::common::*;
use ucm_core::ErrorKind;
use ucm_infra::{Clock, MonotonicTime};
use ucm_io::{PsyncEngine, ReadMode};

#[test]
fn short_counts_of_the_kernel_are_carried_on() {
    let behaviour = Behaviour {
        short: 1000,
        ..Behaviour::default()
    };
    let Some(place) = or_skip(
        "short_counts_of_the_kernel_are_carried_on",
        Fuse::mount(behaviour),
    ) else {
        return;
    };
    let path = place.dir().join("block");
    for io in both() {
        let pool = slots(2, 8192);
        let (slot, mut back) = (filled(&pool, 1), pool.try_acquire().unwrap());
        let meta = publish(&io, place.dir(), "block", slot.as_slice());
        assert_eq!(meta.len, 8192);
        assert!(place.files()["block"] == slot.as_slice());
        let read = io
            .read(&path, 0, 8192, back.as_mut_slice(), ReadMode::Default)
            .unwrap();
        assert_eq!((read.bytes, read.file_len), (8192, 8192));
        assert!(back.as_slice() == slot.as_slice());
    }
    // Nine calls for each of two files, in both directions: the counts were indeed short.
    assert!(place.requests(op::WRITE) >= 18 && place.requests(op::READ) >= 18);
}

#[test]
fn a_close_that_fails_fails_the_publish() {
    let behaviour = Behaviour {
        flush_error: libc::EDQUOT,
        ..Behaviour::default()
    };
    let Some(place) = or_skip(
        "a_close_that_fails_fails_the_publish",
        Fuse::mount(behaviour),
    ) else {
        return;
    };
    let error = try_publish(&plain(), place.dir(), "block", &[1; 100]).unwrap_err();
    assert_eq!(
        (error.kind(), error.os_code()),
        (ErrorKind::NoSpace, Some(libc::EDQUOT))
    );
    assert_eq!(place.requests(op::WRITE), 1);
    assert_eq!(place.requests(op::RENAME), 0);
    assert!(place.files().is_empty());
}

#[test]
fn a_call_that_hangs_anywhere_costs_its_deadline_and_no_more() {
    for stall in [op::CREATE, op::WRITE, op::FLUSH, op::RENAME] {
        let behaviour = Behaviour {
            stall,
            ..Behaviour::default()
        };
        let name = "a_call_that_hangs_anywhere_costs_its_deadline_and_no_more";
        let Some(place) = or_skip(name, Fuse::mount(behaviour)) else {
            return;
        };
        let (pool, clock) = clocked(PsyncEngine::new(false), 1);
        let slots = slots(2, 4096);
        let deadline = clock.now().after(Duration::from_secs(30));
        let hung = start_publish(&pool, 2, deadline, place.dir(), "block", filled(&slots, 1));
        place.await_stalled();
        assert!(hung.try_recv().is_err());
        clock.advance(Duration::from_secs(30));
        assert_eq!(fails(hung.recv().unwrap()), ErrorKind::Timeout);
        // The slot stays with the call; a replacement serves the others.
        assert_eq!((slots.out(), pool.stuck()), (1, 1));
        let elsewhere = tempfile::tempdir().unwrap();
        let other = start_publish(
            &pool,
            0,
            MonotonicTime::NEVER,
            elsewhere.path(),
            "other",
            filled(&slots, 2),
        );
        other.recv().unwrap().unwrap();
        place.release();
        eventually(|| slots.out() == 0 && pool.stuck() == 0);
        // A late file is not published, unless the rename itself hung: then it exists and is
        // complete.
        let files = place.files();
        match stall {
            op::RENAME => assert_eq!(files["block"].len(), 4096),
            _ => assert!(files.is_empty(), "{stall}: {:?}", files.keys()),
        }
    }
}

#[test]
fn a_read_that_hangs_gives_its_slot_back_when_it_returns() {
    let behaviour = Behaviour {
        stall: op::READ,
        ..Behaviour::default()
    };
    let name = "a_read_that_hangs_gives_its_slot_back_when_it_returns";
    let Some(place) = or_skip(name, Fuse::mount(behaviour)) else {
        return;
    };
    let (pool, clock) = clocked(PsyncEngine::new(false), 1);
    publish(&plain(), place.dir(), "block", &[7; 4096]);
    let slots = slots(1, 4096);
    let (path, mut slot) = (place.dir().join("block"), slots.try_acquire().unwrap());
    let hung = start(
        &pool,
        0,
        clock.now().after(Duration::from_nanos(1)),
        move |io| io.read(&path, 0, 4096, slot.as_mut_slice(), ReadMode::Default),
    );
    place.await_stalled();
    clock.advance(Duration::from_nanos(1));
    assert_eq!(fails(hung.recv().unwrap()), ErrorKind::Timeout);
    assert!(slots.try_acquire().is_none());
    pool.shutdown(Duration::ZERO);
    assert!(slots.try_acquire().is_none());
    place.release();
    eventually(|| slots.out() == 0);
    // The late bytes went into the quarantined slot and nowhere else.
    assert_eq!(slots.try_acquire().unwrap().as_slice(), [7; 4096]);
}
