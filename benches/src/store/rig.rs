//! Our side: an engine over one root, opened as in production except for the number of threads, and
//! the caller's memory.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use ucm_core::BlockId;
use ucm_device::{ArenaOptions, DeviceSpan, HostArena, HugePages, Slot, SlotPool};
use ucm_infra::SystemClock;
use ucm_store::builder::StoreSpec;
use ucm_store::engine::{Engine, Pieces, Row, RowSides, Task, Until};

use super::Result;
use super::contest::{Spent, Watch};

/// Layers of a block, one tensor each, as in a model of 7 or 8 billion parameters.
const LAYERS: usize = 32;
/// Longer than any turn.
const PATIENCE: Duration = Duration::from_secs(120);
/// Alignment of a caller's memory, in bytes, as of tensors: some processors copy to slightly
/// misaligned memory at a quarter of the speed.
const ALIGN: usize = 64;

/// A store over a root.
pub(super) struct Rig {
    engine: Engine,
    root: PathBuf,
}

impl Rig {
    /// Opens a store below `root`. `workers` threads may load and the same number may dump; staging
    /// has space for the blocks of a turn.
    pub(super) fn open(
        root: PathBuf,
        layout: &str,
        block: usize,
        workers: usize,
        direct: bool,
        count: usize,
    ) -> Result<Self> {
        let identity = crate::identity(&block.to_string());
        let seconds = PATIENCE.as_secs_f64();
        // Dumps use half of the threads. A quarter of the slots is reserved for loads.
        let spec = json!({
            "stages": [{
                "kind": "posix", "storage_backends": [root], "layout": layout, "io_direct": direct,
                "posix_data_trans_concurrency": workers * 2, "storage_capacity": 64u64 << 30,
                "free_space_floor": 0,
            }],
            "identity": identity, "part": [0, 0, 0], "tensor_sizes": [block / LAYERS],
            "shard_size": block, "block_size": block, "block_tokens": 128, "dtype": "f32",
            "labels": {}, "processes": 1, "scheduler_elsewhere": false, "lookup_only": false,
            "staging_bytes": (count * 4 / 3 + 4) * (block + 4096), "copy_threads": 1,
            "lookup_s": seconds, "load_s": seconds, "dump_s": seconds, "probe_s": seconds,
            "shutdown_s": 3.0, "breaker_threshold": 4,
            "breaker_window_s": 60.0, "breaker_cool_down_s": 10.0,
            "breaker_damaged_per_minute": 16,
        });
        let engine = StoreSpec::parse(&spec.to_string())?.open(SystemClock::shared())?;
        // Before the root is counted a store accepts only a few hundred blocks.
        let began = Instant::now();
        while engine.stats()["storage_counted"] != 1 {
            if began.elapsed() > PATIENCE {
                return Err("the root was not counted".into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(Self { engine, root })
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn record_len(&self) -> usize {
        self.engine.record_len()
    }

    /// Loads to the caller's memory.
    pub(super) fn load(&self, rows: Vec<Row>) -> Result<Spent> {
        self.timed(|engine| engine.load(rows, Some(PATIENCE)))
    }

    /// Loads to verified slots.
    pub(super) fn verify(&self, ids: &[BlockId]) -> Result<Spent> {
        self.timed(|engine| engine.verify(ids, Some(PATIENCE)))
    }

    /// Dumps until published.
    pub(super) fn dump(&self, rows: Vec<Row>) -> Result<Spent> {
        self.timed(|engine| engine.dump(rows))
    }

    fn timed(&self, begin: impl FnOnce(&Engine) -> ucm_core::Result<Task>) -> Result<Spent> {
        let watch = Watch::start();
        let task = begin(&self.engine)?;
        task.wait(self.engine.clock(), Until::Published, None);
        let spent = watch.stop();
        match task.failures().pop() {
            Some((_, error)) => Err(error.into()),
            None => Ok(spent),
        }
    }

    /// Ends the store and removes it.
    pub(super) fn retire(self) -> Result<()> {
        self.engine.close();
        Ok(std::fs::remove_dir_all(self.root)?)
    }
}

/// One slot, and the same bytes of a caller's memory, for every block of a turn.
pub(super) struct Stock {
    slots: Vec<Slot>,
    caller: Vec<u8>,
    /// Offset of the caller's memory in it.
    start: usize,
    block: usize,
    next: u64,
}

impl Stock {
    /// For `count` blocks; every page has been written before.
    pub(super) fn new(block: usize, record: usize, count: usize) -> Result<Self> {
        let options = ArenaOptions {
            huge: HugePages::Try,
            prefault: true,
            node: None,
        };
        let pool = SlotPool::with_slots(HostArena::with(record * count, options)?, record, count)?;
        let caller = vec![0x5a; block * count + ALIGN];
        let start = caller.as_ptr().align_offset(ALIGN);
        let slots = std::iter::from_fn(|| pool.try_acquire()).collect();
        Ok(Self {
            slots,
            caller,
            start,
            block,
            next: 0,
        })
    }

    /// Blocks of a turn.
    pub(super) fn count(&self) -> usize {
        self.slots.len()
    }

    /// Bytes of KV of a turn.
    pub(super) fn bytes(&self) -> usize {
        self.block * self.count()
    }

    pub(super) fn record_len(&self) -> usize {
        self.slots[0].len()
    }

    /// The caller's memory, one piece for each block; the slots; the length of a record's header.
    pub(super) fn parts(&mut self) -> (std::slice::ChunksExactMut<'_, u8>, &mut [Slot], usize) {
        let header = self.record_len() - self.block;
        let memory = self.caller[self.start..].chunks_exact_mut(self.block);
        (memory, &mut self.slots, header)
    }

    /// Rows of a load or dump of whole blocks, layer by layer, in the caller's memory.
    pub(super) fn rows(&mut self, ids: &[BlockId]) -> Vec<Row> {
        let (tensor, (memory, ..)) = (self.block / LAYERS, self.parts());
        let row = |(&id, memory): (&BlockId, &mut [u8])| Row {
            id,
            shard: 0,
            pieces: Pieces::Listed(memory.chunks_exact_mut(tensor).map(span).collect()),
            ready: None,
            sides: RowSides::None,
        };
        ids.iter().zip(memory).map(row).collect()
    }

    /// New ids for all blocks of a turn, spread like hashes.
    pub(super) fn fresh_ids(&mut self) -> Vec<BlockId> {
        let id = |number: u64| {
            let word = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            BlockId((u128::from(word) << 64 | u128::from(word.rotate_left(17))).to_le_bytes())
        };
        let first = self.next;
        self.next += self.count() as u64;
        (first..self.next).map(id).collect()
    }
}

#[allow(unsafe_code, reason = "device addresses of the bench's own memory")]
fn span(memory: &mut [u8]) -> DeviceSpan {
    // SAFETY: inside the caller's memory, which lives as long as the stock; a turn waits for the
    // end of its task before it uses that memory again.
    unsafe { DeviceSpan::new(memory.as_mut_ptr() as u64, memory.len() as u64) }
}
