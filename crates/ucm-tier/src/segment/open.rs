//! One segment being written: places for records are reserved in order, then it is closed to new
//! ones, and when the last write has ended it can be sealed.
//!
//! A write that failed or came too late leaves a hole that the footer does not name. Nothing here
//! touches a file.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, PAGE, round_up};
use ucm_infra::MonotonicTime;
use ucm_quota::Room;
use ucm_quota::layout::SegmentName;

use super::format::{Entry, HEAD_LEN, footer_len};
use super::index::SegmentNumber;
use crate::backend::{Done, Written};
use crate::writing::Write;

/// Time that opening or sealing a segment has at least, whatever is left of its records' time.
pub(super) const LEAST_TIME: Duration = Duration::from_secs(5);

/// A record that has its place in a segment and is not written yet.
pub(crate) struct Append {
    /// Its number among the records of the segment.
    pub(crate) number: usize,
    pub(crate) entry: Entry,
    pub(crate) write: Write,
}

/// See the module.
pub(crate) struct OpenSegment {
    /// Its number in the index.
    pub(crate) number: SegmentNumber,
    pub(crate) name: SegmentName,
    /// Bytes that were reserved for it.
    pub(crate) room: u64,
    pub(crate) reserved: Arc<Room>,
    /// When it was: one that no one writes to ends as if it held a record since then.
    opened: MonotonicTime,
    inner: Mutex<Inner>,
}

struct Inner {
    /// Where the next record goes.
    end: u64,
    /// Writes that have not ended.
    in_flight: usize,
    members: Vec<Member>,
    /// Nothing is added any more.
    closed: bool,
    /// Somebody seals it.
    taken: bool,
    /// When its oldest record was written.
    oldest: Option<MonotonicTime>,
    /// When it is to be sealed whatever its age, because somebody waits for it.
    flush_due: Option<MonotonicTime>,
    /// The place nearest to the start of its chain, which is used last.
    first_ordinal: u32,
    /// What went wrong, as the medium told.
    trouble: Option<Error>,
}

/// A record in it.
struct Member {
    entry: Entry,
    deadline: MonotonicTime,
    written: bool,
    /// Who waits for the record to be published; none: was told.
    done: Option<Done<Written>>,
}

/// What it takes to seal a segment.
pub(crate) struct Contents {
    /// Where the records end.
    pub(crate) end: u64,
    pub(crate) entries: Vec<Entry>,
    /// The latest deadline of any record.
    pub(crate) deadline: MonotonicTime,
    pub(crate) first_ordinal: u32,
    pub(crate) trouble: Option<Error>,
}

/// What to do when a write has ended.
pub(crate) enum Next {
    Wait,
    /// It holds its first record now, or none after all: the timer counts from here on.
    Begin,
    /// Nothing is being written any more, and nothing will be.
    Seal,
}

/// True if the bytes may be on the medium after this error.
pub(super) fn unsure(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Timeout | ErrorKind::Io | ErrorKind::Closed
    )
}

/// Bytes that a record takes in a segment.
pub(super) fn room_of(write: &Write) -> u64 {
    round_up(write.options.len as u64, PAGE)
}

impl OpenSegment {
    pub(crate) fn new(
        number: SegmentNumber,
        name: SegmentName,
        room: u64,
        reserved: Arc<Room>,
        now: MonotonicTime,
    ) -> Self {
        Self {
            opened: now,
            number,
            name,
            room,
            reserved,
            inner: Mutex::new(Inner {
                end: HEAD_LEN,
                in_flight: 0,
                members: Vec::new(),
                closed: false,
                taken: false,
                oldest: None,
                flush_due: None,
                first_ordinal: u32::MAX,
                trouble: None,
            }),
        }
    }

    /// A place for a record; the write again when there is no room.
    pub(crate) fn reserve(&self, write: Write) -> Result<Append, Write> {
        let len = room_of(&write);
        let mut inner = self.inner.lock();
        let (number, offset, end) = (inner.members.len(), inner.end, inner.end + len);
        if inner.closed || end + footer_len(number + 1) > self.room {
            return Err(write);
        }
        let entry = Entry {
            id: write.id,
            offset,
            len,
        };
        inner.end = end;
        inner.in_flight += 1;
        inner.first_ordinal = inner.first_ordinal.min(write.options.ordinal);
        inner.members.push(Member {
            entry,
            deadline: write.deadline,
            written: false,
            done: None,
        });
        Ok(Append {
            number,
            entry,
            write,
        })
    }

