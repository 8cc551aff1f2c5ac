//! Whether a job of a pool is still waited for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ucm_core::sync::Mutex;

/// One job of a pool. The thread that keeps its time ends it; the thread that runs it checks before
/// every effect whether that happened.
#[derive(Debug, Default)]
pub struct Ticket {
    over: AtomicBool,
    visiting: Mutex<Visiting>,
}

/// Where the thread of the job works as a guest.
#[derive(Debug, Default)]
struct Visiting {
    /// Counts the guests that hang there.
    host: Option<Arc<AtomicUsize>>,
    /// This one is counted.
    stuck: bool,
}

impl Ticket {
    /// Whether the end of the job was reported: nothing more is to be done for it.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// The end of the job was reported.
    pub fn end(&self) {
        self.over.store(true, Ordering::Release);
    }

    /// The same of a job whose thread may hang: it counts as stuck where it visits.
    pub fn write_off(&self) {
        self.end();
        let mut visiting = self.visiting.lock();
        if let Some(host) = visiting.host.as_ref().filter(|_| !visiting.stuck) {
            host.fetch_add(1, Ordering::AcqRel);
            visiting.stuck = true;
        }
    }

    /// The thread of the job works for another pool until the visit is dropped. `host` counts it
    /// from when the job is written off until then.
    pub fn visit(self: &Arc<Self>, host: &Arc<AtomicUsize>) -> Visit {
        let visiting = Visiting {
            host: Some(Arc::clone(host)),
            stuck: false,
        };
        *self.visiting.lock() = visiting;
        Visit(Arc::clone(self))
    }
}

/// A thread works for another pool; see [`Ticket::visit`].
#[derive(Debug)]
pub struct Visit(Arc<Ticket>);

impl Drop for Visit {
    fn drop(&mut self) {
        let visiting = std::mem::take(&mut *self.0.visiting.lock());
        if let Some(host) = visiting.host.filter(|_| visiting.stuck) {
            host.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_counts_as_stuck_from_its_write_off_until_it_returns() {
        let (ticket, stuck) = (Arc::new(Ticket::default()), Arc::new(AtomicUsize::new(0)));
        drop(ticket.visit(&stuck));
        let visit = ticket.visit(&stuck);
        assert!(!ticket.is_over() && stuck.load(Ordering::Acquire) == 0);
        ticket.write_off();
        ticket.write_off();
        assert!(ticket.is_over() && stuck.load(Ordering::Acquire) == 1);
        drop(visit);
        assert_eq!(stuck.load(Ordering::Acquire), 0);
    }

    #[test]
    fn a_job_that_ended_or_visits_no_pool_is_stuck_nowhere() {
        let (ticket, stuck) = (Arc::new(Ticket::default()), Arc::new(AtomicUsize::new(0)));
        let visit = ticket.visit(&stuck);
        ticket.end();
        drop(visit);
        ticket.write_off();
        assert_eq!(stuck.load(Ordering::Acquire), 0);
    }
}
