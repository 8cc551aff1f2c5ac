//! Ascend's ACL, found at run time. It differs from CUDA's: copies name the space at their target,
//! event queries return the opposite values, and a thread has no device before it sets one. This
//! code has not been run on hardware.
//!
//! All values and signatures: `acl_rt.h` and `acl_base_rt.h` of ACL 1.17.0 (their `ACL_*_VERSION`)
//! and `rt_error_codes.h`, in the wheel `torch-npu` 2.14.0.
#![allow(unsafe_code, reason = "calls into the runtime's library")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};

use ucm_core::{Error, ErrorKind, PAGE, Result};
use ucm_infra::is_own_thread;

use super::library::{self, Places, functions};
use super::runtime::{
    Answer, Failed, Owned, RawCopy, RawEvent, RawStream, Runtime, insist, pointer,
};
use crate::fork::Origin;

const VENDOR: &str = "ascend";

const LIBRARY: Places = Places {
    known_by: Some("aclrtCreateStreamWithConfig"),
    names: &["libascendcl.so"],
    below: None,
};

functions! {
    /// The functions that are called.
    Calls {
        Init(*const c_char) -> c_int;
        rtGetDeviceCount(*mut u32) -> c_int;
        rtGetCurrentContext(*mut *mut c_void) -> c_int;
        rtSetCurrentContext(*mut c_void) -> c_int;
        rtSetDevice(i32) -> c_int;
        rtGetSocName() -> *const c_char;
        rtGetVersion(*mut i32, *mut i32, *mut i32) -> c_int;
        rtCreateStreamWithConfig(*mut *mut c_void, u32, u32) -> c_int;
        rtDestroyStream(*mut c_void) -> c_int;
        rtSynchronizeStream(*mut c_void) -> c_int;
        rtStreamQuery(*mut c_void, *mut c_int) -> c_int;
        rtCreateEventWithFlag(*mut *mut c_void, u32) -> c_int;
        rtDestroyEvent(*mut c_void) -> c_int;
        rtRecordEvent(*mut c_void, *mut c_void) -> c_int;
        rtQueryEventStatus(*mut c_void, *mut c_int) -> c_int;
        rtEventElapsedTime(*mut f32, *mut c_void, *mut c_void) -> c_int;
        rtMalloc(*mut *mut c_void, usize, c_int) -> c_int;
        rtFree(*mut c_void) -> c_int;
        rtMemcpyAsync(*mut c_void, usize, *const c_void, usize, c_int, *mut c_void) -> c_int;
        rtMemcpy(*mut c_void, usize, *const c_void, usize, c_int) -> c_int;
    }
}

functions! {
    /// The function that pins memory. Older versions lack it: their `aclrtHostRegister` maps and
    /// does not pin.
    Pins {
        rtHostRegisterV2(*mut c_void, u64, u32) -> c_int;
        rtHostUnregister(*mut c_void) -> c_int;
    }
}

functions! {
    /// The function that keeps a thread's calls from disturbing a graph capture of another thread.
    /// Older versions capture none.
    Captures {
        mdlRICaptureThreadExchangeMode(*mut c_int) -> c_int;
    }
}

const SUCCESS: c_int = 0;
const INVALID_PARAM: c_int = 100_000;
/// Result of `aclInit` if torch has called it before.
const REPEAT_INITIALIZE: c_int = 100_002;
const RT_PARAM_INVALID: c_int = 107_000;
/// Result of `aclrtGetCurrentContext` on a thread without a context.
const RT_CONTEXT_NULL: c_int = 107_002;
const RT_MEMORY_ALLOCATION: c_int = 207_001;
const RT_NO_DEVICE: c_int = 207_004;

/// `ACL_MEMCPY_HOST_TO_DEVICE` and `ACL_MEMCPY_DEVICE_TO_HOST`, by [`Direction`].
const KINDS: [c_int; 2] = [1, 2];

/// `ACL_STREAM_FAST_LAUNCH` and `ACL_STREAM_FAST_SYNC`; the highest of the priorities 0 to 7.
const STREAM_FAST: u32 = 3;
const HIGHEST: u32 = 0;

/// `ACL_EVENT_TIME_LINE`: an event with a timestamp.
const EVENT_TIME_LINE: u32 = 8;

/// `ACL_EVENT_RECORDED_STATUS_COMPLETE`; CUDA's success is 0, and this one's 0 is "not ready".
const RECORDED_COMPLETE: c_int = 1;

