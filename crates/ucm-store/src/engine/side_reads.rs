//! Reading side shards without the KV of their blocks.
//!
//! A read brings the header and the pages of the side shard and nothing else, into a slot like any
//! other read. It looks through the tiers from the top for the record of the block, then for the
//! one in which the side shard lies alone. Each id is for itself: one that is missing says nothing
//! of the next, and what is wrong with a side shard says nothing of the KV.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tracing::warn;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, PAGE, Result, limits};
use ucm_device::Slot;
use ucm_infra::MonotonicTime;
use ucm_io::IoJob;
use ucm_record::{RecordHeader, RecordLayout, Refusal, verify_side};
use ucm_tier::backend::{BlockRead, InPlace, Part, Parts, ReadDone};

use super::Core;
use super::load::LONGEST_LOAD;
use super::sides::mask;
use super::task::{Task, TaskState};
use super::verify::{reason_named, reason_of, refusal};
use crate::stats::Stats;
use crate::tiers::{Request, TierRead};

/// Most reads of side shards at once, and the part of the slots that they take at most.
const AT_ONCE: usize = 64;
const SHARE: usize = 4;

/// Side shards of one name being read, for a list of blocks.
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

/// Reads of side shards that wait for a slot, and those under way.
#[derive(Default)]
pub(super) struct SideReads {
    pending: VecDeque<SideRead>,
    running: usize,
    /// A thread is starting reads.
    pumping: bool,
}

impl SideReads {
    pub(super) fn queued(&self) -> usize {
        self.pending.len()
    }

    pub(super) fn is_pumping(&self) -> bool {
        self.pumping
    }
}

/// One row, and where it is looked for next.
struct SideRead {
    load: Arc<SideLoad>,
    row: usize,
    /// In the record in which it lies alone.
    alone: bool,
    /// The tier that was asked last: the next one behind it that can be asked is.
    after: Option<usize>,
    /// What was told of copies above that is more than that they are not there.
    told: Option<Error>,
}

/// A read under way.
struct Reading {
    read: SideRead,
    id: BlockId,
    tier: usize,
    /// The second read of the same copy, past every cache.
    again: bool,
}

impl SideRead {
    /// The record to look in.
    fn id(&self, layout: &RecordLayout) -> BlockId {
        let id = self.load.ids[self.row];
        match layout.sides().get(self.load.index) {
            Some(side) if self.alone => id.xor(mask(side)),
            _ => id,
        }
    }

    fn is_open(&self) -> bool {
        self.load.open[self.row].load(Ordering::Acquire)
    }
}

impl Core {
    /// Starts reading the side shard of that name of each block, without its KV. `deadline` as of
    /// [`Core::load`]. A side shard that is missing, late or not sound fails its own row and no
    /// other.
    ///
    /// # Errors
    /// `InvalidInput` for a name that the store was not opened with, too many ids, or more than 1
    /// GiB of side shards.
    pub fn load_sides(
        self: &Arc<Self>,
        ids: Vec<BlockId>,
        name: &str,
        deadline: Option<Duration>,
    ) -> Result<SidesTask> {
        self.check_count(ids.len())?;
        let index = self.side_index(name)?;
        let now = self.clock.now();
        let deadline = now.after(deadline.unwrap_or(self.deadlines.load).min(LONGEST_LOAD));
        let (rows, len) = (ids.len(), self.records.layout.sides()[index].len as usize);
        if (rows as u64).saturating_mul(len as u64) > limits::MAX_BLOCK_BYTES {
            let many = Error::invalid("too many side shards in one call: at most 1 GiB")
                .with("name", name);
            return Err(many.with("ids", rows).with("bytes_each", len));
        }
        let state = TaskState::new(rows, now, deadline);
        let load = Arc::new(SideLoad {
            state: Arc::clone(&state),
            request: self.tiers.request(deadline),
            index,
            len,
            ids,
            open: (0..rows).map(|_| AtomicBool::new(true)).collect(),
            bytes: Mutex::new(vec![0; rows * len]),
        });
        let weak = (Arc::downgrade(self), Arc::downgrade(&load));
        let expire = move || {
            if let (Some(core), Some(load)) = (weak.0.upgrade(), weak.1.upgrade()) {
                let late = "the side shard was not there by the deadline";
                core.end_side_load(&load, &Error::new(ErrorKind::Timeout, late));
            }
        };
        let task = Task {
            state: Arc::clone(&state),
            expire: Arc::new(expire),
            flush_soon: Arc::new(|| {}),
        };
        self.life.open_tasks.add(&state);
        if rows > 0 {
            self.begin_side_load(&load, now);
        }
        Ok(SidesTask { task, load })
    }

