//! Runtimes of CUDA's shape: the same calls under another prefix, found at run time. This code has
//! not been run on their hardware; each device is checked when it is opened.
#![allow(unsafe_code, reason = "calls into the runtime's library")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ops::Range;
use std::ptr::null_mut;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::is_own_thread;

use super::library::{self, Places, functions};
use super::runtime::{
    Answer, Failed, Owned, RawCopy, RawEvent, RawStream, Runtime, ends_context, insist, pointer,
};
use crate::fork::Origin;
use crate::numa;

/// The differences between the runtimes of vendors; the table is in `devices.rs`.
pub(crate) struct Vendor {
    /// Prefix of its functions' names.
    pub(crate) prefix: &'static str,
    pub(crate) library: Places,
    /// Result codes of an event or a stream that is not done.
    pub(crate) not_ready: &'static [c_int],
}

functions! {
    /// The function that returns the location of a device. Without it memory comes from the
    /// thread's own node.
    Placed {
        DeviceGetPCIBusId(*mut c_char, c_int, c_int) -> c_int;
    }
}

functions! {
    /// The function that returns the range of an allocation. Without it each piece is copied by
    /// itself.
    Allocated {
        MemGetAddressRange(*mut *mut c_void, *mut usize, *mut c_void) -> c_int;
    }
}

functions! {
    /// The function that keeps a thread's calls from disturbing a graph capture. A runtime without
    /// it has no captures, or refuses such calls during one.
    Captures {
        ThreadExchangeStreamCaptureMode(*mut c_int) -> c_int;
    }
}

functions! {
    /// The functions in use, with the types of HIP's header.
    Calls {
        GetDeviceCount(*mut c_int) -> c_int;
        GetDevice(*mut c_int) -> c_int;
        SetDevice(c_int) -> c_int;
        RuntimeGetVersion(*mut c_int) -> c_int;
        GetErrorName(c_int) -> *const c_char;
        GetLastError() -> c_int;
        DeviceGetStreamPriorityRange(*mut c_int, *mut c_int) -> c_int;
        StreamCreateWithPriority(*mut *mut c_void, c_uint, c_int) -> c_int;
        StreamDestroy(*mut c_void) -> c_int;
        StreamSynchronize(*mut c_void) -> c_int;
        StreamQuery(*mut c_void) -> c_int;
        EventCreateWithFlags(*mut *mut c_void, c_uint) -> c_int;
        EventDestroy(*mut c_void) -> c_int;
        EventRecord(*mut c_void, *mut c_void) -> c_int;
        EventQuery(*mut c_void) -> c_int;
        EventElapsedTime(*mut f32, *mut c_void, *mut c_void) -> c_int;
        Malloc(*mut *mut c_void, usize) -> c_int;
        Free(*mut c_void) -> c_int;
        HostRegister(*mut c_void, usize, c_uint) -> c_int;
        HostUnregister(*mut c_void) -> c_int;
        MemcpyAsync(*mut c_void, *const c_void, usize, c_int, *mut c_void) -> c_int;
        Memcpy(*mut c_void, *const c_void, usize, c_int) -> c_int;
    }
}

/// Constants of CUDA that all of them use. The kinds of copies, by [`Direction`].
///
/// [`Direction`]: super::runtime::Direction
const KINDS: [c_int; 2] = [1, 2];
/// Of memory that is registered: pinned for every device.
const PORTABLE: c_uint = 1;
/// Of streams: they do not wait for the default stream.
const NON_BLOCKING: c_uint = 1;
/// Of threads: their calls do not disturb a graph that a thread captures.
const RELAXED: c_int = 2;

/// Result codes common to all: success, a wrong argument, no memory, no device.
const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;

/// Calls the runtime and checks the result; the call is made in the caller's `unsafe`.
macro_rules! call {
    ($device:ident, $call:ident($($argument:expr),* $(,)?)) => {
        $device.check(stringify!($call), ($device.calls.$call)($($argument),*))
    };
}

