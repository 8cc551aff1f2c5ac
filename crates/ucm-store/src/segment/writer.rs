//! The way of a record into a segment: which one is open, appending to it, sealing it, and telling those who wait.
//!
//! At most one segment takes records; those before it are being sealed. Room for all of a segment is admitted when it is
//! opened, and what it did not need is given back when it ended, so an append asks nobody.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, PAGE, Result, round_up};
use ucm_infra::Mono;
use ucm_io::{IoBuf, IoDone, IoOp, ReadMode};

use super::Segments;
use super::format::{Entry, HEAD_LEN, Owner, encode_head, foot_len};
use super::open::{Next, OpenSegment};
use super::sealing::unsure;
use crate::backend::{Done, Written};
use crate::engine::LANE_DUMP;
use crate::layout::SegmentName;
use crate::space::Ticket;
use crate::writing::Write;

/// Part of the root's limit that a segment may be.
const SHARE: u64 = 64;
/// Time that opening or sealing a segment has at least, whatever is left of its records' time.
pub(super) const LEAST_TIME: Duration = Duration::from_secs(5);

/// Which segment takes records.
#[derive(Default)]
pub(crate) struct Writer(Mutex<State>);

#[derive(Default)]
struct State {
    current: Current,
    /// Segments that were opened and have not ended, the current one too.
    living: Vec<Arc<OpenSegment>>,
    /// What is being opened now is to be closed as soon as it holds what waits for it.
    hurry: bool,
    /// Nothing waits for more any more.
    last: bool,
}

#[derive(Default)]
enum Current {
    #[default]
    None,
    /// One is being opened; these wait for it. Each of them holds a slot, so they are not many.
    Opening(Vec<Write>),
    Open(Arc<OpenSegment>),
}

/// Where a write goes.
enum Way {
    Into(Arc<OpenSegment>, (usize, Entry), Write),
    /// A new segment is needed; the one before it, if any, is full.
    Open(Option<Arc<OpenSegment>>),
    Waits,
}

impl Segments {
    /// Bytes of a segment with one record of `len` bytes.
    pub(super) fn least_room(&self, len: u64) -> u64 {
        HEAD_LEN + round_up(len, PAGE) + foot_len(1)
    }

    /// Length at which segments are sealed now, bytes.
    pub(super) fn room(&self) -> u64 {
        let least = self.least_room(self.shared.config.record.record_len() as u64);
        let share = self.shared.space.usage().capacity / SHARE;
        self.config.size.min(share).max(least)
    }

    /// Writes a record, unless it is there.
    pub(super) fn append(self: &Arc<Self>, write: Write) {
        let deadline = write.deadline;
        let len = round_up(write.options.len as u64, PAGE);
        let way = {
            let mut state = self.writer.0.lock();
            let place = match &state.current {
                Current::Open(open) => open
                    .reserve(write.id, len, write.options.ordinal, write.deadline)
                    .map(|place| (Arc::clone(open), place)),
                _ => None,
            };
            match (place, &mut state.current) {
                (Some((open, place)), _) => Way::Into(open, place, write),
                (None, Current::Opening(waiting)) => {
                    waiting.push(write);
                    Way::Waits
                }
                (None, current) => match std::mem::replace(current, Current::Opening(vec![write])) {
                    Current::Open(full) => Way::Open(Some(full)),
                    _ => Way::Open(None),
                },
            }
        };
        match way {
            Way::Into(open, place, write) => self.write_into(open, place, write),
            Way::Waits => {}
            Way::Open(full) => {
                if let Some(full) = full
                    && full.close()
                {
                    self.seal(&full);
                }
                self.open(self.room().max(self.least_room(len)), deadline);
            }
        }
    }

    /// Opens a segment for those that wait: is the root still ours, is there room, and then the file.
    fn open(self: &Arc<Self>, room: u64, deadline: Mono) {
        let deadline = deadline.max(self.shared.clock.now().after(LEAST_TIME));
        let op = IoOp::Stat {
            paths: vec![self.shared.layout.marker()],
            stop_at_missing: false,
        };
        let segments = Arc::clone(self);
        let looked = move |result: Result<IoDone>| {
            let checked = result.and_then(|answer| match answer {
                IoDone::Stat(metas) => segments.shared.check_root(metas.into_iter().next().flatten()),
                _ => Err(Error::internal("a stat answered with something else")),
            });
            match checked {
                Ok(()) => segments.open_in_root(room, deadline),
                Err(error) => {
                    if error.kind() == ErrorKind::Foreign {
                        segments.shared.look_again();
                    }
                    segments.opened(Err(error));
                }
            }
        };
        self.shared.io.submit(LANE_DUMP, deadline, op, Box::new(looked));
    }

    fn open_in_root(self: &Arc<Self>, room: u64, deadline: Mono) {
        let segments = Arc::clone(self);
        let admitted = move |ticket: Result<Ticket>| match ticket {
            Ok(ticket) => segments.create(room, ticket, deadline),
            Err(error) => segments.opened(Err(error)),
        };
        self.shared.space.admit(room, Box::new(admitted));
    }

