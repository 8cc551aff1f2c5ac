//! The fault-injecting twin of the real engine: stands before it and, by script, fails operations, loses
//! answers, tears and flips bytes, hangs, hides files. The same seed and the same order of operations give the same
//! faults. For tests, ours and those of backends written elsewhere.

mod gate;
mod hidden;
mod rule;
mod strike;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use ucm_core::Result;

pub use gate::Gate;
pub use rule::{Fault, Rule, Tail, errno};

use crate::engine::{Close, Closed, IoEngine, StillWanted};
use crate::op::{IoDone, IoOp, OpKind};
use hidden::Hidden;
use rule::{Active, draw};

/// Most operations the log remembers, the latest.
const MAX_LOG: usize = 1 << 16;

/// Number of a rule, in the order they were added.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RuleId(usize);

/// One operation, as the log remembers it.
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
    inner: Arc<dyn IoEngine>,
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
}

impl FaultyEngine {
    /// Stands before `inner`; without rules it only looks on.
    pub fn new(inner: Arc<dyn IoEngine>, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            inner,
            seed,
            state: Mutex::default(),
            hidden: Mutex::default(),
        })
    }

    /// Puts a rule in force. For each operation the first rule that strikes counts.
    pub fn add(&self, rule: Rule) -> RuleId {
        let mut state = self.state.lock();
        state.rules.push(Active::new(rule));
        RuleId(state.rules.len() - 1)
    }

    /// How often a rule struck.
    pub fn hits(&self, rule: RuleId) -> u64 {
        self.state.lock().rules.get(rule.0).map_or(0, |rule| rule.hits)
    }

    /// Takes all rules out of force; their numbers mean nothing any more.
    pub fn clear(&self) {
        self.state.lock().rules.clear();
    }

    /// Ends the late visibility of every file.
    pub fn reveal(&self) {
        self.hidden.lock().clear();
    }

    /// Operations of this kind so far.
    pub fn count(&self, kind: OpKind) -> u64 {
        self.state.lock().counts[kind as usize]
    }

    /// The latest operations, oldest first (at most 65536).
    pub fn log(&self) -> Vec<Seen> {
        self.state.lock().log.iter().cloned().collect()
    }

    /// Forgets the log and the counts, not the rules.
    pub fn forget(&self) {
        let mut state = self.state.lock();
        state.log.clear();
        state.counts = Default::default();
    }

    /// Notes the operation and decides its fault; with it a random number for that fault.
    fn judge(&self, lane: usize, op: &IoOp<'_>) -> (Option<Fault>, u64) {
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
    fn pass(&self, lane: usize, op: &mut IoOp<'_>, wanted: StillWanted<'_>) -> Result<IoDone> {
        let look = self.hidden.lock().look(op);
        if look.hides_read() {
            return Err(strike::os_error(errno::ENOENT));
        }
        let stop = matches!(
            op,
            IoOp::Stat {
                stop_at_missing: true,
                ..
            }
        );
        let answer = self.inner.run(lane, op, wanted)?;
        Ok(look.filter(answer, stop))
    }
}

impl IoEngine for FaultyEngine {
    fn run(&self, lane: usize, op: &mut IoOp<'_>, wanted: StillWanted<'_>) -> Result<IoDone> {
        match self.judge(lane, op) {
            (Some(fault), draw) => self.strike(fault, draw, lane, op, wanted),
            (None, _) => self.pass(lane, op, wanted),
        }
    }

    fn close(&self, which: Close<'_>) -> Closed {
        self.inner.close(which)
    }

    fn kept(&self) -> usize {
        self.inner.kept()
    }
}
