//! The software CUDA driver (`tests/softcuda`) as the driver of this process, and its controls.
#![allow(unsafe_code, reason = "calls into the driver's library")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of tests may fail the test"
)]
#![allow(dead_code, reason = "each test file uses its part of this")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ops::Deref;
use std::path::PathBuf;
use std::ptr::{null, null_mut};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use libloading::Library;
use parking_lot::{Mutex, MutexGuard};
use ucm_core::{Error, Result};
use ucm_device::{
    ArenaOptions, Device, DeviceSpan, Direction, Event, HostSpan, Piece, Slot, SlotPool, Stream,
    Transfer, open_device,
};
use ucm_infra::{Clock, SystemClock};

/// Kinds counted by [`Driver::bytes`] and [`Driver::live`].
pub(crate) const TO_DEVICE: c_int = 0;
pub(crate) const TO_HOST: c_int = 1;
pub(crate) const ALLOCATIONS: c_int = 0;
pub(crate) const REGISTRATIONS: c_int = 1;
pub(crate) const STREAMS: c_int = 2;
pub(crate) const EVENTS: c_int = 3;
pub(crate) const MODULES: c_int = 4;
pub(crate) const CONTEXTS: c_int = 5;
pub(crate) const FIRST_STREAMS: c_int = 6;

/// The loaded driver.
pub(crate) struct Driver(Library);

/// The driver, used by one test of the process at a time.
pub(crate) struct Alone(MutexGuard<'static, ()>);

impl Deref for Alone {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        Driver::of_process()
    }
}

/// Path of the driver, which cargo builds with the tests: beside the test program or one directory
/// above.
fn path() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let found = program
        .ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join("libsoftcuda.so"));
    found.into_iter().find(|path| path.exists()).unwrap()
}

impl Driver {
    /// Replaces the driver, before any device is opened. Its state is global to the process, so one
    /// test uses it at a time.
    pub(crate) fn load() -> Alone {
        static ALONE: Mutex<()> = Mutex::new(());
        Alone(ALONE.lock())
    }

