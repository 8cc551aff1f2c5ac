//! The segment that takes records, in memory, and those that are being put.
//!
//! A record is copied to the end of the open segment and can be read there at once by this process.
//! When the segment is full or old enough, or when a caller waits for it, its footer is written
//! behind the records and it is put; its records are published, and the outcomes of their receipts
//! reported, when the server has it. At most one segment takes records and a few are being put:
//! beyond that a thread waits, with its record, for one of them. So what a process keeps in memory
//! is bounded.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, PAGE, Result, round_up};
use ucm_infra::{MonotonicTime, Notify};
use ucm_io::{IoJob, Process};
use ucm_quota::layout::SegmentName;

use super::upkeep::LANE_UPLOAD;
use super::{Objects, UPLOADS};
use crate::backend::{OnSealed, Receipt, Written};
use crate::blobs::{BlobName, Filled, ReadAt};
use crate::segment::format::{Entry, HEAD_LEN, Owner, encode_footer, encode_head, footer_len};
use crate::segment::index::{Known, SegmentNumber};

/// Part of the limit that a segment may be.
const SHARE: u64 = 64;
/// Least time that putting a segment has, whatever is left of its records' time.
const LEAST_TIME: Duration = Duration::from_secs(5);
/// Least time between two times that the open segment is put because somebody waits.
const SPACING: Duration = Duration::from_millis(200);
/// How long after a segment was put others must have found it, beside the time between two of their
/// looks.
const FOUND_WITHIN: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Default)]
pub(super) struct Writer {
    state: Mutex<State>,
    /// Rung when a segment was opened, or one that was being put has ended.
    changed: Notify,
    /// Called with the outcomes of receipts.
    pub(super) on_sealed: OnceLock<OnSealed>,
}

#[derive(Default)]
struct State {
    open: Option<Open>,
    /// Somebody opens one.
    opening: bool,
    /// Those that are being put.
    putting: Vec<Arc<Putting>>,
    sequence: u64,
    /// When one was last put because somebody waited.
    last_flush: Option<MonotonicTime>,
    /// Nothing waits for more any more.
    last: bool,
}

/// The segment that takes records.
struct Open {
    number: SegmentNumber,
    name: SegmentName,
    /// Head and records.
    bytes: Vec<u8>,
    /// Bytes that were granted for it.
    room: u64,
    entries: Vec<Entry>,
    members: Vec<Member>,
    opened: MonotonicTime,
    oldest: Option<MonotonicTime>,
    /// When it is to be put whatever its age, because somebody waits.
    due: Option<MonotonicTime>,
}

/// One whose records are not published yet.
struct Putting {
    number: SegmentNumber,
    object: BlobName,
    room: u64,
    /// All of it.
    bytes: Bytes,
    entries: Vec<Entry>,
    members: Mutex<Vec<Member>>,
}

/// A record in it, and its receipt until its outcome was reported.
struct Member {
    deadline: MonotonicTime,
    receipt: Option<Receipt>,
}

/// What a thread with a record does next.
enum Step {
    /// It is done: the record has its place.
    Placed(Receipt),
    /// Opens a segment for it.
    Open,
    /// Waits for one.
    Wait,
}

impl Writer {
    /// Reports the outcome of a receipt.
    fn sealed(&self, receipt: Receipt, result: Result<()>) {
        if let Some(hook) = self.on_sealed.get() {
            hook(receipt, result);
        }
    }

    /// Copies a stretch of a segment that is not put yet into buffers, one behind the other.
    /// `NotFound` where it was put since, or given up.
    pub(super) fn copy_open(&self, at: &ReadAt, into: &mut [(&mut [u8], usize)]) -> Result<Filled> {
        let copy = |bytes: &[u8], into: &mut [(&mut [u8], usize)]| {
            let mut start = usize::try_from(at.offset).ok()?;
            let mut copied = 0;
            for (buffer, len) in into {
                buffer[..*len].copy_from_slice(bytes.get(start..start + *len)?);
                (start, copied) = (start + *len, copied + *len);
            }
            Some(copied)
        };
        let name = at.blob.name;
        let state = self.state.lock();
        let copied = if let Some(open) = state.open.as_ref().filter(|open| open.name == name) {
            copy(&open.bytes, into)
        } else {
            let mut putting = state.putting.iter();
            let found = putting.find(|putting| putting.object.name == name);
            let bytes = found.map(|putting| putting.bytes.clone());
            drop(state);
            bytes.and_then(|bytes| copy(&bytes, into))
        };
        match copied {
            Some(bytes) => Ok(Filled {
                bytes,
                failed: None,
            }),
            None => Err(Error::new(ErrorKind::NotFound, "this segment is not open")),
        }
    }
}

