//! One part of an engine: what it loads and dumps, where its KV lies, and how large its blocks are.
//! Everything else of a store is the same for all of its parts.

use std::sync::Arc;
use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Geometry, Part, Result};
use ucm_device::KvLayout;

use super::config::{Pieces, Row};
use super::dump::Dumps;
use super::reads::Loads;
use super::task::Task;
use crate::records::StoredRecords;

/// One of the parts whose blocks an [`Engine`](super::Engine) loads and dumps.
pub struct EnginePart {
    pub(super) records: Arc<StoredRecords>,
    pub(super) dumps: Arc<Dumps>,
    pub(super) loads: Arc<Loads>,
    /// Where the KV lies, once it was registered.
    pub(super) kv: Mutex<Option<Arc<KvLayout>>>,
}

impl EnginePart {
    /// Registers where the KV lies whose blocks [`EnginePart::rows_of_blocks`] names by number, in
    /// place of an earlier registration. Tasks under way keep theirs.
    ///
    /// # Errors
    /// `InvalidInput` where its pieces are not those of the geometry.
    pub fn register_kv(&self, layout: KvLayout) -> Result<()> {
        let geometry = self.geometry();
        let sizes = geometry.tensors();
        let expected = sizes.len() * geometry.layers() as usize;
        let lengths = layout.spans(0, 0..layout.pieces()).map(|span| span.len());
        if layout.pieces() != expected || !lengths.eq(sizes.iter().copied().cycle().take(expected))
        {
            let text = "the KV must have the pieces that the store was opened for";
            let wrong = Error::invalid(text).with("pieces", layout.pieces());
            return Err(wrong.with("expected", expected));
        }
        *self.kv.lock() = Some(Arc::new(layout));
        Ok(())
    }

    /// Rows of whole blocks, each with its number in the KV that was registered.
    ///
    /// # Errors
    /// `InvalidInput` before [`EnginePart::register_kv`], `Unsupported` where a block has several
    /// shards.
    pub fn rows_of_blocks(
        &self,
        blocks: impl IntoIterator<Item = (BlockId, u64)>,
    ) -> Result<Vec<Row>> {
        let Some(layout) = self.kv.lock().clone() else {
            return Err(Error::invalid(
                "no KV is registered with this store: name addresses, or register it first",
            ));
        };
        let shards = self.geometry().shards();
        if shards > 1 {
            let text =
                "this store splits its blocks into shards, which are named with their addresses";
            return Err(Error::new(ErrorKind::Unsupported, text).with("shards", shards));
        }
        let row = |(id, number)| Row::whole(id, Pieces::Block(Arc::clone(&layout), number));
        Ok(blocks.into_iter().map(row).collect())
    }

    /// Starts loading rows. A block that is absent, refused or late fails the task; see
    /// [`Task::failures`]. Blocks go by the order of their first rows: those before the first that
    /// failed are loaded, those after it that are still being read are cancelled. `deadline`: from
    /// now, the configured one if `None`, ten minutes at most; it ends all of them. A block whose
    /// row is wanted in its slot is read and verified whole, as by [`EnginePart::verify`].
    pub fn load(&self, rows: Vec<Row>, deadline: Option<Duration>) -> Result<Task> {
        self.loads.load(&self.records, rows, deadline)
    }

    /// Loads whole blocks into staging slots and no further: they are read and verified as for a
    /// load, which fails where that one would and has the same effects (a refused record is no hit
    /// any more), and no device memory is touched. `deadline` as of [`EnginePart::load`].
    pub fn verify(&self, ids: &[BlockId], deadline: Option<Duration>) -> Result<Task> {
        let rows = ids.iter().map(|&id| Row::whole(id, Pieces::Slot));
        self.load(rows.collect(), deadline)
    }

    /// Starts dumping rows, or refuses at once (Busy: no slot; Unhealthy: the breaker of the medium
    /// or of writes is open).
    pub fn dump(&self, rows: Vec<Row>) -> Result<Task> {
        self.dumps.dump(&self.records, rows)
    }

    /// Which part it is.
    pub fn part(&self) -> Part {
        self.records.part
    }

    /// The sizes of its blocks.
    pub fn geometry(&self) -> &Geometry {
        &self.records.geometry
    }

    /// Bytes of one of its records on the medium.
    pub fn record_len(&self) -> usize {
        self.records.layout.record_len()
    }
}
