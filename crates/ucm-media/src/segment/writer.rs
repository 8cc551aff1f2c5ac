//! The way of a record into a segment, on any medium ([`AppendBlobs`]): which segments are open,
//! which of them takes the next record, and the write itself, on the thread that brought it.
//!
//! One segment takes records; those before it are being sealed. Through the page cache a file is
//! written by one thread at a time, so a thread that finds all of them busy opens another one, and
//! they are filled side by side. A thread that finds none open opens one; the others wait for it,
//! by their deadlines, as they do where too many are being sealed. Room for all of a segment is
//! reserved when it is opened, and what it did not need is given back when it ended.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, PAGE, Result, round_up};
use ucm_infra::{Clock, MonotonicTime, Notify};
use ucm_io::{IoJob, JobWatch, Process};

use super::cache::SegmentCache;
use super::format::{Entry, HEAD_LEN, encode_head, footer_len};
use super::index::Known;
use super::open::{Append, Next, OpenSegment};
use crate::backend::{Flush, OnSealed, WriteOptions, Written};
use crate::blobs::AppendBlobs;
use crate::lengths::Lengths;
use crate::quota::is_unsure;

/// Part of the limit that a segment may be.
pub(crate) const SHARE: u64 = 64;

/// How segments are written.
pub(crate) struct WriterConfig {
    /// Length at which a segment is sealed, bytes.
    pub(crate) size: u64,
    /// How long after its oldest record was written a segment is sealed.
    pub(crate) age: Duration,
    /// How long after a segment got its name every process that polls has found it.
    pub(crate) found_within: Duration,
    /// The process that writes.
    pub(crate) process: Process,
    /// Called with the outcomes of receipts.
    pub(crate) on_sealed: Arc<OnceLock<OnSealed>>,
}

/// See the module.
pub(crate) struct SegmentWriter<B: AppendBlobs> {
    pub(super) clock: Arc<dyn Clock>,
    pub(crate) config: WriterConfig,
    pub(super) cache: Arc<SegmentCache<B>>,
    pub(super) state: Mutex<State<B::Room>>,
    /// Held while a record goes into the index in place of copies in segments beside it.
    adding: Mutex<()>,
    /// Notified when a segment was opened, may have to be sealed, or has ended.
    pub(crate) changed: Notify,
}

pub(super) struct State<R> {
    /// Those that take records, the last written to last.
    open: Vec<Arc<OpenSegment<R>>>,
    /// The jobs that open one, each with a number.
    opening: Vec<(u64, JobWatch)>,
    /// How often one was opened, for these numbers.
    openings: u64,
    /// Segments that were opened and have not ended, those that take records too.
    living: Vec<Arc<OpenSegment<R>>>,
    /// Nothing waits for more records any more.
    last: bool,
    /// When a segment was last closed for its age or because a caller waited.
    pub(super) closed: Option<MonotonicTime>,
}

/// A record that is to be written.
struct Queued<'a> {
    id: BlockId,
    record: &'a [u8],
    ordinal: u32,
}

/// A segment, and a place in it.
type Placed<R> = (Arc<OpenSegment<R>>, Append);

/// The next step of a thread with a record.
enum Step<R> {
    /// Writes it into this segment.
    Write(Arc<OpenSegment<R>>, Append),
    /// Opens a segment for it, under this number; `needed`: there is no other one for it.
    Open { number: u64, needed: bool },
    /// Waits for one that is being opened, or sealed.
    Wait,
}

