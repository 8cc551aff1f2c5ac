//! What is moved between the device and a record in its slot: all pieces of a block in one
//! transfer.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use ucm_core::{Error, Result};
use ucm_device::{Device, Event, KvLayout, Piece, SlotPool, Stream};
use ucm_infra::{MonotonicTime, WorkerPool};

use super::{Core, Pieces};

/// The device of an engine, the memory on the way to it, and the threads that copy from it.
pub(super) struct DeviceSide {
    pub(super) streams: Streams,
    pub(super) slots: Arc<SlotPool>,
    /// So many of these stay out of reach of dumps.
    pub(super) reserved_slots: usize,
    pub(super) copies: Arc<WorkerPool>,
    /// Where the KV lies, once somebody said so.
    pub(super) kv: Mutex<Option<Arc<KvLayout>>>,
    /// What the device knows of the memory that tiers lend records from, until the engine ends.
    pub(super) _attached: Vec<Arc<dyn Any + Send + Sync>>,
}

/// The device, and those of its streams that no one uses: as many as there were transfers at a
/// time, at most as many as threads that make them. What they take of the device's memory is the
/// device's own, and bounded there.
pub(super) struct Streams {
    device: Arc<dyn Device>,
    idle: Mutex<Vec<Box<dyn Stream>>>,
}

impl Streams {
    pub(super) fn of(device: Arc<dyn Device>) -> Self {
        Self {
            device,
            idle: Mutex::default(),
        }
    }

    pub(super) fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// Runs a transfer on a stream that no one else uses, once the events of `ready` are done;
    /// `Timeout` where they are not by `deadline`.
    pub(super) fn with(
        &self,
        ready: &[Arc<dyn Event>],
        deadline: MonotonicTime,
        transfer: impl FnOnce(&mut dyn Stream) -> Result<()>,
    ) -> Result<()> {
        // Waited for here and not by the stream: what is given to a device cannot be taken back at
        // a deadline. Its caller may drop an event then: it is asked about by a wait that knows the
        // deadline, and by nothing else.
        for event in ready {
            event.wait(Some(deadline))?;
        }
        let idle = self.idle.lock().pop();
        let mut stream = match idle {
            Some(stream) => stream,
            None => self.device.make_stream()?,
        };
        transfer(&mut *stream)?; // a stream that failed is not used again
        self.idle.lock().push(stream);
        Ok(())
    }
}

impl Core {
    /// The layers of a shard.
    pub(super) fn layers_of(&self, shard: u32) -> Range<u32> {
        let count = self.records.geometry.layers_per_shard();
        shard * count..(shard + 1) * count
    }

    /// The device pieces of rows (row number, shard, pieces) of one block, layer by layer, each
    /// with its place in the record. `InvalidInput` for a piece that is not as long as its tensor.
    pub(super) fn pieces<'a>(
        &self,
        rows: impl IntoIterator<Item = &'a (usize, u32, Pieces)>,
    ) -> Result<Vec<Piece>> {
        let sizes = self.records.geometry.tensors();
        let mut all = Vec::new();
        for (row, shard, pieces) in rows {
            let spans = pieces.spans(*shard, self.records.geometry.tensors_per_shard());
            all.reserve(spans.len());
            for (layer, spans) in self.layers_of(*shard).zip(spans.chunks_exact(sizes.len())) {
                let mut at = self.records.layout.layer_data(layer).start;
                for (&span, &size) in spans.iter().zip(sizes) {
                    if span.len() != size {
                        let wrong = Error::invalid("a device piece is not as long as its tensor");
                        let wrong = wrong.with("row", row).with("layer", layer);
                        return Err(wrong.with("given", span.len()).with("expected", size));
                    }
                    all.push(Piece { at, span });
                    at += size as usize;
                }
            }
        }
        Ok(all)
    }
}
