//! Ascend's ACL, found at run time. It is not shaped as CUDA's: copies name the room at their target, events answer
//! the other way round, and a thread has no device before it sets one. Nobody has run it on hardware with this code.
//!
//! All values and signatures: `acl_rt.h` and `acl_base_rt.h` of ACL 1.17.0 (their `ACL_*_VERSION`) and
//! `rt_error_codes.h`, in the wheel `torch-npu` 2.14.0.
#![allow(unsafe_code, reason = "calls into the runtime's library")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut, with_exposed_provenance, with_exposed_provenance_mut};

use ucm_core::{Error, ErrorKind, Result};

use super::library::{self, Places, functions};
use super::runtime::{RawEvent, RawStream, Runtime};

const VENDOR: &str = "ascend";

const LIBRARY: Places = Places {
    vendor: VENDOR,
    known_by: "aclrtCreateStreamWithConfig",
    names: &["libascendcl.so"],
    below: None,
};

functions! {
    /// What we call.
    Calls {
        Init(*const c_char) -> c_int;
        rtGetDeviceCount(*mut u32) -> c_int;
        rtGetDevice(*mut i32) -> c_int;
        rtSetDevice(i32) -> c_int;
        rtGetSocName() -> *const c_char;
        rtGetVersion(*mut i32, *mut i32, *mut i32) -> c_int;
        rtCreateStreamWithConfig(*mut *mut c_void, u32, u32) -> c_int;
        rtDestroyStream(*mut c_void) -> c_int;
        rtSynchronizeStream(*mut c_void) -> c_int;
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
    /// What pins memory, which older versions have not: the `aclrtHostRegister` of theirs maps and does not pin.
    Pins {
        rtHostRegisterV2(*mut c_void, u64, u32) -> c_int;
        rtHostUnregister(*mut c_void) -> c_int;
    }
}

const SUCCESS: c_int = 0;
const INVALID_PARAM: c_int = 100_000;
/// Of `aclInit`, which torch has called before.
const REPEAT_INITIALIZE: c_int = 100_002;
const RT_PARAM_INVALID: c_int = 107_000;
/// Of `aclrtGetDevice` on a thread that has none yet.
const RT_CONTEXT_NULL: c_int = 107_002;
const RT_MEMORY_ALLOCATION: c_int = 207_001;

/// `ACL_MEMCPY_*`.
const HOST_TO_DEVICE: c_int = 1;
const DEVICE_TO_HOST: c_int = 2;
const DEVICE_TO_DEVICE: c_int = 3;

/// What addresses of copies on the device are multiples of.
const ALIGNED: u64 = 64;

/// `ACL_STREAM_FAST_LAUNCH` and `ACL_STREAM_FAST_SYNC`; the highest of the priorities 0 to 7.
const STREAM_FAST: u32 = 3;
const HIGHEST: u32 = 0;

/// `ACL_EVENT_TIME_LINE`: an event that measures times.
const EVENT_TIME_LINE: u32 = 8;

/// `ACL_EVENT_RECORDED_STATUS_COMPLETE`; CUDA's success is 0, and this one's 0 is "not ready".
const RECORDED_COMPLETE: c_int = 1;

/// `ACL_MEM_MALLOC_HUGE_FIRST`.
const HUGE_FIRST: c_int = 0;

/// `ACL_HOST_REG_PINNED`.
const PINNED: u32 = 0x1000_0000;

/// Calls the runtime and checks the answer; the call is made in the caller's `unsafe`.
macro_rules! call {
    ($calls:expr, $call:ident($($argument:expr),* $(,)?)) => {
        check(stringify!($call), ($calls.$call)($($argument),*))
    };
}

/// An error where a call did not succeed.
fn check(call: &str, answer: c_int) -> Result<()> {
    let kind = match answer {
        SUCCESS => return Ok(()),
        RT_MEMORY_ALLOCATION => ErrorKind::NoSpace,
        INVALID_PARAM | RT_PARAM_INVALID => ErrorKind::InvalidInput,
        _ => ErrorKind::Io,
    };
    let failed = Error::new(kind, "a call of the device's runtime failed");
    Err(failed
        .with("call", format!("acl{call}"))
        .with("answer", format!("error {answer}")))
}

/// A device of Ascend.
pub(super) struct Ascend {
    calls: Calls,
    pins: Option<Pins>,
    ordinal: i32,
    description: String,
    /// The process that made it; the runtime does not survive a fork.
    process: u32,
}

impl Ascend {
    /// Device number `ordinal`; `Unsupported` without a runtime, `Config` for a number there is none of.
    pub(super) fn open(ordinal: u32) -> Result<Self> {
        let library = library::find(&LIBRARY)?;
        let calls = Calls::load(&library, VENDOR, "acl")?;
        let (mut count, mut version) = (0_u32, [0_i32; 3]);
        let [major, minor, patch] = &mut version;
        // SAFETY: no configuration.
        let begun = unsafe { (calls.Init)(null()) };
        if begun != REPEAT_INITIALIZE {
            check("Init", begun)?;
        }
        // SAFETY: each call writes numbers; the name is null or a string that lives as long as the library.
        let chip = unsafe {
            call!(calls, rtGetDeviceCount(&raw mut count))?;
            call!(calls, rtGetVersion(major, minor, patch))?;
            let chip = (calls.rtGetSocName)();
            (!chip.is_null()).then(|| CStr::from_ptr(chip).to_string_lossy().into_owned())
        };
        if ordinal >= count {
            let none = Error::new(
                ErrorKind::Config,
                "the machine has no device of this kind and number",
            );
            return Err(none
                .with("device", format!("{VENDOR}:{ordinal}"))
                .with("devices", count));
        }
        let chip = chip.as_deref().unwrap_or(VENDOR);
        Ok(Self {
            calls,
            pins: Pins::load(&library, VENDOR, "acl").ok(),
            ordinal: ordinal.cast_signed(),
            description: format!(
                "{chip} device {ordinal}, ACL {}.{}.{}",
                version[0], version[1], version[2]
            ),
            process: std::process::id(),
        })
    }

    /// Makes the device current on this thread, until what is given ends where the thread had another one.
    fn bind(&self) -> Result<Bound<'_>> {
        library::check_process(self.process)?;
        let mut before = 0;
        // SAFETY: writes one number.
        let answer = unsafe { (self.calls.rtGetDevice)(&raw mut before) };
        if answer != RT_CONTEXT_NULL {
            check("rtGetDevice", answer)?;
        }
        let before = (answer == SUCCESS).then_some(before);
        if before != Some(self.ordinal) {
            // SAFETY: a number.
            unsafe { call!(self.calls, rtSetDevice(self.ordinal)) }?;
        }
        Ok(Bound {
            calls: &self.calls,
            before: before.filter(|&before| before != self.ordinal),
        })
    }

    /// Begins a copy. What follows the target is not ours, so the room there is what is copied.
    ///
    /// # Safety
    /// As [`Runtime::to_device`].
    unsafe fn copy(
        &self,
        to: *mut c_void,
        from: *const c_void,
        len: usize,
        kind: c_int,
        stream: RawStream,
    ) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: the caller vouches for both ranges until the stream's work is over.
        unsafe {
            call!(
                self.calls,
                rtMemcpyAsync(to, len, from, len, kind, handle(stream.0))
            )
        }
    }

    /// Copies, and returns when that is over; else as [`Ascend::copy`].
    ///
    /// # Safety
    /// As [`Runtime::to_device_now`].
    unsafe fn copy_now(&self, to: *mut c_void, from: *const c_void, len: usize, kind: c_int) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: the caller vouches for both ranges until this returns.
        unsafe { call!(self.calls, rtMemcpy(to, len, from, len, kind)) }
    }
}

