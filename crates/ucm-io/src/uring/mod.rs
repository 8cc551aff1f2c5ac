//! The io_uring engine: reads and publishes go through a ring, many at once from one thread; everything else, the naming
//! of what was published, and every callback is left to the thread-pool engine inside, with which the answers agree.
//!
//! Three threads have a part beside the pool's: the callers queue and wake, *the ring's thread* submits in batches and
//! hands answers to the pool, *the watch* answers what is late. A late operation is answered at once and its call taken back; the
//! operation, its buffer and its place stay with the kernel until the call has really returned.
//!
//! For local file systems. The ring's thread itself asks what an open file is (on such that never waits), and kernels
//! take files of FUSE, and whatever else can be polled, for ones that never make it wait, and make wrong of short counts
//! there (seen with 6.18). Nothing is lost on other mounts but speed and threads: deadlines hold, for the watch keeps
//! them. A file that is read is opened with an ordinary descriptor and not with one of the ring's own: those know no
//! statx, while a read tells the length of the very file it read, and closing them tells no error.

mod buffers;
mod hold;
mod kernel;
mod publish;
mod read;
mod ring;
mod shared;
mod state;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_news;
mod work;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::EventfdFlags;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Bell, Lane, MAX_QUEUE, Mono, begin_thread};

use crate::engine::{Done, IoEngine};
use crate::op::IoOp;
use crate::psync::{HOUSEKEEPING, PsyncEngine, PsyncOptions};
use ring::Ring;
use shared::{Counters, Shared, whole_lane};
use state::{Phase, State, Waiting};
use work::Work;

/// Operations on their way at once for each thread that the pool would have given them.
const PER_WORKER: usize = 8;
/// Most operations of a lane on their way at once.
const MAX_RUNNING: usize = 256;

/// How a [`UringEngine`] is set up.
#[derive(Clone, Debug)]
pub struct UringOptions {
    /// The thread-pool engine inside; its lanes are for what the ring does not run.
    pub psync: PsyncOptions,
    /// The lanes of the ring, in the same order: `capacity` operations wait, `max_running` are on their way.
    pub lanes: Vec<Lane>,
    /// Places for operations that were given up and have not ended.
    pub spare: usize,
    /// For tests: as if the kernel had refused the ring with this error number.
    pub refused: Option<i32>,
}

impl UringOptions {
    /// Beside a thread pool of this kind, on a local file system.
    pub fn beside(psync: PsyncOptions) -> Self {
        let lane = |lane: &Lane| Lane {
            max_running: lane.max_running.saturating_mul(PER_WORKER).min(MAX_RUNNING),
            ..*lane
        };
        Self {
            lanes: psync.lanes.iter().map(lane).collect(),
            spare: psync
                .max_replacements
                .max(2)
                .saturating_mul(PER_WORKER)
                .min(MAX_RUNNING),
            refused: None,
            psync,
        }
    }

    fn places(&self) -> usize {
        State::places(&self.lanes, self.spare)
    }

    /// The pool's options, each lane with another before it for what the ring leaves to the pool. The two share the lane's
    /// limit, so that as many workers are kept for loads as without a ring; what is left never takes all of a larger one.
    pub(crate) fn with_left(&self) -> PsyncOptions {
        let mut psync = self.psync.clone();
        let workers = psync.workers;
        let both = |lane: Lane| {
            let left = Lane {
                capacity: self.places().clamp(1, MAX_QUEUE),
                max_running: match lane.max_running {
                    all if all >= workers => all,
                    some => (some - 1).max(1),
                },
                ..lane
            };
            [left, lane]
        };
        psync.lanes = psync.lanes.into_iter().flat_map(both).collect();
        psync
    }
}

/// What the ring looks like now and what it has counted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UringStats {
    /// Operations that wait and that are on their way, by lane, those among them that the pool runs whole.
    pub lanes: Vec<(usize, usize)>,
    /// Operations given up whose calls have not returned.
    pub stuck: usize,
    /// How often the ring's thread woke up.
    pub wakeups: u64,
    /// Calls given to the kernel.
    pub calls: u64,
    /// Bytes of slots registered with the kernel.
    pub registered: u64,
    /// Panics in `done`.
    pub callback_panics: u64,
}

/// Reads and publishes through a ring.
pub struct UringEngine {
    shared: Arc<Shared>,
}

impl UringEngine {
    /// Starts the ring and the pool. The error says that io_uring cannot be used here, or is the pool's.
    pub fn new(options: &UringOptions) -> Result<Arc<Self>> {
        let psync = PsyncEngine::paired(options.with_left())?;
        Self::over(psync, options)
    }

