//! The store for Python: one engine over one medium or a pipeline of several.
#![allow(unsafe_code, reason = "device addresses come from Python as numbers")]

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use numpy::{PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use ucm_core::{BlockId, Error, ErrorKind, MissReason};
use ucm_device::{KvLayout, KvPiece};
use ucm_infra::SystemClock;
use ucm_infra::log::{self, Level};
use ucm_store::builder::StoreSpec;
use ucm_store::engine::{self, Engine, EnginePart, Hint, Located, Row, RowSides};
use ucm_store::tiers::Priority;

use crate::convert::{CallResult, Ids, id_list};
use crate::ffi::{Published, row};
use crate::task::{OfProcess, Sides, Task, limit};

/// Most ids of a lookup in memory with the GIL held: a thousand take 0.2 ms.
const AT_ONCE: usize = 4096;

/// Most rows of a load or dump that is begun with the GIL held.
const ROWS_AT_ONCE: usize = 256;

/// A lookup on a thread of the store.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct Asked(OfProcess<engine::Asked>);

#[pymethods]
impl Asked {
    /// The result of the lookup, with "absent" if all ids are stored, and the seconds it took;
    /// `None` while it is unknown. Never waits.
    fn answer<'py>(
        &self,
        py: Python<'py>,
    ) -> CallResult<Option<(Bound<'py, PyBytes>, &'static str, f64)>> {
        let Some((located, took)) = self.0.get()?.answer() else {
            return Ok(None);
        };
        let (tiers, reason) = located?;
        let reason = reason.unwrap_or(MissReason::Absent).name();
        Ok(Some((PyBytes::new(py, &tiers), reason, took.as_secs_f64())))
    }
}

/// An engine over its tiers, for the blocks of one of its parts. All sizes in bytes, all times in
/// seconds.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct Store {
    engine: Arc<Engine>,
    /// The number of the part that is loaded and dumped. Above 0 it is a view of another store,
    /// which closes the engine.
    part: usize,
    table: OnceLock<Published>,
}

#[pymethods]
impl Store {
    /// `setup`: the description as JSON text, see [`StoreSpec`].
    #[new]
    fn new(py: Python<'_>, setup: &str) -> CallResult<Self> {
        let engine = py.detach(|| StoreSpec::parse(setup)?.open(SystemClock::shared()))?;
        Ok(Self::of(Arc::new(engine), 0))
    }

    /// The same store for the blocks of its part of this number: what it loads, dumps and registers
    /// is of that part, all else is the store's.
    fn for_part(&self, number: usize) -> CallResult<Self> {
        self.engine.check_process()?;
        self.engine.part_at(number)?;
        Ok(Self::of(Arc::clone(&self.engine), number))
    }

    /// For each id, true if it is stored completely.
    fn lookup(&self, py: Python<'_>, block_ids: Ids) -> CallResult<Vec<bool>> {
        Ok(py.detach(|| self.engine.lookup(&block_ids.0))?)
    }

    /// Number of ids stored without a gap, from the first on, and the reason why the next id is no
    /// hit; `None` if every id is a hit.
    fn explain_on_prefix(
        &self,
        py: Python<'_>,
        block_ids: Ids,
    ) -> CallResult<(usize, Option<&'static str>)> {
        let (run, reason) = py.detach(|| self.engine.explain_on_prefix(&block_ids.0))?;
        Ok((run, reason.map(MissReason::name)))
    }

