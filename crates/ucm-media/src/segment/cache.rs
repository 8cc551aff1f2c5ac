//! The segments of a namespace as this process knows them, whatever medium they lie on: lookups and
//! everything else that the index answers without a call on the medium. [`super::reader`] reads.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use tracing::warn;
use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_infra::{Clock, MonotonicTime};
use ucm_io::ReadMode;

use super::footer::{Footer, TAIL, Tail};
use super::format::{Owner, TRAILER_LEN};
use super::index::{Index, Known};
use crate::backend::{Indexed, Listed, Local, LocallyVisible, Presence, WriteOptions, Written};
use crate::blobs::{BlobMeta, Blobs};
use crate::layout::SegmentName;
use crate::lengths::Lengths;
use crate::locally_visible::LocalChanges;
use crate::pending_looks::PendingLooks;

#[cfg(test)]
mod tests;

/// Time between two messages that the index is full.
const LOG_AGAIN: Duration = Duration::from_secs(600);

/// See the module.
pub(crate) struct SegmentCache<B> {
    pub(crate) blobs: Arc<B>,
    pub(crate) index: Arc<Index>,
    pub(crate) lengths: Arc<Lengths>,
    pub(crate) locally_visible: LocalChanges,
    /// Callers that wait for the next listing, and whether the store closes.
    pub(crate) looks: PendingLooks,
    pub(crate) clock: Arc<dyn Clock>,
    /// Digest of the identity.
    pub(crate) namespace: [u8; 32],
    /// When it was last logged that the index is full, and how many records had no room by then.
    logged_full: Mutex<Option<(MonotonicTime, u64)>>,
}

impl<B: Blobs> SegmentCache<B> {
    /// An empty one, of at most `most_blocks` records.
    pub(crate) fn new(
        blobs: Arc<B>,
        lengths: Arc<Lengths>,
        namespace: [u8; 32],
        most_blocks: usize,
        clock: &Arc<dyn Clock>,
    ) -> Arc<Self> {
        Arc::new(Self {
            blobs,
            index: Arc::new(Index::new(most_blocks)),
            lengths,
            locally_visible: LocalChanges::default(),
            looks: PendingLooks::default(),
            clock: Arc::clone(clock),
            namespace,
            logged_full: Mutex::default(),
        })
    }

    /// What a segment of this name that begins or ends now says of itself.
    pub(crate) fn owner(&self, name: SegmentName, time_ns: u64) -> Owner {
        Owner {
            name,
            namespace: self.namespace,
            part: self.lengths.own_part(),
            time_ns,
        }
    }

    /// Whether each record is present whole, by its length; see
    /// [`Backend::lookup`](crate::backend::Backend::lookup).
    pub(crate) fn lookup(&self, ids: &[BlockId], stop_at_missing: bool) -> Vec<Presence> {
        let mut found = Vec::with_capacity(ids.len());
        for &id in ids {
            let there = match self.index.find(id) {
                Some(hit) => self.lengths.presence(hit.len),
                None => Err(MissReason::Absent),
            };
            found.push(there);
            if stop_at_missing && there == Err(MissReason::Absent) {
                break;
            }
        }
        found
    }

    /// The outcome of a write for which nothing is written: the record is present, or there is no
    /// room for it in the index.
    pub(super) fn needs_no_write(
        &self,
        id: BlockId,
        options: &WriteOptions,
    ) -> Option<Result<Written>> {
        if !options.replace && self.is_published(id) {
            return Some(Ok(Written::Present));
        }
        if self.index.has_room(id) {
            return None;
        }
        let full = "the index of segments is full: this block could be written and never be found";
        Some(Err(Error::new(ErrorKind::NoSpace, full)))
    }

    /// Forgets records in this process: how many it had. Their bytes stay until their
    /// segment is removed.
    pub(crate) fn delete(&self, ids: &[BlockId]) -> usize {
        let mut removed = 0;
        for &id in ids {
            removed += usize::from(self.index.remove(id));
            self.locally_visible.removed(id);
        }
        removed
    }