impl Objects {
    /// Bytes of a segment with one record of `len` bytes.
    fn least_room(&self, len: u64) -> u64 {
        HEAD_LEN + round_up(len, PAGE) + footer_len(1)
    }

    /// Length at which segments are put now, bytes.
    pub(super) fn room(&self) -> u64 {
        let share = self.space.limit().map_or(u64::MAX, |limit| limit / SHARE);
        let least = self.least_room(self.remote.config.scope.record.record_len() as u64);
        self.remote.config.size.min(share).max(least)
    }

    /// Whether enough segments of one record each fit below the limit.
    pub(super) fn check_limit(&self, limit: u64) -> Result<()> {
        let least = self.least_room(self.remote.config.scope.record.record_len() as u64) * 8;
        if limit >= least {
            return Ok(());
        }
        let text = "storage_capacity must hold at least 8 segments of one block; raise it";
        let error = Error::new(ErrorKind::Config, text).with("storage_capacity", limit);
        Err(error
            .with("at_least", least)
            .with("bucket", &self.remote.config.place.url))
    }

    /// Puts a record into the open segment, and opens one for it if need be; waits where too much
    /// is being put.
    pub(super) fn append(
        self: &Arc<Self>,
        io: &IoJob,
        id: BlockId,
        record: &[u8],
    ) -> Result<Written> {
        loop {
            io.still_wanted()?;
            let seen = self.writer.changed.seen();
            match self.place(io, id, record) {
                Step::Placed(receipt) => {
                    self.upkeep.timer.notify();
                    return Ok(Written::Sealing(receipt));
                }
                Step::Open => self.open_segment(io, record.len() as u64)?,
                Step::Wait => {
                    let until = Some(io.deadline());
                    self.remote.clock.sleep(&self.writer.changed, seen, until);
                }
            }
        }
    }

    fn place(self: &Arc<Self>, io: &IoJob, id: BlockId, record: &[u8]) -> Step {
        let now = self.remote.clock.now();
        let mut state = self.writer.state.lock();
        let Some(open) = state.open.as_mut() else {
            if state.opening || state.putting.len() >= UPLOADS {
                return Step::Wait;
            }
            state.opening = true;
            return Step::Open;
        };
        let (offset, len) = (open.bytes.len() as u64, round_up(record.len() as u64, PAGE));
        if offset + len + footer_len(open.entries.len() + 1) > open.room {
            let full = self.seal(&mut state);
            drop(state);
            self.send(full);
            return self.place(io, id, record);
        }
        let (entry, receipt) = (Entry { id, offset, len }, Receipt::next());
        open.bytes.extend_from_slice(record);
        open.bytes.resize((offset + len) as usize, 0);
        open.entries.push(entry);
        open.oldest.get_or_insert(now);
        open.members.push(Member {
            deadline: io.deadline(),
            receipt: Some(receipt),
        });
        let number = open.number;
        self.cache.index.add(number, &[entry]);
        self.drop_older(id, number);
        self.cache.locally_visible.gained(id);
        let at_once = state.last || self.remote.config.age.is_zero();
        let full = at_once.then(|| self.seal(&mut state)).flatten();
        drop(state);
        self.send(full);
        Step::Placed(receipt)
    }

    /// Of several copies that only this process has, the last written counts.
    fn drop_older(&self, id: BlockId, number: SegmentNumber) {
        while let Some(other) = self
            .cache
            .index
            .find(id)
            .filter(|hit| hit.private && hit.segment != number)
        {
            self.cache.index.drop_copy(id, &other);
        }
    }

    /// Opens a segment, once it has room.
    fn open_segment(&self, io: &IoJob, len: u64) -> Result<()> {
        let opened = self.make_segment(io, len);
        let mut state = self.writer.state.lock();
        state.opening = false;
        let result = opened.map(|open| state.open = Some(open));
        drop(state);
        self.writer.changed.notify();
        result
    }

    /// `Unhealthy` where the keys may only read. The store was opened like that; it begins to write
    /// with the first dump after they may.
    fn make_segment(&self, io: &IoJob, len: u64) -> Result<Open> {
        if !self.space.may_write() {
            self.begin_writing(io.deadline())?;
            self.space.wanted.notify();
        }
        let room = self.room().max(self.least_room(len));
        self.space.take_room(io, room)?;
        self.begin_segment(room)
    }

