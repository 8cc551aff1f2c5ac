//! Deciding which layout a root gets, and keeping what was decided.
//!
//! On a new root the decision stands in the marker from its first byte on: of several processes that begin at the same
//! time one has its marker stay, and the others go by that. A root that was marked without a decision (by a process with
//! a layout of its own in its configuration) gets it by writing the marker again; two that
//! do so at the same time and differ may use both layouts until they are started again, which costs misses.

use std::ffi::OsString;
use std::path::PathBuf;

use ucm_core::Result;
use ucm_infra::MonotonicTime;
use ucm_io::FileMeta;
use ucm_quota::layout::{BLOCKS, Marker, SEGMENTS, SegmentName, is_namespace, shard_name};

use super::kept::{Kept, LayoutKind, Why};
use super::{Auto, Decision};
use crate::root::unless_read_only;

impl Auto {
    /// Reads what was decided; decides, where nobody has and this process writes.
    pub(super) fn decide(&self, deadline: MonotonicTime) -> Result<Decision> {
        let marker = self.shared.read_marker(deadline)?;
        if let Some(decision) = marker.as_ref().and_then(decided) {
            return Ok(self.counts(decision));
        }
        if self.shared.config.lookup_only {
            return Ok(Decision::Open);
        }
        let made = self.shared.make_root(deadline);
        if marker.is_none() {
            made?;
        }
        let (kind, why) = match self.records(deadline) {
            // As in a namespace of another user: no reason not to use the root.
            Err(error) => {
                let why = format!("what lies below the root could not be seen: {error}");
                return Ok(Decision::Files(why));
            }
            Ok(Some(kind)) => (kind, Why::Records),
            Ok(None) => (LayoutKind::Segment, Why::Default),
        };
        let kept = Kept {
            kind,
            why,
            decided: self.shared.clock.wall_ns() / 1_000_000_000,
        };
        self.keep(kept, marker, deadline)
    }

    /// The layout of the records below the root, of any namespace; where some are in files, that one.
    fn records(&self, deadline: MonotonicTime) -> Result<Option<LayoutKind>> {
        let root = self.shared.layout.root();
        let mut found = None;
        for (name, meta) in self.list(root.to_owned(), deadline)? {
            if !meta.is_dir || !is_namespace(&name) {
                continue;
            }
            let namespace = root.join(&name);
            // Such a directory is made with its first record.
            let blocks = self.list(namespace.join(BLOCKS), deadline)?;
            let shard = |(name, meta): &(OsString, FileMeta)| meta.is_dir && shard_name(name).is_some();
            if blocks.iter().any(shard) {
                return Ok(Some(LayoutKind::File));
            }
            let segments = self.list(namespace.join(SEGMENTS), deadline)?;
            if segments
                .iter()
                .any(|(name, _)| SegmentName::parse(name).is_some())
            {
                found = Some(LayoutKind::Segment);
            }
        }
        Ok(found)
    }

    fn list(&self, dir: PathBuf, deadline: MonotonicTime) -> Result<Vec<(OsString, FileMeta)>> {
        self.shared.call(deadline, move |io| io.list_if_there(&dir))
    }

    /// Writes a decision down; the answer is the one that counts.
    fn keep(&self, kept: Kept, marker: Option<Marker>, deadline: MonotonicTime) -> Result<Decision> {
        *self.shared.decided.lock() = Some(kept);
        let there = match marker {
            Some(marker) => marker,
            None => self.shared.mark(deadline)?,
        };
        if let Some(decision) = decided(&there) {
            return Ok(self.counts(decision));
        }
        let with = Marker {
            layout: kept.to_value(),
            ..there
        };
        if unless_read_only(self.shared.publish_marker(&with, true, deadline))?.is_none() {
            return Ok(Decision::Kept(kept)); // nothing can be written here anyway
        }
        let there = self.shared.read_marker(deadline)?;
        let decision = there.as_ref().and_then(decided);
        Ok(self.counts(decision.unwrap_or(Decision::Kept(kept))))
    }

    /// Remembers what counts, for the day on which the root has to be marked again.
    fn counts(&self, decision: Decision) -> Decision {
        *self.shared.decided.lock() = match decision {
            Decision::Kept(kept) => Some(kept),
            _ => None,
        };
        decision
    }
}

/// What a marker says.
fn decided(marker: &Marker) -> Option<Decision> {
    match Kept::of(marker) {
        Ok(None) => None,
        Ok(Some(kept)) => Some(Decision::Kept(kept)),
        Err(()) => {
            let why = "the root's marker names a layout that this version does not know".to_owned();
            Some(Decision::Files(why))
        }
    }
}
