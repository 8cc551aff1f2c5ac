//! The threads of one call.
//!
//! The calling thread and its helpers divide the items; nothing outlives the call. If the process
//! has an OpenMP runtime (vLLM on a CPU always has; torch loads one), the helpers are that
//! runtime's threads: they already wait on the model's cores, where threads of ours would compete
//! with them. Otherwise they are started for the call.
#![allow(
    unsafe_code,
    reason = "calls a function of the process's OpenMP runtime"
)]

use std::ffi::{c_uint, c_void};
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ucm_core::{Error, Result};

/// Most threads of one call.
pub const MAX_THREADS: usize = 1024;

/// The number of threads of a call.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use ucm_retrieval::Team;
///
/// let sum = AtomicUsize::new(0);
/// Team::new(2).unwrap().run(100, |item| {
///     sum.fetch_add(item, Ordering::Relaxed);
/// }).unwrap();
/// assert_eq!(sum.into_inner(), 4950);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Team(NonZeroUsize);

impl Team {
    /// The calling thread alone.
    pub const ONE: Self = Self(NonZeroUsize::MIN);

    /// At most `threads` threads, including the calling one.
    ///
    /// # Errors
    ///
    /// `InvalidInput` for 0, or for more than [`MAX_THREADS`].
    pub fn new(threads: usize) -> Result<Self> {
        let threads = NonZeroUsize::new(threads).filter(|threads| threads.get() <= MAX_THREADS);
        threads.map(Self).ok_or_else(|| {
            Error::invalid("a call has at least one thread, and not that many")
                .with("limit", MAX_THREADS)
        })
    }

    /// Calls `work` once for each item from 0 to `items - 1`, in any order, and returns when all
    /// are done.
    ///
    /// # Errors
    ///
    /// `Internal` if `work` panicked for an item. Other items may not have been processed then.
    pub fn run(&self, items: usize, work: impl Fn(usize) + Sync) -> Result<()> {
        let share = Share {
            work: &work,
            items,
            next: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
        };
        let threads = self.0.get().min(items);
        if threads <= 1 {
            share.take();
        } else if let Some(parallel) = openmp() {
            let threads = c_uint::try_from(threads).unwrap_or(c_uint::MAX);
            let data = std::ptr::from_ref(&share).cast_mut().cast::<c_void>();
            // SAFETY: this is the entry point by which compiled OpenMP programs start a parallel
            // region: it calls the function with the pointer on its threads, the calling one among
            // them, and returns after all of them have returned, so `share` outlives every use.
            // `take_share` does not unwind.
            unsafe { parallel(take_share, data, threads, 0) };
        } else {
            std::thread::scope(|scope| {
                for _ in 1..threads {
                    let name = "ucm-retrieval".to_owned();
                    // The system cannot start another thread: the existing ones do its part.
                    let _ = std::thread::Builder::new()
                        .name(name)
                        .spawn_scoped(scope, || share.take());
                }
                share.take();
            });
        }
        if share.failed.into_inner() {
            return Err(Error::internal(
                "a kernel of sparse retrieval failed; please report it",
            ));
        }
        Ok(())
    }
}

/// True if calls with several threads use those of an OpenMP runtime of the process. Decided at the
/// first such call.
pub fn has_openmp() -> bool {
    openmp().is_some()
}

/// The items of one call, which its threads take one by one.
struct Share<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    items: usize,
    next: AtomicUsize,
    failed: AtomicBool,
}

impl Share<'_> {
    fn take(&self) {
        let all = || {
            loop {
                let item = self.next.fetch_add(1, Ordering::Relaxed);
                if item >= self.items {
                    return;
                }
                (self.work)(item);
            }
        };
        if catch_unwind(AssertUnwindSafe(all)).is_err() {
            self.next.store(self.items, Ordering::Relaxed);
            self.failed.store(true, Ordering::Relaxed);
        }
    }
}

extern "C" fn take_share(data: *mut c_void) {
    // SAFETY: `run` passes the address of a share that lives until all of these calls have
    // returned.
    let share = unsafe { &*data.cast_const().cast::<Share<'_>>() };
    share.take();
}

type Parallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

/// `GOMP_parallel` of the process, which GCC's and LLVM's runtimes both have.
fn openmp() -> Option<Parallel> {
    static FOUND: OnceLock<Option<Parallel>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let process = libloading::os::unix::Library::this();
        // SAFETY: the name is part of the ABI between compilers and OpenMP runtimes, with these
        // parameters. The runtime was loaded for the whole process, and such libraries are never
        // unloaded.
        unsafe {
            process
                .get::<Parallel>(b"GOMP_parallel\0")
                .ok()
                .map(|found| *found)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn each_item_once(team: Team) {
        for items in [0, 1, 2, 3, 64, 1000] {
            let done: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
            team.run(items, |item| {
                done[item].fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
            assert!(done.into_iter().all(|count| count.into_inner() == 1));
        }
    }

    #[test]
    fn every_item_is_done_once() {
        for threads in [1, 2, 7] {
            each_item_once(Team::new(threads).unwrap());
        }
    }

    #[test]
    fn a_panic_becomes_an_error() {
        for threads in [1, 3] {
            let team = Team::new(threads).unwrap();
            let error = team.run(10, |item| assert_ne!(item, 4)).unwrap_err();
            assert_eq!(error.kind(), ucm_core::ErrorKind::Internal);
        }
    }

    #[test]
    fn a_team_is_bounded() {
        assert!(Team::new(0).is_err());
        assert!(Team::new(MAX_THREADS + 1).is_err());
    }
}
