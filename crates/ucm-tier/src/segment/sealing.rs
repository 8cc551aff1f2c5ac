//! How a segment ends: its footer, its name, and the outcomes of its receipts.

use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{LANE_LOOKUP, MonotonicTime};
use ucm_io::{Finish, IoJob};

use super::discovery::FOUND_BY;
use super::format::{Owner, encode_footer};
use super::open::{Contents, LEAST_TIME, OpenSegment, unsure};
use super::writer::SegmentWriter;

impl SegmentWriter {
    /// Writes the footer of a segment and gives it its name. Called once for each. Not in the lane
    /// of dumps, whose threads may all wait for room that this gives back.
    pub(super) fn seal(self: &Arc<Self>, open: &Arc<OpenSegment>) {
        let contents = open.contents();
        let private = self.cache.blobs.private(open.name);
        let now = self.shared.clock.now();
        let deadline = contents.deadline.max(now.after(LEAST_TIME));
        let (writer, sealed) = (Arc::clone(self), Arc::clone(open));
        if contents.entries.is_empty() {
            let remove = move |io: &IoJob| Ok(io.remove(&[private])?.iter().all(Result::is_ok));
            let removed = move |gone: Result<bool>| {
                let kept = if gone.unwrap_or(false) {
                    0
                } else {
                    sealed.room
                };
                writer.ended(&sealed, &contents, kept, None);
            };
            return self.shared.io.job(LANE_LOOKUP, deadline, remove, removed);
        }
        let owner = Owner {
            time_ns: self.shared.clock.wall_ns(),
            ..self.cache.blobs.owner(open.name)
        };
        let ordinal = contents.first_ordinal;
        let recency = &self.shared.recency;
        let used = recency.published(open.name.as_id(), ordinal, owner.time_ns);
        let target = self.shared.layout.segment(open.name);
        let offset = contents.end;
        let footer = encode_footer(&owner, offset, &contents.entries);
        let finish = move |io: &IoJob| {
            io.finish(Finish {
                private: &private,
                target: &target,
                footer: &footer,
                offset,
                mtime_ns: used,
            })
        };
        let finished = move |result: Result<ucm_io::FileMeta>| match result {
            Ok(meta) => {
                let (number, len) = (sealed.number, meta.len);
                writer.cache.index.named(number, owner.time_ns, used, len);
                writer.ended(&sealed, &contents, len, None);
            }
            Err(error) => {
                writer.shared.missed(&error);
                let kept = if unsure(&error) { sealed.room } else { 0 };
                writer.ended(&sealed, &contents, kept, Some(error));
            }
        };
        self.shared.io.job(LANE_LOOKUP, deadline, finish, finished);
    }

    /// A segment has its name, or never will: the outcomes of its receipts are reported.
    fn ended(&self, open: &Arc<OpenSegment>, contents: &Contents, kept: u64, error: Option<Error>) {
        if error.is_some() || contents.entries.is_empty() {
            self.cache.index.vanished(open.number);
        }
        let found = self.shared.clock.now().after(FOUND_BY);
        for entry in &contents.entries {
            match error {
                None => self.cache.locally_visible.published(entry.id, found),
                Some(_) => self.cache.locally_visible.lost(entry.id),
            }
        }
        let trouble = error.as_ref().or(contents.trouble.as_ref());
        self.shared.space.commit(open.reserved, kept, trouble);
        let outcome = error.map_or(Ok(()), Err);
        for receipt in open.awaited() {
            self.shared.sealed(receipt, outcome.clone());
        }
        self.forget(open);
        self.seal_notify.notify();
    }

    /// Seals what is old enough, and reports the records whose time is over; when to be called
    /// again.
    pub(super) fn seal_due(self: &Arc<Self>, now: MonotonicTime) -> Option<MonotonicTime> {
        let mut next = Vec::new();
        for open in self.living() {
            let after = open.write_off_lost();
            self.go_on(&open, after);
            match open.due(self.config.age) {
                Some(due) if due <= now => self.close_due(&open, now),
                due => next.extend(due),
            }
            let (late, next_late) = open.late(now);
            for receipt in late {
                let text = "the segment of this record was not sealed in time";
                self.shared
                    .sealed(receipt, Err(Error::new(ErrorKind::Timeout, text)));
            }
            next.extend(next_late);
        }
        next.into_iter().min()
    }
}
