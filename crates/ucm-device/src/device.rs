//! The seam between the engine and the places KV lives in: devices, their streams and events.
//!
//! Operations of one stream take effect in order. The synchronous forms return when the bytes have
//! moved (and wait for whatever the stream had in flight before); the asynchronous ones own what
//! they need until they call back.

use std::any::Any;
use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;

use crate::arena::{ArenaOptions, HostArena};
use crate::memory::DeviceMemory;
use crate::region::SharedRegion;
use crate::slots::HostBuf;
use crate::span::{DeviceSpan, HostSpan, Piece};
use crate::transfer::{Direction, Transfer};

/// Called once with the outcome of an asynchronous copy between device pieces; must not block.
pub type CopyDone = Box<dyn FnOnce(Result<()>) + Send>;

/// Called once with the host buffer of an asynchronous gather or scatter and its outcome; must not
/// block.
pub type HostDone = Box<dyn FnOnce(HostBuf, Result<()>) + Send>;

/// Called while a gather goes on, with the host buffer and how many of its pieces, from the first
/// on, are in it.
pub type Landed<'a> = dyn FnMut(&mut [u8], usize) + 'a;

/// A kind of memory that KV lives in.
///
/// ```
/// use ucm_device::{DeviceSpan, Piece, Transfer, open_device};
/// use ucm_infra::SystemClock;
///
/// let device = open_device("host", Transfer::Auto, SystemClock::shared()).unwrap();
/// let mut stream = device.make_stream().unwrap();
/// let mut page = vec![7u8; 64];
/// // SAFETY: the page outlives the stream's work, and no one touches it meanwhile.
/// let span = unsafe { DeviceSpan::new(page.as_mut_ptr() as u64, 64) };
/// let mut record = vec![0; 96];
/// stream.gather(&[Piece { at: 32, span }], &mut record, &mut |_, _| {}).unwrap();
/// assert_eq!(record[31..34], [0, 7, 7]);
/// ```
pub trait Device: Send + Sync {
    /// Name in logs and configuration ("host", "cuda:0").
    fn name(&self) -> &str;

    /// Whether copies from any memory of this process are as fast as those from an arena.
    fn reaches_all_memory(&self) -> bool {
        false
    }

    /// A new stream. Streams are not shared between threads; each worker makes its own.
    fn make_stream(&self) -> Result<Box<dyn Stream>>;

    /// As [`Device::make_stream`], by copies of this kind where they can be used; a device that has
    /// one kind only makes the same stream.
    fn make_stream_by(&self, transfer: Transfer) -> Result<Box<dyn Stream>>;

    /// So many bytes of this device's memory, whatever was in them. `InvalidInput` for none,
    /// `NoSpace` where there is not so much.
    fn allocate(&self, bytes: usize) -> Result<DeviceMemory>;

    /// Pins memory of this process until what is given is dropped: copies to and from it are fast,
    /// and kernels of the device can reach it. No copy may use it any more then. `InvalidInput` for
    /// no byte, another error where the device's library refuses.
    fn register(&self, host: HostSpan) -> Result<Box<dyn Any + Send + Sync>>;

    /// Host memory that this device copies to and from at full speed.
    fn make_arena(&self, bytes: usize, options: ArenaOptions) -> Result<Arc<HostArena>>;

    /// Lets copies to and from memory that this process shares go at full speed, for as long as
    /// what is given lives. Nothing where the device needs not know of it.
    fn attach(&self, _region: &Arc<SharedRegion>) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }

    /// An event that is done once somebody [records](Event::record) it.
    fn make_event(&self) -> Result<Arc<dyn Event>>;

    /// An event of the device's runtime by its handle (torch: `event.cuda_event`), which a caller
    /// recorded and keeps until all work that waits for it has ended, or the deadline of the wait
    /// has passed: shortly before that a wait ends. `Unsupported` where the device has none.
    fn event_of(&self, handle: u64) -> Result<Arc<dyn Event>> {
        let none = "this device has no events: pass 0 once the source is written";
        Err(Error::new(ErrorKind::Unsupported, none).with("handle", handle))
    }
}

/// A point in time on a device: of a stream, done when everything submitted before it has ended, or
/// of the caller that records it.
pub trait Event: Any + Send + Sync {
    /// Whether it is done. Never waits.
    fn done(&self) -> bool;