    /// The tier from which each id would be read, a byte each, and the reason why the next id is no
    /// hit.
    fn locate_on_prefix<'py>(
        &self,
        py: Python<'py>,
        block_ids: Ids,
    ) -> CallResult<(Bound<'py, PyBytes>, Option<&'static str>)> {
        let (tiers, reason) = look_up(py, &self.engine, &block_ids.0, Engine::locate_on_prefix)?;
        Ok((PyBytes::new(py, &tiers), reason.map(MissReason::name)))
    }

    /// The same on a thread of the store.
    fn begin_locate_on_prefix(&self, block_ids: Ids) -> CallResult<Asked> {
        let asked = self.engine.begin_locate_on_prefix(block_ids.0)?;
        Ok(Asked(OfProcess::new(asked)))
    }

    /// The tier from which each id would be read, a byte each, 255 for one that is no hit.
    fn locate<'py>(&self, py: Python<'py>, block_ids: Ids) -> CallResult<Bound<'py, PyBytes>> {
        let (tiers, _) = look_up(py, &self.engine, &block_ids.0, Engine::locate)?;
        Ok(PyBytes::new(py, &tiers))
    }

    /// The same on a thread of the store, with the reason why the first one is no hit.
    fn begin_locate(&self, block_ids: Ids) -> CallResult<Asked> {
        let asked = self.engine.begin_locate(block_ids.0)?;
        Ok(Asked(OfProcess::new(asked)))
    }

    /// True if lookups need memory only, no system call.
    fn answers_at_once(&self) -> bool {
        self.engine.answers_at_once()
    }

    /// Starts a load; `timeout` in seconds, the configured deadline if `None`.
    #[pyo3(signature = (block_ids, shard_index, addrs, timeout = None))]
    fn load(
        &self,
        py: Python<'_>,
        block_ids: Ids,
        shard_index: Vec<i64>,
        addrs: PyReadonlyArray2<'_, u64>,
        timeout: Option<f64>,
    ) -> CallResult<Task> {
        let deadline = limit(timeout)?;
        let rows = rows(self.part()?, block_ids, &shard_index, &addrs)?;
        self.begin(py, rows, |part, rows| part.load(rows, deadline))
    }

    /// Registers the layout of the KV: piece `j` of block `n` is at `first[j] + n * stride[j]`, for
    /// `blocks` blocks.
    fn register_kv(
        &self,
        first: PyReadonlyArray1<'_, u64>,
        stride: PyReadonlyArray1<'_, u64>,
        blocks: u64,
    ) -> CallResult<()> {
        let (first, stride) = (first.as_array(), stride.as_array());
        if first.len() != stride.len() {
            let error = Error::invalid("first and stride must be equally long");
            let error = error.with("first", first.len());
            return Err(error.with("stride", stride.len()).into());
        }
        let part = self.part()?;
        let lengths = part.geometry().tensors().iter().cycle();
        let pieces = first.iter().zip(stride).zip(lengths);
        let pieces = pieces.map(|((&first, &stride), &len)| KvPiece { first, stride, len });
        // SAFETY: the caller of the store vouches that each piece of each block is that many bytes
        // of device memory, valid until the tasks that name the block have ended: the contract of
        // register_kv, load_blocks and dump_blocks.
        let layout = unsafe { KvLayout::new(pieces.collect(), blocks) };
        Ok(part.register_kv(layout?)?)
    }

    /// Starts a load of whole blocks into device blocks by number.
    #[pyo3(signature = (block_ids, blocks, timeout = None))]
    fn load_blocks(
        &self,
        py: Python<'_>,
        block_ids: Ids,
        blocks: PyReadonlyArray1<'_, i64>,
        timeout: Option<f64>,
    ) -> CallResult<Task> {
        let deadline = limit(timeout)?;
        let rows = numbered(self.part()?, block_ids, &blocks)?;
        self.begin(py, rows, |part, rows| part.load(rows, deadline))
    }

    /// Starts a dump of whole device blocks by number, or refuses it at once; `event` and `sides`
    /// as of `dump`.
    #[pyo3(signature = (block_ids, blocks, event = 0, sides = None))]
    fn dump_blocks(
        &self,
        py: Python<'_>,
        block_ids: Ids,
        blocks: PyReadonlyArray1<'_, i64>,
        event: u64,
        sides: Option<PyReadonlyArray2<'_, u8>>,
    ) -> CallResult<Task> {
        let rows = numbered(self.part()?, block_ids, &blocks)?;
        let rows = beside(rows, sides.as_ref())?;
        let rows = after(&self.engine, rows, event)?;
        self.begin(py, rows, |part, rows| part.dump(rows))
    }

    /// Starts reading the side shard of that name of each block, without its KV.
    #[pyo3(signature = (block_ids, name, timeout = None))]
    fn load_sides(
        &self,
        py: Python<'_>,
        block_ids: Ids,
        name: &str,
        timeout: Option<f64>,
    ) -> CallResult<Sides> {
        let (deadline, rows) = (limit(timeout)?, block_ids.0.len());
        let sides = py.detach(|| self.engine.load_sides(block_ids.0, name, deadline))?;
        let task = Py::new(py, Task(OfProcess::new(sides.task.clone())))?;
        let shape = [rows, sides.side_len()];
        Ok(Sides { task, sides, shape })
    }

    /// Starts writing side shards of blocks that are stored without them, or refuses at once. Bytes
    /// by name, with a row for each block.
    fn dump_sides(
        &self,
        py: Python<'_>,
        block_ids: Ids,
        sides: Vec<(String, PyReadonlyArray2<'_, u8>)>,
    ) -> CallResult<Task> {
        let bytes = |(name, rows): &(String, PyReadonlyArray2<'_, u8>)| {
            let bytes: Vec<u8> = rows.as_array().iter().copied().collect();
            (name.clone(), bytes)
        };
        let sides: Vec<_> = sides.iter().map(bytes).collect();
        let task = py.detach(|| {
            let sides: Vec<_> = sides
                .iter()
                .map(|(name, bytes)| (&**name, &bytes[..]))
                .collect();
            self.engine.dump_sides(&block_ids.0, &sides)
        })?;
        Ok(Task(OfProcess::new(task)))
    }

    /// The configured side shards: name, version of the content, bytes.
    fn sides(&self) -> Vec<(String, u32, u64)> {
        let sides = self.engine.sides().iter();
        sides
            .map(|side| (side.name.clone(), side.version, side.len))
            .collect()
    }

    /// Starts reading and verifying whole blocks as a load does, without copying them.
    #[pyo3(signature = (block_ids, timeout = None))]
    fn verify(&self, py: Python<'_>, block_ids: Ids, timeout: Option<f64>) -> CallResult<Task> {
        let deadline = limit(timeout)?;
        let part = self.part()?;
        let task = py.detach(|| part.verify(&block_ids.0, deadline))?;
        Ok(Task(OfProcess::new(task)))
    }

    /// Starts a dump, or refuses it at once. The source is read when the device's event of this
    /// handle is done (0: at once). `sides`: for each row its share of every side shard, in their
    /// order; copied here.
    #[pyo3(signature = (block_ids, shard_index, addrs, event = 0, sides = None))]
    fn dump(
        &self,
        py: Python<'_>,
        block_ids: Ids,
        shard_index: Vec<i64>,
        addrs: PyReadonlyArray2<'_, u64>,
        event: u64,
        sides: Option<PyReadonlyArray2<'_, u8>>,
    ) -> CallResult<Task> {
        let rows = rows(self.part()?, block_ids, &shard_index, &addrs)?;
        let rows = beside(rows, sides.as_ref())?;
        let rows = after(&self.engine, rows, event)?;
        self.begin(py, rows, |part, rows| part.dump(rows))
    }

    /// Hints for the header: parallel lists of ids, parents, ordinals and token counts, and the
    /// 32-byte tag of the blocks' tenant.
    #[pyo3(signature = (block_ids, parents, ordinals, tokens, tenant = None))]
    fn describe(
        &self,
        block_ids: Ids,
        parents: Option<Ids>,
        ordinals: Option<Vec<u32>>,
        tokens: Option<Vec<u32>>,
        tenant: Option<&[u8]>,
    ) -> CallResult<()> {
        let blocks = &block_ids.0;
        for (name, len) in [
            ("parents", parents.as_ref().map(|parents| parents.0.len())),
            ("ordinals", ordinals.as_ref().map(Vec::len)),
            ("tokens", tokens.as_ref().map(Vec::len)),
        ] {
            if let Some(len) = len.filter(|&len| len != blocks.len()) {
                let error = Error::invalid(format!("{name} must have one entry per block id"));
                let error = error.with("given", len).with("expected", blocks.len());
                return Err(error.into());
            }
        }
        let tenant: [u8; 32] = match tenant {
            None => [0; 32],
            Some(tag) => tag.try_into().map_err(|_| {
                Error::invalid("the tag of a tenant has 32 bytes").with("given", tag.len())
            })?,
        };
        let at = |list: &Option<Vec<u32>>, i: usize| list.as_ref().map_or(0, |list| list[i]);
        let hint = |i| Hint {
            parent: parents
                .as_ref()
                .map_or_else(BlockId::default, |parents| parents.0[i]),
            ordinal: at(&ordinals, i),
            tokens: at(&tokens, i),
            tenant,
        };
        let hints = blocks
            .iter()
            .enumerate()
            .map(|(i, &block)| (block, hint(i)));
        Ok(self.engine.describe(hints)?)
    }

    /// Another rank could not use these records: they are no hits until the next dump has replaced
    /// them.
    fn mark_bad(&self, block_ids: Ids) -> CallResult<()> {
        Ok(self.engine.mark_bad(&block_ids.0)?)
    }

    /// Another rank replaces these records: their refusals are cleared.
    fn clear_bad(&self, block_ids: Ids) -> CallResult<()> {
        Ok(self.engine.clear_bad(&block_ids.0)?)
    }

    /// These blocks, in chain order from ordinal `first` on, were used.
    #[pyo3(signature = (block_ids, first = 0))]
    fn touch(&self, py: Python<'_>, block_ids: Ids, first: u32) -> CallResult<()> {
        let ids: Vec<(BlockId, u32)> = block_ids.0.into_iter().zip(first..).collect();
        Ok(py.detach(|| self.engine.touch(&ids))?)
    }

    /// The same, for records that only this process can touch.
    #[pyo3(signature = (block_ids, first = 0))]
    fn touch_own(&self, block_ids: Ids, first: u32) -> CallResult<()> {
        let ids: Vec<(BlockId, u32)> = block_ids.0.into_iter().zip(first..).collect();
        Ok(self.engine.touch_own(&ids)?)
    }

    /// Whether `touch_own` does anything.
    fn wants_touch_own(&self) -> CallResult<bool> {
        self.engine.check_process()?;
        Ok(self.engine.wants_touch_own())
    }

    /// Prefetches blocks into the upper tiers; returns the number of accepted ones.
    fn prefetch(&self, py: Python<'_>, block_ids: Ids, priority: &str) -> CallResult<usize> {
        let Some(priority) = Priority::of_name(priority) else {
            let known = Priority::ALL.map(Priority::name).join(", ");
            let error = Error::invalid("there is no such priority").with("priority", priority);
            return Err(error.with("known", known).into());
        };
        Ok(py.detach(|| self.engine.prefetch(&block_ids.0, priority))?)
    }

    /// Cancels the prefetch of these blocks; returns the number of those still waiting.
    fn cancel_prefetch(&self, py: Python<'_>, block_ids: Ids) -> CallResult<usize> {
        Ok(py.detach(|| self.engine.cancel_prefetch(&block_ids.0))?)
    }

    /// Publishes soon the dumped blocks that wait for others to be published with them.
    fn flush(&self, py: Python<'_>) -> CallResult<()> {
        Ok(py.detach(|| self.engine.flush())?)
    }

    /// Has what others have published listed soon.
    fn refresh(&self, py: Python<'_>) -> CallResult<()> {
        Ok(py.detach(|| self.engine.refresh())?)
    }

    /// Number of blocks that a dump could accept now.
    fn free_dump_slots(&self) -> CallResult<usize> {
        self.engine.check_process()?;
        Ok(self.engine.free_dump_slots())
    }

    /// Ids that this process can read before others, added and removed since the last call.
    fn early<'py>(&self, py: Python<'py>) -> CallResult<(Bound<'py, PyList>, Bound<'py, PyList>)> {
        let early = self.engine.locally_visible()?;
        Ok((id_list(py, &early.added)?, id_list(py, &early.removed)?))
    }

    /// Bytes of one record on the medium.
    #[getter]
    fn record_len(&self) -> CallResult<usize> {
        Ok(self.part()?.record_len())
    }

    /// Counters, gauges and histograms as JSON text.
    fn stats(&self, py: Python<'_>) -> CallResult<String> {
        self.engine.check_process()?;
        Ok(py.detach(|| self.engine.stats().to_string()))
    }

    /// The core's log records of this store since the last call: (level of `logging`, message,
    /// fields).
    fn take_log(&self) -> Vec<Line> {
        lines_of(self.engine.writer())
    }

    /// Address of the store's C table (`ucm_store.h`), the same in every call; it is for blocks of
    /// the first part. An error after the store was closed.
    fn cc_store(&self) -> CallResult<usize> {
        if self.part > 0 {
            let text = "the C table of a store is for blocks of its first part";
            return Err(Error::new(ErrorKind::Unsupported, text).into());
        }
        if let Some(table) = self.table.get() {
            return Ok(table.address());
        }
        let table = Published::new(&self.engine)?;
        Ok(self.table.get_or_init(|| table).address())
    }

    /// Ends the store; repeatable, and without effect in a forked child.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.end());
    }
}

