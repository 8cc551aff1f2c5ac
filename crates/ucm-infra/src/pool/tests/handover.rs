//! Jobs submitted from many threads at once, without a lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ucm_core::ErrorKind;

use super::{Rig, lane};
use crate::clock::MonotonicTime;
use crate::pool::WorkerPool;

const SUBMITTERS: usize = 4;
const JOBS: usize = 2000;

/// Submits from several threads into two lanes until each thread's jobs are accepted or the pool is
/// closed. Returns the numbers of accepted and of reported jobs.
fn submit_all(pool: &WorkerPool, during: impl FnOnce()) -> (usize, Arc<AtomicUsize>) {
    let reported = Arc::new(AtomicUsize::new(0));
    let accepted = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for number in 0..SUBMITTERS {
            let (accepted, reported) = (&accepted, &reported);
            scope.spawn(move || {
                for _ in 0..JOBS {
                    loop {
                        let reported = Arc::clone(reported);
                        let done = move |_: ucm_core::Result<()>| {
                            reported.fetch_add(1, Ordering::AcqRel);
                        };
                        let result = pool.submit(number % 2, MonotonicTime::NEVER, || (), done);
                        match result.map_err(|error| error.kind()) {
                            Ok(()) => {
                                accepted.fetch_add(1, Ordering::AcqRel);
                                break;
                            }
                            Err(ErrorKind::Busy) => std::thread::yield_now(),
                            Err(kind) => {
                                assert_eq!(kind, ErrorKind::Closed);
                                return;
                            }
                        }
                    }
                }
            });
        }
        during();
    });
    (accepted.into_inner(), reported)
}

#[test]
fn every_job_of_many_submitters_is_reported_once() {
    let pool = WorkerPool::builder("test")
        .size(2)
        .lanes(&[lane("a", 8, 2), lane("b", 8, 1)])
        .build()
        .unwrap();
    let (accepted, reported) = submit_all(&pool, || ());
    assert_eq!(accepted, SUBMITTERS * JOBS);
    assert_eq!(pool.shutdown(Duration::from_secs(60)), 0);
    assert_eq!(reported.load(Ordering::Acquire), accepted);
    let lanes = pool.stats().lanes;
    assert_eq!(lanes.iter().map(|lane| lane.queued).sum::<usize>(), 0);
    assert_eq!(
        lanes.iter().map(|lane| lane.completed).sum::<u64>(),
        accepted as u64
    );
}

#[test]
fn a_job_handed_over_while_the_pool_is_shut_down_is_refused_or_reported() {
    for _ in 0..20 {
        let pool = WorkerPool::builder("test")
            .size(2)
            .lanes(&[lane("a", 8, 2), lane("b", 8, 1)])
            .build()
            .unwrap();
        let (accepted, reported) = submit_all(&pool, || {
            pool.shutdown(Duration::ZERO);
        });
        pool.shutdown(Duration::from_secs(60)); // for the jobs that were running
        assert_eq!(reported.load(Ordering::Acquire), accepted);
    }
}

#[test]
fn a_lane_holds_more_than_is_handed_over_at_once() {
    let rig = Rig::new(|pool| pool.lanes(&[lane("long", 1000, 1)]));
    let release = rig.hang(0, MonotonicTime::NEVER, 0);
    for id in 1..=1000 {
        rig.submit(0, MonotonicTime::NEVER, id, move || id).unwrap();
    }
    let full = rig.submit(0, MonotonicTime::NEVER, 1001, || 0).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::Busy);
    assert_eq!(rig.pool.stats().lanes[0].queued, 1000);
    drop(release);
    for id in 0..=1000 {
        assert_eq!(rig.next(), (id, Ok(id)), "in their order");
    }
}
