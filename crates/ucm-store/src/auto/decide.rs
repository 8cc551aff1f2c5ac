//! Deciding which layout a root gets, and keeping what was decided.
//!
//! On a new root the decision stands in the marker from its first byte on: of several processes that begin at the same
//! time one has its marker stay, and the others go by that. A root that was marked without a decision (by a process with
//! a layout of its own in its configuration, or whose measurement failed) gets it by writing the marker again; two that
//! do so at the same time and differ may use both layouts until they are started again, which costs misses.

use std::ffi::OsString;
use std::path::PathBuf;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::Mono;
use ucm_io::{FileMeta, IoDone, IoOp};

use super::kept::{Kept, LayoutKind, Why};
use super::measure::{self, Figures, Place};
use super::{Auto, Decision};
use crate::layout::{BLOCKS, Marker, SEGMENTS, SegmentName, is_namespace, shard_name};
use crate::root::unless_read_only;
use crate::segment::{room_below, side_by_side};
use crate::space::Capacity;

/// Part of what is free, and of the limit, that measuring may write.
const SHARE: u64 = 4;

impl Auto {
    /// Reads what was decided; decides, where nobody has and this process writes.
    pub(super) fn decide(&self, deadline: Mono) -> Result<Decision> {
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
        let (kind, why, figures) = match self.records(deadline) {
            // As in a namespace of another user: no reason not to use the root.
            Err(error) => {
                let why = format!("what lies below the root could not be seen: {error}");
                return Ok(Decision::Files(why));
            }
            Ok(Some(kind)) => (kind, Why::Records, None),
            Ok(None) => match self.figures(deadline) {
                Ok(Some(figures)) => (figures.choice(), Why::Measured, Some(figures)),
                Ok(None) => (LayoutKind::File, Why::Large, None),
                Err(error) => {
                    let why = format!("measuring both failed and is tried again at the next start: {error}");
                    return Ok(Decision::Files(why));
                }
            },
        };
        let kept = Kept {
            kind,
            why,
            decided: self.shared.clock.wall_ns() / 1_000_000_000,
            figures,
        };
        self.keep(kept, marker, deadline)
    }

    /// The layout of the records below the root, of any namespace; where some are in files, that one.
    fn records(&self, deadline: Mono) -> Result<Option<LayoutKind>> {
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

    fn list(&self, dir: PathBuf, deadline: Mono) -> Result<Vec<(OsString, FileMeta)>> {
        match self.shared.call(deadline, IoOp::List { dir }) {
            Ok(IoDone::List(entries)) => Ok(entries),
            Ok(_) => Err(Error::internal("a listing answered with something else")),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Measures both layouts; `None` where blocks are so large that it does not matter.
    fn figures(&self, deadline: Mono) -> Result<Option<Figures>> {
        let shared = &self.shared;
        let record_len = shared.config.record.record_len();
        let Some(cost) = measure::cost(record_len) else {
            return Ok(None);
        };
        let no_room = |what: &'static str| Err(Error::new(ErrorKind::NoSpace, what));
        if let Some(Capacity::Bytes(limit)) = shared.config.capacity
            && cost > limit.get() / SHARE
        {
            return no_room("storage_capacity is too small to measure in it");
        }
        if cost > shared.space_info(deadline)?.1 / SHARE {
            return no_room("too little of the file system is free to measure in it");
        }
        shared.make_dirs(deadline)?;
        shared.probe_io(deadline)?; // from here on the engine is the one that records will go through
        let name = || shared.next_private();
        // A share of what is there, or what others decided, is not known yet: more than segments side by side take.
        let limit = match shared.config.capacity {
            Some(Capacity::Bytes(limit)) => limit.get(),
            _ => u64::MAX,
        };
        let abreast = if self.segments.age.is_zero() {
            1
        } else {
            side_by_side(shared, limit, room_below(&self.segments, limit))
        };
        let place = Place {
            io: &shared.io,
            clock: &*shared.clock,
            record_len,
            file_mode: shared.config.modes.file,
            name: &name,
            abreast: shared.takes_turns().then_some(abreast),
        };
        measure::measure(&place, deadline).map(Some)
    }

    /// Writes a decision down; the answer is the one that counts.
    fn keep(&self, kept: Kept, marker: Option<Marker>, deadline: Mono) -> Result<Decision> {
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