impl Drop for Store {
    /// Closing waits for work under way, so the GIL is released.
    fn drop(&mut self) {
        let close = || self.end();
        if Python::try_attach(|py| py.detach(close)).is_none() {
            close();
        }
        if self.part == 0 {
            log::forget(self.engine.writer());
        }
    }
}

/// A log record: the level of `logging`, the message, the fields.
pub(crate) type Line = (u32, String, HashMap<&'static str, String>);

/// The log records of a store since the last call, see [`log::take`].
pub(crate) fn lines_of(store: u64) -> Vec<Line> {
    let line = |record: log::Record| {
        let fields = record.fields.into_iter().collect();
        (level(record.level), record.message, fields)
    };
    log::take(store).into_iter().map(line).collect()
}

/// The number of a level in Python's `logging`.
fn level(level: Level) -> u32 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG | Level::TRACE => 10,
    }
}

impl Store {
    fn of(engine: Arc<Engine>, part: usize) -> Self {
        Self {
            engine,
            part,
            table: OnceLock::new(),
        }
    }

    fn part(&self) -> ucm_core::Result<&EnginePart> {
        self.engine.part_at(self.part)
    }

    fn end(&self) {
        if self.part > 0 {
            return; // the store that this is a view of ends it
        }
        if let Some(table) = self.table.get() {
            table.close();
        }
        self.engine.close();
    }

