//! The interface between the engine and the memory of KV: devices, their streams and events.
//!
//! Operations of one stream take effect in order. The synchronous forms return when the bytes have
//! moved, after all earlier work of the stream; the asynchronous ones own their arguments until
//! they call back.

use std::any::Any;
use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;

use crate::arena::{ArenaOptions, HostArena};
use crate::memory::DeviceMemory;
use crate::region::SharedRegion;
use crate::span::{DeviceSpan, HostSpan, Piece};
use crate::transfer::{Direction, Transfer};

/// Called once with the outcome of an asynchronous copy; must not block.
pub type CopyDone = Box<dyn FnOnce(Result<()>) + Send>;

/// Called during a gather, with the host buffer and the number of its pieces, from the first on,
/// that it contains.
pub type Copied<'a> = dyn FnMut(&mut [u8], usize) + 'a;

/// A device: a kind of memory for KV.
///
/// ```
/// use ucm_device::{DeviceSpan, Piece, Transfer, open_device};
/// use ucm_infra::SystemClock;
///
/// let device = open_device("host", Transfer::Auto, SystemClock::shared()).unwrap();
/// let mut stream = device.make_stream().unwrap();
/// let mut page = vec![7u8; 64];
/// // SAFETY: the page outlives the stream's work, and nothing else touches it.
/// let span = unsafe { DeviceSpan::new(page.as_mut_ptr() as u64, 64) };
/// let mut record = vec![0; 96];
/// stream.gather(&[Piece { at: 32, span }], &mut record, &mut |_, _| {}).unwrap();
/// assert_eq!(record[31..34], [0, 7, 7]);
/// ```
pub trait Device: Send + Sync {
    /// Name in logs and configuration ("host", "cuda:0").
    fn name(&self) -> &str;

    /// True if copies from any memory of this process are as fast as those from an arena.
    fn reaches_all_memory(&self) -> bool {
        false
    }

    /// A new stream. Streams are not shared between threads; each worker makes its own.
    fn make_stream(&self) -> Result<Box<dyn Stream>>;

    /// As [`Device::make_stream`], with this method of copies if possible. A device with one method
    /// makes the same stream.
    fn make_stream_by(&self, transfer: Transfer) -> Result<Box<dyn Stream>>;

    /// `len` uninitialised bytes of this device's memory. `InvalidInput` for zero, `NoSpace` if the
    /// device has no such amount.
    fn allocate(&self, bytes: usize) -> Result<DeviceMemory>;

    /// Pins memory of this process until the returned value is dropped: copies to and from it are
    /// fast, and kernels of the device can reach it. No copy may use it at the drop. `InvalidInput`
    /// for zero bytes, another error if the device's library refuses.
    fn register(&self, host: HostSpan) -> Result<Box<dyn Any + Send + Sync>>;

    /// Host memory for copies to and from this device at full speed.
    fn make_arena(&self, bytes: usize, options: ArenaOptions) -> Result<Arc<HostArena>>;

    /// Makes copies to and from this process's shared memory run at full speed, as long as the
    /// returned value lives. `None` if the device does not need to know the memory.
    fn attach(&self, _region: &Arc<SharedRegion>) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }

    /// An event that is done once it is [recorded](Event::record).
    fn make_event(&self) -> Result<Arc<dyn Event>>;

    /// An event of the device's runtime by its handle (torch: `event.cuda_event`). The caller has
    /// recorded it and keeps it until all work that waits for it has ended or the deadline of the
    /// wait has passed; a wait ends shortly before its deadline. `Unsupported` if the device has no
    /// events.
    fn event_of(&self, handle: u64) -> Result<Arc<dyn Event>> {
        let none = "this device has no events: pass 0 once the source is written";
        Err(Error::new(ErrorKind::Unsupported, none).with("handle", handle))
    }
}

/// A point in time of a caller, who records it.
pub trait Event: Any + Send + Sync {
    /// True if it is done. Never waits.
    fn done(&self) -> bool;

    /// Waits until it is done; `Timeout` at `deadline` (`None`: for ever).
    fn wait(&self, deadline: Option<MonotonicTime>) -> Result<()>;

    /// Sets it to done, because its work has ended. Never waits.
    fn record(&self);
}

/// An ordered queue of copies.
///
/// Lengths are checked before the first byte moves: an `InvalidInput` error has changed nothing.
pub trait Stream: Send {
    /// Copies many device pieces into one host buffer, each to its own offset; bytes between them
    /// are unchanged. All pieces of a block are in one call, so that adjacent pieces can be joined
    /// and small ones staged in one transfer. While pieces are still to be copied, the device may
    /// call `copied` with the number of pieces copied so far, in order. The caller then computes
    /// their checksum while they are in the processor's caches.
    fn gather(&mut self, src: &[Piece], dst: &mut [u8], copied: &mut Copied<'_>) -> Result<()>;

    /// Copies one host buffer into many device pieces, each from its own offset; in one call as for
    /// [`Stream::gather`].
    fn scatter(&mut self, src: &[u8], dst: &[Piece]) -> Result<()>;

    /// Copies between pieces of the device and memory of this process outside of slots, all in one
    /// transfer. No pair may write memory that another reads or writes.
    fn transfer(&mut self, direction: Direction, pairs: &[(DeviceSpan, HostSpan)]) -> Result<()>;

    /// As [`Stream::transfer`], without waiting. `done` is called exactly once; `Busy` if the queue
    /// is full; then it is dropped without a call.
    fn transfer_async(
        &mut self,
        direction: Direction,
        pairs: Vec<(DeviceSpan, HostSpan)>,
        done: CopyDone,
    ) -> Result<()>;

    /// Calls `call` when all earlier work has ended. It must not block. `Busy` if the queue is
    /// full; then it is dropped without a call.
    fn callback(&mut self, call: Box<dyn FnOnce() + Send>) -> Result<()>;

    /// Waits until all submitted work has ended; `Timeout` at `deadline` (`None`: for ever).
    fn synchronize(&mut self, deadline: Option<MonotonicTime>) -> Result<()>;
}
