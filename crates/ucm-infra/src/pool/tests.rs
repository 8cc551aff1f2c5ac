//! The pool under a clock that stands still: nothing here waits for time to pass.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use ucm_core::{Error, ErrorKind, Result};

use super::*;
use crate::clock::ManualClock;
use crate::completion::Completion;

const SECOND: Duration = Duration::from_secs(1);
/// Only a broken test ever waits this long.
const GUARD: Duration = Duration::from_secs(60);

fn lane(name: &'static str, capacity: usize, max_running: usize) -> Lane {
    Lane {
        name,
        capacity,
        max_running,
    }
}

/// A pool, its clock, and a channel into which jobs report.
struct Rig {
    clock: Arc<ManualClock>,
    pool: Arc<WorkerPool>,
    told: Receiver<(u32, Result<u32>)>,
    tell: Sender<(u32, Result<u32>)>,
}

impl Rig {
    fn new(describe: impl FnOnce(WorkerPoolBuilder) -> WorkerPoolBuilder) -> Self {
        let clock = ManualClock::new();
        let shared: Arc<dyn Clock> = Arc::clone(&clock) as _;
        let pool = describe(WorkerPool::builder("test").clock(shared))
            .build()
            .unwrap();
        let (tell, told) = channel();
        Self {
            clock,
            pool,
            told,
            tell,
        }
    }

    fn deadline(&self, span: Duration) -> Mono {
        self.clock.now().after(span)
    }

    /// Submits a job that does `work` and reports `(id, result)`.
    fn submit(
        &self,
        lane: usize,
        deadline: Mono,
        id: u32,
        work: impl FnOnce() -> u32 + Send + 'static,
    ) -> Result<()> {
        let tell = self.tell.clone();
        self.pool.submit(lane, deadline, work, move |result| {
            tell.send((id, result)).unwrap();
        })
    }

    /// Submits a job that hangs until the returned sender is used or dropped; returns once it runs.
    fn hang(&self, lane: usize, deadline: Mono, id: u32) -> Sender<()> {
        let (release, held) = channel::<()>();
        let (running, runs) = channel();
        self.submit(lane, deadline, id, move || {
            running.send(()).unwrap();
            held.recv().ok();
            id
        })
        .unwrap();
        runs.recv_timeout(GUARD).unwrap();
        release
    }

    fn next(&self) -> (u32, Result<u32, ErrorKind>) {
        let (id, result) = self.told.recv_timeout(GUARD).unwrap();
        (id, result.map_err(|error| error.kind()))
    }

    /// Waits until the pool's threads made `enough` true.
    fn until(&self, enough: impl Fn(&PoolStats) -> bool) -> PoolStats {
        assert!(
            self.pool
                .shared
                .wait_until(Mono::NEVER, |state| enough(&state.stats()))
        );
        self.pool.stats()
    }
}

#[test]
fn a_job_is_done_and_told() {
    let rig = Rig::new(|pool| pool.size(2));
    rig.submit(0, Mono::NEVER, 1, || 41).unwrap();
    assert_eq!(rig.next(), (1, Ok(41)));
    let lane = rig.pool.stats().lanes[0];
    assert_eq!((lane.submitted, lane.completed, lane.timed_out), (1, 1, 0));
}

#[test]
fn lane_zero_goes_first_and_order_holds_within_a_lane() {
    let rig = Rig::new(|pool| pool.lanes(&[lane("load", 8, 1), lane("dump", 8, 1)]));
    let release = rig.hang(1, Mono::NEVER, 0);
    for (lane, id) in [(1, 1), (1, 2), (0, 3), (0, 4)] {
        rig.submit(lane, Mono::NEVER, id, move || id).unwrap();
    }
    drop(release);
    let order: Vec<u32> = (0..5).map(|_| rig.next().0).collect();
    assert_eq!(order, [0, 3, 4, 1, 2]);
}