    /// How many records have their place and are not written yet.
    pub(crate) fn backlog(&self) -> usize {
        self.inner.lock().in_flight
    }

    /// A record was written; `done` is to be called when it is published.
    pub(crate) fn written(
        &self,
        number: usize,
        done: Done<Written>,
        now: MonotonicTime,
        at_once: bool,
    ) -> Next {
        let mut inner = self.inner.lock();
        if let Some(member) = inner.members.get_mut(number) {
            (member.written, member.done) = (true, Some(done));
        }
        let first = inner.oldest.is_none();
        inner.oldest.get_or_insert(now);
        inner.closed |= at_once && inner.in_flight == 1;
        match inner.one_less() {
            Next::Wait if first => Next::Begin,
            next => next,
        }
    }

    /// A write ended without a record; nothing is added behind it any more, unless it was only
    /// refused a place in a queue.
    pub(crate) fn failed(&self, error: &Error, go_on: bool, at_once: bool) -> Next {
        let mut inner = self.inner.lock();
        inner.closed |= !go_on || (at_once && inner.in_flight == 1);
        if !go_on {
            inner.trouble.get_or_insert_with(|| error.clone());
        }
        match inner.one_less() {
            Next::Wait if inner.in_flight == 0 => Next::Begin, // it may hold nothing
            next => next,
        }
    }

    /// Adds nothing any more; whether it can be sealed now.
    pub(crate) fn close(&self) -> bool {
        let mut inner = self.inner.lock();
        inner.closed = true;
        inner.take()
    }

    /// Somebody waits for what it holds: it is to be sealed at that time, if not before.
    pub(crate) fn seal_by(&self, due: MonotonicTime) {
        let mut inner = self.inner.lock();
        inner.flush_due = Some(inner.flush_due.map_or(due, |other| other.min(due)));
    }

    /// When it is to be sealed, if it holds a record (or no one writes one) and still takes more:
    /// `age` after the oldest was written, sooner if somebody waits, and early enough for those
    /// that do, whatever the age.
    pub(crate) fn due(&self, age: Duration) -> Option<MonotonicTime> {
        let inner = self.inner.lock();
        let empty = (inner.in_flight == 0).then_some(self.opened);
        let oldest = inner.oldest.or(empty).filter(|_| !inner.closed)?;
        let waiting = inner.members.iter().filter(|member| member.done.is_some());
        let first = waiting.map(|member| member.deadline).min();
        let in_time = first.map(|deadline| oldest.after(deadline.since(oldest) / 4 * 3));
        [Some(oldest.after(age)), in_time, inner.flush_due]
            .into_iter()
            .flatten()
            .min()
    }

    /// Those whose deadline has passed, and when the next one does.
    pub(crate) fn late(&self, now: MonotonicTime) -> (Vec<Done<Written>>, Option<MonotonicTime>) {
        let mut inner = self.inner.lock();
        let (mut late, mut next) = (Vec::new(), None);
        for member in inner
            .members
            .iter_mut()
            .filter(|member| member.done.is_some())
        {
            if member.deadline <= now {
                late.extend(member.done.take());
            } else {
                next = Some(next.map_or(member.deadline, |next: MonotonicTime| {
                    next.min(member.deadline)
                }));
            }
        }
        (late, next)
    }

    /// What is in it.
    pub(crate) fn contents(&self) -> Contents {
        let inner = self.inner.lock();
        let written = inner.members.iter().filter(|member| member.written);
        Contents {
            end: inner.end,
            entries: written.clone().map(|member| member.entry).collect(),
            deadline: written
                .map(|member| member.deadline)
                .max()
                .unwrap_or_default(),
            first_ordinal: inner.first_ordinal,
            trouble: inner.trouble.clone(),
        }
    }

    /// Everybody who waits for it, to be told.
    pub(crate) fn waiting(&self) -> Vec<Done<Written>> {
        let mut inner = self.inner.lock();
        inner
            .members
            .iter_mut()
            .filter_map(|member| member.done.take())
            .collect()
    }
}

impl Inner {
    fn one_less(&mut self) -> Next {
        self.in_flight -= 1;
        if self.take() { Next::Seal } else { Next::Wait }
    }

    /// True once, when it can be sealed.
    fn take(&mut self) -> bool {
        let ready = self.closed && self.in_flight == 0 && !self.taken;
        self.taken |= ready;
        ready
    }
}
