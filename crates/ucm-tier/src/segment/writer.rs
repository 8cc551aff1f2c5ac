//! Which segments are open, and which of them takes the next record.
//!
//! One segment takes records; those before it are being sealed. Through the page cache a file is
//! written by one thread at a time, so a thread that finds all of them busy opens another one, and
//! they are filled side by side. Room for all of a segment is reserved when it is opened, and what
//! it did not need is given back when it ended, so an append asks no one.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{Error, PAGE, Result, round_up};
use ucm_infra::{LANE_DUMP, MonotonicTime, Notify};
use ucm_io::IoJob;
use ucm_quota::Room;
use ucm_quota::layout::SegmentName;

use super::format::{HEAD_LEN, encode_head, footer_len};
use super::index::Known;
use super::open::{Append, LEAST_TIME, OpenSegment, room_of, unsure};
use super::{SegmentConfig, Segments};
use crate::backend::{Done, either};
use crate::shared::Shared;
use crate::writing::Write;

/// Part of the root's limit that a segment may be.
const SHARE: u64 = 64;

/// Most segments that take records side by side.
const STRIPES: usize = 4;
/// Least time between two times that what is open is sealed because somebody waits.
const SPACING: Duration = Duration::from_millis(50);

/// Which segment takes records.
#[derive(Default)]
pub(crate) struct Writer {
    state: Mutex<State>,
    /// Rung when one was opened, or not.
    opened: Notify,
    /// Held while a record goes into the index in place of copies in segments beside it.
    pub(super) adding: Mutex<()>,
}

#[derive(Default)]
struct State {
    /// Those that take records, the last written to last.
    open: Vec<Arc<OpenSegment>>,
    /// How many are being opened.
    opening: usize,
    /// These wait for one of them. Each holds a slot, so they are not many.
    waiting: Vec<Coming>,
    /// Those that waited and have their place by now, and those that found none; the thread that
    /// opened the segment writes them.
    placed: Vec<(Arc<OpenSegment>, Append)>,
    left: Vec<Coming>,
    /// Segments that were opened and have not ended, those that take records too.
    living: Vec<Arc<OpenSegment>>,
    /// How often somebody wanted what had come by then to be published: a segment that takes some
    /// of it later is sealed soon.
    flushes: u64,
    /// Nothing waits for more any more.
    last: bool,
    /// When a segment was last closed for its age or because somebody waited.
    closed: Option<MonotonicTime>,
}

/// A write that looks for its place.
pub(super) struct Coming {
    write: Write,
    /// [`State::flushes`] since when it waits, if it does: who is placed at once was flushed by no
    /// one yet.
    came: Option<u64>,
}

impl Coming {
    pub(super) fn new(write: Write) -> Self {
        Self { write, came: None }
    }

    /// Whether somebody wanted it to be published while it waited.
    fn is_flushed(&self, state: &State) -> bool {
        self.came.is_some_and(|came| came < state.flushes)
    }
}

/// What opening a segment came to.
enum Created {
    /// A private file of this name.
    File(SegmentName),
    /// None is needed, and there is no room to spare for it.
    Unwanted,
    /// Room has to be made first.
    NeedsRoom,
}

/// Where a record goes.
enum Place {
    /// Into this segment.
    Into(Arc<OpenSegment>, Append),
    /// One has to be opened for it; `Err`: all that are open are being written to, and one beside
    /// them would be better.
    Open(Result<Coming, Coming>),
    /// It waits for one that is being opened.
    Waits,
    /// The same, on the thread that brought it: it would go cold if that went on.
    StandsBy(Coming),
}

impl State {
    /// Finds a place for a record, in a segment that no one writes to if there is one, and the
    /// segments that had no more room. `beside`: how many may be open for that; `stands_by`:
    /// whether the thread that brings it may wait.
    fn place(
        &mut self,
        mut coming: Coming,
        beside: usize,
        stands_by: bool,
        now: MonotonicTime,
    ) -> (Place, Vec<Arc<OpenSegment>>) {
        let mut full = Vec::new();
        loop {
            // The last one written to comes first, so that few are open.
            let idlest = (0..self.open.len())
                .rev()
                .min_by_key(|&at| self.open[at].backlog());
            let Some(at) = idlest else { break };
            let open = self.open.remove(at);
            let busy = open.backlog() > 0;
            if busy && self.open.len() + 1 + self.opening < beside {
                self.open.push(open);
                self.opening += 1;
                return (Place::Open(Err(coming)), full);
            }
            let flushed = coming.is_flushed(self);
            match open.reserve(coming.write) {
                Ok(append) => {
                    if flushed {
                        open.seal_by(now);
                    }
                    self.open.push(Arc::clone(&open));
                    return (Place::Into(open, append), full);
                }
                Err(write) => {
                    coming.write = write;
                    full.push(open);
                }
            }
        }
        if self.opening == 0 {
            self.opening = 1;
            return (Place::Open(Ok(coming)), full);
        }
        // Not to go cold while another thread opens one.
        if self.open.len() + self.opening < beside {
            self.opening += 1;
            return (Place::Open(Err(coming)), full);
        }
        coming.came.get_or_insert(self.flushes);
        if stands_by {
            return (Place::StandsBy(coming), full);
        }
        self.waiting.push(coming);
        (Place::Waits, full)
    }

