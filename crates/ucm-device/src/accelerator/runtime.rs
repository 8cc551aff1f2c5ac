//! The functions that we need of an accelerator's runtime: the one interface between the copies of
//! this crate and the libraries of vendors.

use std::ops::Range;
use std::ptr::with_exposed_provenance_mut;
use std::thread::sleep;
use std::time::Duration;

use tracing::warn;
use ucm_core::{Error, Result};

pub(super) use crate::transfer::Direction;

/// The address of something that the runtime made, as its calls take it.
pub(super) fn pointer<T>(address: u64) -> *mut T {
    with_exposed_provenance_mut(address as usize)
}

/// A stream of the runtime's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RawStream(pub(super) u64);

impl RawStream {
    /// The stream of copies that name none.
    pub(super) const DEFAULT: Self = Self(0);

    pub(super) fn raw<T>(self) -> *mut T {
        pointer(self.0)
    }
}

/// An event of the runtime's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RawEvent(pub(super) u64);

impl RawEvent {
    pub(super) fn raw<T>(self) -> *mut T {
        pointer(self.0)
    }
}

/// Something that the runtime made or keeps for us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Owned {
    Stream(RawStream),
    Event(RawEvent),
    /// Memory of the device, by its address.
    Memory(u64),
    /// Pinned memory of the host, by its address.
    Pinned(*mut u8),
}

/// One copy. Addresses are the device's or those of this process's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawCopy {
    pub(super) way: Direction,
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) len: usize,
}

impl RawCopy {
    /// Between a device address and a host address.
    pub(super) fn between(way: Direction, device: u64, host: *mut u8, len: usize) -> Self {
        let host = host.expose_provenance() as u64;
        let (to, from) = match way {
            Direction::ToDevice => (device, host),
            Direction::ToHost => (host, device),
        };
        Self { way, to, from, len }
    }
}

/// A kernel of `kernels/copy.cu`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kernel {
    /// Descriptors (source, destination, length).
    Batch,
    /// Over descriptors (device address, offset, length): from the addresses to `base` plus the
    /// offsets.
    Gather,
    /// The same descriptors in the other direction.
    Scatter,
}

/// A failed call of a library.
pub(super) struct Failed {
    pub(super) error: Error,
    /// No earlier work continues: the context is broken for good, or belongs to another process.
    pub(super) is_end: bool,
}

impl Failed {
    /// For a device of this process's parent: its work does not touch this process's memory.
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

/// Of a call that was not made, or says nothing of the work before it.
impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self {
            error,
            is_end: false,
        }
    }
}

/// The result of a call of a library.
pub(super) type Answer<T = ()> = Result<T, Failed>;

/// The result codes of CUDA's driver, and of runtimes of its shape, after which a context does
/// nothing more: the process is ending, the context was destroyed, or it is broken so that every
/// later call returns the same code (NVIDIA's documentation of `CUresult`; the numbers of HIP are
/// the same).
const CONTEXT_ENDED: [i64; 17] = [
    4, 201, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810,
];

/// True for one of those result codes.
pub(super) fn ends_context(answer: impl Into<i64>) -> bool {
    CONTEXT_ENDED.contains(&answer.into())
}

/// Attempts of a call that releases a resource.
const TRIES: usize = 8;

/// Makes a device current for a release, which is not repeated elsewhere, so a failure is retried a
/// few times.
pub(super) fn insist<T>(bind: impl Fn() -> Answer<T>) -> Answer<T> {
    let mut bound = bind();
    for _ in 1..TRIES {
        if bound.is_ok() {
            break;
        }
        bound = bind();
    }
    bound
}

