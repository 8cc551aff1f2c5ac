//! One segment being written: places for records are reserved in order and filled in any, then it is closed to new ones,
//! and when the last write has ended it can be sealed.
//!
//! A write that failed or came too late leaves a hole that the foot does not name. Nothing here touches a file.

use parking_lot::Mutex;
use ucm_core::{BlockId, Error};
use ucm_infra::Mono;

use super::format::{Entry, HEAD_LEN, foot_len};
use super::index::SegmentNumber;
use crate::backend::{Done, Written};
use crate::layout::SegmentName;
use crate::space::Ticket;

/// See the module.
pub(crate) struct OpenSegment {
    /// Its number in the index.
    pub(crate) number: SegmentNumber,
    pub(crate) name: SegmentName,
    /// Bytes that were admitted for it.
    pub(crate) room: u64,
    pub(crate) ticket: Ticket,
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
    oldest: Option<Mono>,
    /// The place nearest to the start of its chain, which is used last.
    first_ordinal: u32,
    /// What went wrong, as the medium told.
    trouble: Option<Error>,
}

/// A record in it.
struct Member {
    entry: Entry,
    deadline: Mono,
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
    pub(crate) deadline: Mono,
    pub(crate) first_ordinal: u32,
    pub(crate) trouble: Option<Error>,
}

/// What to do when a write has ended.
pub(crate) enum Next {
    Wait,
    /// It holds its first record now: the timer counts from here on.
    Begin,
    /// Nothing is being written any more, and nothing will be.
    Seal,
}

impl OpenSegment {
    pub(crate) fn new(number: SegmentNumber, name: SegmentName, room: u64, ticket: Ticket) -> Self {
        Self {
            number,
            name,
            room,
            ticket,
            inner: Mutex::new(Inner {
                end: HEAD_LEN,
                in_flight: 0,
                members: Vec::new(),
                closed: false,
                taken: false,
                oldest: None,
                first_ordinal: u32::MAX,
                trouble: None,
            }),
        }
    }

    /// A place for a record of `len` bytes (whole pages): its number and its offset; `None` when there is no room.
    pub(crate) fn reserve(
        &self,
        id: BlockId,
        len: u64,
        ordinal: u32,
        deadline: Mono,
    ) -> Option<(usize, Entry)> {
        let mut inner = self.inner.lock();
        let (offset, end) = (inner.end, inner.end + len);
        if inner.closed || end + foot_len(inner.members.len() + 1) > self.room {
            return None;
        }
        let entry = Entry { id, offset, len };
        inner.end = end;
        inner.in_flight += 1;
        inner.first_ordinal = inner.first_ordinal.min(ordinal);
        inner.members.push(Member {
            entry,
            deadline,
            written: false,
            done: None,
        });
        Some((inner.members.len() - 1, entry))
    }

    /// A record was written; `done` is to be called when it is published.
    pub(crate) fn written(&self, number: usize, done: Done<Written>, now: Mono, at_once: bool) -> Next {
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

    /// A write ended without a record; nothing is added behind it any more, unless it was only refused a place in a queue.
    pub(crate) fn failed(&self, error: &Error, go_on: bool, at_once: bool) -> Next {
        let mut inner = self.inner.lock();
        inner.closed |= !go_on || (at_once && inner.in_flight == 1);
        if !go_on {
            inner.trouble.get_or_insert_with(|| error.clone());
        }
        inner.one_less()
    }

    /// Adds nothing any more; whether it can be sealed now.
    pub(crate) fn close(&self) -> bool {
        let mut inner = self.inner.lock();
        inner.closed = true;
        inner.take()
    }

    /// When its oldest record was written, if there is one and it still takes more.
    pub(crate) fn oldest(&self) -> Option<Mono> {
        let inner = self.inner.lock();
        inner.oldest.filter(|_| !inner.closed)
    }

    /// Those whose deadline has passed, and when the next one does.
    pub(crate) fn late(&self, now: Mono) -> (Vec<Done<Written>>, Option<Mono>) {
        let mut inner = self.inner.lock();
        let (mut late, mut next) = (Vec::new(), None);
        for member in inner.members.iter_mut().filter(|member| member.done.is_some()) {
            if member.deadline <= now {
                late.extend(member.done.take());
            } else {
                next = Some(next.map_or(member.deadline, |next: Mono| next.min(member.deadline)));
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
            deadline: written.map(|member| member.deadline).max().unwrap_or_default(),
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
