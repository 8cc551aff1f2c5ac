//! Loads of side shards without the KV of their blocks.
//!
//! A read brings the header and the pages of the side shard and nothing else, into a slot like any
//! other read: from the record of the block in one tier after the other, then from the record in
//! which the side shard lies alone. Each id is for itself: one that is missing says nothing of the
//! next, and a damaged side shard says nothing of the KV.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tracing::warn;
use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, PAGE, Result, limits};
use ucm_device::Slot;
use ucm_io::IoJob;
use ucm_media::backend::{BlockRead, InPlace, Parts, ReadDone, ReadPart};
use ucm_record::{RecordHeader, RecordLayout, Refusal, verify_side};

use super::core::{Core, LANE_SIDES, await_end, closed, reason_named, reason_of, refusal};
use super::task::{Task, TaskState};
use crate::records::side_mask;
use crate::stats::{StageSpan, add};
use crate::tiers::{Reader, Request, TierRead};

/// Most reads of side shards at once, and the part of the slots that they take at most.
const AT_ONCE: usize = 64;
const SHARE: usize = 4;

/// A load of the side shards of one name, for a list of blocks.
#[derive(Clone)]
pub struct SidesTask {
    /// Its row *i* is the *i*-th id; one that has arrived ([`Task::shard_done`]) is there and
    /// sound, the others have failed by themselves, most of them because there is no such side
    /// shard ([`ErrorKind::NotFound`]).
    pub task: Task,
    load: Arc<SideLoad>,
}

impl SidesTask {
    /// Bytes of each side shard.
    pub fn side_len(&self) -> usize {
        self.load.len
    }

    /// The bytes of the side shards, one behind the other; zeros where one is not there. Final once
    /// the task is finished.
    pub fn bytes(&self) -> Vec<u8> {
        self.load.bytes.lock().clone()
    }
}

/// See [`SidesTask`].
struct SideLoad {
    core: Arc<Core>,
    state: Arc<TaskState>,
    request: Request,
    /// Which side shard, and its bytes.
    index: usize,
    len: usize,
    ids: Vec<BlockId>,
    /// Rows that have not ended.
    open: Box<[AtomicBool]>,
    bytes: Mutex<Vec<u8>>,
}

impl SideLoad {
    /// A row has ended, unless it had before.
    fn end_row(&self, row: usize, result: Result<&[u8]>) {
        if !self.open[row].swap(false, Ordering::AcqRel) {
            return;
        }
        match result {
            Ok(side) => {
                self.bytes.lock()[row * side.len()..][..side.len()].copy_from_slice(side);
                self.state.rows_arrived(std::iter::once(row));
                add(&self.core.stats.sides_loaded, 1);
            }
            Err(error) => {
                self.state.fail_row(row, error.with("block", self.ids[row]));
                add(&self.core.stats.sides_missing, 1);
            }
        }
        self.state.rows_staged(1);
        self.state.rows_finished(1);
    }

    /// Every row that has not ended fails.
    fn end(&self, error: &Error) {
        for row in 0..self.ids.len() {
            self.end_row(row, Err(error.clone()));
        }
    }
}

/// See the module.
pub(super) struct SideLoads {
    core: Arc<Core>,
    reads: Mutex<SideReads>,
}

/// Reads of side shards that wait for a slot, and those under way.
#[derive(Default)]
struct SideReads {
    pending: VecDeque<SideRead>,
    running: usize,
    /// A thread is starting reads.
    pumping: bool,
}

/// One row, and where it is read next.
struct SideRead {
    load: Arc<SideLoad>,
    row: usize,
    /// In the record in which it lies alone.
    alone: bool,
    /// The tier that was read last: the next one behind it that can be read follows.
    after: Option<usize>,
    /// The first failure of a copy above, other than that it is not there.
    failed: Option<Error>,
}

impl SideRead {
    /// The record to read.
    fn id(&self, layout: &RecordLayout) -> BlockId {
        let id = self.load.ids[self.row];
        match layout.sides().get(self.load.index) {
            Some(side) if self.alone => id.xor(side_mask(side)),
            _ => id,
        }
    }

    fn end(&self, result: Result<&[u8]>) {
        self.load.end_row(self.row, result);
    }
}

/// A read under way.
struct SideReading {
    loads: Arc<SideLoads>,
    read: SideRead,
    id: BlockId,
    tier: usize,
    /// The second read of the same copy, past every cache.
    again: bool,
}

impl SideLoads {
    pub(super) fn new(core: &Arc<Core>) -> Arc<Self> {
        Arc::new(Self {
            core: Arc::clone(core),
            reads: Mutex::default(),
        })
    }