#[test]
fn a_full_lane_refuses_and_gives_the_job_back() {
    let rig = Rig::new(|pool| pool.lanes(&[lane("load", 1, 1), lane("dump", 1, 1)]));
    let release = rig.hang(0, Mono::NEVER, 0);
    rig.submit(0, Mono::NEVER, 1, || 1).unwrap();
    let called = Arc::new(AtomicUsize::new(0));
    let (one, two) = (Arc::clone(&called), Arc::clone(&called));
    let refused = rig
        .pool
        .offer(
            0,
            Mono::NEVER,
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
    // The other lane has room of its own.
    rig.submit(1, Mono::NEVER, 2, || 2).unwrap();
    assert_eq!(rig.pool.stats().lanes[0].refused, 1);
    drop(release);
    assert_eq!([rig.next().0, rig.next().0, rig.next().0], [0, 1, 2]);
}

#[test]
fn a_limited_lane_leaves_workers_to_the_others() {
    let rig = Rig::new(|pool| pool.size(3).lanes(&[lane("load", 8, 3), lane("dump", 8, 2)]));
    let dumps = [rig.hang(1, Mono::NEVER, 1), rig.hang(1, Mono::NEVER, 2)];
    rig.submit(1, Mono::NEVER, 3, || 3).unwrap();
    // The third worker is free, but not for a dump.
    rig.submit(0, Mono::NEVER, 4, || 4).unwrap();
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
fn a_stuck_worker_is_written_off_and_replaced() {
    let rig = Rig::new(|pool| pool.max_replacements(1));
    let release = rig.hang(0, rig.deadline(SECOND), 1);
    rig.submit(0, Mono::NEVER, 2, || 2).unwrap();
    rig.clock.advance(SECOND);
    assert_eq!(rig.next(), (1, Err(ErrorKind::Timeout)));
    assert_eq!(rig.pool.stuck(), 1);
    // The replacement goes on with the queue.
    assert_eq!(rig.next(), (2, Ok(2)));
    let stats = rig.until(|stats| stats.idle == 1);
    assert_eq!((stats.live, stats.stuck, stats.replaced), (1, 1, 1));
    drop(release);
    // The late one is not told again, and its thread goes, because its place was filled.
    let stats = rig.until(|stats| stats.stuck == 0);
    assert_eq!(
        (stats.live, stats.lanes[0].late, stats.lanes[0].completed),
        (1, 1, 1)
    );
    assert!(rig.told.try_recv().is_err());
}

#[test]
fn past_the_cap_nobody_is_replaced_until_someone_returns() {
    let rig = Rig::new(|pool| pool.size(1).max_replacements(1));
    let first = rig.hang(0, rig.deadline(SECOND), 1);
    rig.clock.advance(SECOND);
    assert_eq!(rig.next().0, 1);
    let second = rig.hang(0, rig.deadline(SECOND), 2);
    rig.clock.advance(SECOND);
    assert_eq!(rig.next().0, 2);
    let stats = rig.pool.stats();
    assert_eq!((stats.live, stats.stuck, stats.replaced), (0, 2, 1));
    // Nobody is left to run this one: it times out in the queue.
    rig.submit(0, rig.deadline(SECOND), 3, || 3).unwrap();
    rig.clock.advance(SECOND);
    assert_eq!(rig.next(), (3, Err(ErrorKind::Timeout)));
    // Who returns works again, because its place was not filled.
    rig.submit(0, Mono::NEVER, 4, || 4).unwrap();
    drop(first);
    assert_eq!(rig.next(), (4, Ok(4)));
    drop(second);
    let stats = rig.until(|stats| stats.stuck == 0);
    assert_eq!((stats.live, stats.replaced), (1, 1));
}

#[test]
fn with_workers_missing_a_limited_lane_never_gets_the_last_one() {
    let rig = Rig::new(|pool| pool.size(2).lanes(&[lane("load", 8, 2), lane("dump", 8, 1)]));
    let stuck = rig.hang(0, rig.deadline(SECOND), 1);
    rig.clock.advance(SECOND);
    assert_eq!(rig.next(), (1, Err(ErrorKind::Timeout)));
    rig.submit(1, Mono::NEVER, 2, || 2).unwrap();
    rig.submit(0, Mono::NEVER, 3, || 3).unwrap();
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
    let done =
        move |result: Result<Buffer>| tell.send(result.map(drop).map_err(|error| error.kind())).unwrap();
    rig.pool.submit(0, rig.deadline(SECOND), work, done).unwrap();
    runs.recv_timeout(GUARD).unwrap();
    rig.clock.advance(SECOND);
    assert_eq!(told.recv_timeout(GUARD).unwrap(), Err(ErrorKind::Timeout));
    // Reported, yet the call may still write into the buffer: nobody has it back.
    assert!(drops.try_recv().is_err());
    drop(release);
    assert_eq!(drops.recv_timeout(GUARD).unwrap().as_deref(), Some("test-0"));
}

#[test]
fn a_queued_job_past_its_deadline_never_runs() {
    let rig = Rig::new(|pool| pool.size(1));
    let release = rig.hang(0, Mono::NEVER, 0);
    let (buffer, buffers) = channel::<()>();
    rig.submit(0, rig.deadline(SECOND), 1, move || {
        buffer.send(()).unwrap();
        1
    })
    .unwrap();
    rig.clock.advance(SECOND);
    assert_eq!(rig.next(), (1, Err(ErrorKind::Timeout)));
    // What it held is gone by the time it is told.
    assert!(
        buffers
            .try_recv()
            .is_err_and(|error| error == std::sync::mpsc::TryRecvError::Disconnected)
    );
    assert_eq!(rig.pool.stuck(), 0);
    drop(release);
    assert_eq!(rig.next(), (0, Ok(0)));
}

#[test]
fn a_deadline_in_the_past_is_a_timeout_without_work() {
    let rig = Rig::new(|pool| pool.size(1));
    rig.clock.advance(SECOND);
    rig.submit(0, Mono(0), 1, || 1).unwrap();
    assert_eq!(rig.next(), (1, Err(ErrorKind::Timeout)));
}

#[test]
fn panics_are_told_and_kill_no_worker() {
    let rig = Rig::new(|pool| pool.size(1));
    rig.submit(0, Mono::NEVER, 1, || panic!("meant")).unwrap();
    let (id, result) = rig.told.recv_timeout(GUARD).unwrap();
    let error = result.unwrap_err();
    assert_eq!((id, error.kind()), (1, ErrorKind::Internal));
    assert!(error.to_string().contains("panic=meant"), "{error}");
    rig.pool
        .submit(0, Mono::NEVER, || (), |_| panic!("meant"))
        .unwrap();
    rig.submit(0, Mono::NEVER, 2, || 2).unwrap();
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
    let release = rig.hang(0, Mono::NEVER, 0);
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
        pool.submit(0, Mono::NEVER, work, move |result| {
            tell.send((2, result)).unwrap()
        })
        .unwrap();
    };
    rig.pool.submit(0, Mono::NEVER, || 1, done).unwrap();
    assert_eq!(rig.next(), (2, Ok(2)));
}

#[test]
fn start_and_exit_hooks_run_once_per_worker() {
    let (starts, exits) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (started, exited) = (Arc::clone(&starts), Arc::clone(&exits));
    let rig = Rig::new(|pool| {
        pool.size(3)
            .on_start(move |_| {
                started.fetch_add(1, Ordering::Relaxed);
                Ok(())
            })
            .on_exit(move |_| {
                exited.fetch_add(1, Ordering::Relaxed);
            })
    });
    assert_eq!(starts.load(Ordering::Relaxed), 3);
    assert_eq!(rig.pool.shutdown(SECOND), 0);
    assert_eq!(
        (starts.load(Ordering::Relaxed), exits.load(Ordering::Relaxed)),
        (3, 3)
    );
}

#[test]
fn a_failed_start_fails_the_build() {
    let bad = || WorkerPool::builder("test").size(2);
    let error = bad().on_start(|slot| {
        if slot == 1 {
            Err(Error::invalid("no"))
        } else {
            Ok(())
        }
    });
    assert_eq!(error.build().unwrap_err().kind(), ErrorKind::InvalidInput);
    let error = bad().on_start(|_| panic!("meant")).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal);
}