impl<R> State<R> {
    /// Finds a place for a record, in a segment that no thread writes to if there is one, and the
    /// segments that had no more room. `beside`: how many may be open for that, while at most
    /// `sealing` others are being sealed.
    fn place(
        &mut self,
        queued: &Queued<'_>,
        job: &JobWatch,
        beside: usize,
        sealing: usize,
    ) -> (Step<R>, Vec<Arc<OpenSegment<R>>>) {
        let mut full = Vec::new();
        // A thread that hangs opens none any more.
        self.opening.retain(|(_, job)| job.is_wanted());
        loop {
            // The last one written to comes first, so that few are open.
            let last_first = (0..self.open.len()).rev();
            let idlest = last_first.min_by_key(|&at| self.open[at].backlog());
            let Some(at) = idlest else { break };
            let open = self.open.remove(at);
            let busy = open.backlog() > 0;
            if busy && self.open.len() + 1 + self.opening.len() < beside {
                self.open.push(open);
                return (self.begin_opening(job, false), full);
            }
            match open.reserve(queued.id, queued.record.len() as u64, queued.ordinal, job) {
                Some(append) => {
                    self.open.push(Arc::clone(&open));
                    return (Step::Write(open, append), full);
                }
                None => full.push(open),
            }
        }
        if self.sealing() >= sealing {
            return (Step::Wait, full);
        }
        let needed = self.opening.is_empty();
        // Not to go cold while another thread opens one.
        if needed || self.open.len() + self.opening.len() < beside {
            return (self.begin_opening(job, needed), full);
        }
        (Step::Wait, full)
    }

    /// How many take no more records and have not ended.
    fn sealing(&self) -> usize {
        self.living.len() - self.open.len()
    }

    fn begin_opening(&mut self, job: &JobWatch, needed: bool) -> Step<R> {
        let number = self.openings;
        self.openings += 1;
        self.opening.push((number, job.clone()));
        Step::Open { number, needed }
    }
}

/// Bytes of a segment with one record of `len` bytes.
fn least_room(len: u64) -> u64 {
    HEAD_LEN + round_up(len, PAGE) + footer_len(1)
}