    /// Starts loading side shards; see [`Engine::load_sides`](super::Engine::load_sides).
    pub(super) fn load(
        self: &Arc<Self>,
        ids: Vec<BlockId>,
        name: &str,
        deadline: Option<Duration>,
    ) -> Result<SidesTask> {
        let core = &self.core;
        core.check_count(ids.len())?;
        let index = core.parts.first.side_index(name)?;
        let len = core.parts.first.layout.sides()[index].len as usize;
        let rows = ids.len();
        if (rows as u64).saturating_mul(len as u64) > limits::MAX_BLOCK_BYTES {
            let text = "too many side shards in one call: at most 1 GiB";
            let many = Error::invalid(text).with("name", name);
            return Err(many.with("ids", rows).with("bytes_each", len));
        }
        let (state, request) = core.begin_load(rows, deadline);
        let load = Arc::new(SideLoad {
            core: Arc::clone(core),
            state: Arc::clone(&state),
            request,
            index,
            len,
            ids,
            open: (0..rows).map(|_| AtomicBool::new(true)).collect(),
            bytes: Mutex::new(vec![0; rows * len]),
        });
        let weak = Arc::downgrade(&load);
        let expire = move || {
            if let Some(load) = weak.upgrade() {
                let late = "the side shard was not there by the deadline";
                load.end(&Error::new(ErrorKind::Timeout, late));
            }
        };
        if rows > 0 {
            self.begin(&load);
        }
        let task = Task {
            state,
            expire: Arc::new(expire),
            flush_soon: Arc::new(|| {}),
        };
        Ok(SidesTask { task, load })
    }

    /// Lets the rows of a load wait for their reads, or ends it here.
    fn begin(self: &Arc<Self>, load: &Arc<SideLoad>) {
        if let Err(error) = self.core.check_available(load.state.started) {
            return load.end(&error);
        }
        let mut reads = self.reads.lock();
        if reads.pending.len() + load.ids.len() > limits::MAX_IDS_PER_CALL {
            drop(reads);
            let full = "too many side shards wait for a staging slot";
            return load.end(&Error::new(ErrorKind::Busy, full));
        }
        for row in 0..load.ids.len() {
            reads.pending.push_back(SideRead {
                load: Arc::clone(load),
                row,
                alone: false,
                after: None,
                failed: None,
            });
        }
        drop(reads);
        let this = Arc::clone(self);
        self.core.start(LANE_SIDES, move || this.pump());
        // Either the thread that closes the engine has seen them, or we see here that it is closed.
        if let Err(closed) = self.core.check_open() {
            load.end(&closed);
        }
    }

    /// Side shards waiting for a slot.
    pub(super) fn queued(&self) -> usize {
        self.reads.lock().pending.len()
    }

    /// Ends every load of side shards that still waits, because the engine is closed.
    pub(super) fn end(&self) {
        let pending = std::mem::take(&mut self.reads.lock().pending);
        for read in pending {
            read.end(Err(closed()));
        }
    }

    /// As [`Loads::await_pump`](super::reads::Loads::await_pump).
    pub(super) fn await_pump(&self) {
        await_end(|| self.reads.lock().pumping);
    }

    /// Starts waiting reads while slots are free, those of one tier together. One thread at a time,
    /// as in [`Loads::pump`](super::reads::Loads::pump).
    pub(super) fn pump(self: &Arc<Self>) {
        if std::mem::replace(&mut self.reads.lock().pumping, true) {
            return;
        }
        loop {
            let begun = self.take_slots();
            if begun.is_empty() {
                return;
            }
            let mut reads = Vec::with_capacity(begun.len());
            for (read, slot) in begun {
                match self.place(read) {
                    Some(reading) => reads.push(reading.in_tier(slot)),
                    None => drop(slot),
                }
            }
            self.core.tiers.reads.read(reads);
        }
    }

    /// Reads that can begin now, each with a slot; none ends the pumping. Rows that have ended are
    /// dropped.
    fn take_slots(&self) -> Vec<(SideRead, Slot)> {
        let slots = &self.core.device.slots;
        let most = (slots.capacity() / SHARE).clamp(1, AT_ONCE);
        let (mut begun, mut reads) = (Vec::new(), self.reads.lock());
        while reads.running < most
            && let Some(read) = reads.pending.pop_front()
        {
            if !read.load.open[read.row].load(Ordering::Acquire) {
                continue;
            }
            let Some(slot) = slots.try_acquire() else {
                reads.pending.push_front(read);
                break;
            };
            reads.running += 1;
            begun.push((read, slot));
        }
        reads.pumping = !begun.is_empty();
        begun
    }

    /// Where a side shard may be: in its block's record, in this tier or one below, then alone.
    /// Where no record can have it its row has ended, and its read with it.
    fn place(self: &Arc<Self>, mut read: SideRead) -> Option<SideReading> {
        loop {
            let (core, number) = (&self.core, read.load.request.number);
            let id = read.id(&core.parts.first.layout);
            if let Some(tier) = core.tiers.table.place(id, read.after, number) {
                return Some(SideReading {
                    loads: Arc::clone(self),
                    read,
                    id,
                    tier,
                    again: false,
                });
            }
            if read.alone {
                break;
            }
            (read.alone, read.after) = (true, None);
        }
        self.reads.lock().running -= 1;
        let absent = || Error::new(ErrorKind::NotFound, "no record has this side shard");
        let error = read.failed.take().unwrap_or_else(absent);
        read.end(Err(error));
        None
    }

