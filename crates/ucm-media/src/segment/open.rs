//! One segment being written: places for records are reserved in order, then it is closed to new
//! ones, and when the last write has ended it can be sealed.
//!
//! A write that fails or is too late leaves a hole that the footer does not name. So does a write
//! whose thread hangs: after the deadline of its job the segment continues without it.
//! Nothing here touches the medium.

use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, PAGE, round_up};
use ucm_infra::MonotonicTime;
use ucm_io::JobWatch;

use super::format::{Entry, HEAD_LEN, footer_len};
use super::index::SegmentNumber;
use crate::backend::Receipt;
use crate::layout::SegmentName;

/// Time that sealing a segment has at least, whatever is left of its records' time.
pub(super) const LEAST_TIME: Duration = Duration::from_secs(5);

/// The place of a record in a segment, which is not written yet.
pub(super) struct Append {
    /// Its number among the records of the segment.
    pub(super) number: usize,
    pub(super) entry: Entry,
}

/// See the module.
pub(super) struct OpenSegment<R> {
    /// Its number in the index.
    pub(super) number: SegmentNumber,
    pub(super) name: SegmentName,
    /// Bytes that were reserved for it.
    pub(super) room: u64,
    pub(super) reserved: R,
    /// When it was opened: one that no thread writes to ends as if it held a record since then.
    opened: MonotonicTime,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// Where the next record goes.
    end: u64,
    /// Writes that have not ended.
    in_flight: usize,
    members: Vec<Member>,
    /// Nothing is added any more.
    closed: bool,
    /// A thread seals it.
    taken: bool,
    /// When its oldest record was written.
    oldest: Option<MonotonicTime>,
    /// When it is to be sealed whatever its age, because a caller waits for it.
    flush_due: Option<MonotonicTime>,
    /// The place nearest to the start of its chain, which is used last.
    first_ordinal: u32,
    /// The error that the medium reported.
    trouble: Option<Error>,
}

/// A record in it.
struct Member {
    entry: Entry,
    deadline: MonotonicTime,
    stage: Stage,
}

/// How far a record is.
enum Stage {
    /// A thread writes it, for this job.
    Writing(JobWatch),
    /// It was written. The receipt is there until its outcome was reported.
    Written(Option<Receipt>),
    /// It was not, or too late: the footer does not name it.
    Failed,
}

/// The inputs for sealing a segment.
pub(super) struct Contents {
    /// Where the records end.
    pub(super) end: u64,
    pub(super) entries: Vec<Entry>,
    /// The latest deadline of any record.
    pub(super) deadline: MonotonicTime,
    pub(super) first_ordinal: u32,
    pub(super) trouble: Option<Error>,
}

/// The next step after a write.
pub(super) enum Next {
    Wait,
    /// It holds its first record now, or none after all: the timer counts from here on.
    Begin,
    /// Nothing is being written any more, and nothing will be.
    Seal,
}