    /// Begins a load or dump, with the GIL held if that is short.
    fn begin(
        &self,
        py: Python<'_>,
        rows: Vec<Row>,
        begin: impl FnOnce(&EnginePart, Vec<Row>) -> ucm_core::Result<engine::Task> + Send,
    ) -> CallResult<Task> {
        let (many, part) = (rows.len() > ROWS_AT_ONCE, self.part()?);
        let begin = || begin(part, rows);
        let task = if many { py.detach(begin) } else { begin() }?;
        Ok(Task(OfProcess::new(task)))
    }
}

/// Rows of whole blocks by their numbers on the device.
fn numbered(
    part: &EnginePart,
    block_ids: Ids,
    blocks: &PyReadonlyArray1<'_, i64>,
) -> CallResult<Vec<Row>> {
    let (ids, blocks) = (block_ids.0, blocks.as_array());
    if ids.len() != blocks.len() {
        let error = Error::invalid("block_ids and blocks must be equally many");
        let error = error.with("block_ids", ids.len());
        return Err(error.with("blocks", blocks.len()).into());
    }
    // A negative number also lies beyond every layout's last block.
    let numbers = blocks.iter().map(|&number| number as u64);
    Ok(part.rows_of_blocks(ids.into_iter().zip(numbers))?)
}

