//! How a segment ends: its footer, its name, and telling everybody who waits for it.

use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{LANE_DUMP, MonotonicTime};
use ucm_io::{FileMeta, Finish, IoJob};

use super::Segments;
use super::discovery::FOUND_BY;
use super::format::{Owner, encode_footer};
use super::open::{Contents, LEAST_TIME, OpenSegment, unsure};
use crate::backend::Written;

impl Segments {
    /// Writes the footer of a segment and gives it its name. Called once for each.
    pub(super) fn seal(self: &Arc<Self>, open: &Arc<OpenSegment>) {
        let contents = open.contents();
        let private = self.files.private(open.name);
        let deadline = contents
            .deadline
            .max(self.shared.clock.now().after(LEAST_TIME));
        let (segments, sealed) = (Arc::clone(self), Arc::clone(open));
        if contents.entries.is_empty() {
            let remove = move |io: &IoJob| Ok(io.remove(&[private])?.iter().all(Result::is_ok));
            let removed = move |gone: Result<bool>| {
                let kept = if gone.unwrap_or(false) {
                    0
                } else {
                    sealed.room
                };
                segments.ended(&sealed, &contents, kept, None);
            };
            return self.shared.io.job(LANE_DUMP, deadline, remove, removed);
        }
        let owner = Owner {
            time_ns: self.shared.clock.wall_ns(),
            ..self.files.owner(open.name)
        };
        let ordinal = contents.first_ordinal;
        let used = self
            .shared
            .recency
            .published(open.name.as_id(), ordinal, owner.time_ns);
        let target = self.shared.layout.segment(open.name);
        let (footer, offset) = (
            encode_footer(&owner, contents.end, &contents.entries),
            contents.end,
        );
        let finish = move |io: &IoJob| {
            io.finish(Finish {
                private: &private,
                target: &target,
                footer: &footer,
                offset,
                mtime_ns: used,
            })
        };
        let finished = move |result: Result<FileMeta>| {
            segments.sealed(&sealed, &contents, owner.time_ns, used, result);
        };
        self.shared.io.job(LANE_DUMP, deadline, finish, finished);
    }

    fn sealed(
        self: &Arc<Self>,
        open: &Arc<OpenSegment>,
        contents: &Contents,
        sealed_ns: u64,
        used_ns: i64,
        result: Result<FileMeta>,
    ) {
        match result {
            Ok(meta) => {
                self.index.named(open.number, sealed_ns, used_ns, meta.len);
                self.ended(open, contents, meta.len, None);
            }
            Err(error) => {
                self.shared.missed(&error);
                let kept = if unsure(&error) { open.room } else { 0 };
                self.ended(open, contents, kept, Some(error));
            }
        }
    }

    /// A segment has its name, or never will: everybody is told.
    fn ended(
        self: &Arc<Self>,
        open: &Arc<OpenSegment>,
        contents: &Contents,
        kept: u64,
        error: Option<Error>,
    ) {
        if error.is_some() || contents.entries.is_empty() {
            self.index.vanished(open.number);
        }
        let found = self.shared.clock.now().after(FOUND_BY);
        for entry in &contents.entries {
            match error {
                None => self.locally_visible.published(entry.id, found),
                Some(_) => self.locally_visible.lost(entry.id),
            }
        }
        let trouble = error.as_ref().or(contents.trouble.as_ref());
        open.reserved.commit(kept, trouble);
        for done in open.waiting() {
            done(match &error {
                None => Ok(Written::Published),
                Some(error) => Err(error.clone()),
            });
        }
        self.forget(open);
        self.seal_notify.notify();
    }

    /// Seals what is old enough and tells those whose time is over; when to look again.
    pub(super) fn seal_due(self: &Arc<Self>, now: MonotonicTime) -> Option<MonotonicTime> {
        let mut next: Option<MonotonicTime> = None;
        let mut sooner =
            |time: MonotonicTime| next = Some(next.map_or(time, |next| next.min(time)));
        let (late, next_late) = self.late_waiting(now);
        for write in late {
            let text = "the segment for this record was not opened in time";
            write.end(Err(Error::new(ErrorKind::Timeout, text)));
        }
        next_late.into_iter().for_each(&mut sooner);
        self.discovery
            .looks
            .end_late(now)
            .into_iter()
            .for_each(&mut sooner);
        for open in self.open_segments() {
            match open.due(self.config.age) {
                Some(due) if due <= now => self.close_due(&open, now),
                Some(due) => sooner(due),
                None => {}
            }
            let (late, next_late) = open.late(now);
            for done in late {
                let text = "the segment of this record was not sealed in time";
                done(Err(Error::new(ErrorKind::Timeout, text)));
            }
            next_late.into_iter().for_each(&mut sooner);
        }
        next
    }
}
