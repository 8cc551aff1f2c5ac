//! The bucket of a store, as its parts use it: calls that wait with a deadline, and the documents
//! that describe what lies there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tracing::warn;
use ucm_core::{ErrorKind, Result};
use ucm_infra::{Clock, MonotonicTime, Runtime};

use super::bucket::{Bucket, BucketConfig, DOCUMENT, Url};
use super::names::Names;
use crate::layout::Marker;
use crate::lengths::Lengths;
use crate::scope::Scope;

/// The limit where none is configured, bytes.
pub(super) const DEFAULT_CAPACITY: u64 = 100 << 30;

/// Configuration of the backend.
#[derive(Debug, Clone)]
pub struct ObjectConfig {
    /// Where the bucket is.
    pub place: BucketConfig,
    /// Whose records it keeps.
    pub scope: Scope,
    /// The limit on bytes below the prefix; none: that of the marker, or the default.
    pub capacity: Option<u64>,
    /// Segments that were not used for so long are removed; none: only where nothing else bounds
    /// what lies there.
    pub expire_after: Option<Duration>,
    /// Length at which a segment is put, bytes.
    pub size: u64,
    /// How long after its oldest record was written a segment is put.
    pub age: Duration,
    /// How often others' segments are looked for.
    pub refresh: Duration,
}

/// See the module.
pub(super) struct Remote {
    pub(super) config: ObjectConfig,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) bucket: Bucket,
    pub(super) names: Names,
    /// Where the client runs.
    pub(super) runtime: Arc<Runtime>,
    /// The server has conditional writes, which a limit that several writers share needs.
    conditions: AtomicBool,
    /// The keys may write and not delete.
    keeps_all: AtomicBool,
}

impl Remote {
    pub(super) fn new(config: ObjectConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        let prefix = Url::parse(&config.place.url)?.prefix.to_owned();
        Ok(Self {
            bucket: Bucket::new(&config.place)?,
            names: Names::new(&prefix, config.scope.identity.namespace()),
            runtime: Runtime::of_this_process()?,
            config,
            clock,
            conditions: AtomicBool::new(false),
            keeps_all: AtomicBool::new(false),
        })
    }

    /// Waits for a call of the client.
    pub(super) fn call<T>(
        &self,
        deadline: MonotonicTime,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        self.runtime.wait(&*self.clock, deadline, work)
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.clock.wall_ns()
    }

    /// Whether the server has conditional writes.
    pub(super) fn has_conditions(&self) -> bool {
        self.conditions.load(Ordering::Acquire)
    }

    /// Whether the keys may write and not delete.
    pub(super) fn keeps_all(&self) -> bool {
        self.keeps_all.load(Ordering::Acquire)
    }

    /// Tries whether the server has conditional writes, unless it was seen to; `Unhealthy` where
    /// the keys may only read.
    pub(super) fn probe(&self, deadline: MonotonicTime) -> Result<()> {
        if self.has_conditions() {
            return Ok(());
        }
        let probe = self.names.probe();
        let conditions = match self.call(deadline, self.bucket.try_conditions(&probe)) {
            // Only the server's own answer: an error that may pass is an error here.
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(false),
            tried => tried,
        };
        let deleted = self.call(deadline, self.bucket.delete(&probe));
        let conditions = conditions?;
        let (store, url) = (self.config.scope.writer, &self.config.place.url);
        match deleted {
            Err(error) if error.kind() == ErrorKind::Unhealthy => {
                self.keeps_all.store(true, Ordering::Release);
                warn!(
                    store,
                    "the keys may write to {url} and not delete there: nothing is removed, and \
                     nothing more is stored once storage_capacity is used up: {error}"
                );
            }
            deleted => deleted?,
        }
        self.conditions.store(conditions, Ordering::Release);
        if !conditions {
            warn!(
                store,
                "{url} has no conditional writes, so storage_capacity cannot be kept to: segments \
                 are removed by their age alone (expire_after)"
            );
        }
        Ok(())
    }

    /// The marker that is there.
    pub(super) fn stored_marker(&self, deadline: MonotonicTime) -> Result<Option<Marker>> {
        let found = self.call(deadline, self.bucket.get(&self.names.marker(), DOCUMENT))?;
        found.map(|(bytes, _)| Marker::parse(&bytes)).transpose()
    }

    /// The marker that is there, or a new one.
    pub(super) fn marker(&self, deadline: MonotonicTime) -> Result<Option<Marker>> {
        if let Some(marker) = self.stored_marker(deadline)? {
            return Ok(Some(marker));
        }
        let capacity = self.config.capacity.unwrap_or(DEFAULT_CAPACITY);
        let fresh = Marker::new(crate::random_hex(), self.now_ns(), capacity);
        let (bytes, path) = (Bytes::from(fresh.to_bytes()), self.names.marker());
        if self.has_conditions() {
            let _ = self.call(deadline, self.bucket.put_new(&path, bytes))?;
        } else {
            self.call(deadline, self.bucket.put(&path, bytes))?;
        }
        // Of several that are put at the same time one stays.
        self.stored_marker(deadline)
    }

    /// Adds the sizes of this writer's parts to their manifests.
    pub(super) fn describe(&self, lengths: &Lengths, deadline: MonotonicTime) -> Result<()> {
        let (scope, bucket) = (&self.config.scope, &self.bucket);
        for own in lengths.own() {
            let path = self.names.manifest(own.part);
            // Of several that begin at once each adds to what the others wrote.
            let mut written = false;
            while !written {
                let stored = self.call(deadline, bucket.get(&path, DOCUMENT))?;
                let known = stored.as_ref().map(|(bytes, _)| &**bytes);
                let (manifest, is_new) = scope.describe(lengths, [own], known);
                let bytes = manifest.into();
                written = match stored {
                    _ if !is_new => true,
                    _ if !self.has_conditions() => {
                        self.call(deadline, bucket.put(&path, bytes))?;
                        true
                    }
                    Some((_, version)) => {
                        self.call(deadline, bucket.replace(&path, bytes, version))?
                    }
                    None => self.call(deadline, bucket.put_new(&path, bytes))?,
                };
            }
        }
        Ok(())
    }

    /// Reads which lengths records may have, where one was found whose length is not known and it
    /// is time for that: those of writers that keep other side shards. Where it fails, such records
    /// stay misses for now.
    pub(super) fn learn_lengths(&self, lengths: &Lengths, deadline: MonotonicTime) {
        if !lengths.is_look_due(self.clock.now()) {
            return;
        }
        for known in lengths.parts() {
            let path = self.names.manifest(known.part);
            let stored = self.call(deadline, self.bucket.get(&path, DOCUMENT));
            if let Ok(Some((bytes, _))) = stored {
                lengths.learn_from_document(&bytes);
            }
        }
    }
}
