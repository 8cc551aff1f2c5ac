//! What a thread that may hang is doing, and who hears of it when the thread is written off.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, Result};

/// Hears that what was begun did not end in time.
type Late = Box<dyn FnOnce(Error) + Send>;

/// One job of a pool, as the thread that keeps its time and the one that runs it see it: the first
/// writes it off, the second asks before every effect whether that happened.
#[derive(Default)]
pub struct Ticket {
    over: AtomicBool,
    doing: Mutex<Doing>,
}

#[derive(Default)]
struct Doing {
    /// Nothing more is begun.
    written_off: bool,
    /// Who hears of what is under way on the thread, the innermost last.
    late: Vec<Late>,
}

impl Ticket {
    /// Whether the end of the job was told: nothing more is to be done for it.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// The job ended, as the caller that waits for it was told.
    pub fn end(&self) {
        self.over.store(true, Ordering::Release);
    }

    /// The job is written off: all that is under way ends with this error, the innermost first.
    pub fn write_off(&self, error: &Error) {
        self.end();
        let late = {
            let mut doing = self.doing.lock();
            doing.written_off = true;
            std::mem::take(&mut doing.late)
        };
        late.into_iter().rev().for_each(|late| late(error.clone()));
    }

    /// Does `work` on this thread. `ended` hears once how that ended, from here or from
    /// [`Ticket::write_off`]; what comes after that is dropped.
    pub fn run<T: 'static>(
        &self,
        work: impl FnOnce() -> Result<T>,
        ended: impl FnOnce(Result<T>) + Send + 'static,
    ) {
        let ended = Arc::new(Mutex::new(Some(ended)));
        let late = Arc::clone(&ended);
        let watched = self.watch(Box::new(move |error| {
            let ended = late.lock().take();
            if let Some(ended) = ended {
                ended(Err(error));
            }
        }));
        if let Err(late) = watched {
            drop(work); // with what it holds, before anybody hears
            let text = "the job ran past its deadline, and nothing more is done for it";
            return late(Error::new(ErrorKind::Timeout, text));
        }
        let result = work();
        self.unwatch();
        let ended = ended.lock().take();
        if let Some(ended) = ended {
            ended(result);
        }
    }

    /// Until [`Ticket::unwatch`], `late` hears when the job is written off; given back where it was
    /// before.
    pub fn watch(&self, late: Late) -> Result<(), Late> {
        let mut doing = self.doing.lock();
        if doing.written_off {
            return Err(late);
        }
        doing.late.push(late);
        Ok(())
    }

    /// What was last begun has ended; false where that was told to be late.
    pub fn unwatch(&self) -> bool {
        self.doing.lock().late.pop().is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn what_ends_in_time_is_told_from_where_it_was_done() {
        let (ticket, told) = (Ticket::default(), Arc::new(Mutex::new(None)));
        let hears = Arc::clone(&told);
        ticket.run(|| Ok(7), move |result| *hears.lock() = Some(result));
        assert!(matches!(told.lock().take(), Some(Ok(7))));
        ticket.write_off(&Error::internal("late"));
        assert!(told.lock().is_none(), "it had ended");
    }

    #[test]
    fn what_is_written_off_is_told_once_and_its_end_is_dropped() {
        let (ticket, told) = (Arc::new(Ticket::default()), Arc::new(AtomicUsize::new(0)));
        let (outer, inner) = (Arc::clone(&told), Arc::clone(&told));
        let (watch, deeper) = (Arc::clone(&ticket), Arc::clone(&ticket));
        let within = move || {
            deeper.run(
                || {
                    watch.write_off(&Error::new(ErrorKind::Timeout, "late"));
                    Ok(1)
                },
                move |result| {
                    assert_eq!(
                        result.map_err(|error| error.kind()),
                        Err(ErrorKind::Timeout)
                    );
                    assert_eq!(
                        inner.fetch_add(1, Ordering::AcqRel),
                        0,
                        "the innermost hears first"
                    );
                },
            );
            Ok(2)
        };
        ticket.run(within, move |result: Result<i32>| {
            assert!(result.is_err());
            outer.fetch_add(1, Ordering::AcqRel);
        });
        assert_eq!(told.load(Ordering::Acquire), 2);
        assert!(ticket.is_over());
        ticket.run(
            || -> Result<()> { unreachable!("nothing is begun any more") },
            |result| {
                assert!(result.is_err());
            },
        );
    }
}
