//! When segments were last used: each writer writes that into a small object of its own, once a
//! minute at most.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use futures_util::stream::StreamExt;
use object_store::ObjectMeta;
use serde::{Deserialize, Serialize};
use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Result};
use ucm_infra::MonotonicTime;

use super::bucket::{AT_ONCE, Bucket, DOCUMENT, MOST_LISTED};
use super::names::Names;
use super::remote::Remote;
use crate::blobs::BlobName;
use crate::layout::FORMAT;
use crate::segment::index::Index;

/// Most writers whose uses are read, those that wrote last; and most segments of one.
const MOST_WRITERS: usize = 256;
const MOST_USES: usize = 1 << 16;

/// Uses of segments by this writer.
pub(super) struct SegmentUses {
    remote: Arc<Remote>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Segments, and when they were used.
    used: HashMap<BlobName, u64>,
    /// All of that is in the bucket.
    is_written: bool,
    /// Records that were used.
    count: u64,
}

/// The uses of one writer: names of segments, and when, ns of Unix time.
#[derive(Serialize, Deserialize, Default)]
struct Uses {
    format: u32,
    used: BTreeMap<String, u64>,
}

impl SegmentUses {
    pub(super) fn new(remote: &Arc<Remote>) -> Self {
        Self {
            remote: Arc::clone(remote),
            state: Mutex::default(),
        }
    }

    /// A use of a record is one of its segment.
    pub(super) fn touch(&self, index: &Index, ids: &[(BlockId, u32)]) {
        let now = self.remote.now_ns();
        let mut state = self.state.lock();
        for (id, _) in ids {
            let Some(hit) = index.find(*id).filter(|hit| !hit.private) else {
                continue;
            };
            state.used.insert(hit.blob(), now);
            let used = i64::try_from(now).unwrap_or(i64::MAX);
            index.used(hit.segment, used);
        }
        state.count += ids.len() as u64;
        state.is_written = false;
        if state.used.len() > MOST_USES {
            let mut times: Vec<u64> = state.used.values().copied().collect();
            times.sort_unstable();
            let oldest = times[times.len() / 2];
            state.used.retain(|_, used| *used > oldest);
        }
    }

    /// Writes down which segments this writer has used, unless that is done.
    pub(super) fn write(&self, deadline: MonotonicTime) -> Result<()> {
        let used: BTreeMap<_, _> = {
            let state = self.state.lock();
            if state.is_written || state.used.is_empty() {
                return Ok(());
            }
            let used = state.used.iter();
            used.map(|(blob, at)| (blob.file_name(), *at)).collect()
        };
        let format = FORMAT;
        let bytes = serde_json::to_vec(&Uses { format, used }).unwrap_or_default();
        let path = self.remote.names.uses(self.remote.config.scope.writer);
        let put = self.remote.bucket.put(&path, bytes.into());
        self.remote.call(deadline, put)?;
        self.state.lock().is_written = true;
        Ok(())
    }

    /// Records that were used.
    pub(super) fn count(&self) -> u64 {
        self.state.lock().count
    }
}

/// When segments were last used, by the objects of all writers among those that were listed. One
/// that cannot be read is left out.
pub(super) async fn read_uses(
    listed: &[ObjectMeta],
    bucket: &Bucket,
    names: &Names,
) -> HashMap<BlobName, u64> {
    let uses = names.all_uses();
    let written = listed.iter();
    let written = written.filter(|meta| meta.location.prefix_matches(&uses));
    let mut written: Vec<&ObjectMeta> = written.collect();
    written.sort_unstable_by_key(|meta| std::cmp::Reverse(meta.last_modified));
    let last = written.into_iter().take(MOST_WRITERS);
    let reads = last.map(|meta| bucket.get(&meta.location, DOCUMENT));
    let mut reads = futures_util::stream::iter(reads).buffer_unordered(AT_ONCE);
    let mut used: HashMap<BlobName, u64> = HashMap::new();
    // One after the other, so that they are never all in memory together.
    while let Some(read) = reads.next().await {
        let Ok(Some((bytes, _))) = read else { continue };
        let uses: Uses = serde_json::from_slice(&bytes).unwrap_or_default();
        for (name, at) in uses.used.into_iter().filter(|_| uses.format <= FORMAT) {
            if let Some(segment) = BlobName::parse(&name)
                && (used.len() < MOST_LISTED || used.contains_key(&segment))
            {
                let known = used.entry(segment).or_default();
                *known = at.max(*known);
            }
        }
    }
    used
}