    fn create(self: &Arc<Self>, room: u64, ticket: Ticket, deadline: Mono) {
        let config = &self.shared.config;
        let name = SegmentName {
            writer: config.writer,
            sequence: self.shared.sequence.fetch_add(1, Ordering::Relaxed),
        };
        let op = IoOp::Create {
            path: self.private(name),
            head: encode_head(&self.owner(name), &config.process),
            room,
            mode: config.modes.file,
        };
        let segments = Arc::clone(self);
        let created = move |result: Result<IoDone>| {
            let begun = result.and_then(|_| {
                let number = segments.index.begin(name, true, u64::MAX, segments.now_ns());
                number.ok_or_else(|| Error::internal("two segments have one name"))
            });
            match begun {
                Ok(number) => segments.opened(Ok(OpenSegment::new(number, name, room, ticket))),
                Err(error) => {
                    let kept = if unsure(&error) { room } else { 0 };
                    segments.shared.space.settled(ticket, kept, Some(&error));
                    segments.shared.missed(&error);
                    segments.opened(Err(error));
                }
            }
        };
        self.shared.io.submit(LANE_DUMP, deadline, op, Box::new(created));
    }

    /// A segment was opened, or not: those that wait for it go on.
    fn opened(self: &Arc<Self>, result: Result<OpenSegment>) {
        let open = result.map(Arc::new);
        let (waiting, hurry) = {
            let mut state = self.writer.0.lock();
            let next = match &open {
                Ok(open) => {
                    state.living.push(Arc::clone(open));
                    Current::Open(Arc::clone(open))
                }
                Err(_) => Current::None,
            };
            let waiting = match std::mem::replace(&mut state.current, next) {
                Current::Opening(waiting) => waiting,
                _ => Vec::new(),
            };
            (waiting, std::mem::take(&mut state.hurry))
        };
        match open {
            Ok(open) => {
                waiting.into_iter().for_each(|write| self.append(write));
                if hurry {
                    self.close(&open);
                }
            }
            Err(error) => waiting
                .into_iter()
                .for_each(|write| write.end(Err(error.clone()))),
        }
    }

    fn write_into(self: &Arc<Self>, open: Arc<OpenSegment>, (number, entry): (usize, Entry), write: Write) {
        let Write {
            slot,
            options,
            deadline,
            done,
            ..
        } = write;
        let path = self.private(open.name);
        let op = IoOp::WriteAt {
            path: path.clone(),
            offset: entry.offset,
            buf: IoBuf::Slot(slot),
            len: options.len,
        };
        let segments = Arc::clone(self);
        let written = move |result: Result<IoDone>| match result {
            Ok(IoDone::Wrote { buf }) if options.read_back => {
                segments.read_back(path, open, (number, entry), buf, deadline, done);
            }
            result => segments.written(&open, (number, entry), done, result.map(|_| Written::Published)),
        };
        self.shared.io.submit(LANE_DUMP, deadline, op, Box::new(written));
    }

    /// Reads a record that was just written past every cache, and judges it.
    fn read_back(
        self: &Arc<Self>,
        path: PathBuf,
        open: Arc<OpenSegment>,
        place: (usize, Entry),
        mut buf: IoBuf,
        deadline: Mono,
        done: Done<Written>,
    ) {
        let entry = place.1;
        let len = entry.len as usize;
        if let IoBuf::Slot(slot) = &mut buf {
            slot.as_mut_slice()[..len].fill(0); // a read that brings nothing must not find the right bytes there
        }
        let op = IoOp::Read {
            path,
            offset: entry.offset,
            len,
            buf,
            mode: ReadMode::FreshDirect,
        };
        let segments = Arc::clone(self);
        let read = move |result: Result<IoDone>| {
            let judged = result.and_then(|answer| match answer {
                IoDone::Read { buf, read, .. } => {
                    Ok(segments.shared.judge(entry.id, &buf[..read], entry.len))
                }
                _ => Err(Error::internal("a read answered with something else")),
            });
            let judged = judged.map(|judged| judged.map_or_else(Written::Unsound, |()| Written::Published));
            segments.written(&open, place, done, judged);
        };
        self.shared.io.submit(LANE_DUMP, deadline, op, Box::new(read));
    }

    /// A write ended. Its slot is free by now.
    fn written(
        self: &Arc<Self>,
        open: &Arc<OpenSegment>,
        (number, entry): (usize, Entry),
        done: Done<Written>,
        result: Result<Written>,
    ) {
        let at_once = self.config.age.is_zero() || self.writer.0.lock().last;
        let next = match result {
            Ok(Written::Published) => {
                self.index.add(open.number, &[entry]);
                self.early.gained(entry.id);
                open.written(number, done, self.shared.clock.now(), at_once)
            }
            Ok(other) => {
                done(Ok(other));
                open.failed(&Error::internal("not published"), true, at_once)
            }
            Err(error) => {
                self.shared.missed(&error);
                let next = open.failed(&error, error.kind() == ErrorKind::Busy, at_once);
                done(Err(error));
                next
            }
        };
        match next {
            Next::Wait => {}
            Next::Begin => self.seal_bell.ring(),
            Next::Seal => {
                self.leave(open);
                self.seal(open);
            }
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
        let mut state = self.writer.0.lock();
        if matches!(&state.current, Current::Open(current) if Arc::ptr_eq(current, open)) {
            state.current = Current::None;
        }
    }

    /// Closes what is open; with `last`, from now on nothing waits for more.
    pub(super) fn flush(self: &Arc<Self>, last: bool) {
        let current = {
            let mut state = self.writer.0.lock();
            state.last |= last;
            state.hurry = matches!(state.current, Current::Opening(_));
            match &state.current {
                Current::Open(open) => Some(Arc::clone(open)),
                _ => None,
            }
        };
        if let Some(open) = current {
            self.close(&open);
        }
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
        !state.living.is_empty() || matches!(state.current, Current::Opening(_))
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
