//! Common parts of every call: counting, failures planned by the test, and the checks of process,
//! thread and context.

use std::cell::Cell;
use std::ffi::c_void;
use std::io::Write;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use crate::error::{CUDA_ERROR_NOT_INITIALIZED, CUDA_SUCCESS, CUresult, Outcome};
use crate::state::{ENDED, Handle, Locked, lock};
use crate::{capture, context};

/// The process that called `cuInit`; 0 before.
static PROCESS: AtomicI32 = AtomicI32::new(0);

thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// A function that the library exports.
pub(crate) struct Export {
    pub(crate) name: &'static str,
    /// Where it is.
    pub(crate) address: fn() -> *const c_void,
    calls: AtomicU64,
}

impl Export {
    pub(crate) const fn new(name: &'static str, address: fn() -> *const c_void) -> Self {
        Self {
            name,
            address,
            calls: AtomicU64::new(0),
        }
    }

    /// Calls so far.
    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}

/// Exports functions under their names: each calls one of the functions below, or a similar one,
/// and then the expression behind the arrow.
macro_rules! exports {
    ($names:ident: $($needs:ident $name:ident($($arg:ident: $type:ty),* $(,)?) [$($with:ident),*] => $does:expr;)*) => {
        /// The state of each, in the order of the names.
        mod export {
            use crate::call::Export;

            $(pub(super) static $name: Export = Export::new(stringify!($name), || super::$name as *const _);)*
        }

        /// Names of the exported functions.
        pub const $names: &[&str] = &[$(stringify!($name),)*];

        /// The functions themselves.
        pub(crate) static EXPORTS: &[&crate::call::Export] = &[$(&export::$name,)*];

        $(
            #[doc = concat!("`", stringify!($name), "`, as its vendor's.")]
            ///
            /// # Safety
            /// As in the vendor's documentation: pointers are null or name memory of the
            /// documented kind and size.
            #[unsafe(no_mangle)]
            #[allow(unused_unsafe, reason = "functions without pointers need none")]
            #[allow(clippy::too_many_arguments, reason = "the vendor's own lists")]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> $crate::error::CUresult {
                // SAFETY: the caller's promise.
                $needs(&export::$name, |$($with),*| unsafe { $does })
            }
        )*
    };
}

pub(crate) use exports;

/// A call that works anywhere, even in a forked process.
pub(crate) fn anywhere(function: &'static Export, act: impl FnOnce() -> Outcome) -> CUresult {
    count(function);
    code(act())
}

/// A call that needs no `cuInit`.
pub(crate) fn before_init(
    function: &'static Export,
    act: impl FnOnce(&mut Locked) -> Outcome,
) -> CUresult {
    code(enter(function).and_then(|mut state| act(&mut state)))
}

/// A call that needs `cuInit` and no context. It costs no time on the virtual clock.
pub(crate) fn process(
    function: &'static Export,
    act: impl FnOnce(&mut Locked) -> Outcome,
) -> CUresult {
    code(enter(function).and_then(|mut state| {
        check_init(&state)?;
        act(&mut state)
    }))
}

/// A call that needs a sound context that is current to the thread.
pub(crate) fn context(
    function: &'static Export,
    act: impl FnOnce(&mut Locked, Handle) -> Outcome,
) -> CUresult {
    code(enter(function).and_then(|mut state| {
        check_init(&state)?;
        let current = context::current(&state)?;
        state.clock.call(function.name == "cuLaunchKernel");
        act(&mut state, current)
    }))
}

/// Records the process that initialized the driver.
pub(crate) fn initialized() {
    PROCESS.store(own_pid(), Ordering::Release);
}

/// Runs a callback of `cuLaunchHostFunc`, in which driver calls are forbidden.
pub(crate) fn in_callback(call: impl FnOnce()) {
    IN_CALLBACK.set(true);
    call();
    IN_CALLBACK.set(false);
}

/// Ends the process after an error of the caller that would corrupt data or hang on real hardware.
pub(crate) fn abort(reason: &str) -> ! {
    say(reason);
    std::process::abort()
}

/// A line on standard error.
pub(crate) fn say(what: &str) {
    // Standard error may be closed.
    let _ = writeln!(std::io::stderr(), "softcuda: {what}");
}

fn enter(function: &'static Export) -> Outcome<Locked> {
    let number = count(function);
    let process = PROCESS.load(Ordering::Acquire);
    // In a forked process another thread's lock may be held for ever, so this runs before any lock.
    if process != 0 && process != own_pid() {
        return Err(CUDA_ERROR_NOT_INITIALIZED);
    }
    let mut state = lock();
    while state.control.is_blocked(function.name) {
        ENDED.wait(&mut state);
    }
    if let Some(code) = state.control.failure(function.name, number) {
        return Err(code);
    }
    capture::check(&mut state, function.name)?;
    Ok(state)
}

fn count(function: &'static Export) -> u64 {
    if IN_CALLBACK.get() {
        let name = function.name;
        abort(&format!(
            "{name} was called from inside a cuLaunchHostFunc callback"
        ));
    }
    function.calls.fetch_add(1, Ordering::Relaxed) + 1
}

fn check_init(state: &Locked) -> Outcome {
    if state.initialized {
        Ok(())
    } else {
        Err(CUDA_ERROR_NOT_INITIALIZED)
    }
}

fn code(outcome: Outcome) -> CUresult {
    outcome.err().unwrap_or(CUDA_SUCCESS)
}

fn own_pid() -> i32 {
    std::process::id().cast_signed()
}
