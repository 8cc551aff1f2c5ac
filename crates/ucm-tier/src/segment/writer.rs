//! The way of a record into a segment: which segments are open, which of them takes the next
//! record, and the write itself, on the thread that brought the record.
//!
//! One segment takes records; those before it are being sealed. Through the page cache a file is
//! written by one thread at a time, so a thread that finds all of them busy opens another one, and
//! they are filled side by side. A thread that finds none open opens one; the others wait for it,
//! by their deadlines. Room for all of a segment is reserved when it is opened, and what it did not
//! need is given back when it ended.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, PAGE, Result, round_up};
use ucm_infra::{MonotonicTime, Notify};
use ucm_io::{IoJob, JobWatch};
use ucm_quota::layout::SegmentName;

use super::SegmentConfig;
use super::cache::SegmentCache;
use super::files::SegmentFiles;
use super::format::{Entry, HEAD_LEN, encode_head, footer_len};
use super::index::Known;
use super::open::{Append, Next, OpenSegment, unsure};
use crate::backend::{WriteOptions, Written};
use crate::shared::Shared;

/// Part of the root's limit that a segment may be.
const SHARE: u64 = 64;
/// Most segments that take records side by side.
const STRIPES: usize = 4;
/// Least time between two times that what is open is sealed because a caller waits.
const SPACING: Duration = Duration::from_millis(50);

/// See the module.
pub(super) struct SegmentWriter {
    pub(super) shared: Arc<Shared>,
    pub(super) config: SegmentConfig,
    pub(super) cache: Arc<SegmentCache<SegmentFiles>>,
    state: Mutex<State>,
    /// Rung when a segment was opened, or not.
    opened: Notify,
    /// Held while a record goes into the index in place of copies in segments beside it.
    adding: Mutex<()>,
    /// Rung when a segment may have to be sealed, or has ended.
    pub(super) seal_notify: Notify,
}

#[derive(Default)]
struct State {
    /// Those that take records, the last written to last.
    open: Vec<Arc<OpenSegment>>,
    /// The jobs that open one, each with a number.
    opening: Vec<(u64, JobWatch)>,
    /// How often one was opened, for these numbers.
    openings: u64,
    /// Segments that were opened and have not ended, those that take records too.
    living: Vec<Arc<OpenSegment>>,
    /// Nothing waits for more records any more.
    last: bool,
    /// When a segment was last closed for its age or because a caller waited.
    closed: Option<MonotonicTime>,
}

/// A record that is to be written.
struct Queued<'a> {
    id: BlockId,
    record: &'a [u8],
    ordinal: u32,
    /// Bytes of the segment that is opened for it.
    room: u64,
}

/// What a thread with a record does next.
enum Step {
    /// Writes it into this segment.
    Write(Arc<OpenSegment>, Append),
    /// Opens a segment for it, under this number; `needed`: there is no other one for it.
    Open { number: u64, needed: bool },
    /// Waits for one that is being opened.
    Wait,
}

impl State {
    /// Finds a place for a record, in a segment that no thread writes to if there is one, and the
    /// segments that had no more room. `beside`: how many may be open for that.
    fn place(
        &mut self,
        queued: &Queued<'_>,
        job: &JobWatch,
        beside: usize,
    ) -> (Step, Vec<Arc<OpenSegment>>) {
        let mut full = Vec::new();
        // A thread that hangs opens none any more.
        self.opening.retain(|(_, job)| job.is_wanted());
        loop {
            // The last one written to comes first, so that few are open.
            let idlest = (0..self.open.len())
                .rev()
                .min_by_key(|&at| self.open[at].backlog());
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
        let needed = self.opening.is_empty();
        // Not to go cold while another thread opens one.
        if needed || self.open.len() + self.opening.len() < beside {
            return (self.begin_opening(job, needed), full);
        }
        (Step::Wait, full)
    }

    fn begin_opening(&mut self, job: &JobWatch, needed: bool) -> Step {
        let number = self.openings;
        self.openings += 1;
        self.opening.push((number, job.clone()));
        Step::Open { number, needed }
    }
}

/// How many segments of that room are filled side by side below a root with this limit: where one
/// file is written by one thread at a time, no more than are a 64th of the limit together.
fn side_by_side(shared: &Shared, limit: u64, room: u64) -> usize {
    if !shared.writes_cached() {
        return 1;
    }
    let most = usize::try_from(limit / SHARE / room.max(1)).unwrap_or(STRIPES);
    most.clamp(1, STRIPES)
}

impl SegmentWriter {
    pub(super) fn new(cache: &Arc<SegmentCache<SegmentFiles>>, config: SegmentConfig) -> Arc<Self> {
        Arc::new(Self {
            shared: Arc::clone(&cache.blobs.shared),
            config,
            cache: Arc::clone(cache),
            state: Mutex::default(),
            opened: Notify::new(),
            adding: Mutex::new(()),
            seal_notify: Notify::new(),
        })
    }

