//! Pools that start threads on demand.

use std::sync::Arc;

use ucm_core::{ErrorKind, Result};

use super::{Rig, SECOND, lane};
use crate::clock::MonotonicTime;
use crate::pool::inbox::{Inbox, Queued};
use crate::pool::job::JobCell;
use crate::pool::state::State;

#[test]
fn nothing_is_started_before_the_first_job() {
    let rig = Rig::new(|pool| pool.size(3));
    assert_eq!(rig.pool.stats().live, 0);
    assert!(!rig.pool.shared.state.lock().monitored);
    rig.submit(0, MonotonicTime::NEVER, 1, || 1).unwrap();
    assert_eq!(rig.next(), (1, Ok(1)));
    let stats = rig.pool.stats();
    assert_eq!((stats.live, stats.size, stats.replaced), (1, 3, 0));
    assert!(rig.pool.shared.state.lock().monitored);
}

#[test]
fn one_that_was_never_used_ends_at_once() {
    let rig = Rig::new(|pool| pool.size(3));
    assert_eq!(rig.pool.shutdown(SECOND), 0, "and waits for no worker");
    let error = rig.submit(0, MonotonicTime::NEVER, 1, || 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
}

#[test]
fn as_many_workers_as_jobs_that_run_at_once() {
    let rig = Rig::new(|pool| pool.size(3));
    let mut held = Vec::new();
    for id in 0..3 {
        held.push(rig.hang(0, MonotonicTime::NEVER, id));
        assert_eq!(rig.pool.stats().live, id as usize + 1);
    }
    for id in 3..6 {
        rig.submit(0, MonotonicTime::NEVER, id, move || id).unwrap();
    }
    assert_eq!(rig.pool.stats().live, 3, "never more than the size");
    drop(held);
    let mut told: Vec<u32> = (0..6).map(|_| rig.next().0).collect();
    told.sort_unstable();
    assert_eq!(told, [0, 1, 2, 3, 4, 5]);
    // An idle worker is used before another one is started.
    while rig.pool.stats().idle < 3 {
        std::thread::yield_now(); // a job is reported before its worker is idle
    }
    rig.submit(0, MonotonicTime::NEVER, 6, || 6).unwrap();
    assert_eq!(rig.next(), (6, Ok(6)));
}

#[test]
fn jobs_that_come_together_run_together_in_lanes_of_one() {
    let rig = Rig::new(|pool| {
        pool.size(2)
            .lanes(&[lane("keep", 1, 1), lane("find", 1, 1)])
    });
    let meet = std::sync::Arc::new(std::sync::Barrier::new(2));
    for id in 0..2 {
        let meet = std::sync::Arc::clone(&meet);
        let work = move || {
            meet.wait(); // for ever, unless both run
            id
        };
        rig.submit(id as usize, MonotonicTime::NEVER, id, work)
            .unwrap();
    }
    let mut told = [rig.next().0, rig.next().0];
    told.sort_unstable();
    assert_eq!(told, [0, 1]);
}

#[test]
fn a_lane_at_its_limit_starts_no_one() {
    let rig = Rig::new(|pool| {
        pool.size(4)
            .lanes(&[lane("load", 8, 4), lane("dump", 8, 1)])
    });
    let held = rig.hang(1, MonotonicTime::NEVER, 0);
    for id in 1..4 {
        rig.submit(1, MonotonicTime::NEVER, id, move || id).unwrap();
    }
    assert_eq!(rig.pool.stats().live, 1);
    rig.submit(0, MonotonicTime::NEVER, 9, || 9).unwrap();
    assert_eq!(
        rig.next(),
        (9, Ok(9)),
        "another lane gets a worker of its own"
    );
    drop(held);
    for id in 0..4 {
        assert_eq!(rig.next(), (id, Ok(id)));
    }
    assert_eq!(rig.pool.stats().live, 2);
}

#[test]
fn one_that_hangs_is_written_off_and_replaced_as_ever() {
    let rig = Rig::new(|pool| pool.size(2).max_replacements(1));
    let held = rig.hang(0, rig.deadline(SECOND), 1);
    rig.clock.advance(SECOND);
    assert_eq!(rig.next(), (1, Err(ErrorKind::Timeout)));
    let stats = rig.until(|stats| stats.live == 1);
    assert_eq!((stats.stuck, stats.replaced), (1, 1));
    rig.submit(0, MonotonicTime::NEVER, 2, || 2).unwrap();
    assert_eq!(rig.next(), (2, Ok(2)));
    drop(held);
    rig.until(|stats| stats.stuck == 0);
}

#[test]
fn a_start_that_fails_is_tried_again_a_little_later() {
    let inbox = Arc::new(Inbox::new(lane("jobs", 1, 1)));
    let mut state = State::new(1, 0, &[Arc::clone(&inbox)]);
    let job = JobCell::new(|| 1, |_: Result<i32>| (), Arc::clone(&inbox.counters));
    let (job, deadline) = (Arc::new(job), MonotonicTime::NEVER);
    assert!(inbox.reserve() && inbox.push(Queued { job, deadline }).is_ok());
    state.collect();
    assert!(state.grow());
    let now = MonotonicTime(5);
    assert_eq!(state.claim_missing(now, false), [0]);
    let retry = now.after(SECOND);
    state.start_failed(0, retry);
    assert!(state.claim_missing(now, true).is_empty());
    assert_eq!(state.next_event(now), retry, "when the monitor tries again");
    assert_eq!(state.claim_missing(retry, true), [0]);
    assert_eq!(state.stats().failed_starts, 1);
}
