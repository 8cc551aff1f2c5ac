//! What an accelerator's runtime does for us: the one seam between the copies of this crate and the
//! libraries of vendors.

use std::ops::Range;
use std::thread::sleep;
use std::time::Duration;

use tracing::warn;
use ucm_core::{Error, Result};

pub(super) use crate::transfer::Direction;

/// A stream of the runtime's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RawStream(pub(super) u64);

impl RawStream {
    /// The one on which copies go that name none.
    pub(super) const DEFAULT: Self = Self(0);
}

/// An event of the runtime's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RawEvent(pub(super) u64);

/// A kernel of `kernels/copy.cu`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kernel {
    /// Descriptors (source, destination, length).
    Batch,
    /// Descriptors (device address, offset, length), from the addresses to `base` plus the offsets.
    Gather,
    /// The same descriptors the other way.
    Scatter,
}

/// A call of a library that failed.
pub(super) struct Failed {
    pub(super) error: Error,
    /// Nothing that was begun before goes on: the context is broken for good, or belongs to another
    /// process.
    pub(super) is_end: bool,
}

impl Failed {
    /// Of a device that belongs to the parent of this process: nothing of its work touches this
    /// one's memory.
    pub(super) fn of_parent(error: Error) -> Self {
        Self {
            error,
            is_end: true,
        }
    }
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}

/// The answers of CUDA's driver and of runtimes shaped as it after which a context does nothing
/// more: the process is ending, the context was destroyed, or it is broken so that every later call
/// gets the same answer (NVIDIA's documentation of `CUresult`; the numbers of HIP are the same).
const CONTEXT_ENDED: [i64; 17] = [
    4, 201, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810,
];

/// Whether an answer is one of those.
pub(super) fn ends_context(answer: impl Into<i64>) -> bool {
    CONTEXT_ENDED.contains(&answer.into())
}

/// How often what ends something is tried.
const TRIES: usize = 8;

/// Makes a device current for what ends something, which no one does again: where that fails it is
/// tried a few times.
pub(super) fn insist<T>(bind: impl Fn() -> Result<T, Failed>) -> Result<T, Failed> {
    let mut bound = bind();
    for _ in 1..TRIES {
        if bound.is_ok() {
            break;
        }
        bound = bind();
    }
    bound
}

/// Waits until all work of a stream is over, failed or not. Every wait for work is this one: what
/// the work uses is free when it returns, and never if it does not.
///
/// An error of the runtime's own wait says nothing of the work: it may be of the call alone (one
/// that HIP refuses while some thread captures a graph), and the stream goes on. So the stream is
/// asked until it says that it has done all, or that its context does nothing any more. Where it
/// never does, this thread waits for ever, is written off by the watch of its pool, and keeps what
/// it holds: memory that may still be written.
pub(super) fn wait_until_over(runtime: &dyn Runtime, stream: RawStream) -> Result<()> {
    let Err(failed) = runtime.synchronize(stream) else {
        return Ok(());
    };
    let mut pause = ASKED[0];
    loop {
        match runtime.is_over(stream) {
            Ok(true) => return Err(failed),
            Err(end) if end.is_end => return Err(failed),
            Ok(false) | Err(_) => {}
        }
        if pause == ASKED[1] {
            warn!(device = runtime.description(), error = %failed, "a wait for copies failed while \
            they went on");
        }
        sleep(pause);
        pause *= if pause > ASKED[1] { 1 } else { 2 };
    }
}

/// How often a stream is asked whether it is over, first and last.
const ASKED: [Duration; 2] = [Duration::from_micros(16), Duration::from_micros(16 << 10)];

/// One device through its vendor's library. Every call may be made by any thread: it makes the
/// device current on the thread while it lasts, and is no trouble to a graph that some thread
/// captures. Calls that begin work return at once; [`wait_until_over`] waits.
pub(super) trait Runtime: Send + Sync {
    /// What the device and its driver are, for logs and for what was measured of them.
    fn description(&self) -> &str;

    /// The node of the machine's memory that is nearest to the device, where there are several and
    /// it is known.
    fn node(&self) -> Option<u32> {
        None
    }

