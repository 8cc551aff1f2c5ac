//! What tests count and order.
#![allow(unsafe_code, reason = "the C ABI")]

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::sync::LazyLock;

use parking_lot::{Condvar, Mutex};

#[derive(Default)]
pub(crate) struct State {
    calls: HashMap<String, u64>,
    /// Function -> the number of calls until it fails, and the error.
    failing: HashMap<String, (u64, c_int)>,
    held: bool,
    pub(crate) live: [u64; 4],
    pub(crate) together: u64,
}

pub(crate) static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);
pub(crate) static RELEASED: Condvar = Condvar::new();

pub(crate) const MEMORY: usize = 0;
pub(crate) const RINGS: usize = 1;
pub(crate) const FILES: usize = 2;
pub(crate) const UNDER_WAY: usize = 3;

/// Counts a call; returns its planned error number, if any.
pub(crate) fn called(name: &str) -> Option<c_int> {
    let mut state = STATE.lock();
    *state.calls.entry(name.to_owned()).or_default() += 1;
    let (left, errno) = state.failing.get_mut(name)?;
    *left -= 1;
    let errno = *errno;
    if state.failing.get(name).is_some_and(|(left, _)| *left == 0) {
        state.failing.remove(name);
        return Some(errno);
    }
    None
}

pub(crate) fn count(kind: usize, more: bool) {
    let live = &mut STATE.lock().live[kind];
    *live = if more {
        *live + 1
    } else {
        live.saturating_sub(1)
    };
}

/// Waits while operations are held.
pub(crate) fn await_release() {
    let mut state = STATE.lock();
    RELEASED.wait_while(&mut state, |state| state.held);
}

/// Ends the process, because the code under test would have corrupted data.
#[allow(clippy::print_stderr, reason = "the last message of a process")]
pub(crate) fn mistake(what: &str) -> ! {
    eprintln!("soft3fs: {what}");
    std::process::abort();
}

/// A name from a caller.
///
/// # Safety
/// It ends with a zero.
unsafe fn name_of(name: *const c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(name) }
        .to_string_lossy()
        .into_owned()
}

/// How often a function was called.
///
/// # Safety
/// The name ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn soft3fs_calls(name: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let name = unsafe { name_of(name) };
    STATE.lock().calls.get(&name).copied().unwrap_or(0)
}

/// The `nth` call of a function from now fails with this error number.
///
/// # Safety
/// The name ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn soft3fs_fail(name: *const c_char, nth: u64, errno: c_int) {
    // SAFETY: the caller's promise.
    let name = unsafe { name_of(name) };
    STATE.lock().failing.insert(name, (nth.max(1), errno));
}

/// Operations begin after that time.
#[unsafe(no_mangle)]
pub extern "C" fn soft3fs_hold(on: bool) {
    STATE.lock().held = on;
    RELEASED.notify_all();
}

/// What exists of a kind.
#[unsafe(no_mangle)]
pub extern "C" fn soft3fs_live(kind: c_int) -> u64 {
    let kind = usize::try_from(kind).unwrap_or(usize::MAX);
    STATE.lock().live.get(kind).copied().unwrap_or(0)
}

/// The most operations taken together.
#[unsafe(no_mangle)]
pub extern "C" fn soft3fs_together() -> u64 {
    STATE.lock().together
}
