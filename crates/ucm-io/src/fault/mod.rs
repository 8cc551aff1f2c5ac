//! The fault-injecting twin of the real engines: stands before one of them and, by script, fails operations, loses
//! answers, tears and flips bytes, hangs, hides files. The same seed and the same order of submissions give the same
//! faults. For tests, ours and those of backends written elsewhere.

mod copy;
mod gate;
mod hidden;
mod rule;
mod strike;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{Error, Result};
use ucm_infra::{Clock, Lane, Mono, WorkerPool};

pub use gate::Gate;
pub use rule::{Fault, Rule, Tail, errno};

use crate::engine::{Done, IoEngine};
use crate::op::{IoDone, IoOp, OpKind};
use hidden::Hidden;
use rule::{Active, draw};

/// Most operations that can hang at once; more are refused with `Busy`.
const MAX_HANGING: usize = 16;
/// Most operations the log remembers, the latest.
const MAX_LOG: usize = 1 << 16;

/// Number of a rule, in the order they were added.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RuleId(usize);

/// One submitted operation, as the log remembers it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seen {
    /// Its kind.
    pub kind: OpKind,
    /// Its lane.
    pub lane: usize,
    /// The names it was about.
    pub paths: Vec<PathBuf>,
    /// Name of the fault that befell it.
    pub fault: Option<&'static str>,
}

/// An engine that goes wrong by script.
pub struct FaultyEngine {
    shared: Arc<Shared>,
}

struct Shared {
    inner: Arc<dyn IoEngine>,
    clock: Arc<dyn Clock>,
    seed: u64,
    state: Mutex<State>,
    hidden: Mutex<Hidden>,
}

#[derive(Default)]
struct State {
    rules: Vec<Active>,
    ops: u64,
    counts: [u64; OpKind::ALL.len()],
    log: VecDeque<Seen>,
    /// Where operations hang, so that their deadlines hold; made with the first rule that needs it.
    hang: Option<Arc<WorkerPool>>,
    /// Hanging operations that count as one lost worker; 0 is 1.
    places: usize,
}

impl FaultyEngine {
    /// Stands before `inner`; without rules it only looks on. `clock` must be the one of `inner`.
    pub fn new(inner: Arc<dyn IoEngine>, clock: Arc<dyn Clock>, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            shared: Arc::new(Shared {
                inner,
                clock,
                seed,
                state: Mutex::default(),
                hidden: Mutex::default(),
            }),
        })
    }

    /// Puts a rule in force. For each operation the first rule that strikes counts. Errors: no threads to hang in.
    pub fn add(&self, rule: Rule) -> Result<RuleId> {
        let mut state = self.shared.state.lock();
        if rule.hangs() && state.hang.is_none() {
            let lane = Lane {
                name: "hang",
                capacity: MAX_HANGING,
                max_running: MAX_HANGING,
            };
            let pool = WorkerPool::builder("ucm-hang")
                .size(MAX_HANGING)
                .lanes(&[lane])
                .max_replacements(MAX_HANGING)
                .clock(Arc::clone(&self.shared.clock))
                .build()?;
            state.hang = Some(pool);
        }
        state.rules.push(Active::new(rule));
        Ok(RuleId(state.rules.len() - 1))
    }

    /// How often a rule struck.
    pub fn hits(&self, rule: RuleId) -> u64 {
        self.shared
            .state
            .lock()
            .rules
            .get(rule.0)
            .map_or(0, |rule| rule.hits)
    }

    /// So many operations that hang count as one lost worker, as in a ring; 1 if nothing is said.
    pub fn places_of_a_worker(&self, places: usize) {
        self.shared.state.lock().places = places;
    }

    /// Takes all rules out of force; their numbers mean nothing any more.
    pub fn clear(&self) {
        self.shared.state.lock().rules.clear();
    }

    /// Ends the late visibility of every file.
    pub fn reveal(&self) {
        self.shared.hidden.lock().clear();
    }

    /// Operations of this kind submitted so far.
    pub fn count(&self, kind: OpKind) -> u64 {
        self.shared.state.lock().counts[kind as usize]
    }

    /// The latest operations, oldest first (at most 65536).
    pub fn log(&self) -> Vec<Seen> {
        self.shared.state.lock().log.iter().cloned().collect()
    }

    /// Forgets the log and the counts, not the rules.
    pub fn forget(&self) {
        let mut state = self.shared.state.lock();
        state.log.clear();
        state.counts = Default::default();
    }
}

