//! What every call goes through: counting, failures planned by the test, and the checks of process, thread and context.

use std::cell::Cell;
use std::io::Write;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use crate::context;
use crate::error::{CUDA_ERROR_NOT_INITIALIZED, CUDA_SUCCESS, CUresult, Outcome};
use crate::exports::{Function, NAMES};
use crate::state::{Handle, Locked, lock};

/// The process that called `cuInit`; 0 before.
static PROCESS: AtomicI32 = AtomicI32::new(0);

static CALLS: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];

thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// A call that is answered anywhere, even in a process that was forked.
pub(crate) fn anywhere(function: Function, act: impl FnOnce() -> Outcome) -> CUresult {
    count(function);
    code(act())
}

/// A call that needs no `cuInit`.
pub(crate) fn before_init(function: Function, act: impl FnOnce(&mut Locked) -> Outcome) -> CUresult {
    code(enter(function).and_then(|mut state| act(&mut state)))
}

/// A call that needs `cuInit` and no context. It costs no time on the virtual clock.
pub(crate) fn process(function: Function, act: impl FnOnce(&mut Locked) -> Outcome) -> CUresult {
    code(enter(function).and_then(|mut state| {
        check_init(&state)?;
        act(&mut state)
    }))
}

/// A call that needs a context that is current to the thread and sound.
pub(crate) fn context(function: Function, act: impl FnOnce(&mut Locked, Handle) -> Outcome) -> CUresult {
    code(enter(function).and_then(|mut state| {
        check_init(&state)?;
        let current = context::current(&state)?;
        state.clock.call(function == Function::cuLaunchKernel);
        act(&mut state, current)
    }))
}

/// Remembers which process initialized the driver.
pub(crate) fn initialized() {
    PROCESS.store(own_pid(), Ordering::Release);
}

/// Calls of a function so far.
pub(crate) fn calls(function: usize) -> u64 {
    CALLS[function].load(Ordering::Relaxed)
}

/// Runs a callback of `cuLaunchHostFunc`, in which no function of the driver may be called.
pub(crate) fn in_callback(call: impl FnOnce()) {
    IN_CALLBACK.set(true);
    call();
    IN_CALLBACK.set(false);
}

/// Ends the process for a mistake of the caller that real hardware punishes with corrupt data or a hang.
pub(crate) fn abort(reason: &str) -> ! {
    say(reason);
    std::process::abort()
}

/// A line on standard error.
pub(crate) fn say(what: &str) {
    // Where standard error is closed there is nobody to tell.
    let _ = writeln!(std::io::stderr(), "softcuda: {what}");
}

fn enter(function: Function) -> Outcome<Locked> {
    let number = count(function);
    let process = PROCESS.load(Ordering::Acquire);
    // In a forked process another thread's lock may be held for ever, so nothing is locked before this.
    if process != 0 && process != own_pid() {
        return Err(CUDA_ERROR_NOT_INITIALIZED);
    }
    let mut state = lock();
    match state.control.failure(function as usize, number) {
        None => Ok(state),
        Some(code) => Err(code),
    }
}

fn count(function: Function) -> u64 {
    if IN_CALLBACK.get() {
        let name = NAMES[function as usize];
        abort(&format!(
            "{name} was called from inside a cuLaunchHostFunc callback"
        ));
    }
    CALLS[function as usize].fetch_add(1, Ordering::Relaxed) + 1
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
