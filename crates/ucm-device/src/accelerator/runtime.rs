//! What an accelerator's runtime does for us: the one seam between the copies of this crate and the libraries of vendors.

use ucm_core::{Error, Result};

pub(super) use crate::transfer::Direction;

/// A stream of the runtime's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RawStream(pub(super) u64);

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

/// One device through its vendor's library. Every call may be made by any thread and makes the device current on it first.
/// Calls that begin work return at once; [`Runtime::synchronize`] waits.
pub(super) trait Runtime: Send + Sync {
    /// What the device and its driver are, for logs and for what was measured of them.
    fn description(&self) -> &str;

    /// The node of the machine's memory that is nearest to the device, where there are several and it is known.
    fn node(&self) -> Option<u32> {
        None
    }

    /// A stream that does not wait for the default stream, of the highest priority there is.
    fn make_stream(&self) -> Result<RawStream>;

    /// Its work may still go on; the stream ends after it.
    fn end_stream(&self, stream: RawStream);

    /// Returns when all work of the stream is over, failed or not. Nothing bounds it but the driver.
    fn synchronize(&self, stream: RawStream) -> Result<()>;

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

    /// Gives it back; nothing may use it any more.
    fn free(&self, address: u64);

    /// Begins a copy from the host to the device.
    ///
    /// # Safety
    /// Both ranges stay as they are until the stream's work is over; see [`DeviceSpan::new`](crate::DeviceSpan::new) for the
    /// device's.
    unsafe fn to_device(&self, to: u64, from: *const u8, len: usize, stream: RawStream) -> Result<()>;

    /// Begins a copy from the device to the host.
    ///
    /// # Safety
    /// As [`Runtime::to_device`]; nobody reads `to` before the stream's work is over.
    unsafe fn to_host(&self, to: *mut u8, from: u64, len: usize, stream: RawStream) -> Result<()>;

    /// Copies from the host to the device and returns when that is over: the last resort, where no copy of a stream
    /// gives right bytes.
    ///
    /// # Safety
    /// As [`Runtime::to_device`], until it returns.
    unsafe fn to_device_now(&self, to: u64, from: *const u8, len: usize) -> Result<()>;

    /// The same from the device to the host.
    ///
    /// # Safety
    /// As [`Runtime::to_host`], until it returns.
    unsafe fn to_host_now(&self, to: *mut u8, from: u64, len: usize) -> Result<()>;

    /// Begins a copy on the device between ranges that do not overlap.
    ///
    /// # Safety
    /// As [`Runtime::to_device`], of both.
    unsafe fn on_device(&self, to: u64, from: u64, len: usize, stream: RawStream) -> Result<()>;

    /// Pins host memory; the device's address of it, where the device can reach it.
    ///
    /// # Safety
    /// The range is mapped, stays mapped until [`Runtime::unregister`], and no part of it is registered already.
    unsafe fn register(&self, start: *mut u8, len: usize) -> Result<Option<u64>>;

    /// Nothing may use the pinned memory any more.
    fn unregister(&self, start: *mut u8);

    /// Whether [`Runtime::launch`] can be used; not where a runtime does not say.
    fn has_kernels(&self) -> bool {
        false
    }

    /// Begins a kernel over `count` descriptors of three words at `descriptors`, in the device's memory; `grid` is over
    /// descriptors and over the tiles of one.
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
        Err(Error::internal("a kernel was begun on a device without any"))
    }
}
