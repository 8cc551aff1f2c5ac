//! Segments that listings show, whatever the medium, and those of them whose footers are to be
//! read.
//!
//! A segment never changes under its name, so its footer is read once. One that cannot be used is
//! tried a few times, for it may not be visible whole yet.

use std::collections::{BTreeMap, HashMap, HashSet};

use ucm_core::{Error, ErrorKind, MissReason};
use ucm_infra::{Clock, MonotonicTime};
use ucm_io::ReadMode;

use super::cache::SegmentCache;
use super::index::SegmentNumber;
use crate::blobs::{BlobMeta, Blobs};
use crate::layout::SegmentName;

/// Footers read in one turn, and how many of them at once.
const PER_TURN: usize = 256;
const AT_ONCE: usize = 16;
/// How often a footer that cannot be used is read.
const TRIES: u8 = 3;
/// Most segments that wait, and most that cannot be used.
const MOST: usize = 1 << 20;

/// See the module.
#[derive(Default)]
pub(crate) struct UnreadSegments {
    /// Those that wait, by the time of their last use.
    pub(crate) queue: BTreeMap<(i64, SegmentName), BlobMeta>,
    /// Those that cannot be used, as they were listed, and how often they were read.
    odd: HashMap<SegmentName, (BlobMeta, u8)>,
}

impl UnreadSegments {
    /// Adds a segment that was listed, unless the index has it, or it cannot be used and is as it
    /// was. Where there is no room it is found by a later listing.
    pub(crate) fn offer<B>(&mut self, cache: &SegmentCache<B>, meta: BlobMeta) {
        let name = meta.blob.name;
        let is_known_odd = self.odd.get(&name).is_some_and(|(seen, tries)| {
            *tries >= TRIES && (seen.len, seen.inode) == (meta.len, meta.inode)
        });
        if !is_known_odd && !self.is_full() && !cache.index.knows(name) {
            self.queue.insert((meta.used_ns, name), meta);
        }
    }

    /// Nothing more can be added.
    pub(crate) fn is_full(&self) -> bool {
        self.queue.len() >= MOST
    }

    /// Reads footers into the index, the youngest first; the segments of which the medium failed,
    /// and why. Ends early where it fails for all of those that are read at once.
    pub(crate) fn read<B: Blobs>(
        &mut self,
        cache: &SegmentCache<B>,
        clock: &dyn Clock,
        deadline: MonotonicTime,
    ) -> Vec<(BlobMeta, Error)> {
        let (mut left, mut failed) = (PER_TURN, Vec::new());
        while left > 0 && !self.queue.is_empty() && clock.now() < deadline {
            let mut batch = Vec::new();
            while batch.len() < AT_ONCE.min(left)
                && let Some((_, meta)) = self.queue.pop_last()
            {
                batch.push(meta);
            }
            left -= batch.len();
            let before = failed.len();
            let footers = cache.footers(&batch, ReadMode::Default, deadline);
            for (meta, footer) in batch.iter().zip(footers) {
                match footer {
                    Ok(Ok(footer)) => cache.add(meta, &footer),
                    Ok(Err(MissReason::NewerVersion)) => self.note_odd(meta, TRIES),
                    Ok(Err(_)) => self.note_odd(meta, 1),
                    Err(error) if error.kind() == ErrorKind::NotFound => {} // removed since
                    Err(error) => failed.push((*meta, error)),
                }
            }
            if failed.len() - before == batch.len() {
                break;
            }
        }
        failed
    }

    fn note_odd(&mut self, meta: &BlobMeta, tries: u8) {
        let room = self.odd.len() < MOST;
        match self.odd.get_mut(&meta.blob.name) {
            Some((seen, before)) => (*seen, *before) = (*meta, before.saturating_add(tries)),
            None if room => _ = self.odd.insert(meta.blob.name, (*meta, tries)),
            None => {}
        }
    }
}

/// A listing of all segments, which may take several turns: it finds new ones, and those that were
/// removed.
pub(crate) struct ListingAll {
    /// Segments of the index at its beginning that were not listed yet.
    missing: HashMap<SegmentName, SegmentNumber>,
    /// Segments that cannot be used and are still there.
    odd: HashSet<SegmentName>,
    /// How many were listed.
    pub(crate) listed: usize,
}

impl ListingAll {
    pub(crate) fn begin<B>(cache: &SegmentCache<B>) -> Self {
        let known = cache.index.stats().into_iter();
        Self {
            missing: known.map(|known| (known.name, known.number)).collect(),
            odd: HashSet::new(),
            listed: 0,
        }
    }

    /// Takes further segments of the listing.
    pub(crate) fn take<B>(
        &mut self,
        cache: &SegmentCache<B>,
        unread: &mut UnreadSegments,
        found: &[BlobMeta],
    ) {
        self.listed += found.len();
        for meta in found {
            let name = meta.blob.name;
            // A segment never changes. One of another length is another segment: other processes,
            // which read its footer, have none of its records, and neither must this one, or no
            // process would store them again.
            if let Some(number) = self.missing.remove(&name)
                && cache.index.file_len(number) != Some(meta.len)
            {
                cache.index.vanished(number);
            }
            if unread.odd.contains_key(&name) {
                self.odd.insert(name);
            }
            unread.offer(cache, *meta);
        }
    }

    /// All were listed: the segments that were removed, which leave the index.
    pub(crate) fn end<B>(
        self,
        cache: &SegmentCache<B>,
        unread: &mut UnreadSegments,
    ) -> Vec<SegmentName> {
        unread.odd.retain(|name, _| self.odd.contains(name));
        for number in self.missing.values() {
            cache.index.vanished(*number);
        }
        self.missing.into_keys().collect()
    }
}