/// A device of a vendor.
pub(super) struct Device {
    vendor: &'static Vendor,
    calls: Calls,
    captures: Option<Captures>,
    allocated: Option<Allocated>,
    ordinal: c_int,
    description: String,
    node: Option<u32>,
    /// The process that made it; runtimes do not survive a fork.
    origin: Origin,
}

impl Device {
    /// Device number `ordinal`; `Unsupported` without a runtime, `Config` if there is no such
    /// device.
    pub(super) fn open(name: &'static str, vendor: &'static Vendor, ordinal: u32) -> Result<Self> {
        let library = library::find(name, &vendor.library)?;
        let mut device = Self {
            vendor,
            calls: Calls::load(&library, name, vendor.prefix)?,
            captures: Captures::load(&library, name, vendor.prefix).ok(),
            allocated: Allocated::load(&library, name, vendor.prefix).ok(),
            ordinal: c_int::try_from(ordinal).unwrap_or(c_int::MAX),
            description: String::new(),
            node: None,
            origin: Origin::this()?,
        };
        library::check_begun()?;
        let (mut count, mut version) = (0, 0);
        // SAFETY: each call writes one number.
        unsafe {
            call!(device, GetDeviceCount(&raw mut count))?;
            call!(device, RuntimeGetVersion(&raw mut version))?;
        }
        library::begun()?;
        if device.ordinal >= count {
            return Err(library::no_device(name, ordinal, count));
        }
        device.description = format!("{name} device {ordinal}, runtime {version}");
        device.node = Placed::load(&library, name, vendor.prefix)
            .ok()
            .and_then(|placed| device.bus_id(&placed))
            .and_then(|pci| numa::node_of(&pci));
        Ok(device)
    }

    /// The address of the device on the PCI bus, if the runtime reports it.
    fn bus_id(&self, placed: &Placed) -> Option<String> {
        let mut text = [0; 32];
        let len = text.len() as c_int;
        // SAFETY: writes at most the given number of characters.
        let answer = unsafe { (placed.DeviceGetPCIBusId)(text.as_mut_ptr(), len, self.ordinal) };
        self.check("DeviceGetPCIBusId", answer).ok()?;
        let text = text.map(|letter| letter.to_ne_bytes()[0]);
        let text = CStr::from_bytes_until_nul(&text).ok()?;
        Some(text.to_string_lossy().into_owned())
    }

    /// Interprets the result of a query whether work has ended.
    fn is_done(&self, call: &str, answer: c_int) -> Answer<bool> {
        let asked = self.check(call, answer);
        if self.vendor.not_ready.contains(&answer) {
            return Ok(false);
        }
        asked.map(|()| true)
    }