/// Rows that wait for an event of the device, unless its handle is 0.
fn after(engine: &Engine, mut rows: Vec<Row>, event: u64) -> ucm_core::Result<Vec<Row>> {
    if event != 0 {
        let event = engine.event_of(event)?;
        for row in &mut rows {
            row.ready = Some(Arc::clone(&event));
        }
    }
    Ok(rows)
}

/// Rows by the addresses of their pieces.
fn rows(
    part: &EnginePart,
    block_ids: Ids,
    shard_index: &[i64],
    addrs: &PyReadonlyArray2<'_, u64>,
) -> CallResult<Vec<Row>> {
    let (ids, geometry) = (block_ids.0, part.geometry());
    let (rows, pieces) = (addrs.shape()[0], addrs.shape()[1]);
    if ids.len() != rows || shard_index.len() != rows {
        let error =
            Error::invalid("block_ids, shard_index and the rows of addrs must be equally many");
        let error = error.with("block_ids", ids.len());
        let error = error.with("shard_index", shard_index.len());
        return Err(error.with("addrs", rows).into());
    }
    if rows > 0 && pieces != geometry.tensors_per_shard() {
        let error = Error::invalid("addrs must have one column per tensor of a shard");
        let error = error.with("columns", pieces);
        return Err(error.with("expected", geometry.tensors_per_shard()).into());
    }
    let shards = ids.into_iter().zip(shard_index);
    let mut read = Vec::with_capacity(rows);
    for (number, ((id, &shard), addrs)) in shards.zip(addrs.as_array().rows()).enumerate() {
        let shard = u32::try_from(shard).map_err(|_| {
            let error = Error::invalid("shard index out of range").with("row", number);
            error.with("shard", shard).with("shards", geometry.shards())
        })?;
        // SAFETY: the caller of the store vouches that each address names that many bytes
        // of device memory, valid until the task ended; that is the contract of load_data
        // and dump_data.
        let row = unsafe { row(geometry, number, (id, shard), addrs.iter().copied()) };
        read.push(row?);
    }
    Ok(read)
}

/// Looks ids up, with the GIL held if that is short.
fn look_up(
    py: Python<'_>,
    engine: &Engine,
    ids: &[BlockId],
    lookup: fn(&Engine, &[BlockId]) -> Located,
) -> Located {
    match engine.answers_at_once() && ids.len() <= AT_ONCE {
        true => lookup(engine, ids),
        false => py.detach(|| lookup(engine, ids)),
    }
}

/// Rows with their side shards.
fn beside(
    mut rows: Vec<Row>,
    sides: Option<&PyReadonlyArray2<'_, u8>>,
) -> ucm_core::Result<Vec<Row>> {
    let Some(sides) = sides.map(PyReadonlyArray2::as_array) else {
        return Ok(rows);
    };
    if sides.nrows() != rows.len() {
        let error = Error::invalid("sides must have a row for each row of the dump");
        return Err(error
            .with("given", sides.nrows())
            .with("expected", rows.len()));
    }
    for (row, sides) in rows.iter_mut().zip(sides.rows()) {
        row.sides = RowSides::Beside(sides.iter().copied().collect());
    }
    Ok(rows)
}
