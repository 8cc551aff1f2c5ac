//! Deadlines, and workers that hang past them.

use std::sync::mpsc::{Sender, TryRecvError, channel};

use ucm_core::{ErrorKind, Result};

use super::{GUARD, Rig, SECOND, lane};
use crate::clock::MonotonicTime;

#[test]
fn a_stuck_worker_is_written_off_and_replaced() {
    let rig = Rig::new(|pool| pool.max_replacements(1));
    let release = rig.hang(0, rig.deadline(SECOND), 1);
    rig.submit(0, MonotonicTime::NEVER, 2, || 2).unwrap();
    rig.clock.advance(SECOND);
    assert_eq!(rig.next(), (1, Err(ErrorKind::Timeout)));
    assert_eq!(rig.pool.stuck(), 1);
    // The replacement continues with the queue.
    assert_eq!(rig.next(), (2, Ok(2)));
    let stats = rig.until(|stats| stats.live == 1);
    assert_eq!((stats.live, stats.stuck, stats.replaced), (1, 1, 1));
    drop(release);
    // The late job is not reported again, and its thread ends, because its place was filled.
    let stats = rig.until(|stats| stats.stuck == 0);
    assert_eq!(
        (stats.live, stats.lanes[0].late, stats.lanes[0].completed),
        (1, 1, 1)
    );
    assert!(rig.told.try_recv().is_err());
}

#[test]
fn past_the_cap_no_one_is_replaced_until_someone_returns() {
    let rig = Rig::new(|pool| pool.size(1).max_replacements(1));
    let first = rig.hang(0, rig.deadline(SECOND), 1);
    rig.clock.advance(SECOND);
    assert_eq!(rig.next().0, 1);
    let second = rig.hang(0, rig.deadline(SECOND), 2);
    rig.clock.advance(SECOND);
    assert_eq!(rig.next().0, 2);
    let stats = rig.pool.stats();
    assert_eq!((stats.live, stats.stuck, stats.replaced), (0, 2, 1));
    // No worker is left for this one: it times out in the queue.
    rig.submit(0, rig.deadline(SECOND), 3, || 3).unwrap();
    rig.clock.advance(SECOND);
    assert_eq!(rig.next(), (3, Err(ErrorKind::Timeout)));
    // A returning worker takes jobs again, because its place was not filled.
    rig.submit(0, MonotonicTime::NEVER, 4, || 4).unwrap();
    drop(first);
    assert_eq!(rig.next(), (4, Ok(4)));
    drop(second);
    let stats = rig.until(|stats| stats.stuck == 0);
    assert_eq!((stats.live, stats.replaced), (1, 1));
}

#[test]
fn with_workers_missing_a_limited_lane_never_gets_the_last_one() {
    let rig = Rig::new(|pool| {
        pool.size(2)
            .lanes(&[lane("load", 8, 2), lane("dump", 8, 1)])
    });
    let stuck = rig.hang(0, rig.deadline(SECOND), 1);
    rig.clock.advance(SECOND);
    assert_eq!(rig.next(), (1, Err(ErrorKind::Timeout)));
    rig.submit(1, MonotonicTime::NEVER, 2, || 2).unwrap();
    rig.submit(0, MonotonicTime::NEVER, 3, || 3).unwrap();
    assert_eq!(rig.next(), (3, Ok(3)));
    assert_eq!(rig.pool.stats().lanes[1].queued, 1);
    drop(stuck);
    assert_eq!(rig.next(), (2, Ok(2)));
}

#[test]
fn what_a_late_call_returns_is_dropped_by_its_worker() {
    /// Stands for a buffer.
    struct Buffer(Sender<Option<String>>);
    impl Drop for Buffer {
        fn drop(&mut self) {
            self.0
                .send(std::thread::current().name().map(str::to_owned))
                .unwrap();
        }
    }
    let rig = Rig::new(|pool| pool.max_replacements(1));
    let (dropped, drops) = channel();
    let (release, held) = channel::<()>();
    let (running, runs) = channel();
    let (tell, told) = channel();
    let buffer = Buffer(dropped);
    let work = move || {
        running.send(()).unwrap();
        held.recv().ok();
        buffer
    };
    let done = move |result: Result<Buffer>| {
        tell.send(result.map(drop).map_err(|error| error.kind()))
            .unwrap()
    };
    rig.pool
        .submit(0, rig.deadline(SECOND), work, done)
        .unwrap();
    runs.recv_timeout(GUARD).unwrap();
    rig.clock.advance(SECOND);
    assert_eq!(told.recv_timeout(GUARD).unwrap(), Err(ErrorKind::Timeout));
    // Reported, but the call may still write into the buffer, so it is not free yet.
    assert!(drops.try_recv().is_err());
    drop(release);
    assert_eq!(
        drops.recv_timeout(GUARD).unwrap().as_deref(),
        Some("test-0")
    );
}

#[test]
fn a_queued_job_past_its_deadline_never_runs() {
    let rig = Rig::new(|pool| pool.size(1));
    let release = rig.hang(0, MonotonicTime::NEVER, 0);
    let (buffer, buffers) = channel::<()>();
    rig.submit(0, rig.deadline(SECOND), 1, move || {
        buffer.send(()).unwrap();
        1
    })
    .unwrap();
    rig.clock.advance(SECOND);
    assert_eq!(rig.next(), (1, Err(ErrorKind::Timeout)));
    // Its buffer is dropped before the report.
    assert!(
        buffers
            .try_recv()
            .is_err_and(|error| error == TryRecvError::Disconnected)
    );
    assert_eq!(rig.pool.stuck(), 0);
    drop(release);
    assert_eq!(rig.next(), (0, Ok(0)));
}

#[test]
fn a_deadline_in_the_past_is_a_timeout_without_work() {
    let rig = Rig::new(|pool| pool.size(1));
    rig.clock.advance(SECOND);
    rig.submit(0, MonotonicTime(0), 1, || 1).unwrap();
    assert_eq!(rig.next(), (1, Err(ErrorKind::Timeout)));
}