/// Waits until all work of a stream is over, failed or not. Every wait for work uses this function:
/// the memory of the work is free when it returns, and never if it does not.
///
/// An error of the runtime's own wait does not mean that the work has ended: the call alone may
/// have failed (HIP refuses it while some thread captures a graph) while the stream continues. So
/// the stream is queried until it has finished, or its context is certainly dead. If neither
/// happens, this thread waits for ever, its pool writes it off, and it keeps its memory, which may
/// still be written.
pub(super) fn wait_until_over(runtime: &dyn Runtime, stream: RawStream) -> Result<()> {
    let Err(Failed { error, .. }) = runtime.synchronize(stream) else {
        return Ok(());
    };
    let mut pause = ASKED[0];
    loop {
        match runtime.is_over(stream) {
            Ok(true) => return Err(error),
            Err(end) if end.is_end => return Err(error),
            Ok(false) | Err(_) => {}
        }
        if pause == ASKED[1] {
            warn!(device = runtime.description(), %error, "a wait for copies failed while \
            they went on");
        }
        sleep(pause);
        pause *= if pause > ASKED[1] { 1 } else { 2 };
    }
}

/// Intervals between queries of a stream, first and last.
const ASKED: [Duration; 2] = [Duration::from_micros(16), Duration::from_micros(16 << 10)];

/// One device through its vendor's library. Any thread may make every call: the device is current
/// on the thread during the call, and a graph capture of another thread is not disturbed. Calls
/// that begin work return at once; [`wait_until_over`] waits.
pub(super) trait Runtime: Send + Sync {
    /// Description of the device and its driver, for logs and as the key of measurements.
    fn description(&self) -> &str;

    /// The NUMA node nearest to the device, if there are several and it is known.
    fn node(&self) -> Option<u32> {
        None
    }

    /// A stream that does not wait for the default stream, of the highest priority.
    fn make_stream(&self) -> Answer<RawStream>;

    /// Waits until all work of the stream is over, without a limit. After an error the work may
    /// still be running: see [`wait_until_over`].
    fn synchronize(&self, stream: RawStream) -> Answer;

    /// True if all work of the stream is over. Never waits.
    fn is_over(&self, stream: RawStream) -> Answer<bool>;

    /// An event with a timestamp.
    fn make_event(&self) -> Answer<RawEvent>;

    fn record(&self, event: RawEvent, stream: RawStream) -> Answer;

    /// True if the work before its record is over.
    fn is_done(&self, event: RawEvent) -> Answer<bool>;

    /// Milliseconds between two events that are done.
    fn elapsed_ms(&self, from: RawEvent, to: RawEvent) -> Answer<f32>;

    /// Memory of the device.
    fn allocate(&self, bytes: usize) -> Answer<u64>;

    /// The allocation around a device address; `None` if the runtime does not report it. A copy
    /// must not extend beyond it.
    fn allocation(&self, _address: u64) -> Option<Range<u64>> {
        None
    }

    /// Begins a copy on a stream. Without a stream it copies at once: the last resort, if copies of
    /// streams are wrong. With unpinned memory it may return early: the rest is work of
    /// [`RawStream::DEFAULT`].
    ///
    /// # Safety
    /// Both ranges stay valid and unchanged until the stream's work is over; see
    /// [`DeviceSpan::new`](crate::DeviceSpan::new) for the device's. The target is
    /// not read before.
    unsafe fn copy(&self, copy: RawCopy, stream: Option<RawStream>) -> Answer;

    /// Pins host memory; returns the device's address of it, if the device can reach it.
    ///
    /// # Safety
    /// The range is mapped, stays mapped until [`Runtime::end`], and no part of it is registered
    /// already.
    unsafe fn register(&self, start: *mut u8, len: usize) -> Answer<Option<u64>>;

    /// Gives back what nothing uses any more; a stream ends after its work. After an error the
    /// driver may still know it.
    fn end(&self, owned: Owned) -> Answer;

    /// True if [`Runtime::launch`] can be used. The default is false.
    fn has_kernels(&self) -> bool {
        false
    }

    /// Begins a kernel over `count` descriptors of three words at `descriptors`, in the device's
    /// memory; `grid` is over descriptors and over the tiles of one.
    ///
    /// # Safety
    /// As [`Runtime::copy`], for the descriptors and all ranges that they name.
    unsafe fn launch(
        &self,
        _kernel: Kernel,
        _descriptors: u64,
        _count: u64,
        _base: u64,
        _grid: [u32; 2],
        _stream: RawStream,
    ) -> Answer {
        Err(Error::internal(NO_KERNELS).into())
    }
}

pub(super) const NO_KERNELS: &str = "a kernel was begun on a device without any";