    /// A read has ended, `next`: with this one to follow it, before those that wait.
    fn read_ended(self: &Arc<Self>, next: Option<SideRead>) {
        let mut reads = self.reads.lock();
        reads.running -= 1;
        if let Some(next) = next {
            reads.pending.push_front(next);
        }
        drop(reads);
        self.pump();
    }
}

impl SideReading {
    /// The read in its tier: the header, and the pages where the side shard lies in records of this
    /// store. Where the header names other pages, these are read after it.
    fn in_tier(self, slot: Slot) -> TierRead<Self> {
        let (layout, index) = (&self.loads.core.parts.first.layout, self.read.load.index);
        let pages = |range: Range<usize>| range.start..range.end.next_multiple_of(PAGE as usize);
        let mut first = Vec::with_capacity(2);
        if self.read.alone {
            first.push(0..layout.side_alone(index).map_or(0, |range| pages(range).end));
        } else {
            first.push(0..layout.header_len());
            first.extend(layout.side_data(index).map(pages));
        }
        let (wanted, room, brought) = (layout.sides()[index].clone(), slot.len(), first.clone());
        let mut found = false;
        let arrived = move |_: &IoJob, part: ReadPart<'_>| {
            let header = RecordHeader::decode(part.record).ok().filter(|_| !found)?;
            let pages = header.side_of(&wanted)?.pages();
            let holds = |part: &Range<usize>| part.start <= pages.start && pages.end <= part.end;
            found = true;
            (!brought.iter().any(holds) && pages.end <= room).then(|| vec![pages])
        };
        let request = self.read.load.request;
        let read = BlockRead {
            parts: Some(Parts {
                steps: vec![first],
                arrived: Box::new(arrived),
            }),
            sides: true,
            again: self.again,
            // one that the index does not know is not waited for: the caller makes it again
            looked: true,
            in_place: match self.again {
                true => InPlace::Never,
                false => InPlace::Region,
            },
            ..BlockRead::whole(self.id, slot, request.deadline)
        };
        TierRead {
            tier: self.tier,
            read,
            request,
            reader: self,
        }
    }

    /// Decrypts and verifies a side shard.
    fn verify<'a>(&self, done: &'a mut ReadDone) -> Result<&'a [u8], Refusal> {
        let core = &self.loads.core;
        let wanted = &core.parts.first.layout.sides()[self.read.load.index];
        if let Err(error) = core.tiers.decrypt_side(self.tier, self.id, wanted, done) {
            let reason = reason_named(&error);
            return Err(Refusal::new(
                reason,
                "record",
                error,
                "one that is authentic",
            ));
        }
        let record = done.lent.as_deref().unwrap_or(done.slot.as_slice());
        verify_side(
            record,
            done.stored_len,
            &core.parts.first.expect(self.id),
            wanted,
        )
    }

    /// This copy cannot be used: the next one is read.
    fn read_next(self, reason: MissReason, error: Error) {
        let (loads, mut read) = (self.loads, self.read);
        if error.kind() == ErrorKind::Closed {
            read.end(Err(error));
            return loads.read_ended(None);
        }
        if reason != MissReason::Absent {
            read.failed.get_or_insert(error);
        }
        read.after = Some(self.tier);
        loads.read_ended(Some(read));
    }

    /// A copy of a side shard is damaged. The record of a block stays: its KV is verified by the
    /// load that loads it. A record of the side shard alone is refused like any, so that the next
    /// dump replaces it.
    fn refuse(&self, reason: MissReason) {
        let (core, id) = (&self.loads.core, self.id);
        add(&core.stats.sides_refused, 1);
        if self.read.alone {
            core.refuse(id, Some(self.tier), reason);
            return;
        }
        let side = &core.parts.first.layout.sides()[self.read.load.index].name;
        let (store, name) = (core.parts.writer, reason.name());
        warn!(
            store,
            block = %id,
            reason = name,
            "side shard {side} of record {id} was refused ({name}); another copy is read"
        );
    }
}

impl Reader for SideReading {
    /// On the thread that has read a side shard: verified and delivered, or read from the next
    /// copy.
    fn read_ended(self, result: Result<ReadDone>, _: StageSpan) {
        let mut done = match result {
            Ok(done) => done,
            Err(error) => {
                let reason = reason_of(&error);
                return self.read_next(reason, error);
            }
        };
        let refused = match self.verify(&mut done) {
            Ok(side) => {
                self.read.end(Ok(side));
                drop(done);
                return self.loads.read_ended(None);
            }
            Err(refused) => refused,
        };
        if refused.reason.is_damage() && !self.again {
            // Past every cache: the medium may be damaged, or only the way from it.
            let (core, again) = (Arc::clone(&self.loads.core), true);
            let again = Self { again, ..self };
            return core.tiers.reads.read(vec![again.in_tier(done.slot)]);
        }
        let reason = refused.reason;
        if reason.is_damage() {
            self.refuse(reason);
        }
        drop(done);
        self.read_next(reason, refusal(reason).caused_by(Error::from(refused)));
    }
}