    /// Opens none after all, unless it is the only one that something waits for by now.
    fn gives_up_opening(&mut self) -> bool {
        let unwanted = self.opening > 1 || self.waiting.is_empty();
        if unwanted {
            self.opening -= 1;
        }
        unwanted
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

/// Length at which segments are sealed below a root with this limit, bytes, where no record is
/// longer.
fn room_below(config: &SegmentConfig, limit: u64) -> u64 {
    config.size.min(limit / SHARE)
}

impl Segments {
    /// Bytes of a segment with one record of `len` bytes.
    pub(super) fn least_room(&self, len: u64) -> u64 {
        HEAD_LEN + round_up(len, PAGE) + footer_len(1)
    }

    /// Length at which segments are sealed now, bytes.
    pub(super) fn room(&self) -> u64 {
        let least = self.least_room(self.shared.config.record.record_len() as u64);
        room_below(&self.config, self.shared.space.usage().capacity).max(least)
    }

    /// Writes a record into a segment, and opens one for it if need be.
    pub(super) fn append(self: &Arc<Self>, io: &IoJob, mut coming: Coming) {
        let room = self.room_for(room_of(&coming.write));
        let mut beside = if self.is_short(io) {
            1
        } else {
            self.stripes(room)
        };
        loop {
            if let Err(late) = io.still_wanted() {
                return coming.write.end(Err(late));
            }
            let now = self.shared.clock.now();
            let opened = self.writer.opened.seen();
            let (flushed, (place, full)) = {
                let mut state = self.writer.state.lock();
                let flushed = coming.is_flushed(&state);
                (flushed, state.place(coming, beside, io.is_lent(), now))
            };
            if flushed || matches!(place, Place::Waits) {
                // the timer keeps when it is sealed, and the deadline of what waits
                self.seal_notify.notify();
            }
            full.iter()
                .filter(|full| full.close())
                .for_each(|full| self.seal(full));
            match place {
                Place::Into(open, append) => return self.write_into(io, &open, append),
                Place::Waits => return,
                Place::Open(Ok(coming)) => return self.open(io, Some(coming), room),
                Place::Open(Err(again)) => {
                    self.open(io, None, room);
                    (coming, beside) = (again, 1);
                }
                Place::StandsBy(again) => {
                    let until = Some(io.deadline());
                    self.shared.clock.sleep(&self.writer.opened, opened, until);
                    coming = again;
                }
            }
        }
    }

    /// Whether what is left of a job's time is too little to open a segment for others too.
    fn is_short(&self, io: &IoJob) -> bool {
        io.deadline() < self.shared.clock.now().after(LEAST_TIME)
    }

    /// Bytes of the segment that is opened for a record of `len` bytes.
    fn room_for(&self, len: u64) -> u64 {
        self.room().max(self.least_room(len))
    }

    /// How many segments of that room may take records side by side: one where they are sealed at
    /// once anyway.
    fn stripes(&self, room: u64) -> usize {
        if self.seals_at_once() {
            return 1;
        }
        side_by_side(&self.shared, self.shared.space.usage().capacity, room)
    }

    /// Opens a segment: is the root still ours, is there room, and then the file. Without a record
    /// that needs it only room that is granted already is taken.
    fn open(self: &Arc<Self>, io: &IoJob, coming: Option<Coming>, room: u64) {
        let needed = coming.is_some();
        if let Some(mut coming) = coming {
            let mut state = self.writer.state.lock();
            coming.came.get_or_insert(state.flushes);
            state.waiting.push(coming);
        }
        let reserved = Room::new(&self.shared.space);
        if needed && self.is_short(io) {
            self.seal_notify.notify(); // the timer keeps the deadline of what waits
            let deadline = self.shared.clock.now().after(LEAST_TIME);
            return self.open_later(room, deadline, reserved);
        }
        let created = self.when_created(room, io.deadline(), &reserved);
        self.open_with(io, room, needed, reserved, created);
    }

    fn open_with(
        self: &Arc<Self>,
        io: &IoJob,
        room: u64,
        needed: bool,
        reserved: Arc<Room>,
        created: Done<Created>,
    ) {
        io.here(|io| self.create(io, room, needed, &reserved), created);
        self.write_waiting(io);
    }

    /// What follows once a segment was created, or not.
    fn when_created(
        self: &Arc<Self>,
        room: u64,
        deadline: MonotonicTime,
        reserved: &Arc<Room>,
    ) -> Done<Created> {
        let (segments, reserved) = (Arc::clone(self), Arc::clone(reserved));
        Box::new(move |result| match result {
            Ok(Created::File(name)) => segments.opened(segments.begin(name, room, reserved)),
            Ok(Created::Unwanted) => {
                segments.writer.opened.notify();
                // the thread that waits until nothing is written any more
                segments.seal_notify.notify();
            }
            Ok(Created::NeedsRoom) => {
                let held = Arc::clone(&reserved);
                let deadline = deadline.max(segments.shared.clock.now().after(LEAST_TIME));
                reserved.reserve(room, deadline, move |made| match made {
                    Ok(()) => segments.open_later(room, deadline, held),
                    Err(error) => segments.opened(Err(error)),
                });
            }
            Err(error) => {
                reserved.commit(if unsure(&error) { room } else { 0 }, Some(&error));
                segments.shared.missed(&error);
                segments.opened(Err(error));
            }
        })
    }

    /// Opens a segment on a thread for dumps: one for which room was made, or that needs more time
    /// than its record has.
    fn open_later(self: &Arc<Self>, room: u64, deadline: MonotonicTime, reserved: Arc<Room>) {
        let (created, ended) = either(self.when_created(room, deadline, &reserved));
        let segments = Arc::clone(self);
        let work = move |io: &IoJob| {
            segments.open_with(io, room, true, reserved, created);
            Ok(())
        };
        self.shared.io.job(LANE_DUMP, deadline, work, ended);
    }

    /// Takes a segment into the index whose file was made.
    fn begin(&self, name: SegmentName, room: u64, reserved: Arc<Room>) -> Result<OpenSegment> {
        let number = self.index.begin(Known {
            name,
            part: self.shared.config.part,
            private: true,
            sealed_ns: u64::MAX,
            used_ns: self.now_ns(),
            len: 0,
        });
        match number {
            Some(number) => {
                let now = self.shared.clock.now();
                Ok(OpenSegment::new(number, name, room, reserved, now))
            }
            None => {
                let twice = Error::internal("two segments have one name");
                reserved.commit(room, Some(&twice));
                Err(twice)
            }
        }
    }

    /// Makes the file of a segment, once it has room.
    fn create(
        self: &Arc<Self>,
        io: &IoJob,
        room: u64,
        needed: bool,
        reserved: &Room,
    ) -> Result<Created> {
        let config = &self.shared.config;
        let marker = io.look(self.shared.layout.marker())?;
        self.shared
            .check_root(marker)
            .inspect_err(|_| self.shared.look_again())?;
        if needed || reserved.try_reserve(room).is_err() {
            io.still_wanted()?;
            if !needed && self.writer.state.lock().gives_up_opening() {
                return Ok(Created::Unwanted);
            }
            if !reserved.take(room)? {
                return Ok(Created::NeedsRoom);
            }
        }
        let name = self.files.next_name();
        let head = encode_head(&self.files.owner(name), &config.process);
        io.create(&self.files.private(name), &head, room, config.modes.file)?;
        Ok(Created::File(name))
    }

    /// A segment was opened, or not. The first that waits for it has its place there; the others
    /// too where it is closed at once or no other is filled beside it, else each looks for one that
    /// no one writes to.
    fn opened(self: &Arc<Self>, result: Result<OpenSegment>) {
        let open = result.map(Arc::new);
        let alone = open.as_ref().is_ok_and(|open| self.stripes(open.room) == 1);
        let mut state = self.writer.state.lock();
        state.opening -= 1;
        // A segment that could not be opened fails those that have no other to wait for.
        let mut waiting = match &open {
            Err(_) if state.opening > 0 => Vec::new(),
            _ => std::mem::take(&mut state.waiting),
        };
        let flush_soon = match waiting.is_empty() {
            true => state.last,
            false => waiting.iter().any(|coming| coming.is_flushed(&state)),
        };
        if flush_soon {
            state.closed = Some(self.shared.clock.now());
        }
        if let Ok(open) = &open {
            state.living.push(Arc::clone(open));
            state.open.push(Arc::clone(open));
            for Coming { write, came } in std::mem::take(&mut waiting) {
                let place = if flush_soon || alone || state.placed.is_empty() {
                    open.reserve(write)
                } else {
                    Err(write)
                };
                match place {
                    Ok(append) => state.placed.push((Arc::clone(open), append)),
                    Err(write) => state.left.push(Coming { write, came }),
                }
            }
        }
        drop(state);
        self.writer.opened.notify();
        match open {
            Ok(open) if flush_soon => self.close(&open),
            Ok(_) => {}
            Err(error) => waiting
                .into_iter()
                .for_each(|coming| coming.write.end(Err(error.clone()))),
        }
        self.seal_notify.notify();
    }

    /// Writes what waited for a segment: one here, and the others on threads for dumps.
    fn write_waiting(self: &Arc<Self>, io: &IoJob) {
        let (placed, left) = {
            let mut state = self.writer.state.lock();
            (
                std::mem::take(&mut state.placed),
                std::mem::take(&mut state.left),
            )
        };
        for Coming { write, came } in left {
            let segments = Arc::clone(self);
            self.shared.on_a_thread(write, move |io, write| {
                segments.append(io, Coming { write, came });
            });
        }
        let mut placed = placed.into_iter();
        let first = placed.next();
        for (open, append) in placed {
            self.write_elsewhere(&open, append);
        }
        match first {
            Some((open, append))
                if append.write.deadline == io.deadline() && io.still_wanted().is_ok() =>
            {
                self.write_into(io, &open, append);
            }
            Some((open, append)) => self.write_elsewhere(&open, append),
            None => {}
        }
    }

    /// Those that wait for a segment to be opened and whose time is over, and when that of the next
    /// one is.
    pub(super) fn late_waiting(&self, now: MonotonicTime) -> (Vec<Write>, Option<MonotonicTime>) {
        let mut state = self.writer.state.lock();
        let late = state
            .waiting
            .extract_if(.., |coming| coming.write.deadline <= now);
        let late = late.map(|coming| coming.write).collect();
        (
            late,
            state
                .waiting
                .iter()
                .map(|coming| coming.write.deadline)
                .min(),
        )
    }

    /// Takes no more records into this segment.
    pub(super) fn close(self: &Arc<Self>, open: &Arc<OpenSegment>) {
        self.leave(open);
        if open.close() {
            self.seal(open);
        }
    }

    /// The next record goes into another one.
    pub(super) fn leave(&self, open: &Arc<OpenSegment>) {
        let mut state = self.writer.state.lock();
        state.open.retain(|other| !Arc::ptr_eq(other, open));
    }

    /// Whether nothing waits for more any more, so that a segment is sealed as soon as nothing is
    /// written to it.
    pub(super) fn seals_at_once(&self) -> bool {
        self.config.age.is_zero() || self.writer.state.lock().last
    }

    /// Closes what is open; with `last`, from now on nothing waits for more.
    pub(super) fn flush(self: &Arc<Self>, last: bool) {
        let open = {
            let mut state = self.writer.state.lock();
            state.last |= last;
            state.flushes += 1;
            state.open.clone()
        };
        open.iter().for_each(|open| self.close(open));
    }

    /// Closes a segment that is due.
    pub(super) fn close_due(self: &Arc<Self>, open: &Arc<OpenSegment>, now: MonotonicTime) {
        self.writer.state.lock().closed = Some(now);
        self.close(open);
    }

    /// Closes what is open now, or soon if that was done a moment ago: somebody waits for it.
    pub(super) fn flush_soon(self: &Arc<Self>) {
        let now = self.shared.clock.now();
        let (open, due) = {
            let mut state = self.writer.state.lock();
            state.flushes += 1;
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
        self.writer.state.lock().open.len()
    }

    /// The segments that were opened and have not ended.
    pub(super) fn open_segments(&self) -> Vec<Arc<OpenSegment>> {
        self.writer.state.lock().living.clone()
    }

    /// A segment has ended.
    pub(super) fn forget(&self, open: &Arc<OpenSegment>) {
        let mut state = self.writer.state.lock();
        state.living.retain(|living| !Arc::ptr_eq(living, open));
    }

    /// Whether a segment has not ended yet.
    pub(super) fn is_writing(&self) -> bool {
        let state = self.writer.state.lock();
        !state.living.is_empty() || state.opening > 0
    }

    /// Names of the segments that were opened and have not ended.
    pub(super) fn living(&self) -> HashSet<SegmentName> {
        self.writer
            .state
            .lock()
            .living
            .iter()
            .map(|open| open.name)
            .collect()
    }
}
