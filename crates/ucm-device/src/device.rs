//! The seam between the engine and the places KV lives in: devices, their streams and events.
//!
//! Operations of one stream take effect in order. The synchronous forms return when the bytes have moved (and wait for
//! whatever the stream had in flight before); the asynchronous ones own what they need until they call back.

use std::any::Any;
use std::sync::Arc;

use ucm_core::Result;
use ucm_infra::MonotonicTime;

use crate::arena::{ArenaOptions, HostArena};
use crate::slots::HostBuf;
use crate::span::{DeviceSpan, Piece, end_to_end};

/// Called once with the outcome of an asynchronous copy between device pieces; must not block.
pub type CopyDone = Box<dyn FnOnce(Result<()>) + Send>;

/// Called once with the host buffer of an asynchronous gather or scatter and its outcome; must not block.
pub type HostDone = Box<dyn FnOnce(HostBuf, Result<()>) + Send>;

/// A kind of memory that KV lives in.
pub trait Device: Send + Sync {
    /// Name in logs and configuration ("host", "cuda:0").
    fn name(&self) -> &str;

    /// A new stream. Streams are not shared between threads; each worker makes its own.
    fn make_stream(&self) -> Result<Box<dyn Stream>>;

    /// Host memory that this device copies to and from at full speed.
    fn make_arena(&self, bytes: usize, options: ArenaOptions) -> Result<Arc<HostArena>>;
}

/// A point in a stream: done when everything submitted before it has ended.
pub trait Event: Any + Send + Sync {
    /// Whether it is done. Never waits.
    fn done(&self) -> bool;

    /// Waits until it is done; `Timeout` when `deadline` comes first (`None`: for ever).
    fn wait(&self, deadline: Option<MonotonicTime>) -> Result<()>;
}

/// An ordered queue of copies.
///
/// Lengths are checked before the first byte moves: an `InvalidInput` error has changed nothing.
pub trait Stream: Send {
    /// Copies one piece of the device to another of the same length; they may overlap.
    fn copy(&mut self, src: DeviceSpan, dst: DeviceSpan) -> Result<()> {
        self.batch(&[(src, dst)])
    }

    /// Copies many pieces (source, destination). No pair may write what another reads or writes.
    fn batch(&mut self, pairs: &[(DeviceSpan, DeviceSpan)]) -> Result<()>;

    /// Many device pieces into one host buffer, end to end; together they must be exactly as long as `dst`.
    fn gather(&mut self, src: &[DeviceSpan], dst: &mut [u8]) -> Result<()> {
        fits(src, dst.len())?;
        self.gather_pieces(&end_to_end(0, src), dst)
    }

    /// One host buffer into many device pieces, end to end; together they must be exactly as long as `src`.
    fn scatter(&mut self, src: &[u8], dst: &[DeviceSpan]) -> Result<()> {
        fits(dst, src.len())?;
        self.scatter_pieces(src, &end_to_end(0, dst))
    }

    /// Many device pieces into one host buffer, each at its own offset; the bytes between them are left alone.
    fn gather_pieces(&mut self, src: &[Piece], dst: &mut [u8]) -> Result<()>;

    /// One host buffer into many device pieces, each from its own offset.
    fn scatter_pieces(&mut self, src: &[u8], dst: &[Piece]) -> Result<()>;

    /// As [`Stream::copy`], without waiting. `done` is called exactly once, with `Busy` when the stream's queue is full.
    fn copy_async(&mut self, src: DeviceSpan, dst: DeviceSpan, done: CopyDone) {
        self.batch_async(vec![(src, dst)], done);
    }

    /// As [`Stream::batch`], without waiting; `done` as in [`Stream::copy_async`].
    fn batch_async(&mut self, pairs: Vec<(DeviceSpan, DeviceSpan)>, done: CopyDone);

    /// As [`Stream::gather_pieces`], without waiting. The operation owns `dst` and gives it to `done`, which is called
    /// exactly once, with `Busy` when the stream's queue is full.
    fn gather_async(&mut self, src: Vec<Piece>, dst: HostBuf, done: HostDone);

    /// As [`Stream::scatter_pieces`], without waiting; `src` and `done` as in [`Stream::gather_async`].
    fn scatter_async(&mut self, src: HostBuf, dst: Vec<Piece>, done: HostDone);

    /// Calls `call` when everything submitted before has ended. It must not block. `Busy` when the queue is full; then
    /// it is dropped without a call.
    fn callback(&mut self, call: Box<dyn FnOnce() + Send>) -> Result<()>;

    /// An event at this point of the stream. `Busy` when the queue is full.
    fn record(&mut self) -> Result<Arc<dyn Event>>;

    /// Lets everything submitted later start only when `event` is done. `Busy` when the queue is full, `Unsupported` for
    /// an event of a device this one cannot wait for.
    fn wait_event(&mut self, event: Arc<dyn Event>) -> Result<()>;

    /// Waits until everything submitted has ended; `Timeout` when `deadline` comes first (`None`: for ever).
    fn synchronize(&mut self, deadline: Option<MonotonicTime>) -> Result<()>;
}

/// Checks that the spans are together exactly as long as the host buffer.
fn fits(spans: &[DeviceSpan], host: usize) -> Result<()> {
    let total = spans
        .iter()
        .try_fold(0u64, |sum, span| sum.checked_add(span.len()));
    if total == Some(host as u64) {
        return Ok(());
    }
    Err(
        ucm_core::Error::invalid("device pieces and host buffer differ in length")
            .with(
                "pieces",
                total.map_or_else(|| "too long".to_owned(), |n| n.to_string()),
            )
            .with("host", host),
    )
}