    /// Lets the rows of a load wait for their reads, or ends it here.
    fn begin_side_load(self: &Arc<Self>, load: &Arc<SideLoad>, now: MonotonicTime) {
        if let Err(error) = self.check_available(now) {
            return self.end_side_load(load, &error);
        }
        let read = |row| SideRead {
            load: Arc::clone(load),
            row,
            alone: false,
            after: None,
            told: None,
        };
        {
            let mut reads = self.reads.sides.lock();
            if reads.pending.len() + load.ids.len() > limits::MAX_IDS_PER_CALL {
                drop(reads);
                let full = "too many side shards wait for a staging slot";
                return self.end_side_load(load, &Error::new(ErrorKind::Busy, full));
            }
            reads.pending.extend((0..load.ids.len()).map(read));
        }
        self.pump_elsewhere();
        // Either the thread that closes the engine has seen them, or we see here that it is closed.
        if let Err(closed) = self.usable() {
            self.end_side_load(load, &closed);
        }
    }

    /// Starts waiting reads while slots are free, those of one tier together. One thread at a time,
    /// as in [`Core::pump`].
    pub(super) fn pump_sides(self: &Arc<Self>) {
        if std::mem::replace(&mut self.reads.sides.lock().pumping, true) {
            return;
        }
        loop {
            let begun = self.take_slots_for_sides();
            if begun.is_empty() {
                return;
            }
            let mut batches: Vec<(usize, Vec<TierRead<Reading>>)> = Vec::new();
            for (read, slot) in begun {
                let Some(reading) = self.place_side(read) else {
                    drop(slot);
                    continue;
                };
                let tier = reading.tier;
                let read = self.tier_read_of_side(reading, slot);
                match batches.last_mut() {
                    Some((last, batch)) if *last == tier => batch.push(read),
                    _ => batches.push((tier, vec![read])),
                }
            }
            for (tier, batch) in batches {
                self.tiers.read(tier, batch, &self.side_way_on());
            }
        }
    }