#[test]
fn a_start_that_hangs_fails_the_build_at_its_deadline() {
    let clock = ManualClock::new();
    let (release, held) = channel::<()>();
    let held = Mutex::new(held);
    let builder = WorkerPool::builder("test")
        .clock(Arc::clone(&clock) as _)
        .start_within(SECOND)
        .on_start(move |_| {
            held.lock().recv().ok();
            Ok(())
        });
    std::thread::scope(|scope| {
        let build = scope.spawn(|| builder.build().map(drop));
        clock.await_sleepers(1);
        clock.advance(SECOND);
        assert_eq!(build.join().unwrap().unwrap_err().kind(), ErrorKind::Timeout);
    });
    drop(release);
}

#[test]
fn a_replacement_that_fails_to_start_is_tried_again() {
    let attempts = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&attempts);
    let rig = Rig::new(|pool| {
        pool.max_replacements(1)
            .on_start(move |_| match counted.fetch_add(1, Ordering::Relaxed) {
                1 => Err(Error::internal("meant")),
                _ => Ok(()),
            })
    });
    let _held = rig.hang(0, rig.deadline(SECOND), 1);
    rig.submit(0, Mono::NEVER, 2, || 2).unwrap();
    rig.clock.advance(SECOND);
    assert_eq!(rig.next(), (1, Err(ErrorKind::Timeout)));
    let stats = rig.until(|stats| stats.failed_starts == 1);
    assert_eq!(stats.live, 0);
    rig.clock.advance(SECOND);
    assert_eq!(rig.next(), (2, Ok(2)));
    assert_eq!(attempts.load(Ordering::Relaxed), 3);
}

