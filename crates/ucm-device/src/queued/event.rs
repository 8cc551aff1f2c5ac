//! Events that the host records: set by the stream's thread when it reaches them, or by the caller
//! that records them.

use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, Completion, MonotonicTime};

use crate::device::Event;

/// A point in a host stream, or set by the caller that records it.
pub(crate) struct HostEvent {
    reached: Arc<Completion<()>>,
    clock: Arc<dyn Clock>,
}

impl HostEvent {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self {
            reached: Completion::new(),
            clock,
        })
    }
}

impl Event for HostEvent {
    fn done(&self) -> bool {
        self.reached.peek().is_some()
    }

    fn wait(&self, deadline: Option<MonotonicTime>) -> Result<()> {
        self.reached
            .wait(&*self.clock, deadline)
            .ok_or_else(|| Error::new(ErrorKind::Timeout, "the event was not done in time"))
    }

    fn record(&self) {
        self.reached.complete(());
    }
}