/// The device that a thread had is its current one again when this ends: torch's threads keep theirs.
#[must_use]
struct Bound<'a> {
    calls: &'a Calls,
    before: Option<i32>,
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: a number that the runtime gave. The answer would help nobody.
            let _ = unsafe { call!(self.calls, rtSetDevice(before)) };
        }
    }
}

fn handle(number: u64) -> *mut c_void {
    with_exposed_provenance_mut(number as usize)
}

impl Runtime for Ascend {
    fn description(&self) -> &str {
        &self.description
    }

    fn make_stream(&self) -> Result<RawStream> {
        let _bound = self.bind()?;
        let mut stream = null_mut();
        // SAFETY: writes one handle.
        unsafe {
            call!(
                self.calls,
                rtCreateStreamWithConfig(&raw mut stream, HIGHEST, STREAM_FAST)
            )
        }?;
        Ok(RawStream(stream.expose_provenance() as u64))
    }

    fn end_stream(&self, stream: RawStream) {
        if let Ok(_bound) = self.bind() {
            // SAFETY: a stream of ours that nobody uses any more.
            let _ = unsafe { call!(self.calls, rtDestroyStream(handle(stream.0))) };
        }
    }

    fn synchronize(&self, stream: RawStream) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: a stream of ours.
        unsafe { call!(self.calls, rtSynchronizeStream(handle(stream.0))) }
    }

    fn make_event(&self) -> Result<RawEvent> {
        let _bound = self.bind()?;
        let mut event = null_mut();
        // SAFETY: writes one handle.
        unsafe { call!(self.calls, rtCreateEventWithFlag(&raw mut event, EVENT_TIME_LINE)) }?;
        Ok(RawEvent(event.expose_provenance() as u64))
    }

    fn end_event(&self, event: RawEvent) {
        if let Ok(_bound) = self.bind() {
            // SAFETY: an event of ours that nobody uses any more.
            let _ = unsafe { call!(self.calls, rtDestroyEvent(handle(event.0))) };
        }
    }

    fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: an event and a stream of ours.
        unsafe { call!(self.calls, rtRecordEvent(handle(event.0), handle(stream.0))) }
    }

    /// An event that nobody recorded is not done here.
    fn is_done(&self, event: RawEvent) -> Result<bool> {
        let _bound = self.bind()?;
        let mut status = 0;
        // SAFETY: an event of ours, or one whose maker keeps it while it is asked about; writes one number.
        unsafe { call!(self.calls, rtQueryEventStatus(handle(event.0), &raw mut status)) }?;
        Ok(status == RECORDED_COMPLETE)
    }

    fn elapsed_ms(&self, from: RawEvent, to: RawEvent) -> Result<f32> {
        let _bound = self.bind()?;
        let mut elapsed = 0.0;
        // SAFETY: two events of ours; writes one number.
        unsafe {
            call!(
                self.calls,
                rtEventElapsedTime(&raw mut elapsed, handle(from.0), handle(to.0))
            )
        }?;
        Ok(elapsed)
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let _bound = self.bind()?;
        let mut address = null_mut();
        // SAFETY: writes one address.
        unsafe { call!(self.calls, rtMalloc(&raw mut address, bytes, HUGE_FIRST)) }?;
        Ok(address.expose_provenance() as u64)
    }

    fn free(&self, address: u64) {
        if let Ok(_bound) = self.bind() {
            // SAFETY: allocated above, and the caller says that nothing uses it any more.
            let _ = unsafe { call!(self.calls, rtFree(handle(address))) };
        }
    }

    unsafe fn to_device(&self, to: u64, from: *const u8, len: usize, stream: RawStream) -> Result<()> {
        // SAFETY: the caller vouches for both ranges.
        unsafe { self.copy(handle(to), from.cast(), len, HOST_TO_DEVICE, stream) }
    }

    unsafe fn to_host(&self, to: *mut u8, from: u64, len: usize, stream: RawStream) -> Result<()> {
        let from = with_exposed_provenance(from as usize);
        // SAFETY: as above.
        unsafe { self.copy(to.cast(), from, len, DEVICE_TO_HOST, stream) }
    }

    unsafe fn to_device_now(&self, to: u64, from: *const u8, len: usize) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.copy_now(handle(to), from.cast(), len, HOST_TO_DEVICE) }
    }

    unsafe fn to_host_now(&self, to: *mut u8, from: u64, len: usize) -> Result<()> {
        let from = with_exposed_provenance(from as usize);
        // SAFETY: as above.
        unsafe { self.copy_now(to.cast(), from, len, DEVICE_TO_HOST) }
    }

    unsafe fn on_device(&self, to: u64, from: u64, len: usize, stream: RawStream) -> Result<()> {
        if !to.is_multiple_of(ALIGNED) || !from.is_multiple_of(ALIGNED) {
            let unaligned = Error::invalid("copies on this device begin at multiples of 64 bytes");
            return Err(unaligned.with("from", from).with("to", to));
        }
        let from = with_exposed_provenance(from as usize);
        // SAFETY: as above.
        unsafe { self.copy(handle(to), from, len, DEVICE_TO_DEVICE, stream) }
    }

    /// There are no kernels, so nobody asks for the device's address.
    unsafe fn register(&self, start: *mut u8, len: usize) -> Result<Option<u64>> {
        let Some(pins) = &self.pins else {
            let old = Error::new(ErrorKind::Unsupported, "this version of ACL does not pin memory");
            return Err(old.with("function", "aclrtHostRegisterV2"));
        };
        let _bound = self.bind()?;
        // SAFETY: the caller vouches for the range.
        unsafe { call!(pins, rtHostRegisterV2(start.cast(), len as u64, PINNED)) }?;
        Ok(None)
    }

    fn unregister(&self, start: *mut u8) {
        if let (Some(pins), Ok(_bound)) = (&self.pins, self.bind()) {
            // SAFETY: registered above, and the caller says that nothing uses it any more.
            let _ = unsafe { call!(pins, rtHostUnregister(start.cast())) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accelerator::library::tests::stub;

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
        let (_directory, newer) = stub("acl", Pins::NAMES.iter().copied());
        assert!(Pins::load(&newer, VENDOR, "acl").is_ok());
    }
}
