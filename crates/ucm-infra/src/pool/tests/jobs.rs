//! Queueing, lanes, results and panics.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ucm_core::{ErrorKind, Result};

use super::{GUARD, Rig, SECOND, lane};
use crate::clock::MonotonicTime;

#[test]
fn a_job_is_done_and_told() {
    let rig = Rig::new(|pool| pool.size(2));
    rig.submit(0, MonotonicTime::NEVER, 1, || 41).unwrap();
    assert_eq!(rig.next(), (1, Ok(41)));
    let lane = rig.pool.stats().lanes[0];
    assert_eq!((lane.submitted, lane.completed, lane.timed_out), (1, 1, 0));
}

#[test]
fn lane_zero_goes_first_and_order_holds_within_a_lane() {
    let rig = Rig::new(|pool| pool.lanes(&[lane("load", 8, 1), lane("dump", 8, 1)]));
    let release = rig.hang(1, MonotonicTime::NEVER, 0);
    for (lane, id) in [(1, 1), (1, 2), (0, 3), (0, 4)] {
        rig.submit(lane, MonotonicTime::NEVER, id, move || id)
            .unwrap();
    }
    drop(release);
    let order: Vec<u32> = (0..5).map(|_| rig.next().0).collect();
    assert_eq!(order, [0, 3, 4, 1, 2]);
}

#[test]
fn a_full_lane_refuses_and_gives_the_job_back() {
    let rig = Rig::new(|pool| pool.lanes(&[lane("load", 1, 1), lane("dump", 1, 1)]));
    let release = rig.hang(0, MonotonicTime::NEVER, 0);
    rig.submit(0, MonotonicTime::NEVER, 1, || 1).unwrap();
    let called = Arc::new(AtomicUsize::new(0));
    let (one, two) = (Arc::clone(&called), Arc::clone(&called));
    let refused = rig
        .pool
        .offer(
            0,
            MonotonicTime::NEVER,
            move || one.fetch_add(1, Ordering::Relaxed),
            move |_: Result<usize>| {
                two.fetch_add(1, Ordering::Relaxed);
            },
        )
        .unwrap_err();
    assert_eq!(refused.error.kind(), ErrorKind::Busy);
    assert!(
        refused.error.to_string().contains("lane=load"),
        "{}",
        refused.error
    );
    assert_eq!(called.load(Ordering::Relaxed), 0);
    (refused.done)(Err(refused.error));
    assert_eq!(called.load(Ordering::Relaxed), 1);
    // The other lane has its own capacity.
    rig.submit(1, MonotonicTime::NEVER, 2, || 2).unwrap();
    assert_eq!(rig.pool.stats().lanes[0].refused, 1);
    drop(release);
    assert_eq!([rig.next().0, rig.next().0, rig.next().0], [0, 1, 2]);
}

#[test]
fn a_limited_lane_leaves_workers_to_the_others() {
    let rig = Rig::new(|pool| {
        pool.size(3)
            .lanes(&[lane("load", 8, 3), lane("dump", 8, 2)])
    });
    let dumps = [
        rig.hang(1, MonotonicTime::NEVER, 1),
        rig.hang(1, MonotonicTime::NEVER, 2),
    ];
    rig.submit(1, MonotonicTime::NEVER, 3, || 3).unwrap();
    // The third worker is free, but not for a dump.
    rig.submit(0, MonotonicTime::NEVER, 4, || 4).unwrap();
    assert_eq!(rig.next(), (4, Ok(4)));
    let stats = rig.pool.stats();
    assert_eq!((stats.lanes[1].queued, stats.lanes[1].running), (1, 2));
    let [first, second] = dumps;
    drop(first);
    let mut told = [rig.next().0, rig.next().0];
    told.sort_unstable();
    assert_eq!(told, [1, 3]);
    drop(second);
    assert_eq!(rig.next(), (2, Ok(2)));
}

#[test]
fn jobs_beyond_a_lanes_limit_are_taken_by_the_worker_that_makes_room() {
    let rig = Rig::new(|pool| pool.size(3).lanes(&[lane("limited", 64, 1)]));
    let release = rig.hang(0, MonotonicTime::NEVER, 0);
    for id in 1..=20 {
        // wakes no worker: it cannot run yet
        rig.submit(0, MonotonicTime::NEVER, id, move || id).unwrap();
    }
    drop(release);
    for id in 0..=20 {
        assert_eq!(rig.next(), (id, Ok(id)));
    }
}

#[test]
fn panics_are_told_and_kill_no_worker() {
    let rig = Rig::new(|pool| pool.size(1));
    rig.submit(0, MonotonicTime::NEVER, 1, || panic!("meant"))
        .unwrap();
    let (id, result) = rig.told.recv_timeout(GUARD).unwrap();
    let error = result.unwrap_err();
    assert_eq!((id, error.kind()), (1, ErrorKind::Internal));
    assert!(error.to_string().contains("panic=meant"), "{error}");
    rig.pool
        .submit(0, MonotonicTime::NEVER, || (), |_| panic!("meant"))
        .unwrap();
    rig.submit(0, MonotonicTime::NEVER, 2, || 2).unwrap();
    assert_eq!(rig.next(), (2, Ok(2)));
    let stats = rig.pool.stats();
    assert_eq!(
        (stats.live, stats.callback_panics, stats.lanes[0].panicked),
        (1, 1, 1)
    );
}

#[test]
fn work_that_panics_when_dropped_is_told_all_the_same() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("meant");
        }
    }
    let rig = Rig::new(|pool| pool.size(1));
    let release = rig.hang(0, MonotonicTime::NEVER, 0);
    let bomb = Bomb;
    rig.submit(0, rig.deadline(SECOND), 1, move || {
        let _armed = &bomb;
        1
    })
    .unwrap();
    rig.clock.advance(SECOND);
    assert_eq!(rig.next(), (1, Err(ErrorKind::Timeout)));
    drop(release);
    assert_eq!(rig.next(), (0, Ok(0)));
    // The monitor survived it.
    let _held = rig.hang(0, rig.deadline(SECOND), 2);
    rig.clock.advance(SECOND);
    assert_eq!(rig.next(), (2, Err(ErrorKind::Timeout)));
    assert_eq!(rig.pool.stats().callback_panics, 1);
}

#[test]
fn done_may_submit_again() {
    let rig = Rig::new(|pool| pool.size(1));
    let (pool, tell) = (Arc::downgrade(&rig.pool), rig.tell.clone());
    let done = move |first: Result<u32>| {
        let pool = pool.upgrade().unwrap();
        let work = move || first.unwrap() + 1;
        pool.submit(0, MonotonicTime::NEVER, work, move |result| {
            tell.send((2, result)).unwrap()
        })
        .unwrap();
    };
    rig.pool
        .submit(0, MonotonicTime::NEVER, || 1, done)
        .unwrap();
    assert_eq!(rig.next(), (2, Ok(2)));
}
