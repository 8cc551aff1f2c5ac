//! A test's controls of the driver: the functions whose names begin with `softcuda_`.
//!
//! They work from every thread, with or without a context, and take no virtual time. An unknown
//! name or stream ends the process, so that a misspelt test does not pass.
#![allow(unsafe_code, reason = "the C ABI, and the memory that tests name")]

use std::ffi::{CStr, c_char};
use std::time::Duration;

use crate::call::{Export, abort};
use crate::clock::Cost;
use crate::copy;
use crate::error::{CUDA_SUCCESS, CUresult, Outcome};
use crate::memory::Kind;
use crate::state::{ENDED, Handle, State, lock};
use crate::{context, exports, stream, vendors};

/// The settings and counts of tests.
pub(crate) struct Control {
    /// Calls that will fail: function, number of the call, result.
    failures: Vec<(&'static str, u64, CUresult)>,
    pub(crate) holds_new_streams: bool,
    /// The function whose calls block.
    blocked: Option<&'static str>,
    jitter: Option<Jitter>,
    /// Functions and kernels that move wrong bytes.
    wrong: Vec<String>,
    /// By the kinds of [`softcuda_bytes`].
    bytes: [u64; 5],
}

struct Jitter {
    seed: u64,
    most: u64,
}

impl Control {
    pub(crate) const fn new() -> Self {
        Self {
            failures: Vec::new(),
            holds_new_streams: false,
            blocked: None,
            jitter: None,
            wrong: Vec::new(),
            bytes: [0; 5],
        }
    }

    /// The result planned for this call, if one is.
    pub(crate) fn failure(&mut self, function: &str, number: u64) -> Option<CUresult> {
        let is_this = |it: &(&str, u64, CUresult)| it.0 == function && it.1 == number;
        let index = self.failures.iter().position(is_this)?;
        Some(self.failures.swap_remove(index).2)
    }

    /// Whether calls of a function wait.
    pub(crate) fn is_blocked(&self, function: &str) -> bool {
        self.blocked == Some(function)
    }

    /// True if a function or kernel must move a wrong byte.
    pub(crate) fn is_wrong(&self, name: &str) -> bool {
        self.wrong.iter().any(|wrong| wrong == name)
    }

    /// Delay of the next operation.
    pub(crate) fn delay(&mut self) -> Option<Duration> {
        let Jitter { seed, most } = self.jitter.as_mut()?;
        // Marsaglia's xorshift.
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        Some(Duration::from_micros(*seed % (*most + 1)))
    }

    /// Counts what an operation moved.
    pub(crate) fn moved(&mut self, cost: Cost) {
        match cost {
            Cost::None | Cost::Fill(_) => {}
            Cost::ToDevice(len) => self.bytes[0] += len,
            Cost::ToHost(len) => self.bytes[1] += len,
            Cost::OnDevice(len) => self.bytes[2] += len,
            Cost::Kernel { host, device } => {
                self.bytes[3] += host;
                self.bytes[4] += device;
            }
        }
    }
}

/// Makes a call fail: the `nth` one of `function` from now on (the next is 1) returns `result` and
/// does nothing else. Can be used for several calls.
///
/// # Safety
/// `function` is a name with its zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softcuda_fail(function: *const c_char, nth: u64, result: CUresult) {
    // SAFETY: the caller's promise.
    let function = unsafe { export(function) };
    if nth == 0 || result == CUDA_SUCCESS {
        abort("softcuda_fail: calls count from 1, and success is no failure");
    }
    let mut state = lock();
    let number = function.calls() + nth;
    state.control.failures.push((function.name, number, result));
}

/// Removes the planned failures that have not happened.
#[unsafe(no_mangle)]
pub extern "C" fn softcuda_mend() {
    lock().control.failures.clear();
}

/// Makes calls of a function, which are counted, block; null lets all continue.
///
/// # Safety
/// `function` is null or a name with its zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softcuda_block(function: *const c_char) {
    // SAFETY: the caller's promise.
    let blocked = (!function.is_null()).then(|| unsafe { export(function) }.name);
    lock().control.blocked = blocked;
    ENDED.notify_all();
}

/// Breaks the primary context of a device, if it has one: every later call in it returns `result`,
/// and pending work of its streams is dropped.
#[unsafe(no_mangle)]
pub extern "C" fn softcuda_break(device: i32, result: CUresult) {
    let mut state = lock();
    let index = usize::try_from(device).unwrap_or(usize::MAX);
    match state
        .contexts
        .get(index)
        .and_then(|context| context.as_ref())
    {
        Some(context) if result != CUDA_SUCCESS => {
            let context = context.handle;
            context::poison(&mut state, context, result);
        }
        _ => abort("softcuda_break: no such context, or success, which breaks nothing"),
    }
}

/// Makes every copy of this function, or every launch of this kernel of a loaded module, write a
/// wrong byte; null ends that for all.
///
/// # Safety
/// `name` is null or a name with its zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softcuda_corrupt(name: *const c_char) {
    let mut state = lock();
    if name.is_null() {
        state.control.wrong.clear();
        return;
    }
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) }
        .to_string_lossy()
        .into_owned();
    let copies = [Cost::ToDevice(0), Cost::ToHost(0), Cost::OnDevice(0)]
        .map(|cost| [copy::name(cost, false), copy::name(cost, true)]);
    if !copies.as_flattened().contains(&&*name)
        && !state.functions.values().any(|it| it.name() == name)
    {
        abort(&format!("softcuda_corrupt: no copy and no kernel {name:?}"));
    }
    state.control.wrong.push(name);
}

