//! Callers that wait for the next listing of the segments of others. Each is called back once:
//! after the listing, at its deadline, or when the store closes, whichever is first.

use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{MonotonicTime, Notify};

use crate::backend::Done;

/// Most callers that wait.
const MOST: usize = 1 << 16;

/// A caller that waits, and until when.
type Waiter = (MonotonicTime, Done<()>);

/// See the module.
#[derive(Default)]
pub(crate) struct PendingLooks {
    waiting: Mutex<Waiting>,
    /// Notified when the next listing is due, and when the store closes.
    pub(crate) due: Notify,
    /// The same for the thread that keeps the deadlines of callers, and those of writes.
    pub(crate) timer: Notify,
}

#[derive(Default)]
struct Waiting {
    /// For the next listing.
    next: Vec<Waiter>,
    /// For the one that runs.
    now: Vec<Waiter>,
    /// Why the last one failed, and before when none is made.
    failed: Option<(MonotonicTime, Error)>,
    closed: bool,
}

/// Callers whose listing has ended.
pub(crate) struct Looked(Vec<Waiter>);

impl PendingLooks {
    /// Calls back after the next listing: with `Timeout` when none ended by the deadline, `Busy`
    /// where too many wait, `Closed` once the store closes, and with the error of the last one
    /// where that failed and the next one has not ended well.
    pub(crate) fn add(&self, now: MonotonicTime, deadline: MonotonicTime, done: Done<()>) {
        let mut waiting = self.waiting.lock();
        let error = match &waiting.failed {
            _ if waiting.closed => closed(),
            Some((until, error)) if now < *until => error.clone(),
            _ if waiting.next.len() >= MOST => {
                let text = "too many reads wait for a listing of what others have stored";
                Error::new(ErrorKind::Busy, text)
            }
            _ => {
                waiting.next.push((deadline, done));
                drop(waiting);
                return self.wake();
            }
        };
        drop(waiting);
        done(Err(error));
    }

    fn wake(&self) {
        self.due.notify();
        self.timer.notify();
    }

    /// Calls back those whose deadline has passed, however long the listing takes; the next
    /// deadline, if any wait.
    pub(crate) fn end_late(&self, now: MonotonicTime) -> Option<MonotonicTime> {
        let mut waiting = self.waiting.lock();
        let Waiting {
            next, now: looking, ..
        } = &mut *waiting;
        let over = |(deadline, _): &mut Waiter| *deadline <= now;
        let late: Vec<_> = next
            .extract_if(.., over)
            .chain(looking.extract_if(.., over))
            .collect();
        let left = next.iter().chain(&*looking);
        let soonest = left.map(|(deadline, _)| *deadline).min();
        drop(waiting);
        let text = "what others have stored was not listed in time";
        Looked(late).tell(&Err(Error::new(ErrorKind::Timeout, text)));
        soonest
    }

    /// The store closes: calls all of them back, and no thread begins anything any more.
    pub(crate) fn end(&self) {
        let closing = Waiting {
            closed: true,
            ..Waiting::default()
        };
        let Waiting { mut next, now, .. } = std::mem::replace(&mut *self.waiting.lock(), closing);
        next.extend(now);
        Looked(next).tell(&Err(closed()));
        self.wake();
    }

    /// Whether the store closes.
    pub(crate) fn is_closed(&self) -> bool {
        self.waiting.lock().closed
    }

    /// An error once the store closes.
    pub(crate) fn unless_closed(&self) -> Result<()> {
        (!self.is_closed()).then_some(()).ok_or_else(closed)
    }

    /// Whether a caller waits for the next listing.
    pub(crate) fn is_asked(&self) -> bool {
        !self.waiting.lock().next.is_empty()
    }

    /// A listing begins, one at a time; whether a caller waits for it.
    pub(crate) fn begin(&self) -> bool {
        let mut waiting = self.waiting.lock();
        waiting.now = std::mem::take(&mut waiting.next);
        if let Some((until, _)) = &mut waiting.failed {
            *until = MonotonicTime::NEVER; // until it has ended well
        }
        !waiting.now.is_empty()
    }

    /// The listing has ended: the callers that waited for it, to be called back without a lock.
    pub(crate) fn looked(&self) -> Looked {
        let mut waiting = self.waiting.lock();
        waiting.failed = None;
        Looked(std::mem::take(&mut waiting.now))
    }

    /// The listing has failed, and none is made before this time: all callers, to be called back
    /// without a lock. Those that come until then get the error too.
    #[cfg(feature = "object")]
    pub(crate) fn failed(&self, error: Error, until: MonotonicTime) -> Looked {
        let mut waiting = self.waiting.lock();
        waiting.failed = Some((until, error));
        let mut all = std::mem::take(&mut waiting.now);
        all.append(&mut waiting.next);
        Looked(all)
    }
}

impl Looked {
    /// Calls them back with its outcome.
    pub(crate) fn tell(self, result: &Result<()>) {
        for (_, done) in self.0 {
            done(result.clone());
        }
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the store is closed")
}