/// `ACL_STREAM_STATUS_COMPLETE`.
const STREAM_COMPLETE: c_int = 0;

/// `ACL_MODEL_RI_CAPTURE_MODE_RELAXED`.
const RELAXED: c_int = 2;

/// `ACL_MEM_MALLOC_HUGE_FIRST`.
const HUGE_FIRST: c_int = 0;

/// `ACL_HOST_REG_PINNED`.
const PINNED: u32 = 0x1000_0000;

/// Up to this version of Linux memory that ACL did not allocate cannot be registered: using it
/// "leads to exceptions".
const TOO_OLD_TO_PIN: (u32, u32) = (5, 10);

/// File with the version of Linux.
const OSRELEASE: &str = "/proc/sys/kernel/osrelease";

/// Calls the runtime and checks the result; the call is made in the caller's `unsafe`.
macro_rules! call {
    ($calls:expr, $call:ident($($argument:expr),* $(,)?)) => {
        check(stringify!($call), ($calls.$call)($($argument),*))
    };
}

/// An error if a call failed. No known code of it guarantees that work is over.
fn check(call: &str, answer: c_int) -> Answer {
    let kind = match answer {
        SUCCESS => return Ok(()),
        RT_MEMORY_ALLOCATION => ErrorKind::NoSpace,
        INVALID_PARAM | RT_PARAM_INVALID => ErrorKind::InvalidInput,
        RT_NO_DEVICE => ErrorKind::Unsupported,
        _ => ErrorKind::Io,
    };
    let failed = Error::new(kind, "a call of the device's runtime failed");
    Err(Failed {
        error: failed
            .with("call", format!("acl{call}"))
            .with("answer", format!("error {answer}")),
        is_end: false,
    })
}

/// True if our memory can be pinned under this version of Linux.
fn can_pin(osrelease: &str) -> bool {
    let mut numbers = osrelease.split(['.', '-', '+']).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) > TOO_OLD_TO_PIN,
        _ => false,
    }
}

/// A device of Ascend.
pub(super) struct Ascend {
    calls: Calls,
    /// Or the reason why memory is not pinned.
    pins: Result<Pins>,
    captures: Option<Captures>,
    ordinal: i32,
    /// The default context of the device.
    context: *mut c_void,
    description: String,
    /// The process that made it; the runtime does not survive a fork.
    origin: Origin,
}

// SAFETY: a handle of the runtime, which any thread may use; `bind` sets the state of the thread.
unsafe impl Send for Ascend {}
// SAFETY: as above.
unsafe impl Sync for Ascend {}

impl Ascend {
    /// Device number `ordinal`; `Unsupported` without a runtime, `Config` if there is no such
    /// device.
    pub(super) fn open(ordinal: u32) -> Result<Self> {
        let library = library::find(VENDOR, &LIBRARY)?;
        let calls = Calls::load(&library, VENDOR, "acl")?;
        library::check_begun()?;
        let (mut count, mut version) = (0_u32, [0_i32; 3]);
        let [major, minor, patch] = &mut version;
        // SAFETY: no configuration.
        let begun = unsafe { (calls.Init)(null()) };
        if begun != REPEAT_INITIALIZE {
            check("Init", begun)?;
        }
        // SAFETY: each call writes numbers; the name is null or a string that lives as long as the
        // library.
        let chip = unsafe {
            call!(calls, rtGetDeviceCount(&raw mut count))?;
            call!(calls, rtGetVersion(major, minor, patch))?;
            let chip = (calls.rtGetSocName)();
            (!chip.is_null()).then(|| CStr::from_ptr(chip).to_string_lossy().into_owned())
        };
        library::begun()?;
        if ordinal >= count {
            return Err(library::no_device(VENDOR, ordinal, count));
        }
        let osrelease = std::fs::read_to_string(OSRELEASE).unwrap_or_default();
        let pins = if can_pin(&osrelease) {
            Pins::load(&library, VENDOR, "acl")
        } else {
            let old = "ACL cannot pin our memory under this old version of Linux";
            Err(Error::new(ErrorKind::Unsupported, old).with("linux", osrelease.trim()))
        };
        let chip = chip.as_deref().unwrap_or(VENDOR);
        let mut device = Self {
            calls,
            pins,
            captures: Captures::load(&library, VENDOR, "acl").ok(),
            ordinal: ordinal.cast_signed(),
            context: null_mut(),
            description: format!(
                "{chip} device {ordinal}, ACL {}.{}.{}",
                version[0], version[1], version[2]
            ),
            origin: Origin::this()?,
        };
        let bound = device.bind()?;
        let context = device.current()?;
        drop(bound);
        device.context = context;
        Ok(device)
    }