    fn of_process() -> &'static Self {
        static LOADED: OnceLock<Driver> = OnceLock::new();
        LOADED.get_or_init(|| {
            // SAFETY: before this test starts any thread; every test file does this first.
            unsafe { std::env::set_var("UCM_TEST_DRIVER", path()) };
            // SAFETY: our own library.
            Self(unsafe { Library::new(path()) }.unwrap())
        })
    }

    /// A function of it.
    fn function<F: Copy>(&self, name: &CStr) -> F {
        // SAFETY: the callers below use the driver's function types.
        *unsafe { self.0.get::<F>(name.to_bytes_with_nul()) }.unwrap()
    }

    /// Makes the `nth` call of a function from now on return an error.
    pub(crate) fn fail(&self, function: &str, nth: u64, code: c_int) {
        let fail: unsafe extern "C" fn(*const c_char, u64, c_int) = self.function(c"softcuda_fail");
        let name = CString::new(function).unwrap();
        // SAFETY: reads the name during the call.
        unsafe { fail(name.as_ptr(), nth, code) }
    }

    /// Makes `count` calls from the `nth` one on return an error.
    pub(crate) fn fail_times(&self, function: &str, nth: u64, times: u64, code: c_int) {
        (nth..nth + times).for_each(|nth| self.fail(function, nth, code));
    }

    /// Calls of a function block, or all continue.
    pub(crate) fn block(&self, function: Option<&CStr>) {
        let block: unsafe extern "C" fn(*const c_char) = self.function(c"softcuda_block");
        // SAFETY: reads the name during the call, or null, which ends it.
        unsafe { block(function.map_or(null(), CStr::as_ptr)) }
    }

    /// Breaks the context of a device.
    pub(crate) fn break_context(&self, device: c_int, code: c_int) {
        let it: unsafe extern "C" fn(c_int, c_int) = self.function(c"softcuda_break");
        // SAFETY: two numbers.
        unsafe { it(device, code) }
    }

    /// Ends all failures.
    pub(crate) fn mend(&self) {
        let mend: unsafe extern "C" fn() = self.function(c"softcuda_mend");
        // SAFETY: no arguments.
        unsafe { mend() }
    }

    /// Makes copies by a function, or launches of a kernel, write wrong bytes.
    pub(crate) fn corrupt(&self, name: &CStr) {
        let corrupt: unsafe extern "C" fn(*const c_char) = self.function(c"softcuda_corrupt");
        // SAFETY: reads the name during the call.
        unsafe { corrupt(name.as_ptr()) }
    }

    /// Ends all wrong bytes.
    pub(crate) fn sound(&self) {
        let corrupt: unsafe extern "C" fn(*const c_char) = self.function(c"softcuda_corrupt");
        // SAFETY: null ends it.
        unsafe { corrupt(null()) }
    }

    /// Holds all streams.
    pub(crate) fn hold(&self) {
        let hold: unsafe extern "C" fn(*mut c_void) = self.function(c"softcuda_hold");
        // SAFETY: null is all streams.
        unsafe { hold(null_mut()) }
    }

    pub(crate) fn release(&self) {
        let release: unsafe extern "C" fn(*mut c_void) = self.function(c"softcuda_release");
        // SAFETY: as above.
        unsafe { release(null_mut()) }
    }

    /// Sets whether new allocations are adjacent.
    pub(crate) fn side_by_side(&self, on: bool) {
        let side_by_side: unsafe extern "C" fn(u32) = self.function(c"softcuda_side_by_side");
        // SAFETY: a number.
        unsafe { side_by_side(u32::from(on)) }
    }

    /// Random pauses before operations.
    pub(crate) fn jitter(&self, seed: u64, most_us: u64) {
        let jitter: unsafe extern "C" fn(u64, u64) = self.function(c"softcuda_jitter");
        // SAFETY: two numbers.
        unsafe { jitter(seed, most_us) }
    }

    pub(crate) fn calls(&self, function: &str) -> u64 {
        let calls: unsafe extern "C" fn(*const c_char) -> u64 = self.function(c"softcuda_calls");
        let name = CString::new(function).unwrap();
        // SAFETY: reads the name during the call.
        unsafe { calls(name.as_ptr()) }
    }

    pub(crate) fn bytes(&self, kind: c_int) -> u64 {
        let bytes: unsafe extern "C" fn(c_int) -> u64 = self.function(c"softcuda_bytes");
        // SAFETY: a number.
        unsafe { bytes(kind) }
    }

    pub(crate) fn live(&self, kind: c_int) -> u64 {
        let live: unsafe extern "C" fn(c_int) -> u64 = self.function(c"softcuda_live");
        // SAFETY: a number.
        unsafe { live(kind) }
    }

    /// The context of CUDA that this thread has; 0 for none.
    pub(crate) fn current(&self) -> usize {
        let (mut context, get) = (
            7,
            self.function::<unsafe extern "C" fn(*mut usize) -> c_int>(c"cuCtxGetCurrent"),
        );
        // SAFETY: writes one handle.
        assert_eq!(unsafe { get(&raw mut context) }, 0);
        context
    }

    /// Removes this thread's contexts.
    pub(crate) fn clear_current(&self) {
        let set: unsafe extern "C" fn(usize) -> c_int = self.function(c"cuCtxSetCurrent");
        while self.current() != 0 {
            // SAFETY: null takes the last one off.
            assert_eq!(unsafe { set(0) }, 0);
        }
    }

    /// Begins a graph capture by this thread, in the primary context of the first device, in the
    /// strictest mode. Returns the stream.
    pub(crate) fn begin_capture(&self) -> usize {
        let make: unsafe extern "C" fn(*mut usize, u32) -> c_int = self.function(c"cuStreamCreate");
        let begin: unsafe extern "C" fn(usize, u32) -> c_int =
            self.function(c"cuStreamBeginCapture_v2");
        let mut stream = 0;
        // SAFETY: writes one handle.
        let answers = unsafe { [make(&raw mut stream, 1), begin(stream, 0)] };
        assert_eq!(answers, [0; 2]);
        stream
    }

    /// Ends it; 0 if nothing disturbed it.
    pub(crate) fn end_capture(&self, stream: usize) -> c_int {
        let end: unsafe extern "C" fn(usize, *mut usize) -> c_int =
            self.function(c"cuStreamEndCapture");
        let destroy: unsafe extern "C" fn(usize) -> c_int = self.function(c"cuStreamDestroy_v2");
        let mut graph = 0;
        // SAFETY: writes one handle.
        let (answer, destroyed) = unsafe { (end(stream, &raw mut graph), destroy(stream)) };
        assert_eq!(destroyed, 0);
        answer
    }

    /// Calls a function of ACL, or another, with numbers as arguments and result.
    pub(crate) fn call<A, B>(&self, function: &CStr, first: A, second: B) -> c_int {
        let it: unsafe extern "C" fn(A, B) -> c_int = self.function(function);
        // SAFETY: the tests name functions of these types, with pointers to variables of theirs.
        unsafe { it(first, second) }
    }

    /// This thread's last error in a runtime of CUDA's shape; others have none.
    pub(crate) fn last_error(&self, vendor: &str) -> Option<c_int> {
        let name = match vendor {
            "hip" => c"hipGetLastError",
            "musa" => c"musaGetLastError",
            "maca" => c"mcGetLastError",
            _ => return None,
        };
        let last: unsafe extern "C" fn() -> c_int = self.function(name);
        // SAFETY: no arguments.
        Some(unsafe { last() })
    }

    /// The virtual clock.
    pub(crate) fn now_ns(&self) -> u64 {
        let now: unsafe extern "C" fn() -> u64 = self.function(c"softcuda_now_ns");
        // SAFETY: no arguments.
        unsafe { now() }
    }

    /// Sets whether calls and copies have the costs of an H100.
    pub(crate) fn model(&self, on: bool) {
        let model: unsafe extern "C" fn(c_int) = self.function(c"softcuda_model");
        // SAFETY: a number.
        unsafe { model(c_int::from(on)) }
    }

    /// Memory of the device for a test, in the primary context, which it retains.
    pub(crate) fn memory(&self, len: usize) -> Memory {
        type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
        let (mut context, mut address) = (null_mut(), 0);
        let init: unsafe extern "C" fn(u32) -> c_int = self.function(c"cuInit");
        let retain: Retain = self.function(c"cuDevicePrimaryCtxRetain");
        let current: unsafe extern "C" fn(*mut c_void) -> c_int = self.function(c"cuCtxSetCurrent");
        let allocate: unsafe extern "C" fn(*mut u64, usize) -> c_int =
            self.function(c"cuMemAlloc_v2");
        // SAFETY: each call writes one handle or address.
        let answers = unsafe {
            [
                init(0),
                retain(&raw mut context, 0),
                current(context),
                allocate(&raw mut address, len),
            ]
        };
        assert_eq!(answers, [0; 4]);
        Memory { address, len }
    }

    /// An event of the caller, recorded on its own stream behind work held by [`Driver::hold`].
    pub(crate) fn recorded_event(&self, memory: &Memory) -> u64 {
        let (mut stream, mut event) = (null_mut::<c_void>(), null_mut::<c_void>());
        let make: unsafe extern "C" fn(*mut *mut c_void, u32) -> c_int =
            self.function(c"cuStreamCreate");
        let event_of: unsafe extern "C" fn(*mut *mut c_void, u32) -> c_int =
            self.function(c"cuEventCreate");
        let set: unsafe extern "C" fn(u64, u8, usize, *mut c_void) -> c_int =
            self.function(c"cuMemsetD8Async");
        let record: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int =
            self.function(c"cuEventRecord");
        // SAFETY: the test owns the memory; each call writes one handle or none.
        let answers = unsafe {
            [
                make(&raw mut stream, 1),
                event_of(&raw mut event, 0),
                set(memory.address, 0x5a, memory.len, stream),
                record(event, stream),
            ]
        };
        assert_eq!(answers, [0; 4]);
        event.expose_provenance() as u64
    }
}