    fn begin_segment(&self, room: u64) -> Result<Open> {
        let name = {
            let mut state = self.writer.state.lock();
            state.sequence += 1;
            SegmentName {
                writer: self.remote.config.scope.writer,
                sequence: state.sequence,
            }
        };
        let known = Known {
            name,
            part: self.remote.config.scope.part,
            private: true,
            sealed_ns: u64::MAX,
            used_ns: i64::try_from(self.remote.now_ns()).unwrap_or(i64::MAX),
            len: 0,
        };
        let Some(number) = self.cache.index.begin(known) else {
            self.space.commit_room(room, 0, None);
            return Err(Error::internal("two segments have one name"));
        };
        let mut bytes = Vec::with_capacity(usize::try_from(room).unwrap_or(0));
        bytes.extend_from_slice(&encode_head(&self.owner(name), &Process::this()));
        Ok(Open {
            number,
            name,
            bytes,
            room,
            entries: Vec::new(),
            members: Vec::new(),
            opened: self.remote.clock.now(),
            oldest: None,
            due: None,
        })
    }

    fn owner(&self, name: SegmentName) -> Owner {
        Owner {
            name,
            namespace: *self.remote.config.scope.identity.digest(),
            part: self.remote.config.scope.part,
            time_ns: self.remote.now_ns(),
        }
    }

    /// Ends the open segment, if there is one that holds a record: from now on it takes no more.
    fn seal(&self, state: &mut State) -> Option<Arc<Putting>> {
        let mut open = state.open.take_if(|open| !open.entries.is_empty())?;
        let owner = self.owner(open.name);
        let footer = encode_footer(&owner, open.bytes.len() as u64, &open.entries);
        open.bytes.extend_from_slice(&footer);
        let putting = Arc::new(Putting {
            number: open.number,
            object: BlobName {
                sealed_ns: owner.time_ns,
                name: open.name,
            },
            room: open.room,
            bytes: Bytes::from(open.bytes),
            entries: open.entries,
            members: Mutex::new(open.members),
        });
        state.putting.push(Arc::clone(&putting));
        Some(putting)
    }

    /// Puts a segment that was sealed, on a thread of its own.
    fn send(self: &Arc<Self>, sealed: Option<Arc<Putting>>) {
        let Some(putting) = sealed else { return };
        let now = self.remote.clock.now();
        let last = putting
            .members
            .lock()
            .iter()
            .map(|member| member.deadline)
            .max();
        let deadline = last.unwrap_or(now).max(now.after(LEAST_TIME));
        let (objects, ended, sent) = (Arc::clone(self), Arc::clone(self), Arc::clone(&putting));
        let work = move || objects.put(&sent, deadline);
        let done = move |result: Result<Result<()>>| {
            ended.was_put(&putting, result.and_then(|result| result));
        };
        if let Err(refused) = self.upkeep.pool.offer(LANE_UPLOAD, deadline, work, done) {
            (refused.done)(Err(refused.error));
        }
    }

    /// Sends a segment.
    fn put(&self, putting: &Putting, deadline: MonotonicTime) -> Result<()> {
        let (remote, bytes) = (&self.remote, putting.bytes.clone());
        let path = remote.names.segment(putting.object);
        let put = remote
            .bucket
            .put_large(&path, bytes, remote.has_conditions());
        remote.call(deadline, put)
    }

    /// A segment was put, or not.
    fn was_put(&self, putting: &Putting, result: Result<()>) {
        let len = putting.bytes.len() as u64;
        match &result {
            Ok(()) => {
                let used = i64::try_from(putting.object.sealed_ns).unwrap_or(i64::MAX);
                self.cache
                    .index
                    .named(putting.number, putting.object.sealed_ns, used, len);
                let found = self
                    .remote
                    .clock
                    .now()
                    .after(self.remote.config.refresh + FOUND_WITHIN);
                putting
                    .entries
                    .iter()
                    .for_each(|entry| self.cache.locally_visible.published(entry.id, found));
                self.space.commit_room(putting.room, len, None);
            }
            Err(error) => {
                self.cache.index.vanished(putting.number);
                putting
                    .entries
                    .iter()
                    .for_each(|entry| self.cache.locally_visible.lost(entry.id));
                // It may be there all the same, where no one knows. A put that the server refused
                // (`Unhealthy`) stored nothing.
                let unsure = matches!(
                    error.kind(),
                    ErrorKind::Timeout | ErrorKind::Io | ErrorKind::Closed
                );
                self.space
                    .commit_room(putting.room, if unsure { len } else { 0 }, Some(error));
            }
        }
        let members = std::mem::take(&mut *putting.members.lock());
        self.writer
            .state
            .lock()
            .putting
            .retain(|other| other.number != putting.number);
        self.writer.changed.notify();
        self.upkeep.timer.notify();
        for receipt in members.into_iter().filter_map(|member| member.receipt) {
            self.writer.sealed(receipt, result.clone());
        }
    }