    /// Bytes of a segment with one record of `len` bytes.
    pub(super) fn least_room(len: u64) -> u64 {
        HEAD_LEN + round_up(len, PAGE) + footer_len(1)
    }

    /// Length at which segments are sealed now, bytes.
    pub(super) fn room(&self) -> u64 {
        let least = Self::least_room(self.shared.config.record.record_len() as u64);
        let limit = self.shared.space.usage().capacity;
        self.config.size.min(limit / SHARE).max(least)
    }

    /// Writes a record into a segment, and opens one for it if need be.
    pub(super) fn write(
        self: &Arc<Self>,
        io: &IoJob,
        id: BlockId,
        record: &[u8],
        options: &WriteOptions,
    ) -> Result<Written> {
        let queued = Queued {
            id,
            record,
            ordinal: options.ordinal,
            room: self.room().max(Self::least_room(record.len() as u64)),
        };
        let (job, mut beside) = (io.watch(), self.stripes(queued.room));
        loop {
            io.still_wanted()?;
            let opened = self.opened.seen();
            let (step, full) = self.state.lock().place(&queued, &job, beside);
            full.iter()
                .filter(|full| full.close())
                .for_each(|full| self.seal(full));
            match step {
                Step::Write(open, append) => return self.append(io, &open, append, record),
                Step::Open { number, needed } => match self.open(io, number, needed, &queued)? {
                    Some((open, append)) => return self.append(io, &open, append, record),
                    None => beside = 1,
                },
                Step::Wait => {
                    let until = Some(io.deadline());
                    self.shared.clock.sleep(&self.opened, opened, until);
                }
            }
        }
    }

    /// How many segments of that room may take records side by side: one where they are sealed at
    /// once anyway.
    fn stripes(&self, room: u64) -> usize {
        if self.seals_at_once() {
            return 1;
        }
        side_by_side(&self.shared, self.shared.space.usage().capacity, room)
    }