/// Memory of the device.
pub(crate) struct Memory {
    pub(crate) address: u64,
    pub(crate) len: usize,
}

impl Memory {
    pub(crate) fn span(&self, at: usize, len: usize) -> DeviceSpan {
        assert!(at + len <= self.len);
        // SAFETY: inside the memory, which the test keeps and does not touch until all work has
        // ended.
        unsafe { DeviceSpan::new(self.address + at as u64, len as u64) }
    }

    pub(crate) fn fill(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len);
        let write: unsafe extern "C" fn(u64, *const u8, usize) =
            Driver::of_process().function(c"softcuda_write");
        // SAFETY: within the length of both.
        unsafe { write(self.address, bytes.as_ptr(), bytes.len()) }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        let read: unsafe extern "C" fn(u64, *mut u8, usize) =
            Driver::of_process().function(c"softcuda_read");
        // SAFETY: within the length of both.
        unsafe { read(self.address, bytes.as_mut_ptr(), bytes.len()) };
        bytes
    }
}

/// A device over the driver, by its name.
pub(crate) fn open_named(name: &str, transfer: Transfer) -> Arc<dyn Device> {
    Driver::of_process();
    open_device(name, transfer, SystemClock::shared()).unwrap()
}

/// The device over the driver.
pub(crate) fn open(transfer: Transfer) -> Arc<dyn Device> {
    open_named("cuda", transfer)
}