    /// Reads that can begin now, each with a slot; none ends the pumping. Rows that have ended are
    /// dropped.
    fn take_slots_for_sides(&self) -> Vec<(SideRead, Slot)> {
        let most = (self.device.slots.capacity() / SHARE).clamp(1, AT_ONCE);
        let (mut begun, mut reads) = (Vec::new(), self.reads.sides.lock());
        while reads.running < most
            && let Some(read) = reads.pending.pop_front()
        {
            if !read.is_open() {
                continue;
            }
            let Some(slot) = self.device.slots.try_acquire() else {
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
    /// Where it is nowhere its row has ended, and so has its place among those that run.
    fn place_side(self: &Arc<Self>, mut read: SideRead) -> Option<Reading> {
        loop {
            let id = read.id(&self.records.layout);
            if let Some(tier) = self.tiers.place(id, read.after, read.load.request.number) {
                return Some(Reading {
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
        self.reads.sides.lock().running -= 1;
        let nowhere = || Error::new(ErrorKind::NotFound, "no record has this side shard");
        let error = read.told.take().unwrap_or_else(nowhere);
        self.end_side(&read.load, read.row, Err(error));
        None
    }

    /// What a tier is asked for: the header, and the pages where the side shard lies in records of
    /// this store. Where the header names other pages, these are read then.
    fn tier_read_of_side(&self, reading: Reading, slot: Slot) -> TierRead<Reading> {
        let (layout, index) = (&self.records.layout, reading.read.load.index);
        let pages = |range: Range<usize>| range.start..range.end.next_multiple_of(PAGE as usize);
        let (head, side) = if reading.read.alone {
            (
                0..layout.side_alone(index).map_or(0, |range| pages(range).end),
                None,
            )
        } else {
            (0..layout.header_len(), layout.side_data(index).map(pages))
        };
        let first: Vec<_> = std::iter::once(head).chain(side).collect();
        let (wanted, room, brought) = (layout.sides()[index].clone(), slot.len(), first.clone());
        let mut asked = false;
        let arrived = move |_: &IoJob, part: Part<'_>| {
            let header = RecordHeader::decode(part.record).ok().filter(|_| !asked)?;
            let pages = header.side_of(&wanted)?.pages();
            let here = brought
                .iter()
                .any(|part| part.start <= pages.start && pages.end <= part.end);
            asked = true;
            (!here && pages.end <= room).then(|| vec![pages])
        };
        let request = reading.read.load.request;
        let read = BlockRead {
            parts: Some(Parts {
                steps: vec![first],
                arrived: Box::new(arrived),
            }),
            sides: true,
            again: reading.again,
            // one that is not known to be there is not looked for: the caller makes it again
            looked: true,
            in_place: match reading.again {
                true => InPlace::Never,
                false => InPlace::Region,
            },
            ..BlockRead::whole(reading.id, slot, request.deadline)
        };
        TierRead {
            read,
            request,
            whose: reading,
        }
    }

    fn side_way_on(
        self: &Arc<Self>,
    ) -> Arc<impl Fn(Reading, Result<ReadDone>) + Send + Sync + 'static + use<>> {
        let core = Arc::clone(self);
        Arc::new(move |reading, result| core.side_came(reading, result))
    }

    /// The way of a side shard on the thread that has read it: verified, and handed over; or looked
    /// for in the next copy.
    fn side_came(self: &Arc<Self>, reading: Reading, result: Result<ReadDone>) {
        let Reading {
            mut read,
            id,
            tier,
            again,
        } = reading;
        let (load, row) = (Arc::clone(&read.load), read.row);
        let (reason, error) = match result {
            Err(error) => (reason_of(&error), error),
            Ok(mut done) => {
                let wanted = &self.records.layout.sides()[load.index];
                let decrypted = self.tiers.decrypt_side(tier, id, wanted, &mut done);
                let record = done.lent.as_deref().unwrap_or(done.slot.as_slice());
                let checked = verify_side(record, done.stored_len, &self.expect(id), wanted);
                let refused = |error| {
                    Refusal::new(
                        reason_named(&error),
                        "record",
                        &error,
                        "one that is authentic",
                    )
                };
                match decrypted.map_err(refused).and(checked) {
                    Ok(bytes) => {
                        self.end_side(&load, row, Ok(bytes));
                        self.reads.sides.lock().running -= 1;
                        drop(done);
                        return self.pump_sides();
                    }
                    // The medium or the way from it? A second read past every cache tells.
                    Err(refused) if refused.reason.is_damage() && !again => {
                        let again = Reading {
                            read,
                            id,
                            tier,
                            again: true,
                        };
                        let read = self.tier_read_of_side(again, done.slot);
                        return self.tiers.read(tier, vec![read], &self.side_way_on());
                    }
                    Err(refused) => {
                        let reason = refused.reason;
                        (reason, refusal(reason).caused_by(Error::from(refused)))
                    }
                }
            }
        };
        if reason.is_damage() {
            self.side_refused(&read, id, tier, reason);
        }
        if error.kind() == ErrorKind::Closed {
            self.reads.sides.lock().running -= 1;
            self.end_side(&load, row, Err(error));
            return self.pump_sides();
        }
        if reason != MissReason::Absent {
            read.told.get_or_insert(error);
        }
        read.after = Some(tier);
        let mut reads = self.reads.sides.lock();
        reads.running -= 1;
        reads.pending.push_front(read);
        drop(reads);
        self.pump_sides();
    }

    /// A copy of a side shard is not sound. The record of a block is left alone: its KV is verified
    /// by the load that loads it. One that is nothing else is refused like any record, so that the
    /// next dump replaces it.
    fn side_refused(
        self: &Arc<Self>,
        read: &SideRead,
        id: BlockId,
        tier: usize,
        reason: MissReason,
    ) {
        Stats::add(&self.stats.sides_refused, 1);
        if read.alone {
            self.refuse(id, Some(tier), reason);
            return;
        }
        let side = &self.records.layout.sides()[read.load.index].name;
        let name = reason.name();
        warn!(
            store = self.records.writer,
            block = %id,
            reason = name,
            "side shard {side} of record {id} was refused ({name}); it is looked for elsewhere"
        );
    }

    /// A row has ended, unless it had before.
    fn end_side(&self, load: &SideLoad, row: usize, result: Result<&[u8]>) {
        if !load.open[row].swap(false, Ordering::AcqRel) {
            return;
        }
        match result {
            Ok(side) => {
                load.bytes.lock()[row * side.len()..][..side.len()].copy_from_slice(side);
                load.state.rows_arrived(std::iter::once(row));
                Stats::add(&self.stats.sides_loaded, 1);
            }
            Err(error) => {
                load.state.fail_row(row, error.with("block", load.ids[row]));
                Stats::add(&self.stats.sides_missing, 1);
            }
        }
        load.state.rows_staged(1);
        load.state.rows_finished(1);
    }

    /// Every row that has not ended fails.
    fn end_side_load(&self, load: &SideLoad, error: &Error) {
        for row in 0..load.ids.len() {
            self.end_side(load, row, Err(error.clone()));
        }
    }

    /// Ends every load of side shards that still waits, because the engine is closed.
    pub(super) fn end_side_loads(&self) {
        let pending = std::mem::take(&mut self.reads.sides.lock().pending);
        for read in pending {
            let closed = Error::new(ErrorKind::Closed, "the store is closed");
            self.end_side(&read.load, read.row, Err(closed));
        }
    }
}