    /// Every record of the index.
    pub(crate) fn list(&self) -> Vec<Listed> {
        let all = self.index.list().into_iter();
        all.map(|(id, len, used_ns)| Listed { id, len, used_ns })
            .collect()
    }

    /// Reads the footers of these segments. The outer error is the medium's, the inner one that of
    /// the bytes.
    pub(crate) fn footers(
        &self,
        of: &[BlobMeta],
        mode: ReadMode,
        deadline: MonotonicTime,
    ) -> Vec<Result<Result<Footer, MissReason>>> {
        let mut found: Vec<_> = of.iter().map(|_| Ok(Err(MissReason::Truncated))).collect();
        let long = |(_, meta): &(usize, &BlobMeta)| meta.len >= TRAILER_LEN as u64;
        let read: Vec<(usize, &BlobMeta)> = of.iter().enumerate().filter(long).collect();
        let tails = read
            .iter()
            .map(|(_, meta)| (meta.blob, meta.len.saturating_sub(TAIL)..meta.len));
        let tails = self.blobs.read_pieces(tails.collect(), mode, deadline);
        let mut longer = Vec::new();
        for ((at, meta), tail) in read.into_iter().zip(tails) {
            let name = meta.blob.name;
            found[at] = tail.map(|(tail, len)| {
                match Footer::in_tail(&tail, len, name, &self.namespace, &self.lengths)? {
                    Tail::Whole(footer) => Ok(footer),
                    Tail::Longer(trailer) => {
                        longer.push((at, trailer));
                        Err(MissReason::Truncated) // until it is read, below
                    }
                }
            });
        }
        if !longer.is_empty() {
            let pieces = longer
                .iter()
                .map(|(at, trailer)| (of[*at].blob, trailer.footer.clone()));
            let pieces = self.blobs.read_pieces(pieces.collect(), mode, deadline);
            for ((at, trailer), piece) in longer.into_iter().zip(pieces) {
                found[at] = piece.map(|(footer, _)| Footer::of(&trailer, &footer, &self.lengths));
            }
        }
        for (meta, found) in of.iter().zip(&mut found) {
            let named = meta.blob.sealed_ns;
            if named != 0 && matches!(found, Ok(Ok(footer)) if footer.sealed_ns != named) {
                *found = Ok(Err(MissReason::ForeignId));
            }
        }
        found
    }

    /// Takes the records of a segment into the index.
    pub(crate) fn add(&self, meta: &BlobMeta, footer: &Footer) {
        let known = Known {
            name: meta.blob.name,
            part: footer.part,
            private: false,
            sealed_ns: footer.sealed_ns,
            used_ns: meta.used_ns,
            len: meta.len,
        };
        let Some(number) = self.index.begin(known) else {
            return;
        };
        self.index.add(number, &footer.entries);
        // The first length that is not known has the manifest read before it is looked up.
        let mut entries = footer.entries.iter();
        let _ = entries.all(|entry| self.lengths.is_ours(entry.len));
    }

    /// A turn of discovery ends: blocks of removed segments leave, and it is logged, once in a
    /// while, that the index is full. `place`: where the segments lie.
    pub(crate) fn after_listing(&self, store: u64, place: &dyn Display) {
        self.index.sweep_if_due();
        let (now, (no_room, most)) = (self.clock.now(), self.index.no_room());
        let mut logged = self.logged_full.lock();
        let again = logged.is_none_or(|(at, count)| no_room > count && now.since(at) >= LOG_AGAIN);
        if no_room == 0 || !again {
            return;
        }
        *logged = Some((now, no_room));
        warn!(
            store,
            most,
            no_room,
            "the index of {place} is full: it has room for {most} blocks, {no_room} more that are \
             stored there are misses for this process; lower storage_capacity, or store larger \
             blocks"
        );
    }
}

impl<B: Blobs> Local for SegmentCache<B> {
    fn locally_visible(&self) -> LocallyVisible {
        self.locally_visible.take(self.clock.now())
    }
}
