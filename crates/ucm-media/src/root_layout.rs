//! Which layout a root has, where no configuration names one: a root keeps what it has, a new one
//! gets segments.
//!
//! What the marker says counts; where it says nothing, the records that are there; where there are
//! none, the default, and the marker says so from then on. On a new root the decision stands in the
//! marker from its first byte on: of several processes that begin at the same time one has its
//! marker stay, and the others go by that. A root that was marked without a decision (by a process
//! whose configuration names a layout) gets it by writing the marker again; two that do so at the
//! same time and differ may use both layouts until they are started again, which costs misses.

use std::ffi::OsString;
use std::path::PathBuf;

use serde::Deserialize;
use ucm_core::Result;
use ucm_infra::MonotonicTime;
use ucm_io::FileMeta;

use crate::layout::{BLOCKS, Marker, SEGMENTS, SegmentName, is_namespace, shard_name};
use crate::layout_kind::{Decision, LayoutKind, RootLayout};
use crate::root::unless_read_only;
use crate::shared::{Shared, is_link};

/// Decides on the layout of a root.
pub(crate) struct LayoutChoice<'a>(pub(crate) &'a Shared);

impl LayoutChoice<'_> {
    /// Reads which layout was decided on; decides, where no process has and this one writes. `None`
    /// where it does not.
    pub(crate) fn decide(&self, deadline: MonotonicTime) -> Result<Option<Decision>> {
        let marker = self.0.read_marker(deadline)?;
        if let Some(decision) = marker.as_ref().and_then(|marker| self.as_marked(marker)) {
            return Ok(Some(decision));
        }
        if self.0.config.scope.lookup_only {
            return Ok(None);
        }
        let (kind, why) = match self.layout_of_records(deadline) {
            // As in a namespace of another user: no reason not to use the root.
            Err(error) => {
                let why = format!("what lies below the root could not be seen: {error}");
                return Ok(Some(Decision::for_now(&why)));
            }
            Ok(Some(kind)) => (kind, "records"),
            Ok(None) => (LayoutKind::Segment, "default"),
        };
        let layout = RootLayout {
            kind,
            why: why.to_owned(),
            decided: self.0.clock.wall_ns() / 1_000_000_000,
        };
        self.keep_layout(layout, marker, deadline).map(Some)
    }

    /// The contents of a marker, kept for the case that the root has to be marked again.
    fn as_marked(&self, marker: &Marker) -> Option<Decision> {
        let said = marker.layout.as_ref()?;
        let layout = RootLayout::deserialize(said).ok();
        let unknown = "the root's marker names a layout that this version does not know";
        let decision = layout.as_ref().map(RootLayout::decision);
        self.0.root.lock().layout = layout;
        Some(decision.unwrap_or_else(|| Decision::for_now(unknown)))
    }

    /// The layout of the records below the root, of any namespace; where some are in files, that
    /// one.
    fn layout_of_records(&self, deadline: MonotonicTime) -> Result<Option<LayoutKind>> {
        let root = self.0.layout.root();
        let mut found = None;
        for (name, meta) in self.list(root.to_owned(), deadline)? {
            if !meta.is_dir || !is_namespace(&name) {
                continue;
            }
            let namespace = root.join(&name);
            // Such a directory is made with its first record.
            let blocks = self.list(namespace.join(BLOCKS), deadline)?;
            let mut blocks = blocks.iter();
            if blocks.any(|(name, meta)| meta.is_dir && shard_name(name).is_some()) {
                return Ok(Some(LayoutKind::File));
            }
            let segments = self.list(namespace.join(SEGMENTS), deadline)?;
            let mut names = segments.iter().map(|(name, _)| name);
            if names.any(|name| SegmentName::parse(name).is_some()) {
                found = Some(LayoutKind::Segment);
            }
        }
        Ok(found)
    }

    fn list(&self, dir: PathBuf, deadline: MonotonicTime) -> Result<Vec<(OsString, FileMeta)>> {
        match self.0.call(deadline, move |io| io.list_if_there(&dir)) {
            // of any namespace: its own users log it
            Err(error) if is_link(&error) => Ok(Vec::new()),
            listed => listed,
        }
    }

    /// Writes a decision down; the answer is the one that counts.
    fn keep_layout(
        &self,
        layout: RootLayout,
        marker: Option<Marker>,
        deadline: MonotonicTime,
    ) -> Result<Decision> {
        self.0.root.lock().layout = Some(layout.clone());
        let there = match marker {
            Some(marker) => marker,
            None => {
                self.0.make_root(deadline)?;
                self.0.mark(deadline)?
            }
        };
        if let Some(decision) = self.as_marked(&there) {
            return Ok(decision);
        }
        let with = Marker {
            layout: serde_json::to_value(&layout).ok(),
            ..there
        };
        // Where nothing can be written it counts all the same, for nothing is written there.
        let there = match unless_read_only(self.0.publish_marker(&with, true, deadline))? {
            Some(()) => self.0.read_marker(deadline)?,
            None => None,
        };
        let decision = there.and_then(|marker| self.as_marked(&marker));
        Ok(decision.unwrap_or_else(|| layout.decision()))
    }
}
