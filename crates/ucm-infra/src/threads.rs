//! Start of ucm's threads: their names, their processors and their first calls.

use std::cell::Cell;
use std::io;
use std::sync::OnceLock;
use std::thread::JoinHandle;

use rustix::thread::CpuSet;
use ucm_core::sync::Mutex;
use ucm_core::{Error, Result};

/// Processors for threads that start from now on; `None`: those of the starting thread.
static PROCESSORS: Mutex<Option<CpuSet>> = Mutex::new(None);

/// Restricts the threads that ucm starts from now on, in the whole process, to these processors.
///
/// A thread inherits the processors of the thread that starts it. If that thread is bound to a
/// processor for computing, the threads that copy and write would compete for this very processor.
///
/// # Errors
///
/// `InvalidInput` for an empty list, or a number beyond the limit of this kernel interface (1024).
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

/// True if ucm started this thread, by [`begin_thread`]: it runs no foreign code.
pub fn is_own_thread() -> bool {
    IS_OWN.get()
}

/// Calls of every thread of ucm before its work.
static FIRST: OnceLock<fn()> = OnceLock::new();

/// Makes threads that ucm starts from now on, in the whole process, call `first` before their work.
/// Only the first call of this function has an effect.
pub fn threads_begin_with(first: fn()) {
    FIRST.get_or_init(|| first);
}

/// Starts a thread of ucm. The system shows the first 15 bytes of its name.
///
/// # Errors
///
/// An error of the system if it cannot start one more thread.
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

/// First steps of every thread of ucm.
pub(crate) fn start_thread() {
    IS_OWN.set(true);
    let told = *PROCESSORS.lock();
    // If none of these processors is available to this container any more, the thread keeps those
    // it inherited.
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
