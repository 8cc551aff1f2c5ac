//! A gate that tests keep closed: operations block at it until it is opened.

use std::fmt;
use std::sync::Arc;

use ucm_core::sync::{Condvar, Mutex};

/// Clones share one gate.
#[derive(Clone, Default)]
pub struct Gate(Arc<Inner>);

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Default)]
struct State {
    open: bool,
    waiting: usize,
}

impl Gate {
    /// A shut gate.
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens it, for good.
    pub fn open(&self) {
        self.0.state.lock().open = true;
        self.0.news.notify_all();
    }

    /// Number of operations that block at the gate now.
    pub fn waiting(&self) -> usize {
        self.0.state.lock().waiting
    }

    /// Waits until at least `count` operations block at the gate.
    pub fn await_waiting(&self, count: usize) {
        let mut state = self.0.state.lock();
        while state.waiting < count {
            state = self.0.news.wait(state);
        }
    }

    /// Blocks until the gate is open.
    pub(super) fn pass(&self) {
        let mut state = self.0.state.lock();
        state.waiting += 1;
        self.0.news.notify_all();
        while !state.open {
            state = self.0.news.wait(state);
        }
        state.waiting -= 1;
        self.0.news.notify_all();
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0.state.lock();
        write!(f, "Gate(open: {}, waiting: {})", state.open, state.waiting)
    }
}
