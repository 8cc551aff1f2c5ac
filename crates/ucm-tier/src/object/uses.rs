//! When segments were last used: each writer tells it in a small object of its own, once a minute
//! at most.

use std::collections::{BTreeMap, HashMap};

use futures_util::stream::StreamExt;
use object_store::ObjectMeta;
use serde::{Deserialize, Serialize};
use ucm_core::{BlockId, Result};
use ucm_infra::MonotonicTime;
use ucm_quota::layout::FORMAT;

use super::bucket::{Bucket, MOST_LISTED};
use super::names::{Names, SegmentObject};
use super::{AT_ONCE, DOCUMENT, Objects};

/// Writers whose uses are read, those heard of last; and what one tells of at most.
const MOST_WRITERS: usize = 256;
const MOST_USES: usize = 1 << 16;

/// What was used here.
#[derive(Default)]
pub(super) struct Told {
    /// Segments, and when.
    pub(super) of: HashMap<SegmentObject, u64>,
    /// All of that is told.
    pub(super) all: bool,
    /// Records.
    pub(super) count: u64,
}

/// What one writer tells of its uses: names of segments, and when, ns of Unix time.
#[derive(Serialize, Deserialize, Default)]
struct Uses {
    format: u32,
    used: BTreeMap<String, u64>,
}

impl Objects {
    /// Uses of records are uses of their segments.
    pub(super) fn touch(&self, ids: &[(BlockId, u32)]) {
        let now = self.now_ns();
        let mut state = self.space.state.lock();
        for hit in ids
            .iter()
            .filter_map(|(id, _)| self.index.find(*id))
            .filter(|hit| !hit.private)
        {
            let segment = SegmentObject {
                sealed_ns: hit.sealed_ns,
                name: hit.name,
            };
            state.uses.of.insert(segment, now);
            self.index
                .used(hit.segment, i64::try_from(now).unwrap_or(i64::MAX));
        }
        state.uses.count += ids.len() as u64;
        state.uses.all = false;
        if state.uses.of.len() > MOST_USES {
            let mut times: Vec<u64> = state.uses.of.values().copied().collect();
            times.sort_unstable();
            let oldest = times[times.len() / 2];
            state.uses.of.retain(|_, used| *used > oldest);
        }
    }

    /// Tells which segments this writer has used.
    pub(super) fn tell_uses(&self, deadline: MonotonicTime) -> Result<()> {
        let (writer, uses) = {
            let state = self.space.state.lock();
            if state.uses.all || state.uses.of.is_empty() {
                return Ok(());
            }
            let used = state
                .uses
                .of
                .iter()
                .map(|(segment, at)| (segment.file_name(), *at))
                .collect();
            (
                self.config.scope.writer,
                Uses {
                    format: FORMAT,
                    used,
                },
            )
        };
        let bytes = serde_json::to_vec(&uses).unwrap_or_default();
        let path = self.names.uses(writer);
        self.call(deadline, self.bucket.put(&path, bytes.into()))
    }
}

/// When segments were last used, as writers tell; one that cannot be read tells nothing.
pub(super) async fn uses_told(
    bucket: &Bucket,
    names: &Names,
    listed: &[ObjectMeta],
) -> HashMap<SegmentObject, u64> {
    let uses = names.all_uses();
    let mut told: Vec<&ObjectMeta> = listed
        .iter()
        .filter(|meta| meta.location.prefix_matches(&uses))
        .collect();
    told.sort_unstable_by_key(|meta| std::cmp::Reverse(meta.last_modified));
    let reads = told
        .into_iter()
        .take(MOST_WRITERS)
        .map(|meta| bucket.get(&meta.location, DOCUMENT));
    let mut reads = futures_util::stream::iter(reads).buffer_unordered(AT_ONCE);
    let mut used: HashMap<SegmentObject, u64> = HashMap::new();
    // One after the other, so that they are never all in memory together.
    while let Some(read) = reads.next().await {
        let Ok(Some((bytes, _))) = read else { continue };
        let uses: Uses = serde_json::from_slice(&bytes).unwrap_or_default();
        for (name, at) in uses.used.into_iter().filter(|_| uses.format <= FORMAT) {
            let Some(segment) = SegmentObject::parse(&name) else {
                continue;
            };
            if let Some(known) = used.get_mut(&segment) {
                *known = at.max(*known);
            } else if used.len() < MOST_LISTED {
                used.insert(segment, at);
            }
        }
    }
    used
}
