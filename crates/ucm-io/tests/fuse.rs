//! The engines on a file system that gives short counts, fails closes and stalls: what network mounts do,
//! by real system calls. Needs root and /dev/fuse.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::fuse::{Fuse, Manners, op};
use common::*;
use ucm_core::ErrorKind;
use ucm_infra::{Clock, ManualClock};
use ucm_io::{IoOptions, IoPool};

/// By the thread pool alone: kernels (6.18 at least) carry on a short call of a ring by themselves if the file can be
/// polled, as those of FUSE can, and start again at its first byte. One more reason why such mounts are the pool's.
#[test]
fn short_counts_of_the_kernel_are_carried_on() {
    let manners = Manners {
        short: 1000,
        ..Manners::default()
    };
    let Some(place) = or_skip("short_counts_of_the_kernel_are_carried_on", Fuse::mount(manners)) else {
        return;
    };
    for engine in [pool(), direct_pool()] {
        let pool = slots(1, 8192);
        let slot = filled(&pool, 1);
        let expected = slot.as_slice().to_vec();
        let meta = publish(&*engine, place.dir(), "block", slot);
        assert_eq!(meta.len, 8192);
        assert!(place.files()["block"] == expected);
        let op = read_op(place.dir().join("block"), 0, 8192, pool.try_acquire().unwrap());
        let (got, file_len) = bytes_of(call(&*engine, op).unwrap()).unwrap();
        assert!(got == expected && file_len == 8192);
    }
    // Nine calls for each of two files, both ways: the counts were short indeed.
    assert!(place.requests(op::WRITE) >= 18 && place.requests(op::READ) >= 18);
}

#[test]
fn a_close_that_fails_fails_the_publish() {
    let manners = Manners {
        flush_error: libc::EDQUOT,
        ..Manners::default()
    };
    let Some(place) = or_skip("a_close_that_fails_fails_the_publish", Fuse::mount(manners)) else {
        return;
    };
    let engine = pool();
    let error = call(&*engine, publish_op(place.dir(), "block", vec![1; 100])).unwrap_err();
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
        let manners = Manners {
            stall,
            ..Manners::default()
        };
        let name = "a_call_that_hangs_anywhere_costs_its_deadline_and_no_more";
        let Some(place) = or_skip(name, Fuse::mount(manners)) else {
            return;
        };
        let clock = ManualClock::new();
        let engine = IoPool::psync(
            false,
            &IoOptions {
                clock: Arc::clone(&clock) as Arc<dyn Clock>,
                max_replacements: 1,
                ..IoOptions::with_workers(1)
            },
        )
        .unwrap();
        let pool = slots(2, 4096);
        let deadline = clock.now().after(Duration::from_secs(30));
        let hung = start(
            &*engine,
            2,
            deadline,
            publish_op(place.dir(), "block", filled(&pool, 1)),
        );
        place.await_stalled();
        assert!(hung.try_recv().is_err());
        clock.advance(Duration::from_secs(30));
        assert_eq!(hung.recv().unwrap().unwrap_err().kind(), ErrorKind::Timeout);
        // The slot stays with the call; a replacement serves the others.
        assert_eq!((pool.out(), engine.stuck()), (1, 1));
        let elsewhere = tempfile::tempdir().unwrap();
        publish(&*engine, elsewhere.path(), "other", filled(&pool, 2));
        place.release();
        eventually(|| pool.out() == 0 && engine.stuck() == 0);
        // Too late is not published, unless it was the naming itself that hung: then it is there, and whole.
        let files = place.files();
        match stall {
            op::RENAME => assert_eq!(files["block"].len(), 4096),
            _ => assert!(files.is_empty(), "{stall}: {:?}", files.keys()),
        }
    }
}

#[test]
fn a_read_that_hangs_gives_its_slot_back_when_it_returns() {
    let Some(place) = or_skip(
        "a_read_that_hangs_gives_its_slot_back_when_it_returns",
        Fuse::mount(Manners {
            stall: op::READ,
            ..Manners::default()
        }),
    ) else {
        return;
    };
    let clock = ManualClock::new();
    let engine = IoPool::psync(
        false,
        &IoOptions {
            clock: Arc::clone(&clock) as Arc<dyn Clock>,
            ..IoOptions::with_workers(1)
        },
    )
    .unwrap();
    publish(&*engine, place.dir(), "block", vec![7; 4096]);
    let pool = slots(1, 4096);
    let op = read_op(place.dir().join("block"), 0, 4096, pool.try_acquire().unwrap());
    let hung = start(&*engine, 0, clock.now().after(Duration::from_nanos(1)), op);
    place.await_stalled();
    clock.advance(Duration::from_nanos(1));
    assert_eq!(hung.recv().unwrap().unwrap_err().kind(), ErrorKind::Timeout);
    assert!(pool.try_acquire().is_none());
    engine.shutdown(Duration::ZERO);
    assert!(pool.try_acquire().is_none());
    place.release();
    eventually(|| pool.out() == 0);
    // The late bytes went into the quarantined slot and nowhere else.
    assert_eq!(pool.try_acquire().unwrap().as_slice(), vec![7; 4096]);
}