    /// Until the returned guard is dropped, the device's default context is current on this thread,
    /// and calls of this thread do not disturb a graph capture of another thread.
    fn bind(&self) -> Answer<Bound<'_>> {
        self.origin
            .check(library::FORKED)
            .map_err(Failed::of_parent)?;
        let mut bound = Bound {
            device: self,
            mode: None,
            before: null_mut(),
        };
        if let Some(captures) = &self.captures {
            let mut mode = RELAXED;
            // SAFETY: exchanges one number.
            unsafe { call!(captures, mdlRICaptureThreadExchangeMode(&raw mut mode)) }?;
            bound.mode = Some(mode);
        }
        let before = self.current()?;
        if before.is_null() || before != self.context {
            // SAFETY: a number.
            unsafe { call!(self.calls, rtSetDevice(self.ordinal)) }?;
            if !is_own_thread() {
                bound.before = before;
            }
        }
        Ok(bound)
    }

    /// The context of this thread; null if it has none.
    fn current(&self) -> Answer<*mut c_void> {
        let mut context = null_mut();
        // SAFETY: writes one handle.
        let answer = unsafe { (self.calls.rtGetCurrentContext)(&raw mut context) };
        if answer == RT_CONTEXT_NULL {
            return Ok(null_mut());
        }
        check("rtGetCurrentContext", answer).map(|()| context)
    }
}

/// On drop, the previous context of the caller's thread is current again, so torch's threads keep
/// theirs. A thread without a previous context keeps ours: ACL has no call to remove it.
#[must_use]
struct Bound<'a> {
    device: &'a Ascend,
    /// The thread's previous capture mode.
    mode: Option<c_int>,
    before: *mut c_void,
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        if !self.before.is_null() {
            // SAFETY: a context from the runtime. A failure cannot be handled here.
            let _ = unsafe { call!(self.device.calls, rtSetCurrentContext(self.before)) };
        }
        if let (Some(captures), Some(mode)) = (&self.device.captures, &mut self.mode) {
            // SAFETY: as above.
            let _ = unsafe { call!(captures, mdlRICaptureThreadExchangeMode(mode)) };
        }
    }
}

impl Runtime for Ascend {
    fn description(&self) -> &str {
        &self.description
    }

    fn make_stream(&self) -> Answer<RawStream> {
        let _bound = self.bind()?;
        let (calls, mut stream) = (&self.calls, null_mut());
        let made = &raw mut stream;
        // SAFETY: writes one handle.
        unsafe { call!(calls, rtCreateStreamWithConfig(made, HIGHEST, STREAM_FAST)) }?;
        Ok(RawStream(stream.expose_provenance() as u64))
    }

    fn synchronize(&self, stream: RawStream) -> Answer {
        let _bound = self.bind()?;
        // SAFETY: a stream of ours, or the default one.
        unsafe { call!(self.calls, rtSynchronizeStream(stream.raw())) }
    }

    fn is_over(&self, stream: RawStream) -> Answer<bool> {
        let _bound = self.bind()?;
        let mut status = 0;
        // SAFETY: a stream of ours, or the default one; writes one number.
        unsafe { call!(self.calls, rtStreamQuery(stream.raw(), &raw mut status)) }?;
        Ok(status == STREAM_COMPLETE)
    }

    fn make_event(&self) -> Answer<RawEvent> {
        let _bound = self.bind()?;
        let (calls, mut event) = (&self.calls, null_mut());
        let made = &raw mut event;
        // SAFETY: writes one handle.
        unsafe { call!(calls, rtCreateEventWithFlag(made, EVENT_TIME_LINE)) }?;
        Ok(RawEvent(event.expose_provenance() as u64))
    }

    fn record(&self, event: RawEvent, stream: RawStream) -> Answer {
        let _bound = self.bind()?;
        // SAFETY: an event and a stream of ours.
        unsafe { call!(self.calls, rtRecordEvent(event.raw(), stream.raw())) }
    }

    /// An event that was never recorded is not done here.
    fn is_done(&self, event: RawEvent) -> Answer<bool> {
        let _bound = self.bind()?;
        let mut status = 0;
        // SAFETY: an event of ours, or one whose maker keeps it while it is polled; writes one
        // number.
        unsafe { call!(self.calls, rtQueryEventStatus(event.raw(), &raw mut status)) }?;
        Ok(status == RECORDED_COMPLETE)
    }

