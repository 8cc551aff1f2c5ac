//! A bucket as tools see it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, MonotonicTime, Runtime, SystemClock};

use super::bucket::{Bucket, BucketConfig, DOCUMENT, Url, time_of};
use super::names::Names;
use super::uses::read_uses;
use crate::blobs::BlobName;
use crate::layout::{MARKER, Marker};
use crate::lengths::LONGEST_RECORD;
use crate::place::{Item, Place, Room};

/// How long one call may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// How old the known uses may be when something is removed; a writer writes its own once a minute
/// at most.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// See the module.
pub(crate) struct ObjectPlace {
    bucket: Bucket,
    names: Names,
    runtime: Arc<Runtime>,
    clock: Arc<dyn Clock>,
    /// When segments were last used, and when that was read.
    uses: Mutex<Option<(MonotonicTime, HashMap<BlobName, u64>)>>,
}

impl ObjectPlace {
    /// A place in this bucket.
    pub(crate) fn open(at: &BucketConfig) -> Result<Self> {
        let url = Url::parse(&at.url)?;
        Ok(Self {
            bucket: Bucket::new(at)?,
            names: Names::new(url.prefix, String::new()),
            runtime: Runtime::of_this_process()?,
            clock: SystemClock::shared(),
            uses: Mutex::default(),
        })
    }

    /// When a segment was last used, as its writers wrote it down and as was read a moment ago at
    /// most.
    async fn used(&self, segment: BlobName) -> Result<Option<u64>> {
        let now = self.clock.now();
        if let Some((at, used)) = &*self.uses.lock()
            && now.since(*at) < LOOK_AGAIN
        {
            return Ok(used.get(&segment).copied());
        }
        let listed = self.bucket.list(&self.names.all_uses()).await?;
        let used = read_uses(&listed, &self.bucket, &self.names).await;
        let found = used.get(&segment).copied();
        *self.uses.lock() = Some((now, used));
        Ok(found)
    }

    fn call<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.runtime
            .wait(&*self.clock, self.clock.now().after(PATIENCE), work)
    }
}

impl Place for ObjectPlace {
    fn room(&self) -> Result<Room> {
        let marker = self.call(self.bucket.get(&self.names.marker(), DOCUMENT))?;
        let marker = marker.map(|(bytes, _)| Marker::parse(&bytes)).transpose()?;
        Ok(Room {
            limit: marker.map_or(0, |marker| marker.storage_capacity),
            ..Room::default()
        })
    }

    fn list(&self) -> Result<Vec<Item>> {
        let (listed, used) = self.call(async {
            let listed = self.bucket.list(self.names.prefix()).await?;
            let used = read_uses(&listed, &self.bucket, &self.names).await;
            Ok((listed, used))
        })?;
        let item = |meta: object_store::ObjectMeta| {
            let segment = self.names.parse_segment(&meta.location);
            let used = segment.and_then(|segment| used.get(&segment).copied());
            let made = segment.map_or_else(|| time_of(&meta), |segment| segment.sealed_ns);
            Item {
                path: self.names.path_in_a_root(&meta.location),
                name: meta.location.to_string(),
                len: meta.size,
                used_ns: made.max(used.unwrap_or(0)),
                version: meta.e_tag.unwrap_or_default(),
            }
        };
        Ok(listed.into_iter().map(item).collect())
    }

    fn read(&self, name: &str, start: u64, len: u64) -> Result<Option<Vec<u8>>> {
        let path = object_store::path::Path::from(name);
        let read = self.call(async {
            let Some(meta) = self.bucket.head(&path).await? else {
                return Ok(None);
            };
            // Whatever length a listing names.
            let end = start.saturating_add(len.min(LONGEST_RECORD)).min(meta.size);
            if start >= end {
                return Ok(Some(Vec::new())); // a server refuses a stretch of nothing
            }
            self.bucket.range(&path, start..end).await.map(Some)
        });
        match read {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            read => read,
        }
    }

    fn remove(&self, item: &Item) -> Result<bool> {
        let path = object_store::path::Path::from(item.name.as_str());
        let ours = self.names.path_in_a_root(&path);
        if ours.is_empty() || ours == MARKER {
            let text = "this object is none of those that a tool removes";
            return Err(Error::new(ErrorKind::InvalidInput, text).with("object", &path));
        }
        let segment = self.names.parse_segment(&path);
        self.call(async {
            let Some(now) = self.bucket.head(&path).await? else {
                return Ok(false);
            };
            // Some servers list no tags; an object that never changes has its length at least.
            let is_another = match item.version.is_empty() {
                true => now.size != item.len,
                false => now.e_tag.unwrap_or_default() != item.version,
            };
            if is_another {
                return Ok(false);
            }
            if let Some(segment) = segment
                && self.used(segment).await? > Some(item.used_ns)
            {
                return Ok(false);
            }
            self.bucket.delete(&path).await.map(|()| true)
        })
    }
}