impl<R> OpenSegment<R> {
    pub(super) fn new(
        number: SegmentNumber,
        name: SegmentName,
        room: u64,
        reserved: R,
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
                first_ordinal: u32::MAX,
                ..Inner::default()
            }),
        }
    }

    /// A place for a record of `len` bytes, which this job writes; `None` when there is no room.
    pub(super) fn reserve(
        &self,
        id: BlockId,
        len: u64,
        ordinal: u32,
        job: &JobWatch,
    ) -> Option<Append> {
        let len = round_up(len, PAGE);
        let mut inner = self.inner.lock();
        let (number, offset, end) = (inner.members.len(), inner.end, inner.end + len);
        if inner.closed || end + footer_len(number + 1) > self.room {
            return None;
        }
        let entry = Entry { id, offset, len };
        inner.end = end;
        inner.in_flight += 1;
        inner.first_ordinal = inner.first_ordinal.min(ordinal);
        inner.members.push(Member {
            entry,
            deadline: job.deadline(),
            stage: Stage::Writing(job.clone()),
        });
        Some(Append { number, entry })
    }

    /// How many records have their place and are not written yet.
    pub(super) fn backlog(&self) -> usize {
        self.inner.lock().in_flight
    }

    /// A record was written. Its receipt; none where the segment went on without it.
    pub(super) fn written(
        &self,
        number: usize,
        now: MonotonicTime,
        at_once: bool,
    ) -> (Option<Receipt>, Next) {
        let mut inner = self.inner.lock();
        let Some(stage) = inner.writing(number) else {
            return (None, Next::Wait);
        };
        let receipt = Some(Receipt::next());
        *stage = Stage::Written(receipt);
        let first = inner.oldest.is_none();
        inner.oldest.get_or_insert(now);
        inner.closed |= at_once && inner.in_flight == 1;
        let next = match inner.one_less() {
            Next::Wait if first => Next::Begin,
            next => next,
        };
        (receipt, next)
    }

    /// A write ended without a record; nothing is added behind it any more, unless it was only
    /// refused a place in a queue.
    pub(super) fn failed(&self, number: usize, error: &Error, at_once: bool) -> Next {
        let go_on = error.kind() == ErrorKind::Busy;
        let mut inner = self.inner.lock();
        let Some(stage) = inner.writing(number) else {
            return Next::Wait;
        };
        *stage = Stage::Failed;
        inner.closed |= !go_on || (at_once && inner.in_flight == 1);
        if !go_on {
            inner.trouble.get_or_insert_with(|| error.clone());
        }
        match inner.one_less() {
            Next::Wait if inner.in_flight == 0 => Next::Begin, // it may hold nothing
            next => next,
        }
    }

    /// Goes on without the records whose job is no longer waited for, because its thread hangs.
    pub(super) fn write_off_lost(&self) -> Next {
        let lost: Vec<usize> = {
            let inner = self.inner.lock();
            let lost = |(_, member): &(usize, &Member)| match &member.stage {
                Stage::Writing(job) => !job.is_wanted(),
                Stage::Written(_) | Stage::Failed => false,
            };
            let members = inner.members.iter().enumerate();
            members.filter(lost).map(|(number, _)| number).collect()
        };
        let hangs = Error::new(ErrorKind::Timeout, "a write did not return in time");
        let mut next = Next::Wait;
        for number in lost {
            if let Next::Seal = self.failed(number, &hangs, false) {
                next = Next::Seal;
            }
        }
        next
    }

    /// Adds nothing any more; whether it can be sealed now.
    pub(super) fn close(&self) -> bool {
        let mut inner = self.inner.lock();
        inner.closed = true;
        inner.take()
    }

    /// A caller waits for what it holds: it is to be sealed at that time, if not before.
    pub(super) fn seal_by(&self, due: MonotonicTime) {
        let mut inner = self.inner.lock();
        inner.flush_due = Some(inner.flush_due.map_or(due, |other| other.min(due)));
    }

    /// When it is to be sealed, if it holds a record (or no thread writes one) and still takes
    /// more: `age` after the oldest was written, sooner if a caller waits, and early enough for
    /// those whose outcome is awaited, whatever the age: after this many quarters of their time.
    pub(super) fn due(&self, age: Duration, quarters: u32) -> Option<MonotonicTime> {
        let inner = self.inner.lock();
        let empty = (inner.in_flight == 0).then_some(self.opened);
        let oldest = inner.oldest.or(empty).filter(|_| !inner.closed)?;
        let awaited = inner.members.iter().filter(|member| member.is_awaited());
        let first = awaited.map(|member| member.deadline).min();
        let in_time = first.map(|deadline| oldest.after(deadline.since(oldest) / 4 * quarters));
        let sooner = in_time.into_iter().chain(inner.flush_due);
        sooner.chain([oldest.after(age)]).min()
    }

    /// The receipts whose deadline has passed, and when the next deadline of a record passes.
    pub(super) fn late(&self, now: MonotonicTime) -> (Vec<Receipt>, Option<MonotonicTime>) {
        let mut inner = self.inner.lock();
        let mut late = Vec::new();
        for member in &mut inner.members {
            if let Stage::Written(receipt) = &mut member.stage
                && member.deadline <= now
            {
                late.extend(receipt.take());
            }
        }
        let open = inner.members.iter().filter(|member| member.is_open());
        let ahead = open.filter(|member| member.deadline > now);
        let next = ahead.map(|member| member.deadline).min();
        (late, next)
    }

    /// What is in it.
    pub(super) fn contents(&self) -> Contents {
        let inner = self.inner.lock();
        let written = |member: &&Member| matches!(member.stage, Stage::Written(_));
        let written = inner.members.iter().filter(written);
        let deadline = written.clone().map(|member| member.deadline).max();
        Contents {
            end: inner.end,
            entries: written.map(|member| member.entry).collect(),
            deadline: deadline.unwrap_or_default(),
            first_ordinal: inner.first_ordinal,
            trouble: inner.trouble.clone(),
        }
    }

    /// The receipts whose outcome was not reported yet.
    pub(super) fn awaited(&self) -> Vec<Receipt> {
        let mut inner = self.inner.lock();
        let receipts = inner.members.iter_mut();
        let receipts = receipts.filter_map(|member| match &mut member.stage {
            Stage::Written(receipt) => receipt.take(),
            Stage::Writing(_) | Stage::Failed => None,
        });
        receipts.collect()
    }
}

impl Member {
    /// Whether it was written, and its outcome is awaited.
    fn is_awaited(&self) -> bool {
        matches!(self.stage, Stage::Written(Some(_)))
    }

    /// Whether its deadline matters still.
    fn is_open(&self) -> bool {
        self.is_awaited() || matches!(self.stage, Stage::Writing(_))
    }
}

impl Inner {
    /// The stage of a record that is being written.
    fn writing(&mut self, number: usize) -> Option<&mut Stage> {
        let stage = &mut self.members.get_mut(number)?.stage;
        matches!(stage, Stage::Writing(_)).then_some(stage)
    }

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