    fn elapsed_ms(&self, from: RawEvent, to: RawEvent) -> Answer<f32> {
        let _bound = self.bind()?;
        let (mut elapsed, from, to) = (0.0, from.raw(), to.raw());
        // SAFETY: two events of ours; writes one number.
        unsafe { call!(self.calls, rtEventElapsedTime(&raw mut elapsed, from, to)) }?;
        Ok(elapsed)
    }

    fn allocate(&self, bytes: usize) -> Answer<u64> {
        let _bound = self.bind()?;
        let mut address = null_mut();
        // SAFETY: writes one address.
        unsafe { call!(self.calls, rtMalloc(&raw mut address, bytes, HUGE_FIRST)) }?;
        Ok(address.expose_provenance() as u64)
    }

    /// What follows the target is not ours, so the room there is what is copied.
    unsafe fn copy(&self, copy: RawCopy, stream: Option<RawStream>) -> Answer {
        let RawCopy { way, to, from, len } = copy;
        let _bound = self.bind()?;
        let (to, from, kind) = (pointer(to), pointer::<c_void>(from), KINDS[way as usize]);
        // SAFETY: the caller vouches for both ranges until the stream's work is over.
        unsafe {
            match stream.map(RawStream::raw) {
                Some(on) => call!(self.calls, rtMemcpyAsync(to, len, from, len, kind, on)),
                None => call!(self.calls, rtMemcpy(to, len, from, len, kind)),
            }
        }
    }

    /// There are no kernels, so the device's address is not needed.
    unsafe fn register(&self, start: *mut u8, len: usize) -> Answer<Option<u64>> {
        let pins = self.pins.as_ref().map_err(Clone::clone)?;
        if !start.addr().is_multiple_of(PAGE as usize) {
            let unaligned = Error::invalid("memory that ACL pins begins at a multiple of 4096");
            return Err(unaligned.with("address", format_args!("{start:p}")).into());
        }
        let _bound = self.bind()?;
        // SAFETY: the caller vouches for the range.
        unsafe { call!(pins, rtHostRegisterV2(start.cast(), len as u64, PINNED)) }?;
        Ok(None)
    }

    fn end(&self, owned: Owned) -> Answer {
        let _bound = insist(|| self.bind())?;
        // SAFETY: made or registered above, and the caller says that nothing uses it any more.
        unsafe {
            match owned {
                Owned::Stream(stream) => call!(self.calls, rtDestroyStream(stream.raw())),
                Owned::Event(event) => call!(self.calls, rtDestroyEvent(event.raw())),
                Owned::Memory(address) => call!(self.calls, rtFree(pointer(address))),
                Owned::Pinned(start) => {
                    let pins = self.pins.as_ref().map_err(Clone::clone)?;
                    call!(pins, rtHostUnregister(start.cast()))
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accelerator::library::tests::stub;

    #[test]
    fn old_versions_of_linux_pin_nothing() {
        for old in [
            "5.10.0-60.18.0.50.oe2203.aarch64",
            "5.10",
            "4.19.90-2102",
            "3.10.0-1160.el7",
            "",
            "5",
            "new",
        ] {
            assert!(!can_pin(old), "{old}");
        }
        for new in [
            "5.11.0",
            "5.15.0-91-generic",
            "6.1.0-13-amd64\n",
            "6.18.44-fc-v669",
            "10.0",
        ] {
            assert!(can_pin(new), "{new}");
        }
    }

    #[test]
    fn a_function_that_is_missing_is_named_and_pinning_is_not_needed() {
        for missing in Calls::NAMES {
            let there = Calls::NAMES.iter().copied().filter(|name| name != missing);
            let (_directory, library) = stub("acl", there);
            let error = Calls::load(&library, VENDOR, "acl").err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            let text = error.to_string();
            assert!(text.contains(&format!("function=acl{missing}")), "{text}");
        }
        let (_directory, whole) = stub("acl", Calls::NAMES.iter().copied());
        assert!(Calls::load(&whole, VENDOR, "acl").is_ok());
        assert!(Pins::load(&whole, VENDOR, "acl").is_err());
        assert!(Captures::load(&whole, VENDOR, "acl").is_err());
        let newer = Pins::NAMES.iter().chain(Captures::NAMES);
        let (_directory, newer) = stub("acl", newer.copied());
        assert!(Pins::load(&newer, VENDOR, "acl").is_ok());
        assert!(Captures::load(&newer, VENDOR, "acl").is_ok());
    }
}