    /// An error if a call failed. The runtime keeps the error for the thread's next query of the
    /// last error, which other code makes, so it is cleared here.
    fn check(&self, call: &str, answer: c_int) -> Answer {
        if answer == SUCCESS {
            return Ok(());
        }
        // SAFETY: no arguments; and a number, for which the result is null or a string that lives
        // as long as the library.
        let name = unsafe {
            (self.calls.GetLastError)();
            let name = (self.calls.GetErrorName)(answer);
            (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
        };
        let kind = match answer {
            OUT_OF_MEMORY => ErrorKind::NoSpace,
            INVALID_VALUE => ErrorKind::InvalidInput,
            NO_DEVICE => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        let failed = Error::new(kind, "a call of the device's runtime failed");
        let failed = failed.with("call", format!("{}{call}", self.vendor.prefix));
        Err(Failed {
            error: failed.with("answer", name.unwrap_or_else(|| format!("error {answer}"))),
            is_end: ends_context(answer),
        })
    }

    /// Until the returned guard is dropped, the device is current on this thread, and calls of this
    /// thread do not disturb a graph capture of another thread.
    fn bind(&self) -> Answer<Bound<'_>> {
        self.origin
            .check(library::FORKED)
            .map_err(Failed::of_parent)?;
        let mut bound = Bound {
            device: self,
            mode: None,
            before: None,
        };
        if let Some(captures) = &self.captures {
            let mut mode = RELAXED;
            // SAFETY: exchanges one number.
            let answer = unsafe { (captures.ThreadExchangeStreamCaptureMode)(&raw mut mode) };
            self.check(EXCHANGE, answer)?;
            bound.mode = Some(mode);
        }
        let mut before = 0;
        // SAFETY: writes one number.
        unsafe { call!(self, GetDevice(&raw mut before)) }?;
        if before != self.ordinal {
            // SAFETY: a number.
            unsafe { call!(self, SetDevice(self.ordinal)) }?;
            // A thread of ours has no device of its own choice; to restore the first one would
            // start to use that device.
            bound.before = (!is_own_thread()).then_some(before);
        }
        Ok(bound)
    }
}

/// The function of [`Captures`].
const EXCHANGE: &str = "ThreadExchangeStreamCaptureMode";

/// On drop, the previous device of the caller's thread is current again, so torch's threads keep
/// theirs.
#[must_use]
struct Bound<'a> {
    device: &'a Device,
    /// The thread's previous capture mode.
    mode: Option<c_int>,
    before: Option<c_int>,
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        let device = self.device;
        if let Some(before) = self.before {
            // SAFETY: a number from the runtime. A failure cannot be handled here.
            let _ = unsafe { call!(device, SetDevice(before)) };
        }
        if let (Some(captures), Some(mode)) = (&device.captures, &mut self.mode) {
            // SAFETY: as above.
            let answer = unsafe { (captures.ThreadExchangeStreamCaptureMode)(mode) };
            let _ = device.check(EXCHANGE, answer);
        }
    }
}

impl Runtime for Device {
    fn description(&self) -> &str {
        &self.description
    }

    fn node(&self) -> Option<u32> {
        self.node
    }

    fn make_stream(&self) -> Answer<RawStream> {
        let (mut least, mut greatest, mut stream) = (0, 0, null_mut());
        let (low, high, made) = (&raw mut least, &raw mut greatest, &raw mut stream);
        let _bound = self.bind()?;
        // SAFETY: the calls write two numbers and one handle.
        unsafe {
            call!(self, DeviceGetStreamPriorityRange(low, high))?;
            call!(self, StreamCreateWithPriority(made, NON_BLOCKING, greatest))?;
        }
        Ok(RawStream(stream.expose_provenance() as u64))
    }

    fn synchronize(&self, stream: RawStream) -> Answer {
        let _bound = self.bind()?;
        // SAFETY: a stream of ours, or the default one.
        unsafe { call!(self, StreamSynchronize(stream.raw())) }
    }

    fn is_over(&self, stream: RawStream) -> Answer<bool> {
        let _bound = self.bind()?;
        // SAFETY: a stream of ours, or the default one.
        let answer = unsafe { (self.calls.StreamQuery)(stream.raw()) };
        self.is_done("StreamQuery", answer)
    }

    fn make_event(&self) -> Answer<RawEvent> {
        let _bound = self.bind()?;
        let mut event = null_mut();
        // SAFETY: writes one handle.
        unsafe { call!(self, EventCreateWithFlags(&raw mut event, 0)) }?;
        Ok(RawEvent(event.expose_provenance() as u64))
    }

    fn record(&self, event: RawEvent, stream: RawStream) -> Answer {
        let _bound = self.bind()?;
        // SAFETY: an event and a stream of ours.
        unsafe { call!(self, EventRecord(event.raw(), stream.raw())) }
    }

    fn is_done(&self, event: RawEvent) -> Answer<bool> {
        let _bound = self.bind()?;
        // SAFETY: an event of ours, or one whose maker keeps it while it is polled.
        let answer = unsafe { (self.calls.EventQuery)(event.raw()) };
        self.is_done("EventQuery", answer)
    }

    fn elapsed_ms(&self, from: RawEvent, to: RawEvent) -> Answer<f32> {
        let _bound = self.bind()?;
        let (mut elapsed, from, to) = (0.0, from.raw(), to.raw());
        // SAFETY: two events of ours; writes one number.
        unsafe { call!(self, EventElapsedTime(&raw mut elapsed, from, to)) }?;
        Ok(elapsed)
    }