/// Holds a stream: no further operation of it begins until it is released. Null holds all streams,
/// including new ones.
#[unsafe(no_mangle)]
pub extern "C" fn softcuda_hold(stream: Handle) {
    set_held(stream, true);
}

/// Releases a held stream (one of those held by null too); null releases all.
#[unsafe(no_mangle)]
pub extern "C" fn softcuda_release(stream: Handle) {
    set_held(stream, false);
}

/// Delays each operation of every stream by a random time of at most `max_us` microseconds; 0 ends
/// it.
#[unsafe(no_mangle)]
pub extern "C" fn softcuda_jitter(seed: u64, max_us: u64) {
    // A xorshift stays at 0 for ever.
    let jitter = Jitter {
        seed: seed.max(1),
        most: max_us,
    };
    lock().control.jitter = (max_us > 0).then_some(jitter);
}

/// Makes allocations of the device adjacent from now on, or (0) separate again.
#[unsafe(no_mangle)]
pub extern "C" fn softcuda_side_by_side(on: u32) {
    crate::memory::set_side_by_side(&mut lock(), on != 0);
}

/// Accepts host memory as memory of the first device, at its own address: copies and kernels of
/// both devices may use it. `CUDA_ERROR_INVALID_VALUE` if it overlaps known memory.
#[unsafe(no_mangle)]
pub extern "C" fn softcuda_accept(start: usize, len: usize) -> CUresult {
    code(lock().memory.accept(start, len))
}

/// Ends [`softcuda_accept`]; ends the process if queued work still uses the memory.
#[unsafe(no_mangle)]
pub extern "C" fn softcuda_forget(start: usize) -> CUresult {
    code(lock().memory.forget(start))
}

/// Reads device memory (any device address), as it is now.
///
/// # Safety
/// `len` bytes can be written at `into`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softcuda_read(address: u64, into: *mut u8, len: usize) -> CUresult {
    let state = lock();
    let read = state.memory.any_place(address, len).map(|place| {
        // SAFETY: the place is checked and in use; the caller guarantees the other end.
        unsafe { stream::move_bytes(place.address(), into.expose_provenance(), len) };
    });
    code(read)
}

/// Writes device memory (any device address), at once.
///
/// # Safety
/// `len` bytes can be read at `from`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softcuda_write(address: u64, from: *const u8, len: usize) -> CUresult {
    let mut state = lock();
    let written = state.memory.any_place(address, len).map(|place| {
        // SAFETY: as in `softcuda_read`.
        unsafe { stream::move_bytes(from.expose_provenance(), place.address(), len) };
        if let Some(bytes) = place.host(len) {
            stream::written(&mut state, &bytes);
        }
    });
    code(written)
}

/// The number of calls of a function, including failed ones.
///
/// # Safety
/// `function` is a name with its zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softcuda_calls(function: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { export(function) }.calls()
}

/// Bytes moved so far: 0 host to device, 1 device to host, 2 inside of device memory, and by
/// kernels (read and written) 3 of mapped host memory, 4 of device memory.
#[unsafe(no_mangle)]
pub extern "C" fn softcuda_bytes(kind: u32) -> u64 {
    let bytes = lock().control.bytes;
    match bytes.get(kind as usize) {
        Some(&bytes) => bytes,
        None => abort("softcuda_bytes: no such kind"),
    }
}

/// The host's time on the virtual clock, in nanoseconds.
#[unsafe(no_mangle)]
pub extern "C" fn softcuda_now_ns() -> u64 {
    lock().clock.now()
}

/// Switches the cost model: whether work in streams takes virtual time (0: no).
#[unsafe(no_mangle)]
pub extern "C" fn softcuda_model(on: u32) {
    lock().clock.model = on != 0;
}

/// Number of existing objects: 0 allocations (of devices and of pinned host memory), 1
/// registrations, 2 streams, 3 events, 4 modules, 5 contexts, 6 streams that wait neither for the
/// default one nor behind those of a higher priority.
#[unsafe(no_mangle)]
pub extern "C" fn softcuda_live(kind: u32) -> u64 {
    let state = lock();
    match kind {
        0 => state.memory.count(&[Kind::Device, Kind::HostAllocated]),
        1 => state.memory.count(&[Kind::Registered]),
        2 | 6 => {
            let made = state
                .streams
                .values()
                .filter(|it| !it.is_closed && !it.is_default);
            made.filter(|it| kind == 2 || it.is_first()).count() as u64
        }
        3 => state.events.len() as u64,
        4 => state.modules.len() as u64,
        5 => state.contexts.iter().flatten().count() as u64,
        _ => abort("softcuda_live: no such kind"),
    }
}

fn set_held(stream: Handle, held: bool) {
    let mut state = lock();
    let State {
        streams, control, ..
    } = &mut *state;
    if stream == 0 {
        control.holds_new_streams = held;
    } else if !streams.contains_key(&stream) {
        abort("softcuda_hold or softcuda_release: no such stream");
    }
    let meant = streams
        .iter_mut()
        .filter(|(handle, _)| stream == 0 || **handle == stream);
    for (_, found) in meant {
        found.is_held = held;
        found.wake();
    }
}

/// A function by its name.
///
/// # Safety
/// `function` is a name with its zero byte.
unsafe fn export(function: *const c_char) -> &'static Export {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(function) };
    let mut all = exports::EXPORTS.iter().chain(vendors::EXPORTS);
    let found = all.find(|known| known.name.as_bytes() == name.to_bytes());
    found.unwrap_or_else(|| abort(&format!("no function {name:?}")))
}

fn code(outcome: Outcome) -> CUresult {
    outcome.err().unwrap_or(CUDA_SUCCESS)
}
