//! Current work of a thread that may hang, and the callbacks to run when the thread is written off.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, Result};

/// Called if the work did not end in time.
type Late = Box<dyn FnOnce(Error) + Send>;

/// One job of a pool, shared by the monitor and the worker: the monitor writes it off; the worker
/// checks before every effect whether that has happened.
#[derive(Default)]
pub struct Ticket {
    over: AtomicBool,
    doing: Mutex<Doing>,
}

#[derive(Default)]
struct Doing {
    /// Nothing more is begun.
    written_off: bool,
    /// The callbacks of the work under way on the thread, the innermost last.
    late: Vec<Late>,
}

impl Ticket {
    /// True if the end of the job was reported: no further effect is allowed.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Marks the job as ended; its caller has the result.
    pub fn end(&self) {
        self.over.store(true, Ordering::Release);
    }

    /// Writes the job off: all work under way ends with this error, the innermost first.
    pub fn write_off(&self, error: &Error) {
        self.end();
        let late = {
            let mut doing = self.doing.lock();
            doing.written_off = true;
            std::mem::take(&mut doing.late)
        };
        late.into_iter().rev().for_each(|late| late(error.clone()));
    }

    /// Runs `work` on this thread. `ended` gets the result exactly once, from here or from
    /// [`Ticket::write_off`]; a later result is dropped.
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
            drop(work); // with its captured values, before the report
            let text = "the job ran past its deadline and was written off";
            return late(Error::new(ErrorKind::Timeout, text));
        }
        let result = work();
        self.unwatch();
        let ended = ended.lock().take();
        if let Some(ended) = ended {
            ended(result);
        }
    }

    /// Until [`Ticket::unwatch`], `late` is called if the job is written off. Returned if it
    /// already was.
    pub fn watch(&self, late: Late) -> Result<(), Late> {
        let mut doing = self.doing.lock();
        if doing.written_off {
            return Err(late);
        }
        doing.late.push(late);
        Ok(())
    }

    /// Removes the innermost callback, whose work has ended; false if it was already called.
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
                        "the innermost is called first"
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
            || -> Result<()> { unreachable!("no work starts any more") },
            |result| {
                assert!(result.is_err());
            },
        );
    }
}