    /// Opens a segment for a record, which has its place there. `None` where none is needed and no
    /// room is granted that could be spared.
    fn open(
        &self,
        io: &IoJob,
        number: u64,
        needed: bool,
        queued: &Queued<'_>,
    ) -> Result<Option<(Arc<OpenSegment>, Append)>> {
        let made = match self.create(io, needed, queued.room) {
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
        self.opened.notify();
        // The timer keeps the deadline of what is written there, and the end waits for openings.
        self.seal_notify.notify();
        placed
    }

    /// Makes the file of a segment: is the root still ours, is there room, and then the file.
    fn create(&self, io: &IoJob, needed: bool, room: u64) -> Result<Option<OpenSegment>> {
        let (shared, space) = (&self.shared, &self.shared.space);
        let reservation = loop {
            let seen = self.seal_notify.seen();
            let marker = io.look(shared.layout.marker())?;
            io.still_wanted()?; // before room is taken for a segment that stays empty
            shared
                .check_root(marker)
                .inspect_err(|_| shared.look_again())?;
            if !needed {
                match space.try_reserve(room) {
                    Ok(reservation) => break reservation,
                    Err(_) => return Ok(None),
                }
            }
            match space.reserve(room) {
                Ok(Some(reservation)) => break reservation,
                Ok(None) => space.await_grant(room, io.deadline()),
                Err(_) if self.taking_records() > 0 => return Ok(None),
                // Those that are being sealed give back what they do not need.
                Err(error) if error.kind() == ErrorKind::Busy && !self.living().is_empty() => {
                    let until = Some(io.deadline());
                    shared.clock.sleep(&self.seal_notify, seen, until);
                }
                Err(error) => return Err(error),
            }
        };
        let name = self.cache.blobs.next_name();
        let head = encode_head(&self.cache.blobs.owner(name), &shared.config.process);
        let mode = shared.config.modes.file;
        let created = io.create(&self.cache.blobs.private(name), &head, room, mode);
        if let Err(error) = created.and_then(|()| io.still_wanted()) {
            space.commit(
                reservation,
                if unsure(&error) { room } else { 0 },
                Some(&error),
            );
            shared.missed(&error);
            return Err(error);
        }
        let number = self.cache.index.begin(Known {
            name,
            part: shared.config.part,
            private: true,
            sealed_ns: u64::MAX,
            used_ns: i64::try_from(shared.clock.wall_ns()).unwrap_or(i64::MAX),
            len: 0,
        });
        let Some(number) = number else {
            let twice = Error::internal("two segments have one name");
            space.commit(reservation, room, Some(&twice));
            return Err(twice);
        };
        let now = shared.clock.now();
        Ok(Some(OpenSegment::new(number, name, room, reservation, now)))
    }

    /// Writes a record to its place.
    fn append(
        self: &Arc<Self>,
        io: &IoJob,
        open: &Arc<OpenSegment>,
        append: Append,
        record: &[u8],
    ) -> Result<Written> {
        let Append { number, entry } = append;
        let path = self.cache.blobs.private(open.name);
        let written = io.write_at(&path, entry.offset, record, true);
        let (at_once, now) = (self.seals_at_once(), self.shared.clock.now());
        if let Err(error) = written.and_then(|()| io.still_wanted()) {
            self.shared.missed(&error);
            let next = open.failed(number, &error, at_once);
            self.go_on(open, next);
            return Err(error);
        }
        if self.add_newest(open, &entry) {
            // else the index was full, and it cannot be read
            self.cache.locally_visible.gained(entry.id);
        }
        let (receipt, next) = open.written(number, now, at_once);
        if receipt.is_none() {
            self.take_back(open, entry.id);
        }
        self.go_on(open, next);
        let late = || Error::new(ErrorKind::Timeout, "the record was written too late");
        receipt.map(Written::Sealing).ok_or_else(late)
    }

    /// What follows when a write to a segment has ended.
    pub(super) fn go_on(self: &Arc<Self>, open: &Arc<OpenSegment>, next: Next) {
        match next {
            Next::Wait => {}
            Next::Begin => self.seal_notify.notify(),
            Next::Seal => {
                self.leave(open);
                self.seal(open);
            }
        }
    }

    /// Takes a record that was written into the index, the last written in place of copies in
    /// segments beside this one; whether it is found there.
    fn add_newest(&self, open: &OpenSegment, entry: &Entry) -> bool {
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
    fn take_back(&self, open: &OpenSegment, id: BlockId) {
        let found = self.cache.index.find(id);
        if let Some(hit) = found.filter(|hit| hit.segment == open.number) {
            self.cache.index.drop_copy(id, &hit);
            self.cache.locally_visible.lost(id);
        }
    }

    /// Takes no more records into this segment.
    pub(super) fn close(self: &Arc<Self>, open: &Arc<OpenSegment>) {
        self.leave(open);
        if open.close() {
            self.seal(open);
        }
    }

    /// The next record goes into another one.
    fn leave(&self, open: &Arc<OpenSegment>) {
        let mut state = self.state.lock();
        state.open.retain(|other| !Arc::ptr_eq(other, open));
    }

    /// Whether nothing waits for more any more, so that a segment is sealed as soon as nothing is
    /// written to it.
    fn seals_at_once(&self) -> bool {
        self.config.age.is_zero() || self.state.lock().last
    }

    /// Closes what is open; with `last`, from now on nothing waits for more.
    pub(super) fn flush(self: &Arc<Self>, last: bool) {
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

    /// Closes a segment that is due.
    pub(super) fn close_due(self: &Arc<Self>, open: &Arc<OpenSegment>, now: MonotonicTime) {
        self.state.lock().closed = Some(now);
        self.close(open);
    }

    /// Closes what is open now, or soon if that was done a moment ago: a caller waits for it.
    pub(super) fn flush_soon(self: &Arc<Self>) {
        let now = self.shared.clock.now();
        let (open, due) = {
            let mut state = self.state.lock();
            if state.open.is_empty() {
                return;
            }
            let due = state
                .closed
                .map_or(now, |last| last.after(SPACING).max(now));
            if due <= now {
                state.closed = Some(now);
            }
            (state.open.clone(), due)
        };
        if due <= now {
            return open.iter().for_each(|open| self.close(open));
        }
        open.iter().for_each(|open| open.seal_by(due));
        self.seal_notify.notify();
    }

    /// How many segments take records.
    pub(super) fn taking_records(&self) -> usize {
        self.state.lock().open.len()
    }

    /// The segments that were opened and have not ended.
    pub(super) fn living(&self) -> Vec<Arc<OpenSegment>> {
        self.state.lock().living.clone()
    }

    /// Their names.
    pub(super) fn living_names(&self) -> HashSet<SegmentName> {
        let state = self.state.lock();
        state.living.iter().map(|open| open.name).collect()
    }

    /// A segment has ended.
    pub(super) fn forget(&self, open: &Arc<OpenSegment>) {
        let mut state = self.state.lock();
        state.living.retain(|living| !Arc::ptr_eq(living, open));
    }

    /// Whether a segment has not ended yet.
    pub(super) fn is_writing(&self) -> bool {
        let state = self.state.lock();
        !state.living.is_empty() || state.opening.iter().any(|(_, job)| job.is_wanted())
    }

    /// Waits until every segment has ended, by `until` at the latest.
    pub(super) fn await_sealed(&self, until: MonotonicTime) {
        loop {
            let seen = self.seal_notify.seen();
            if !self.is_writing() || self.shared.clock.now() >= until {
                return;
            }
            self.shared
                .clock
                .sleep(&self.seal_notify, seen, Some(until));
        }
    }
}