    /// Puts what is open; with `last`, from now on nothing waits for more.
    pub(super) fn flush(self: &Arc<Self>, last: bool) {
        let sealed = {
            let mut state = self.writer.state.lock();
            state.last |= last;
            self.seal(&mut state)
        };
        self.send(sealed);
    }

    /// Puts what is open now, or soon if that was done a moment ago: somebody waits for it.
    pub(super) fn flush_soon(self: &Arc<Self>) {
        let now = self.remote.clock.now();
        let mut state = self.writer.state.lock();
        let due = state
            .last_flush
            .map_or(now, |last| last.after(SPACING).max(now));
        if due <= now {
            state.last_flush = Some(now);
            let sealed = self.seal(&mut state);
            drop(state);
            return self.send(sealed);
        }
        if let Some(open) = state.open.as_mut() {
            open.due = Some(open.due.map_or(due, |other| other.min(due)));
        }
        drop(state);
        self.upkeep.timer.notify();
    }

    /// Puts what is due, tells those whose time is over; when it is to be looked at again.
    pub(super) fn tend_writes(self: &Arc<Self>, now: MonotonicTime) -> Option<MonotonicTime> {
        let (mut late, mut next, mut sealed) = (Vec::new(), None::<MonotonicTime>, None);
        let mut at = |time: MonotonicTime| next = Some(next.map_or(time, |next| next.min(time)));
        {
            let mut state = self.writer.state.lock();
            let due = state
                .open
                .as_ref()
                .map(|open| open.due(self.remote.config.age));
            match due {
                Some(due) if due <= now => {
                    state.last_flush = Some(now);
                    sealed = self.seal(&mut state);
                }
                Some(due) => at(due),
                None => {}
            }
            let State { open, putting, .. } = &mut *state;
            let mut look = |members: &mut Vec<Member>| {
                for member in members.iter_mut().filter(|member| member.receipt.is_some()) {
                    if member.deadline <= now {
                        late.extend(member.receipt.take());
                    } else {
                        at(member.deadline);
                    }
                }
            };
            open.iter_mut().for_each(|open| look(&mut open.members));
            putting
                .iter()
                .for_each(|putting| look(&mut putting.members.lock()));
        }
        self.send(sealed);
        for receipt in late {
            let text = "the segment with this record was not put in time";
            let late = Error::new(ErrorKind::Timeout, text);
            self.writer.sealed(receipt, Err(late));
        }
        next
    }

    /// Waits until nothing is being put any more, no longer than until then.
    pub(super) fn await_uploads(&self, until: MonotonicTime) {
        loop {
            let seen = self.writer.changed.seen();
            let busy = {
                let state = self.writer.state.lock();
                state.open.is_some() || state.opening || !state.putting.is_empty()
            };
            if !busy || self.remote.clock.now() >= until {
                return;
            }
            self.remote
                .clock
                .sleep(&self.writer.changed, seen, Some(until));
        }
    }

    /// Segments that take records, and those that are being put.
    pub(super) fn writing(&self) -> (u64, u64) {
        let state = self.writer.state.lock();
        (u64::from(state.open.is_some()), state.putting.len() as u64)
    }
}

impl Open {
    /// When it is to be put: at its age, sooner if somebody waits, and early enough for those that
    /// do, whatever the age.
    fn due(&self, age: Duration) -> MonotonicTime {
        let oldest = self.oldest.unwrap_or(self.opened);
        let waiting = self
            .members
            .iter()
            .filter(|member| member.receipt.is_some());
        let first = waiting.map(|member| member.deadline).min();
        let in_time = first.map(|deadline| oldest.after(deadline.since(oldest) / 2));
        let due = in_time.map_or(oldest.after(age), |in_time| in_time.min(oldest.after(age)));
        self.due.map_or(due, |other| other.min(due))
    }
}