impl Shared {
    /// Notes the operation and decides its fault; with it a random number for that fault.
    fn judge(&self, lane: usize, op: &IoOp) -> (Option<Fault>, u64) {
        let mut state = self.state.lock();
        let number = state.ops;
        state.ops += 1;
        state.counts[op.kind() as usize] += 1;
        let fault = state
            .rules
            .iter_mut()
            .zip(1u64..)
            .find_map(|(rule, salt)| rule.strike(lane, op, draw(self.seed, number, salt)));
        if state.log.len() == MAX_LOG {
            state.log.pop_front();
        }
        state.log.push_back(Seen {
            kind: op.kind(),
            lane,
            paths: op.paths().into_iter().map(Path::to_path_buf).collect(),
            fault: fault.as_ref().map(Fault::name),
        });
        (fault, draw(self.seed, number, 0))
    }

    /// Passes an operation on, with what is still invisible taken out of its answer.
    fn pass(self: &Arc<Self>, lane: usize, deadline: Mono, op: IoOp, done: Done) {
        let look = self.hidden.lock().look(&op);
        if look.hides_read() {
            return done(op.failed(strike::os_error(errno::ENOENT)));
        }
        if look.is_clear() {
            return self.inner.submit(lane, deadline, op, done);
        }
        let stop = matches!(
            op,
            IoOp::Stat {
                stop_at_missing: true,
                ..
            }
        );
        let filter =
            Box::new(move |result: Result<IoDone>| done(result.map(|answer| look.filter(answer, stop))));
        self.inner.submit(lane, deadline, op, filter);
    }

    /// Holds `what` in a thread until the gate opens, then hands it to `then`; past the deadline `then` gets `Timeout`
    /// and the thread drops `what` when the gate opens.
    fn hang<T: Send + 'static>(
        &self,
        gate: Gate,
        deadline: Mono,
        what: T,
        then: impl FnOnce(Result<T>) + Send + 'static,
    ) {
        let Some(pool) = self.state.lock().hang.clone() else {
            return then(Err(Error::internal("no pool to hang in")));
        };
        let work = move || {
            gate.pass();
            what
        };
        if let Err(refused) = pool.offer(0, deadline, work, then) {
            drop(refused.work);
            (refused.done)(Err(refused.error));
        }
    }
}

impl IoEngine for FaultyEngine {
    fn submit(&self, lane: usize, deadline: Mono, op: IoOp, done: Done) {
        let (fault, draw) = self.shared.judge(lane, &op);
        match fault {
            Some(fault) => self.shared.strike(fault, draw, lane, deadline, op, done),
            None => self.shared.pass(lane, deadline, op, done),
        }
    }

    fn width(&self, lane: usize) -> usize {
        self.shared.inner.width(lane)
    }

    fn close_kept(&self, gone: &[PathBuf], unused: bool) {
        self.shared.inner.close_kept(gone, unused);
    }

    fn kept(&self) -> usize {
        self.shared.inner.kept()
    }

    fn stuck(&self) -> usize {
        let hang = self.shared.state.lock().hang.clone();
        self.shared.inner.stuck() + hang.map_or(0, |pool| pool.stuck())
    }

    fn lost_workers(&self) -> usize {
        let (hang, places) = {
            let state = self.shared.state.lock();
            (state.hang.clone(), state.places.max(1))
        };
        self.shared.inner.lost_workers() + hang.map_or(0, |pool| pool.stuck()) / places
    }

    fn name(&self) -> &'static str {
        "faulty"
    }

    fn warning(&self) -> Option<String> {
        self.shared.inner.warning()
    }

    fn shutdown(&self, drain: Duration) {
        let until = self.shared.clock.now().after(drain);
        let hang = self.shared.state.lock().hang.clone();
        if let Some(pool) = hang {
            pool.shutdown(drain);
        }
        self.shared.inner.shutdown(until.since(self.shared.clock.now()));
    }
}

impl Drop for FaultyEngine {
    /// Threads that still hang are left to their gates; nothing waits for them.
    fn drop(&mut self) {
        if let Some(pool) = self.shared.state.lock().hang.take() {
            pool.shutdown(Duration::ZERO);
        }
    }
}
