//! Starting and stopping.

use std::sync::{Arc, Barrier};

use ucm_core::{ErrorKind, Result};

use super::{GUARD, Rig, SECOND, lane};
use crate::clock::MonotonicTime;
use crate::completion::Completion;
use crate::pool::{WorkerPool, WorkerPoolBuilder};

#[test]
fn shutdown_drains_what_was_accepted() {
    let rig = Rig::new(|pool| pool.size(2));
    let gate = Completion::new();
    for id in 0..20 {
        let (gate, clock) = (Arc::clone(&gate), Arc::clone(&rig.clock));
        rig.submit(0, MonotonicTime::NEVER, id, move || {
            gate.wait(&*clock, None).unwrap_or(0)
        })
        .unwrap();
    }
    std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| rig.pool.shutdown(SECOND));
        // Two workers at the gate, the monitor, and the thread that shuts down.
        rig.clock.await_sleepers(4);
        assert_eq!(
            rig.submit(0, MonotonicTime::NEVER, 99, || 0)
                .unwrap_err()
                .kind(),
            ErrorKind::Closed
        );
        gate.complete(7);
        assert_eq!(shutdown.join().unwrap(), 0);
    });
    let told: Vec<_> = rig
        .told
        .try_iter()
        .map(|(_, result)| result.unwrap())
        .collect();
    assert_eq!(told, [7; 20]);
    assert_eq!(
        rig.pool.shutdown(SECOND),
        0,
        "a second shutdown finds nothing to do"
    );
}

#[test]
fn shutdown_closes_what_does_not_end_and_joins_no_one() {
    let rig = Rig::new(|pool| pool.size(1));
    let release = rig.hang(0, MonotonicTime::NEVER, 1);
    rig.submit(0, MonotonicTime::NEVER, 2, || 2).unwrap();
    std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| rig.pool.shutdown(SECOND));
        rig.clock.await_sleepers(2);
        rig.clock.advance(SECOND);
        assert_eq!(shutdown.join().unwrap(), 2);
    });
    let mut told = [rig.next(), rig.next()];
    told.sort_unstable_by_key(|(id, _)| *id);
    assert_eq!(
        told,
        [(1, Err(ErrorKind::Closed)), (2, Err(ErrorKind::Closed))]
    );
    assert_eq!(rig.pool.stuck(), 1);
    drop(release);
    let stats = rig.until(|stats| stats.stuck == 0);
    assert_eq!(
        (stats.live, stats.lanes[0].late, stats.lanes[0].closed),
        (0, 1, 2)
    );
}

#[test]
fn deadlines_hold_while_draining() {
    let rig = Rig::new(|pool| pool.size(1).max_replacements(1));
    let release = rig.hang(0, rig.deadline(SECOND), 1);
    rig.submit(0, MonotonicTime::NEVER, 2, || 2).unwrap();
    std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| rig.pool.shutdown(10 * SECOND));
        rig.clock.await_sleepers(2);
        rig.clock.advance(SECOND);
        // The replacement drains the queue; shutdown does not wait for the stuck worker.
        assert_eq!(shutdown.join().unwrap(), 0);
    });
    assert_eq!(rig.next(), (1, Err(ErrorKind::Timeout)));
    assert_eq!(rig.next(), (2, Ok(2)));
    drop(release);
}

#[test]
fn dropping_the_pool_tells_everyone() {
    let rig = Rig::new(|pool| pool.size(1));
    let _held = rig.hang(0, MonotonicTime::NEVER, 1);
    rig.submit(0, MonotonicTime::NEVER, 2, || 2).unwrap();
    let Rig { pool, told, .. } = rig;
    drop(pool);
    let mut ids: Vec<_> = told
        .try_iter()
        .map(|(id, result)| (id, result.unwrap_err().kind()))
        .collect();
    ids.sort_unstable_by_key(|(id, _)| *id);
    assert_eq!(ids, [(1, ErrorKind::Closed), (2, ErrorKind::Closed)]);
}

#[test]
fn the_last_handle_may_go_in_a_callback() {
    let rig = Rig::new(|pool| pool.size(1));
    let Rig {
        pool, told, tell, ..
    } = rig;
    let held = Arc::clone(&pool);
    let meet = Arc::new(Barrier::new(2));
    let met = Arc::clone(&meet);
    let done = move |result: Result<u32>| {
        met.wait();
        met.wait();
        drop(held);
        tell.send((1, result)).unwrap();
    };
    pool.submit(0, MonotonicTime::NEVER, || 1, done).unwrap();
    meet.wait();
    drop(pool);
    meet.wait();
    assert_eq!(told.recv_timeout(GUARD).unwrap().1.unwrap(), 1);
}

#[test]
fn wrong_numbers_are_refused() {
    let kind = |builder: WorkerPoolBuilder| builder.build().unwrap_err().kind();
    let builder = || WorkerPool::builder("test");
    assert_eq!(kind(builder().size(0)), ErrorKind::Config);
    assert_eq!(
        kind(builder().size(1000).max_replacements(25)),
        ErrorKind::Config
    );
    assert_eq!(kind(builder().lanes(&[lane("x", 0, 1)])), ErrorKind::Config);
    assert_eq!(kind(builder().lanes(&[lane("x", 1, 0)])), ErrorKind::Config);
    assert_eq!(
        kind(builder().lanes(&[lane("x", 1, 1); 17])),
        ErrorKind::Config
    );
    let pool = builder().build().unwrap();
    let error = pool
        .submit(1, MonotonicTime::NEVER, || (), |_| ())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}
