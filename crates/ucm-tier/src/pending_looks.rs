//! Callers that wait for the next listing of the segments of others. Each is called back once:
//! after the listing, at its deadline, or when the store closes, whichever is first.

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;

use crate::backend::Done;

/// Most callers that wait.
const MOST: usize = 1 << 16;

/// A caller that waits, and until when.
type Waiter = (MonotonicTime, Done<()>);

/// See the module.
#[derive(Default)]
pub(crate) struct PendingLooks(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    /// For the next listing.
    next: Vec<Waiter>,
    /// For the one that runs.
    now: Vec<Waiter>,
}

/// Callers whose listing has ended.
pub(crate) struct Looked(Vec<Waiter>);

impl PendingLooks {
    /// Calls back after the next listing: with `Timeout` when none ended by the deadline, `Busy`
    /// where too many wait, `Closed` once `is_closing`, which is called under the lock so that
    /// [`PendingLooks::end`] finds every caller. Whether it waits.
    pub(crate) fn add(
        &self,
        deadline: MonotonicTime,
        done: Done<()>,
        is_closing: impl FnOnce() -> bool,
    ) -> bool {
        let mut waiting = self.0.lock();
        let error = if is_closing() {
            closed()
        } else if waiting.next.len() >= MOST {
            let text = "too many reads wait for a listing of what others have stored";
            Error::new(ErrorKind::Busy, text)
        } else {
            waiting.next.push((deadline, done));
            return true;
        };
        drop(waiting);
        done(Err(error));
        false
    }

    /// Calls back those whose deadline has passed, however long the listing takes; the next
    /// deadline, if any wait.
    pub(crate) fn end_late(&self, now: MonotonicTime) -> Option<MonotonicTime> {
        let mut waiting = self.0.lock();
        let Waiting { next, now: looking } = &mut *waiting;
        let over = |(deadline, _): &mut Waiter| *deadline <= now;
        let late: Vec<_> = next
            .extract_if(.., over)
            .chain(looking.extract_if(.., over))
            .collect();
        let soonest = next
            .iter()
            .chain(&*looking)
            .map(|(deadline, _)| *deadline)
            .min();
        drop(waiting);
        for (_, done) in late {
            let text = "what others have stored was not listed in time";
            done(Err(Error::new(ErrorKind::Timeout, text)));
        }
        soonest
    }

    /// Calls all of them back, once the store closes.
    pub(crate) fn end(&self) {
        let Waiting { next, now } = std::mem::take(&mut *self.0.lock());
        for (_, done) in next.into_iter().chain(now) {
            done(Err(closed()));
        }
    }

    /// Whether a caller waits for the next listing.
    pub(crate) fn is_asked(&self) -> bool {
        !self.0.lock().next.is_empty()
    }

    /// A listing begins, one at a time; whether a caller waits for it.
    pub(crate) fn begin(&self) -> bool {
        let mut waiting = self.0.lock();
        waiting.now = std::mem::take(&mut waiting.next);
        !waiting.now.is_empty()
    }

    /// The listing has ended: the callers that waited for it, to be called back without a lock.
    pub(crate) fn looked(&self) -> Looked {
        Looked(std::mem::take(&mut self.0.lock().now))
    }
}

impl Looked {
    /// Calls them back with its outcome.
    pub(crate) fn tell(self, result: &Result<()>) {
        self.0
            .into_iter()
            .for_each(|(_, done)| done(result.clone()));
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the store is closed")
}