/// `Config` unless enough segments of one record each fit below the limit of what `at` names.
pub(crate) fn check_limit(limit: u64, lengths: &Lengths, at: (&'static str, &str)) -> Result<()> {
    let least = least_room(lengths.own_len()) * 8;
    if limit >= least {
        return Ok(());
    }
    let text = "storage_capacity must hold at least 8 segments of one block; raise it or make room";
    let error = Error::new(ErrorKind::Config, text).with("storage_capacity", limit);
    Err(error.with("at_least", least).with(at.0, at.1))
}

impl<B: AppendBlobs> SegmentWriter<B> {
    pub(crate) fn new(cache: &Arc<SegmentCache<B>>, config: WriterConfig) -> Arc<Self> {
        Arc::new(Self {
            clock: Arc::clone(&cache.clock),
            config,
            cache: Arc::clone(cache),
            state: Mutex::new(State {
                open: Vec::new(),
                opening: Vec::new(),
                openings: 0,
                living: Vec::new(),
                last: false,
                closed: None,
            }),
            adding: Mutex::new(()),
            changed: cache.looks.timer.clone(),
        })
    }

    /// Length at which segments are sealed now, bytes.
    pub(crate) fn room(&self) -> u64 {
        let least = least_room(self.cache.lengths.own_len());
        let most = self.cache.blobs.limit() / SHARE;
        self.config.size.min(most).max(least)
    }

    /// Bytes of the segment that is opened for this record.
    fn room_for(&self, record: &[u8]) -> u64 {
        self.room().max(least_room(record.len() as u64))
    }

    /// Writes a record into a segment, unless it is present, or the index has no room for it.
    pub(crate) fn write(
        self: &Arc<Self>,
        io: &IoJob,
        id: BlockId,
        record: &[u8],
        options: &WriteOptions,
    ) -> Result<Written> {
        if let Some(outcome) = self.cache.needs_no_write(id, options) {
            return outcome;
        }
        let queued = Queued {
            id,
            record,
            ordinal: options.ordinal,
        };
        // One where they are sealed at once anyway.
        let mut beside = match self.seals_at_once() {
            true => 1,
            false => self.cache.blobs.side_by_side(self.room_for(record)),
        };
        let job = io.watch();
        loop {
            io.still_wanted()?;
            let seen = self.changed.seen();
            let mut state = self.state.lock();
            let (step, full) = state.place(&queued, &job, beside, B::MOST_SEALING);
            drop(state);
            let full = full.iter().filter(|full| full.close());
            full.for_each(|full| self.seal(full));
            match step {
                Step::Write(open, append) => return self.append(io, &open, append, record),
                Step::Open { number, needed } => match self.open(io, number, needed, &queued)? {
                    Some((open, append)) => return self.append(io, &open, append, record),
                    None => beside = 1,
                },
                Step::Wait => self.clock.sleep(&self.changed, seen, Some(io.deadline())),
            }
        }
    }

    /// Opens a segment for a record, which has its place there. `None` where none is needed and no
    /// room is granted that could be spared.
    fn open(
        &self,
        io: &IoJob,
        number: u64,
        needed: bool,
        queued: &Queued<'_>,
    ) -> Result<Option<Placed<B::Room>>> {
        let made = match self.create(io, needed, queued.record) {
            Err(_) if !needed => Ok(None),
            made => made,
        };
        let placed = {
            let mut state = self.state.lock();
            state.opening.retain(|(other, _)| *other != number);
            made.map(|made| {
                let open = Arc::new(made?);
                let (len, job) = (queued.record.len() as u64, io.watch());
                let append = open.reserve(queued.id, len, queued.ordinal, &job)?;
                state.living.push(Arc::clone(&open));
                state.open.push(Arc::clone(&open));
                Some((open, append))
            })
        };
        // The timer keeps the deadline of what is written there, and the end waits for openings.
        self.changed.notify();
        placed
    }

    /// Makes the blob of a segment, once there is room for it.
    fn create(
        &self,
        io: &IoJob,
        needed: bool,
        record: &[u8],
    ) -> Result<Option<OpenSegment<B::Room>>> {
        let blobs = &self.cache.blobs;
        let (room, reserved) = loop {
            let (seen, room) = (self.changed.seen(), self.room_for(record));
            match blobs.reserve(io, room, needed) {
                Ok(Some(reserved)) => break (room, reserved),
                Ok(None) => {}
                Err(_) if !needed || self.taking_records() > 0 => return Ok(None),
                // Those that are being sealed give back what they do not need.
                Err(error)
                    if B::TAKES_ALL_ROOM
                        && error.kind() == ErrorKind::Busy
                        && !self.living().is_empty() =>
                {
                    self.clock.sleep(&self.changed, seen, Some(io.deadline()));
                }
                Err(error) => return Err(error),
            }
        };
        let (name, wall_ns) = (blobs.next_name(), self.clock.wall_ns());
        let head = encode_head(&self.cache.owner(name, wall_ns), &self.config.process);
        if let Err(error) = blobs.create(io, name, &head, room) {
            let kept = if is_unsure(&error) { room } else { 0 };
            blobs.commit(reserved, kept, Some(&error));
            return Err(error);
        }
        let number = self.cache.index.begin(Known {
            name,
            part: self.cache.lengths.own_part(),
            private: true,
            sealed_ns: u64::MAX,
            used_ns: i64::try_from(wall_ns).unwrap_or(i64::MAX),
            len: 0,
        });
        let Some(number) = number else {
            let twice = Error::internal("two segments have one name");
            blobs.commit(reserved, room, Some(&twice));
            return Err(twice);
        };
        let now = self.clock.now();
        Ok(Some(OpenSegment::new(number, name, room, reserved, now)))
    }

    /// Writes a record to its place.
    fn append(
        self: &Arc<Self>,
        io: &IoJob,
        open: &Arc<OpenSegment<B::Room>>,
        append: Append,
        record: &[u8],
    ) -> Result<Written> {
        let Append { number, entry } = append;
        let written = self.cache.blobs.append(io, open.name, entry.offset, record);
        let (at_once, now) = (self.seals_at_once(), self.clock.now());
        if let Err(error) = written {
            let next = open.failed(number, &error, at_once);
            self.go_on(open, next);
            return Err(error);
        }
        if self.add_newest(open, &entry) {
            // else the index was full, and it cannot be read
            self.cache.locally_visible.added(entry.id);
        }
        let (receipt, next) = open.written(number, now, at_once);
        if receipt.is_none() {
            self.take_back(open, entry.id);
        }
        self.go_on(open, next);
        let late = || Error::new(ErrorKind::Timeout, "the record was written too late");
        receipt.map(Written::Sealing).ok_or_else(late)
    }

    /// The next step after a write to a segment.
    pub(super) fn go_on(self: &Arc<Self>, open: &Arc<OpenSegment<B::Room>>, next: Next) {
        match next {
            Next::Wait => {}
            Next::Begin => self.changed.notify(),
            Next::Seal => {
                self.leave(open);
                self.seal(open);
            }
        }
    }

    /// Takes a record that was written into the index, the last written in place of copies in
    /// segments beside this one; whether it is found there.
    fn add_newest(&self, open: &OpenSegment<B::Room>, entry: &Entry) -> bool {
        let _one_at_a_time = self.adding.lock(); // or two copies drop each other
        self.cache.index.add(open.number, &[*entry]);
        let mut place = self.cache.index.find(entry.id);
        while let Some(other) = place.filter(|hit| hit.private && hit.segment != open.number) {
            self.cache.index.drop_copy(entry.id, &other);
            place = self.cache.index.find(entry.id);
        }
        place.is_some_and(|hit| hit.segment == open.number)
    }

    /// Takes a record out of the index again that its segment will not name.
    fn take_back(&self, open: &OpenSegment<B::Room>, id: BlockId) {
        let found = self.cache.index.find(id);
        if let Some(hit) = found.filter(|hit| hit.segment == open.number) {
            self.cache.index.drop_copy(id, &hit);
            self.cache.locally_visible.removed(id);
        }
    }

    /// Takes no more records into this segment.
    pub(super) fn close(self: &Arc<Self>, open: &Arc<OpenSegment<B::Room>>) {
        self.leave(open);
        if open.close() {
            self.seal(open);
        }
    }

    /// The next record goes into another one.
    fn leave(&self, open: &Arc<OpenSegment<B::Room>>) {
        let mut state = self.state.lock();
        state.open.retain(|other| !Arc::ptr_eq(other, open));
    }

    /// Whether a segment is sealed as soon as nothing is written to it.
    fn seals_at_once(&self) -> bool {
        self.config.age.is_zero() || self.state.lock().last
    }

    /// Closes what is open; after the last time nothing waits for more.
    pub(crate) fn flush(self: &Arc<Self>, how: Flush) {
        let last = match how {
            Flush::Soon => return self.flush_soon(),
            Flush::Now => false,
            Flush::Last => true,
        };
        let (open, living) = {
            let mut state = self.state.lock();
            state.last |= last;
            (state.open.clone(), state.living.clone())
        };
        open.iter().for_each(|open| self.close(open));
        if last {
            living.iter().for_each(|open| {
                let next = open.write_off_lost();
                self.go_on(open, next);
            });
        }
    }

    /// Closes what is open now, or soon if that was done a moment ago: a caller waits for it.
    fn flush_soon(self: &Arc<Self>) {
        let now = self.clock.now();
        let (open, due) = {
            let mut state = self.state.lock();
            if state.open.is_empty() {
                return;
            }
            let next = |last: MonotonicTime| last.after(B::SPACING).max(now);
            let due = state.closed.map_or(now, next);
            if due <= now {
                state.closed = Some(now);
            }
            (state.open.clone(), due)
        };
        if due <= now {
            return open.iter().for_each(|open| self.close(open));
        }
        open.iter().for_each(|open| open.seal_by(due));
        self.changed.notify();
    }

    /// How many segments take records.
    pub(crate) fn taking_records(&self) -> usize {
        self.state.lock().open.len()
    }

    /// How many segments are being sealed.
    #[cfg(feature = "object")]
    pub(crate) fn sealing(&self) -> usize {
        self.state.lock().sealing()
    }

    /// The segments that were opened and have not ended.
    pub(super) fn living(&self) -> Vec<Arc<OpenSegment<B::Room>>> {
        self.state.lock().living.clone()
    }

    /// A segment has ended.
    pub(super) fn forget(&self, open: &Arc<OpenSegment<B::Room>>) {
        let mut state = self.state.lock();
        state.living.retain(|living| !Arc::ptr_eq(living, open));
    }

    /// Whether a segment has not ended yet.
    pub(crate) fn is_writing(&self) -> bool {
        let state = self.state.lock();
        !state.living.is_empty() || state.opening.iter().any(|(_, job)| job.is_wanted())
    }

    /// Waits until every segment has ended, by `until` at the latest.
    pub(crate) fn await_sealed(&self, until: MonotonicTime) {
        loop {
            let seen = self.changed.seen();
            if !self.is_writing() || self.clock.now() >= until {
                return;
            }
            self.clock.sleep(&self.changed, seen, Some(until));
        }
    }
}