    /// Starts the ring beside a pool made `with_left`.
    pub(crate) fn over(psync: Arc<PsyncEngine>, options: &UringOptions) -> Result<Arc<Self>> {
        if let Some(code) = options.refused {
            let error = std::io::Error::from_raw_os_error(code);
            return Err(Error::from_io(error, "this system refuses io_uring"));
        }
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|errno| Error::from_io(errno.into(), "cannot make an eventfd for the ring"))?;
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new(&options.lanes, options.spare)),
            replaced: options.psync.max_replacements,
            clock: Arc::clone(&options.psync.clock),
            psync,
            wake,
            alarm: Bell::new(),
            ends: Bell::new(),
            counters: Counters::default(),
            #[cfg(test)]
            faults: Mutex::default(),
        });
        start_ring(&shared, options.places())?;
        let engine = Arc::new(Self { shared });
        // From here on an early return drops the engine, which shuts it down.
        engine.shared.start_watch()?;
        Ok(engine)
    }

    /// Gives an operation to the pool whole.
    pub(crate) fn submit_whole(psync: &PsyncEngine, lane: usize, deadline: Mono, op: IoOp, done: Done) {
        psync.submit(whole_lane(lane), deadline, op, done);
    }

    /// How many operations of a lane the pool runs at once whole.
    pub(crate) fn width_whole(psync: &PsyncEngine, lane: usize) -> usize {
        psync.width(whole_lane(lane))
    }

    /// Lets the pool close what is kept.
    pub(crate) fn close_kept_whole(psync: &PsyncEngine, gone: &[PathBuf], unused: bool) {
        psync.close_kept_in(whole_lane(HOUSEKEEPING), gone, unused);
    }

    /// How many operations wanted direct I/O and went through the page cache.
    pub fn direct_fallbacks(&self) -> u64 {
        self.shared.psync.direct_fallbacks()
    }

    /// What the ring looks like right now, and what it has counted.
    pub fn stats(&self) -> UringStats {
        let counters = &self.shared.counters;
        let pool = self.shared.psync.pool_stats().lanes;
        let state = self.shared.state.lock();
        let with_pool = |(lane, (queued, running)): (usize, (usize, usize))| {
            let whole = pool.get(whole_lane(lane));
            let also = whole.map_or((0, 0), |lane| (lane.queued, lane.running));
            (queued + also.0, running + also.1)
        };
        UringStats {
            lanes: state.lanes().into_iter().enumerate().map(with_pool).collect(),
            stuck: state.lost(),
            wakeups: counters.wakeups.load(Ordering::Relaxed),
            calls: counters.calls.load(Ordering::Relaxed),
            registered: counters.registered.load(Ordering::Relaxed),
            callback_panics: state.callback_panics,
        }
    }
}

/// Starts the ring's thread and waits until it has its ring: only the thread that makes a ring may use it.
fn start_ring(shared: &Arc<Shared>, places: usize) -> Result<()> {
    let (told, tells) = mpsc::channel();
    let of_thread = Arc::clone(shared);
    let body = move || match kernel::make(places) {
        Ok(ring) => {
            let ring = Ring::new(ring, of_thread, places);
            // If nobody listens, nobody will ever submit, and shutdown is what comes next.
            let _ = told.send(Ok(()));
            ring.run();
        }
        Err(error) => {
            let _ = told.send(Err(error));
        }
    };
    begin_thread("ucm-ring", body)
        .map_err(|error| Error::from_io(error, "cannot start the thread of the ring"))?;
    tells
        .recv()
        .unwrap_or_else(|_| Err(Error::internal("the thread of the ring ended at once")))
}

impl IoEngine for UringEngine {
    fn submit(&self, lane: usize, deadline: Mono, op: IoOp, done: Done) {
        let shared = &self.shared;
        let (refusal, broken) = {
            let state = shared.state.lock();
            (state.refusal(lane), state.broken)
        };
        if let Some(error) = refusal {
            drop(op);
            return done(Err(error));
        }
        if broken {
            return Self::submit_whole(&shared.psync, lane, deadline, op, done);
        }
        let work = match Work::new(op, shared.psync.files()) {
            Err(op) => return Self::submit_whole(&shared.psync, lane, deadline, op, done),
            Ok(Err(error)) => return done(Err(error)),
            Ok(Ok(work)) => Box::new(work),
        };
        let waiting = Waiting { work, deadline, done };
        let pushed = shared.change(|state| {
            state.push(lane, waiting)?;
            // The watch sleeps until the earliest deadline it knew; only an earlier one has to wake it.
            let earlier = deadline < state.watch_wakes;
            if earlier {
                state.watch_wakes = deadline;
            }
            Ok(earlier)
        });
        match pushed {
            Ok(true) => shared.alarm.ring(),
            Ok(false) => {}
            Err((error, Waiting { work, done, .. })) => {
                // The buffer is free again before its owner hears of it.
                drop(work);
                done(Err(error));
            }
        }
    }

    fn width(&self, lane: usize) -> usize {
        Self::width_whole(&self.shared.psync, lane)
    }

    fn close_kept(&self, gone: &[PathBuf], unused: bool) {
        Self::close_kept_whole(&self.shared.psync, gone, unused);
    }

    fn kept(&self) -> usize {
        self.shared.psync.kept()
    }

    fn stuck(&self) -> usize {
        self.shared.state.lock().lost() + self.shared.psync.stuck()
    }

    fn lost_workers(&self) -> usize {
        let shared = &self.shared;
        shared.state.lock().lost_workers(shared.replaced) + shared.psync.stuck()
    }

    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn shutdown(&self, drain: Duration) {
        let shared = &self.shared;
        let until = shared.clock.now().after(drain);
        let stopped = shared.change(|state| {
            if state.phase == Phase::Open {
                state.phase = Phase::Draining;
            }
            state.phase == Phase::Stopped
        });
        if !stopped {
            loop {
                let seen = shared.ends.seen();
                if shared.state.lock().is_drained() || shared.clock.now() >= until {
                    break;
                }
                shared.clock.sleep(&shared.ends, seen, Some(until));
            }
        }
        // First the pool: what it still has of ours is answered by it, and what it drops comes back to be tidied up.
        shared.psync.shutdown(until.since(shared.clock.now()));
        let left = shared.change(|state| {
            state.phase = Phase::Stopped;
            state.abandon()
        });
        shared.alarm.ring();
        shared.report(left, || {
            Error::new(
                ErrorKind::Closed,
                "the engine was shut down before the operation ended",
            )
        });
    }
}

impl Drop for UringEngine {
    fn drop(&mut self) {
        self.shutdown(Duration::ZERO);
    }
}
