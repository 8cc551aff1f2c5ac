//! Which segments are open, and which of them takes the next record.
//!
//! One segment takes records; those before it are being sealed. Where one file alone cannot keep up (the page cache is
//! filled by one thread at a time for each file), some are open side by side and take [`STRIPE_BYTES`] bytes each in turn, so that
//! neighbours of a chain still lie together. Room for all of a segment is admitted when it is opened, and what it did not
//! need is given back when it ended, so an append asks nobody.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{Error, PAGE, Result, round_up};
use ucm_infra::{LANE_DUMP, MonotonicTime};
use ucm_io::IoJob;
use ucm_quota::Room;
use ucm_quota::layout::SegmentName;

use super::format::{HEAD_LEN, Owner, encode_head, footer_len};
use super::index::Known;
use super::open::{Append, OpenSegment};
use super::sealing::unsure;
use super::{SegmentConfig, Segments};
use crate::posix::Shared;
use crate::writing::Write;

/// Part of the root's limit that a segment may be.
const SHARE: u64 = 64;
/// Time that opening or sealing a segment has at least, whatever is left of its records' time.
pub(super) const LEAST_TIME: Duration = Duration::from_secs(5);

/// Bytes that one segment takes before another one may be in turn.
const STRIPE_BYTES: u64 = 4 << 20;
/// Most segments that take records side by side.
const STRIPES: usize = 4;
/// Least time between two times that what is open is sealed because somebody waits.
const SPACING: Duration = Duration::from_millis(50);

/// Which segment takes records.
#[derive(Default)]
pub(crate) struct Writer(Mutex<State>);

#[derive(Default)]
struct State {
    /// Those that take records, the one in turn last.
    open: Vec<Arc<OpenSegment>>,
    /// One is being opened; these wait for it, none if others are open. Each of them holds a slot, so they are not many.
    opening: Option<Vec<Write>>,
    /// Bytes that the one in turn took.
    taken: u64,
    /// Segments that were opened and have not ended, those that take records too.
    living: Vec<Arc<OpenSegment>>,
    /// What is being opened now is to be closed as soon as it holds what waits for it.
    hurry: bool,
    /// Nothing waits for more any more.
    last: bool,
    /// When a segment was last closed for its age or because somebody waited.
    closed: Option<MonotonicTime>,
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

/// What an append has to do once the lock is free.
struct AppendPlan {
    /// Where the write goes; `None`: it waits for a segment to be opened.
    into: Option<(Arc<OpenSegment>, Append)>,
    /// These have no more room.
    full: Vec<Arc<OpenSegment>>,
    /// Another one is to be opened.
    another: bool,
}

impl State {
    fn way(&mut self, mut write: Write, len: u64, abreast: usize) -> AppendPlan {
        let mut another = false;
        if self.taken >= STRIPE_BYTES {
            self.taken = 0;
            let idlest = (0..self.open.len()).min_by_key(|&at| self.open[at].backlog());
            if let Some(at) = idlest {
                let next = self.open.remove(at);
                another = next.backlog() > 1 && self.open.len() + 1 < abreast && self.opening.is_none();
                self.open.push(next);
            }
        }
        let mut full = Vec::new();
        while let Some(current) = self.open.last() {
            match current.reserve(write, len) {
                Ok(append) => {
                    self.taken += len;
                    let into = Some((Arc::clone(current), append));
                    if another {
                        self.opening = Some(Vec::new());
                    }
                    return AppendPlan { into, full, another };
                }
                Err(again) => {
                    write = again;
                    full.extend(self.open.pop());
                    self.taken = 0;
                }
            }
        }
        let another = self.opening.is_none();
        self.opening.get_or_insert_default().push(write);
        AppendPlan {
            into: None,
            full,
            another,
        }
    }

