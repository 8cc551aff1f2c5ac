//! Those who wait for a look at what others have stored: they are called back when it was made,
//! when their time is over, or when the store closes, whichever comes first, and once.

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;

use crate::backend::Done;

/// Most that wait for a look.
const MOST: usize = 1 << 16;

/// Somebody who waits, and until when.
type Waiter = (MonotonicTime, Done<()>);

/// See the module.
#[derive(Default)]
pub(crate) struct PendingLooks(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    /// For the next look.
    next: Vec<Waiter>,
    /// For the one that is under way.
    now: Vec<Waiter>,
}

/// Those for whom a look was made.
pub(crate) struct Looked(Vec<Waiter>);

impl PendingLooks {
    /// Calls back after the next look: `Timeout` when none was made by the deadline, `Busy` where
    /// too many wait, `Closed` once `is_closing`, which is asked in here so that
    /// [`PendingLooks::end`] finds everybody. Whether it waits.
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
            let text = "too many reads wait for a look at what others have stored";
            Error::new(ErrorKind::Busy, text)
        } else {
            waiting.next.push((deadline, done));
            return true;
        };
        drop(waiting);
        done(Err(error));
        false
    }

    /// Those whose time is over are told so, however long the look takes; when the next ones are
    /// late, if any wait.
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
            let text = "nobody has looked in time at what others have stored";
            done(Err(Error::new(ErrorKind::Timeout, text)));
        }
        soonest
    }

    /// All are told, once the store closes, that no look will come.
    pub(crate) fn end(&self) {
        let Waiting { next, now } = std::mem::take(&mut *self.0.lock());
        for (_, done) in next.into_iter().chain(now) {
            done(Err(closed()));
        }
    }

    /// Whether somebody waits for the next look.
    pub(crate) fn is_asked(&self) -> bool {
        !self.0.lock().next.is_empty()
    }

    /// A look begins, one at a time; whether somebody waits for it.
    pub(crate) fn begin(&self) -> bool {
        let mut waiting = self.0.lock();
        waiting.now = std::mem::take(&mut waiting.next);
        !waiting.now.is_empty()
    }

    /// The look has ended: those who waited for it, to be told with no lock held.
    pub(crate) fn looked(&self) -> Looked {
        Looked(std::mem::take(&mut self.0.lock().now))
    }
}

impl Looked {
    /// Tells them what came of it.
    pub(crate) fn tell(self, result: &Result<()>) {
        self.0
            .into_iter()
            .for_each(|(_, done)| done(result.clone()));
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the store is closed")
}