    /// Waits until it is done; `Timeout` when `deadline` comes first (`None`: for ever).
    fn wait(&self, deadline: Option<MonotonicTime>) -> Result<()>;

    /// Makes it done, because what it stands for has ended. Never waits.
    fn record(&self);
}

/// An ordered queue of copies.
///
/// Lengths are checked before the first byte moves: an `InvalidInput` error has changed nothing.
pub trait Stream: Send {
    /// Copies one piece of the device to another of the same length. Only the host lets them
    /// overlap.
    fn copy(&mut self, src: DeviceSpan, dst: DeviceSpan) -> Result<()> {
        self.batch(&[(src, dst)])
    }

    /// Copies many pieces (source, destination). No pair may write what another reads or writes.
    fn batch(&mut self, pairs: &[(DeviceSpan, DeviceSpan)]) -> Result<()>;

    /// Many device pieces into one host buffer, each at its own offset; the bytes between them are
    /// left alone. All pieces of a block come in one call, so that neighbours can be moved at once
    /// and small pieces by way of one staged transfer. Where it has them in order while others are
    /// still to come, the device says so to `landed`, as often as it sees fit: what is made of them
    /// (a checksum) is made while they are in the processor's caches.
    fn gather(&mut self, src: &[Piece], dst: &mut [u8], landed: &mut Landed<'_>) -> Result<()>;

    /// One host buffer into many device pieces, each from its own offset; in one call as for
    /// [`Stream::gather`].
    fn scatter(&mut self, src: &[u8], dst: &[Piece]) -> Result<()>;

    /// Pieces of the device and places of this process's memory that no slot holds, all in one
    /// transfer. No pair may write what another reads or writes.
    fn transfer(&mut self, direction: Direction, pairs: &[(DeviceSpan, HostSpan)]) -> Result<()>;

    /// As [`Stream::transfer`], without waiting. `done` is called exactly once; `Busy` when the
    /// queue is full, and then it is dropped without a call.
    fn transfer_async(
        &mut self,
        direction: Direction,
        pairs: Vec<(DeviceSpan, HostSpan)>,
        done: CopyDone,
    ) -> Result<()>;

    /// As [`Stream::copy`], without waiting. `done` is called exactly once, with `Busy` when the
    /// stream's queue is full.
    fn copy_async(&mut self, src: DeviceSpan, dst: DeviceSpan, done: CopyDone) {
        self.batch_async(vec![(src, dst)], done);
    }

    /// As [`Stream::batch`], without waiting; `done` as in [`Stream::copy_async`].
    fn batch_async(&mut self, pairs: Vec<(DeviceSpan, DeviceSpan)>, done: CopyDone);

    /// As [`Stream::gather`], without waiting. The operation owns `dst` and gives it to `done`,
    /// which is called exactly once, with `Busy` when the stream's queue is full.
    fn gather_async(&mut self, src: Vec<Piece>, dst: HostBuf, done: HostDone);

    /// As [`Stream::scatter`], without waiting; `src` and `done` as in [`Stream::gather_async`].
    fn scatter_async(&mut self, src: HostBuf, dst: Vec<Piece>, done: HostDone);

    /// Calls `call` when everything submitted before has ended. It must not block. `Busy` when the
    /// queue is full; then it is dropped without a call.
    fn callback(&mut self, call: Box<dyn FnOnce() + Send>) -> Result<()>;

    /// An event at this point of the stream. `Busy` when the queue is full.
    fn record(&mut self) -> Result<Arc<dyn Event>>;

    /// Lets everything submitted later start only when `event` is done; never waits itself. Where
    /// the event is not done by `deadline`, no later copy moves a byte: each fails with `Timeout`.
    /// `Busy` when the queue is full, `Unsupported` for an event of a device this one cannot wait
    /// for.
    fn wait_event(&mut self, event: Arc<dyn Event>, deadline: MonotonicTime) -> Result<()>;

    /// Waits until everything submitted has ended; `Timeout` when `deadline` comes first (`None`:
    /// for ever).
    fn synchronize(&mut self, deadline: Option<MonotonicTime>) -> Result<()>;
}