    /// A stream that does not wait for the default stream, of the highest priority there is.
    fn make_stream(&self) -> Result<RawStream>;

    /// Its work may still go on; the stream ends after it.
    fn end_stream(&self, stream: RawStream);

    /// Waits until all work of the stream is over, as long as the driver likes. An error does not
    /// say that it is: [`wait_until_over`] finds that out.
    fn synchronize(&self, stream: RawStream) -> Result<()>;

    /// Whether all work of the stream is over. Never waits.
    fn is_over(&self, stream: RawStream) -> Result<bool, Failed>;

    /// An event that measures times.
    fn make_event(&self) -> Result<RawEvent>;

    fn end_event(&self, event: RawEvent);

    fn record(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Whether what it was recorded after is over.
    fn is_done(&self, event: RawEvent) -> Result<bool>;

    /// Milliseconds between two events that are done.
    fn elapsed_ms(&self, from: RawEvent, to: RawEvent) -> Result<f32>;

    /// Memory of the device.
    fn allocate(&self, bytes: usize) -> Result<u64>;

    /// The allocation that an address of the device lies in; none where the runtime does not say. A
    /// copy reaches no further.
    fn allocation(&self, _address: u64) -> Option<Range<u64>> {
        None
    }

    /// Gives it back; nothing may use it any more.
    fn free(&self, address: u64);

    /// Begins a copy from the host to the device.
    ///
    /// # Safety
    /// Both ranges stay as they are until the stream's work is over; see
    /// [`DeviceSpan::new`](crate::DeviceSpan::new) for the device's.
    unsafe fn to_device(
        &self,
        to: u64,
        from: *const u8,
        len: usize,
        stream: RawStream,
    ) -> Result<()>;

    /// Begins a copy from the device to the host.
    ///
    /// # Safety
    /// As [`Runtime::to_device`]; no one reads `to` before the stream's work is over.
    unsafe fn to_host(&self, to: *mut u8, from: u64, len: usize, stream: RawStream) -> Result<()>;

    /// Copies from the host to the device without a stream: the last resort, where no copy of one
    /// gives right bytes. It may return before that is over, where the memory is not pinned: the
    /// rest is work of [`RawStream::DEFAULT`].
    ///
    /// # Safety
    /// As [`Runtime::to_device`], of that stream.
    unsafe fn to_device_now(&self, to: u64, from: *const u8, len: usize) -> Result<()>;

    /// The same from the device to the host.
    ///
    /// # Safety
    /// As [`Runtime::to_host`], of that stream.
    unsafe fn to_host_now(&self, to: *mut u8, from: u64, len: usize) -> Result<()>;

    /// Begins a copy on the device between ranges that do not overlap.
    ///
    /// # Safety
    /// As [`Runtime::to_device`], of both.
    unsafe fn on_device(&self, to: u64, from: u64, len: usize, stream: RawStream) -> Result<()>;

    /// Pins host memory; the device's address of it, where the device can reach it.
    ///
    /// # Safety
    /// The range is mapped, stays mapped until [`Runtime::unregister`], and no part of it is
    /// registered already.
    unsafe fn register(&self, start: *mut u8, len: usize) -> Result<Option<u64>>;

    /// Nothing may use the pinned memory any more. After an error the driver may still know it.
    fn unregister(&self, start: *mut u8) -> Result<()>;

    /// Whether [`Runtime::launch`] can be used; not where a runtime does not say.
    fn has_kernels(&self) -> bool {
        false
    }

    /// Begins a kernel over `count` descriptors of three words at `descriptors`, in the device's
    /// memory; `grid` is over descriptors and over the tiles of one.
    ///
    /// # Safety
    /// As [`Runtime::to_device`], of all ranges that the descriptors name, and of themselves.
    unsafe fn launch(
        &self,
        _kernel: Kernel,
        _descriptors: u64,
        _count: u64,
        _base: u64,
        _grid: [u32; 2],
        _stream: RawStream,
    ) -> Result<()> {
        Err(Error::internal(
            "a kernel was begun on a device without any",
        ))
    }
}
