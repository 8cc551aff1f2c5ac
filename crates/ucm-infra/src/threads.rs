//! How the threads of ucm begin: named, where they may run, and what they do first.

use std::cell::Cell;
use std::io;
use std::sync::OnceLock;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::thread::CpuSet;
use ucm_core::{Error, Result};

/// Processors for the threads that begin from now on; `None` leaves them to those of the thread
/// that begins them.
static PROCESSORS: Mutex<Option<CpuSet>> = Mutex::new(None);

/// Lets the threads that ucm begins from now on run on these processors of the machine, in the
/// whole process.
///
/// A thread is born with the processors of the one that begins it. Where that one is bound, to
/// compute on a processor of its own, the threads that copy and write would take that very
/// processor from it.
///
/// # Errors
///
/// `InvalidInput` for no processor, or one beyond what the kernel's interface here can name (1024).
pub fn run_threads_on(processors: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    for &processor in processors {
        if processor >= CpuSet::MAX_CPU {
            return Err(Error::invalid("a processor's number is too large")
                .with("processor", processor)
                .with("limit", CpuSet::MAX_CPU));
        }
        set.set(processor);
    }
    if processors.is_empty() {
        return Err(Error::invalid(
            "no processor is named for the threads of ucm",
        ));
    }
    *PROCESSORS.lock() = Some(set);
    Ok(())
}

thread_local! {
    static IS_OWN: Cell<bool> = const { Cell::new(false) };
}

/// Whether ucm began this thread, by [`begin_thread`]: nothing on it is anybody else's.
pub fn is_own_thread() -> bool {
    IS_OWN.get()
}

/// What a thread of ucm does before its work.
static FIRST: OnceLock<fn()> = OnceLock::new();

/// Lets the threads that ucm begins from now on call `first` before their work, in the whole
/// process. What was told first stays.
pub fn threads_begin_with(first: fn()) {
    FIRST.get_or_init(|| first);
}

/// Begins a thread of ucm; its name has at most 15 bytes that the system shows.
///
/// # Errors
///
/// What the system says when it has no room for one more.
pub fn begin_thread<T: Send + 'static>(
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(move || {
            start_thread();
            body()
        })
}

/// What every thread of ucm begins with.
pub(crate) fn start_thread() {
    IS_OWN.set(true);
    let told = *PROCESSORS.lock();
    // What the user took away since, or a container does not have: it stays where it was born.
    if let Some(set) = told {
        let _ = rustix::thread::sched_setaffinity(None, &set);
    }
    if let Some(first) = FIRST.get() {
        first();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_knows_whether_it_is_of_ucm() {
        assert!(!is_own_thread());
        assert!(begin_thread("own", is_own_thread).unwrap().join().unwrap());
    }

    fn here() -> CpuSet {
        rustix::thread::sched_getaffinity(None).unwrap()
    }

    #[test]
    fn threads_run_where_they_were_told_to_the_caller_that_begins_them() {
        let all = here();
        let numbers: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&n| all.is_set(n)).collect();
        assert!(run_threads_on(&[]).is_err());
        assert!(run_threads_on(&[CpuSet::MAX_CPU]).is_err());
        let bound = std::thread::spawn(move || {
            let mut one = CpuSet::new();
            one.set(numbers[0]);
            rustix::thread::sched_setaffinity(None, &one).unwrap();
            let born = begin_thread("ucm-test", here).unwrap().join().unwrap();
            run_threads_on(&numbers).unwrap();
            (
                one,
                born,
                begin_thread("ucm-test", here).unwrap().join().unwrap(),
            )
        });
        let (one, born, told) = bound.join().unwrap();
        assert_eq!(born, one);
        assert_eq!(told, all);
    }

    #[test]
    fn threads_do_first_what_was_told_first() {
        thread_local!(static DONE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) });
        threads_begin_with(|| DONE.set(true));
        threads_begin_with(|| DONE.set(false));
        assert!(
            begin_thread("ucm-test", || DONE.get())
                .unwrap()
                .join()
                .unwrap()
        );
        assert!(!DONE.get());
    }
}