    /// Opens none after all, unless something waits for it by now.
    fn gives_up_opening(&mut self) -> bool {
        let unwanted = self.opening.as_ref().is_none_or(Vec::is_empty);
        if unwanted {
            self.opening = None;
        }
        unwanted
    }
}

/// How many segments of that room are filled side by side below a root with this limit: where records take turns in each,
/// as many as are written at once and no more than are a 64th of the limit together.
fn side_by_side(shared: &Shared, limit: u64, room: u64) -> usize {
    if !shared.serializes_writes() {
        return 1;
    }
    let most = usize::try_from(limit / SHARE / room.max(1)).unwrap_or(STRIPES);
    shared.io.width(LANE_DUMP).min(STRIPES).min(most).max(1)
}

/// Length at which segments are sealed below a root with this limit, bytes, where no record is longer.
fn room_below(config: &SegmentConfig, limit: u64) -> u64 {
    config.size.min(limit / SHARE)
}

/// Bytes that a record takes in a segment.
fn room_of(write: &Write) -> u64 {
    round_up(write.options.len as u64, PAGE)
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

    /// Writes a record, unless it is there.
    pub(super) fn append(self: &Arc<Self>, write: Write) {
        let (len, deadline) = (room_of(&write), write.deadline);
        let abreast = self.abreast(self.room_for(len));
        let way = self.writer.0.lock().way(write, len, abreast);
        self.go(way, len, deadline);
    }

    /// Does what a record of `len` bytes takes that has its way.
    fn go(self: &Arc<Self>, way: AppendPlan, len: u64, deadline: MonotonicTime) {
        way.full
            .iter()
            .filter(|full| full.close())
            .for_each(|full| self.seal(full));
        if way.into.is_none() || way.another {
            self.seal_notify.notify(); // the timer keeps the deadline of what waits
        }
        if way.another {
            self.open(self.room_for(len), deadline, way.into.is_none());
        }
        if let Some((open, append)) = way.into {
            self.enqueue(&open, append);
        }
    }

    /// Bytes of the segment that is opened for a record of `len` bytes.
    fn room_for(&self, len: u64) -> u64 {
        self.room().max(self.least_room(len))
    }

    /// How many segments of that room may take records side by side: one where they are sealed at once anyway.
    fn abreast(&self, room: u64) -> usize {
        if self.seals_at_once() {
            return 1;
        }
        side_by_side(&self.shared, self.shared.space.usage().capacity, room)
    }

    /// Opens a segment: is the root still ours, is there room, and then the file. With `needed` nothing else takes what is
    /// to be written; without, only room that is granted already is taken.
    fn open(self: &Arc<Self>, room: u64, deadline: MonotonicTime, needed: bool) {
        let deadline = deadline.max(self.shared.clock.now().after(LEAST_TIME));
        self.begin_open(room, deadline, needed, Room::new(&self.shared.space));
    }

    fn begin_open(self: &Arc<Self>, room: u64, deadline: MonotonicTime, needed: bool, admitted: Arc<Room>) {
        let (segments, taken) = (Arc::clone(self), Arc::clone(&admitted));
        let work = move |io: &IoJob| segments.create(io, room, needed, &taken);
        let segments = Arc::clone(self);
        let created = move |result: Result<Created>| match result {
            Ok(Created::File(name)) => segments.opened(segments.begin(name, room, admitted)),
            Ok(Created::Unwanted) => segments.seal_notify.notify(), // whoever waits until nothing is written any more
            Ok(Created::NeedsRoom) => {
                let held = Arc::clone(&admitted);
                admitted.make(room, deadline, move |made| match made {
                    Ok(()) => segments.begin_open(room, deadline, true, held),
                    Err(error) => segments.opened(Err(error)),
                });
            }
            Err(error) => {
                admitted.settle(if unsure(&error) { room } else { 0 }, Some(&error));
                segments.shared.missed(&error);
                segments.opened(Err(error));
            }
        };
        self.shared.io.job(LANE_DUMP, deadline, work, created);
    }

    /// Takes a segment into the index whose file was made.
    fn begin(&self, name: SegmentName, room: u64, admitted: Arc<Room>) -> Result<OpenSegment> {
        let number = self.index.begin(Known {
            name,
            part: self.shared.config.part,
            private: true,
            sealed_ns: u64::MAX,
            used_ns: self.now_ns(),
            len: 0,
        });
        match number {
            Some(number) => Ok(OpenSegment::new(number, name, room, admitted)),
            None => {
                let twice = Error::internal("two segments have one name");
                admitted.settle(room, Some(&twice));
                Err(twice)
            }
        }
    }

    /// Makes the file of a segment, once it has room.
    fn create(self: &Arc<Self>, io: &IoJob, room: u64, needed: bool, admitted: &Room) -> Result<Created> {
        let config = &self.shared.config;
        let marker = io.look(self.shared.layout.marker())?;
        self.shared
            .check_root(marker)
            .inspect_err(|_| self.shared.look_again())?;
        if needed || admitted.take_spare(room).is_err() {
            io.still_wanted()?;
            if !needed && self.writer.0.lock().gives_up_opening() {
                return Ok(Created::Unwanted);
            }
            if !admitted.take(room)? {
                return Ok(Created::NeedsRoom);
            }
        }
        let name = self.next_name();
        let head = encode_head(&self.owner(name), &config.process);
        io.create(&self.private(name), &head, room, config.modes.file)?;
        Ok(Created::File(name))
    }

    /// A segment was opened, or not: those that wait for it go on.
    fn opened(self: &Arc<Self>, result: Result<OpenSegment>) {
        let open = result.map(Arc::new);
        let (now, abreast) = (self.shared.clock.now(), self.abreast(self.room()));
        let mut ways = Vec::new();
        let (waiting, hurry) = {
            let mut state = self.writer.0.lock();
            let mut waiting = state.opening.take().unwrap_or_default();
            let hurry = std::mem::take(&mut state.hurry) || state.last && waiting.is_empty();
            if hurry {
                state.closed = Some(now);
            }
            if let Ok(open) = &open {
                state.living.push(Arc::clone(open));
                state.open.push(Arc::clone(open));
                state.taken = 0;
                // All at once, so that nothing that comes now gets between neighbours.
                ways.extend(waiting.drain(..).map(|write| {
                    let (len, deadline) = (room_of(&write), write.deadline);
                    (state.way(write, len, abreast), len, deadline)
                }));
            }
            (waiting, hurry)
        };
        match open {
            Ok(open) => {
                if ways.is_empty() {
                    open.opened_for_nobody(now);
                    self.seal_notify.notify();
                }
                ways.into_iter()
                    .for_each(|(way, len, deadline)| self.go(way, len, deadline));
                if hurry {
                    self.close(&open);
                }
            }
            Err(error) => {
                waiting
                    .into_iter()
                    .for_each(|write| write.end(Err(error.clone())));
                self.seal_notify.notify();
            }
        }
    }

    /// Those that wait for a segment to be opened and whose time is over, and when that of the next one is.
    pub(super) fn late_waiting(&self, now: MonotonicTime) -> (Vec<Write>, Option<MonotonicTime>) {
        let mut state = self.writer.0.lock();
        let Some(waiting) = &mut state.opening else {
            return (Vec::new(), None);
        };
        let late: Vec<_> = waiting.extract_if(.., |write| write.deadline <= now).collect();
        (late, waiting.iter().map(|write| write.deadline).min())
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
        let mut state = self.writer.0.lock();
        if state
            .open
            .last()
            .is_some_and(|current| Arc::ptr_eq(current, open))
        {
            state.taken = 0;
        }
        state.open.retain(|other| !Arc::ptr_eq(other, open));
    }

    /// Whether nothing waits for more any more, so that a segment is sealed as soon as nothing is written to it.
    pub(super) fn seals_at_once(&self) -> bool {
        self.config.age.is_zero() || self.writer.0.lock().last
    }

    /// Closes what is open; with `last`, from now on nothing waits for more.
    pub(super) fn flush(self: &Arc<Self>, last: bool) {
        let open = {
            let mut state = self.writer.0.lock();
            state.last |= last;
            state.hurry |= state
                .opening
                .as_ref()
                .is_some_and(|waiting| last || !waiting.is_empty());
            state.open.clone()
        };
        open.iter().for_each(|open| self.close(open));
    }

    /// Closes a segment that is due.
    pub(super) fn close_due(self: &Arc<Self>, open: &Arc<OpenSegment>, now: MonotonicTime) {
        self.writer.0.lock().closed = Some(now);
        self.close(open);
    }

    /// Closes what is open now, or soon if that was done a moment ago: somebody waits for it.
    pub(super) fn hurry(self: &Arc<Self>) {
        let now = self.shared.clock.now();
        let (open, due) = {
            let mut state = self.writer.0.lock();
            state.hurry |= state.opening.as_ref().is_some_and(|waiting| !waiting.is_empty());
            if state.open.is_empty() {
                return;
            }
            let due = state.closed.map_or(now, |last| last.after(SPACING).max(now));
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
        self.writer.0.lock().open.len()
    }

    /// The segments that were opened and have not ended.
    pub(super) fn open_segments(&self) -> Vec<Arc<OpenSegment>> {
        self.writer.0.lock().living.clone()
    }

    /// A segment has ended.
    pub(super) fn forget(&self, open: &Arc<OpenSegment>) {
        let mut state = self.writer.0.lock();
        state.living.retain(|living| !Arc::ptr_eq(living, open));
    }

    /// Whether a segment has not ended yet.
    pub(super) fn is_writing(&self) -> bool {
        let state = self.writer.0.lock();
        !state.living.is_empty() || state.opening.is_some()
    }

    /// Names of the segments that were opened and have not ended.
    pub(super) fn living(&self) -> HashSet<SegmentName> {
        self.writer.0.lock().living.iter().map(|open| open.name).collect()
    }

    pub(super) fn private(&self, name: SegmentName) -> PathBuf {
        self.shared.layout.private(name.writer, name.sequence)
    }

    pub(super) fn owner(&self, name: SegmentName) -> Owner {
        Owner {
            name,
            namespace: *self.shared.config.identity.digest(),
            part: self.shared.config.part,
            time_ns: self.shared.clock.wall_ns(),
        }
    }
}
