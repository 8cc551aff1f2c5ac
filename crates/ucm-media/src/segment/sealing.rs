//! How a segment ends: its footer, its name, and the outcomes of its receipts.

use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};

use super::format::encode_footer;
use super::open::{Contents, LEAST_TIME, OpenSegment};
use super::writer::SegmentWriter;
use crate::backend::Receipt;
use crate::blobs::{AppendBlobs, BlobMeta, Seal};
use crate::quota::is_unsure;
use crate::turns::NextTurn;

impl<B: AppendBlobs> SegmentWriter<B> {
    /// Writes the footer of a segment and gives it its name. Called once for each.
    pub(super) fn seal(self: &Arc<Self>, open: &Arc<OpenSegment<B::Room>>) {
        let contents = open.contents();
        let (blobs, now) = (&self.cache.blobs, self.clock.now());
        let deadline = contents.deadline.max(now.after(LEAST_TIME));
        let (writer, sealed) = (Arc::clone(self), Arc::clone(open));
        if contents.entries.is_empty() {
            let removed = move |removed: Result<()>| {
                let kept = if removed.is_ok() { 0 } else { sealed.room };
                writer.ended(&sealed, &contents, kept, None);
            };
            return blobs.discard(open.name, deadline, Box::new(removed));
        }
        let sealed_ns = self.clock.wall_ns();
        let (owner, offset) = (self.cache.owner(open.name, sealed_ns), contents.end);
        let footer = encode_footer(&owner, offset, &contents.entries);
        let len = offset + footer.len() as u64;
        let seal = Seal {
            name: open.name,
            sealed_ns,
            offset,
            footer,
            first_ordinal: contents.first_ordinal,
            deadline,
        };
        let ended = move |result: Result<BlobMeta>| match result {
            Ok(BlobMeta { len, used_ns, .. }) => {
                let index = &writer.cache.index;
                index.named(sealed.number, sealed_ns, used_ns, len);
                writer.ended(&sealed, &contents, len, None);
            }
            Err(error) => {
                let kept = match is_unsure(&error) {
                    true if B::TAKES_ALL_ROOM => sealed.room,
                    true => len,
                    false => 0,
                };
                writer.ended(&sealed, &contents, kept, Some(error));
            }
        };
        blobs.seal(seal, Box::new(ended));
    }

    /// A segment has its name, or never will: the outcomes of its receipts are reported.
    fn ended(
        &self,
        open: &Arc<OpenSegment<B::Room>>,
        contents: &Contents,
        kept: u64,
        error: Option<Error>,
    ) {
        if error.is_some() || contents.entries.is_empty() {
            self.cache.index.vanished(open.number);
        }
        let found = self.clock.now().after(self.config.found_within);
        for entry in &contents.entries {
            match error {
                None => self.cache.locally_visible.published(entry.id, found),
                Some(_) => self.cache.locally_visible.removed(entry.id),
            }
        }
        let trouble = error.as_ref().or(contents.trouble.as_ref());
        self.cache.blobs.commit(open.reserved, kept, trouble);
        let outcome = error.map_or(Ok(()), Err);
        for receipt in open.awaited() {
            self.report(receipt, outcome.clone());
        }
        self.forget(open);
        self.changed.notify();
    }

    /// Reports the outcome of a receipt.
    fn report(&self, receipt: Receipt, outcome: Result<()>) {
        if let Some(on_sealed) = self.config.on_sealed.get() {
            on_sealed(receipt, outcome);
        }
    }

    /// One turn of the thread that keeps the time, of callers that wait for a listing too: seals
    /// what is old enough, and reports the records whose time is over. None once the store closes,
    /// when every segment has ended.
    pub(crate) fn turn(self: &Arc<Self>) -> Option<NextTurn> {
        let (looks, now) = (&self.cache.looks, self.clock.now());
        let mut next: Vec<_> = looks.end_late(now).into_iter().collect();
        for open in self.living() {
            let after = open.write_off_lost();
            self.go_on(&open, after);
            match open.due(self.config.age, B::QUARTERS) {
                Some(due) if due <= now => {
                    self.state.lock().closed = Some(now);
                    self.close(&open);
                }
                due => next.extend(due),
            }
            let (late, next_late) = open.late(now);
            for receipt in late {
                let text = "the segment of this record was not sealed in time";
                self.report(receipt, Err(Error::new(ErrorKind::Timeout, text)));
            }
            next.extend(next_late);
        }
        if looks.is_closed() && !self.is_writing() {
            return None;
        }
        Some(next.into_iter().min())
    }
}