/// A slot of host memory that the device pins.
pub(crate) fn slot(device: &dyn Device, len: usize) -> Slot {
    let arena = device.make_arena(len, ArenaOptions::default()).unwrap();
    SlotPool::new(arena, len).unwrap().try_acquire().unwrap()
}

pub(crate) fn gather(stream: &mut dyn Stream, src: &[Piece], dst: &mut [u8]) -> Result<()> {
    stream.gather(src, dst, &mut |_, _| {})
}

/// The pieces with their parts of a host buffer, which is not touched until they were copied.
pub(crate) fn host_pairs(pieces: &[Piece], host: &mut [u8]) -> Vec<(DeviceSpan, HostSpan)> {
    let first = host.as_mut_ptr().expose_provenance();
    let pair = |piece: &Piece| {
        // SAFETY: the test keeps the buffer until the copy has ended.
        let host = unsafe { HostSpan::new((first + piece.at) as u64, piece.span.len()) };
        (piece.span, host)
    };
    pieces.iter().map(pair).collect()
}

/// Copies to memory of a device's own and back, by this thread and by one of a stream's.
pub(crate) fn copy_on(device: &dyn Device) {
    let memory = device.allocate(64).unwrap();
    let mut stream = device.make_stream().unwrap();
    // SAFETY: the memory is there until the copies have ended.
    let span = unsafe { DeviceSpan::new(memory.address(), 64) };
    let piece = [Piece { at: 0, span }];
    stream.scatter(&[9; 64], &piece).unwrap();
    let (tell, told) = mpsc::channel();
    let mut buffer = [0; 64];
    let pairs = host_pairs(&piece, &mut buffer);
    let done = Box::new(move |result| tell.send(result).unwrap());
    stream
        .transfer_async(Direction::ToHost, pairs, done)
        .unwrap();
    told.recv().unwrap().unwrap();
    assert_eq!(buffer, [9; 64]);
}

/// Waits for a condition that another thread makes true.
#[track_caller]
pub(crate) fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is() {
        assert!(Instant::now() < until, "not in time: {what}");
        std::thread::yield_now();
    }
}