#[test]
fn shutdown_drains_what_was_accepted() {
    let rig = Rig::new(|pool| pool.size(2));
    let gate = Completion::new();
    for id in 0..20 {
        let (gate, clock) = (Arc::clone(&gate), Arc::clone(&rig.clock));
        rig.submit(0, Mono::NEVER, id, move || gate.wait(&*clock, None).unwrap_or(0))
            .unwrap();
    }
    std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| rig.pool.shutdown(SECOND));
        // Two workers at the gate, the monitor, and the one who shuts down.
        rig.clock.await_sleepers(4);
        assert_eq!(
            rig.submit(0, Mono::NEVER, 99, || 0).unwrap_err().kind(),
            ErrorKind::Closed
        );
        gate.complete(7);
        assert_eq!(shutdown.join().unwrap(), 0);
    });
    let told: Vec<_> = rig.told.try_iter().map(|(_, result)| result.unwrap()).collect();
    assert_eq!(told, [7; 20]);
    assert_eq!(
        rig.pool.shutdown(SECOND),
        0,
        "a second shutdown finds nothing to do"
    );
}

#[test]
fn shutdown_closes_what_does_not_end_and_joins_nobody() {
    let rig = Rig::new(|pool| pool.size(1));
    let release = rig.hang(0, Mono::NEVER, 1);
    rig.submit(0, Mono::NEVER, 2, || 2).unwrap();
    std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| rig.pool.shutdown(SECOND));
        rig.clock.await_sleepers(2);
        rig.clock.advance(SECOND);
        assert_eq!(shutdown.join().unwrap(), 2);
    });
    let mut told = [rig.next(), rig.next()];
    told.sort_unstable_by_key(|(id, _)| *id);
    assert_eq!(told, [(1, Err(ErrorKind::Closed)), (2, Err(ErrorKind::Closed))]);
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
    rig.submit(0, Mono::NEVER, 2, || 2).unwrap();
    std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| rig.pool.shutdown(10 * SECOND));
        rig.clock.await_sleepers(2);
        rig.clock.advance(SECOND);
        // The replacement drains the queue; the stuck one is not waited for.
        assert_eq!(shutdown.join().unwrap(), 0);
    });
    assert_eq!(rig.next(), (1, Err(ErrorKind::Timeout)));
    assert_eq!(rig.next(), (2, Ok(2)));
    drop(release);
}

#[test]
fn dropping_the_pool_tells_everyone() {
    let rig = Rig::new(|pool| pool.size(1));
    let _held = rig.hang(0, Mono::NEVER, 1);
    rig.submit(0, Mono::NEVER, 2, || 2).unwrap();
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
    let Rig { pool, told, tell, .. } = rig;
    let held = Arc::clone(&pool);
    let meet = Arc::new(Barrier::new(2));
    let met = Arc::clone(&meet);
    let done = move |result: Result<u32>| {
        met.wait();
        met.wait();
        drop(held);
        tell.send((1, result)).unwrap();
    };
    pool.submit(0, Mono::NEVER, || 1, done).unwrap();
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
    assert_eq!(kind(builder().size(1000).max_replacements(25)), ErrorKind::Config);
    assert_eq!(kind(builder().lanes(&[lane("x", 0, 1)])), ErrorKind::Config);
    assert_eq!(kind(builder().lanes(&[lane("x", 1, 0)])), ErrorKind::Config);
    assert_eq!(kind(builder().lanes(&[lane("x", 1, 1); 17])), ErrorKind::Config);
    let pool = builder().build().unwrap();
    let error = pool.submit(1, Mono::NEVER, || (), |_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}