    fn allocate(&self, bytes: usize) -> Answer<u64> {
        let _bound = self.bind()?;
        let mut address = null_mut();
        // SAFETY: writes one address.
        unsafe { call!(self, Malloc(&raw mut address, bytes)) }?;
        Ok(address.expose_provenance() as u64)
    }

    fn allocation(&self, address: u64) -> Option<Range<u64>> {
        let allocated = self.allocated.as_ref()?;
        let _bound = self.bind().ok()?;
        let (mut first, mut len) = (null_mut(), 0);
        let (first_at, len_at) = (&raw mut first, &raw mut len);
        // SAFETY: writes an address and a number.
        let answer = unsafe { (allocated.MemGetAddressRange)(first_at, len_at, pointer(address)) };
        self.check("MemGetAddressRange", answer).ok()?;
        let first = first.expose_provenance() as u64;
        Some(first..first.checked_add(len as u64)?)
    }

    unsafe fn copy(&self, copy: RawCopy, stream: Option<RawStream>) -> Answer {
        let _bound = self.bind()?;
        let (kind, len) = (KINDS[copy.way as usize], copy.len);
        let (to, from) = (pointer(copy.to), pointer::<c_void>(copy.from));
        // SAFETY: the caller vouches for both ranges until the stream's work is over.
        unsafe {
            match stream {
                Some(stream) => call!(self, MemcpyAsync(to, from, len, kind, stream.raw())),
                None => call!(self, Memcpy(to, from, len, kind)),
            }
        }
    }

    /// There are no kernels, so the device's address is not needed.
    unsafe fn register(&self, start: *mut u8, len: usize) -> Answer<Option<u64>> {
        let _bound = self.bind()?;
        // SAFETY: the caller vouches for the range.
        unsafe { call!(self, HostRegister(start.cast(), len, PORTABLE)) }?;
        Ok(None)
    }

    fn end(&self, owned: Owned) -> Answer {
        let _bound = insist(|| self.bind())?;
        // SAFETY: made or registered above, and the caller says that nothing uses it any more.
        unsafe {
            match owned {
                Owned::Stream(stream) => call!(self, StreamDestroy(stream.raw())),
                Owned::Event(event) => call!(self, EventDestroy(event.raw())),
                Owned::Memory(address) => call!(self, Free(pointer(address))),
                Owned::Pinned(start) => call!(self, HostUnregister(start.cast())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accelerator::library::tests::stub;

    /// Result of loading a library without this function.
    fn without(prefix: &str, missing: &str) -> Error {
        let there = Calls::NAMES.iter().copied().filter(|&name| name != missing);
        let (_directory, library) = stub(prefix, there);
        let loaded = Calls::load(&library, "abacus", prefix);
        loaded.err().unwrap()
    }

    #[test]
    fn a_function_that_is_missing_is_named() {
        let hip = Calls::NAMES.iter().map(|&name| ("hip", name));
        for (prefix, name) in hip.chain([("musa", "Malloc"), ("mc", "MemcpyAsync")]) {
            let error = without(prefix, name);
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            let text = error.to_string();
            assert!(text.contains(&format!("function={prefix}{name}")), "{text}");
        }
        let (_directory, whole) = stub("mc", Calls::NAMES.iter().copied());
        assert!(Calls::load(&whole, "maca", "mc").is_ok());
        assert!(
            Placed::load(&whole, "maca", "mc").is_err(),
            "and is not needed"
        );
        assert!(Captures::load(&whole, "maca", "mc").is_err(), "neither");
        assert!(Allocated::load(&whole, "maca", "mc").is_err(), "nor this");
        let newer = Placed::NAMES
            .iter()
            .chain(Captures::NAMES)
            .chain(Allocated::NAMES);
        let (_directory, newer) = stub("mc", newer.copied());
        assert!(Placed::load(&newer, "maca", "mc").is_ok());
        assert!(Captures::load(&newer, "maca", "mc").is_ok());
        assert!(Allocated::load(&newer, "maca", "mc").is_ok());
    }
}