/// Runs `act` on a thread of its own while all streams are held, until it waits for a stream of the
/// device.
pub(crate) fn while_held<T: Send>(
    driver: &Driver,
    device: &str,
    act: impl FnOnce() -> T + Send,
) -> T {
    let wait = match device.split(':').next() {
        Some("hip") => "hipStreamSynchronize",
        Some("musa") => "musaStreamSynchronize",
        Some("maca") => "mcStreamSynchronize",
        Some("ascend") => "aclrtSynchronizeStream",
        _ => "cuStreamSynchronize",
    };
    driver.hold();
    std::thread::scope(|scope| {
        let before = driver.calls(wait);
        let acting = scope.spawn(act);
        eventually("a stream is waited for", || {
            driver.calls(wait) > before || acting.is_finished()
        });
        driver.release();
        acting.join().unwrap()
    })
}

/// A stream of a caller's, in the primary context of the first device.
pub(crate) struct Caller<'a> {
    driver: &'a Driver,
    stream: usize,
}

impl<'a> Caller<'a> {
    /// A stream that begins no work until [`Caller::go`].
    pub(crate) fn held(driver: &'a Driver) -> Self {
        let make: unsafe extern "C" fn(*mut usize, u32) -> c_int =
            driver.function(c"cuStreamCreate");
        let hold: unsafe extern "C" fn(usize) = driver.function(c"softcuda_hold");
        let mut stream = 0;
        // SAFETY: writes one handle, which is held then.
        assert_eq!(unsafe { make(&raw mut stream, 1) }, 0);
        // SAFETY: a stream that exists.
        unsafe { hold(stream) };
        Self { driver, stream }
    }

    pub(crate) fn go(&self) {
        let release: unsafe extern "C" fn(usize) = self.driver.function(c"softcuda_release");
        // SAFETY: a stream that exists.
        unsafe { release(self.stream) }
    }

    /// Sets bytes of the memory.
    pub(crate) fn set(&self, memory: &Memory, at: usize, len: usize, value: u8) {
        let set: unsafe extern "C" fn(u64, u8, usize, usize) -> c_int =
            self.driver.function(c"cuMemsetD8Async");
        let span = memory.span(at, len);
        // SAFETY: inside the memory, which the test keeps.
        assert_eq!(unsafe { set(span.addr(), value, len, self.stream) }, 0);
    }

    /// The handle of an event at this point.
    pub(crate) fn record(&self) -> u64 {
        let make: unsafe extern "C" fn(*mut usize, u32) -> c_int =
            self.driver.function(c"cuEventCreate");
        let record: unsafe extern "C" fn(usize, usize) -> c_int =
            self.driver.function(c"cuEventRecord");
        let mut event = 0;
        // SAFETY: writes one handle, and names it and a stream that exists.
        let answers = unsafe { [make(&raw mut event, 0), record(event, self.stream)] };
        assert_eq!(answers, [0; 2]);
        event as u64
    }

    pub(crate) fn synchronize(&self) {
        let wait: unsafe extern "C" fn(usize) -> c_int =
            self.driver.function(c"cuStreamSynchronize");
        // SAFETY: a stream that exists.
        assert_eq!(unsafe { wait(self.stream) }, 0);
    }
}

impl Drop for Caller<'_> {
    fn drop(&mut self) {
        let destroy: unsafe extern "C" fn(usize) -> c_int =
            self.driver.function(c"cuStreamDestroy_v2");
        self.go();
        // SAFETY: a stream owned by this value.
        unsafe { destroy(self.stream) };
    }
}

/// Waits for an event that is not done until a deadline of `ms` milliseconds has passed.
#[track_caller]
pub(crate) fn wait_late(event: &Arc<dyn Event>, ms: u64) -> Error {
    let event = Arc::clone(event);
    let deadline = SystemClock.now().after(Duration::from_millis(ms));
    let waiting = std::thread::spawn(move || event.wait(Some(deadline)));
    eventually("the wait ends at its deadline", || waiting.is_finished());
    waiting.join().unwrap().unwrap_err()
}

/// Pseudo-random numbers from a seed.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 11) % bound.max(1) as u64) as usize
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for eight in bytes.chunks_mut(8) {
            self.below(1);
            eight.copy_from_slice(&self.0.to_ne_bytes()[..eight.len()]);
        }
        bytes
    }
}
