//! Objects in a bucket: records lie in segments, as below a directory, and a segment is one object.
//!
//! An object is put whole and costs a request, so a writer gathers records in memory and puts a
//! segment when it is large or old enough, or when somebody waits for it ([`writer`]). Its footer
//! is the index, in the format of [`crate::segment`]; a process that looks finds segments by
//! listing their names, which begin with a time, and reads their footers ([`discovery`]), so
//! lookups are answered from memory. A read is a range of an object, neighbours together
//! ([`reader`]). What is written is bounded by one document that writers change by
//! compare-and-swap, where the server has that ([`space`], [`conditions`]); what was used longest
//! ago goes ([`collector`], [`uses`]). [`bucket`] has the client, [`names`] where things lie.
//!
//! A segment is put once, under a name that no one else uses, and never changed; it goes whole.
//! What a writer that dies had not put yet was never published.

mod bucket;
mod collector;
mod conditions;
mod credentials;
mod discovery;
#[cfg(test)]
mod hostile;
mod http;
mod names;
mod place;
mod reader;
mod space;
mod upkeep;
mod uses;
mod writer;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::Slot;
use ucm_infra::{Clock, MonotonicTime};
use ucm_io::{IoJob, IoPool};
use ucm_quota::layout::{FORMAT, Manifest, Marker};

use crate::backend::{
    Backend, BlockRead, Done, Features, Flush, Indexed, Listed, Local, LocallyVisible, MediumStats,
    Outcome, Presence, WriteOptions, Written,
};
use crate::lengths::Lengths;
use crate::scope::Scope;
use crate::segment::index::{Hit, Index};
use crate::segment::locally_visible::LocalChanges;
use crate::segment::runs::runs;
use crate::writing::Write;
pub use bucket::Place;
use bucket::{Bucket, Url};
use discovery::Discovery;
use names::Names;
pub(crate) use place::ObjectPlace;
use space::Space;
use upkeep::Upkeep;
use writer::Writer;

/// Segments that are put at once, while others take records.
const UPLOADS: usize = 2;
/// Bytes of one range that is read for several records.
const LEAST: usize = 1 << 20;
const MOST: usize = 8 << 20;
/// Objects that are read, or removed, at once.
const AT_ONCE: usize = 16;
/// Longest document.
const DOCUMENT: u64 = 16 << 20;
/// Most records in the index in memory; further ones are misses.
const MOST_BLOCKS: usize = 1 << 24;

/// What the backend needs to know.
#[derive(Debug, Clone)]
pub struct ObjectConfig {
    /// Where the bucket is.
    pub place: Place,
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
pub struct ObjectBackend {
    objects: Arc<Objects>,
    /// The threads that wait for the server.
    io: Arc<IoPool>,
}

/// Shared by the handle and the background threads.
struct Objects {
    config: ObjectConfig,
    clock: Arc<dyn Clock>,
    bucket: Bucket,
    names: Names,
    index: Index,
    lengths: Lengths,
    locally_visible: LocalChanges,
    writer: Writer,
    discovery: Discovery,
    space: Space,
    upkeep: Upkeep,
}

impl ObjectBackend {
    /// A backend over these threads; nothing is touched before [`Backend::open`]. `Config` for a
    /// place that is none, or too small a limit.
    pub fn new(config: ObjectConfig, io: Arc<IoPool>, clock: Arc<dyn Clock>) -> Result<Self> {
        let prefix = Url::parse(&config.place.url)?.prefix.to_owned();
        let objects = Objects {
            bucket: Bucket::new(&config.place)?,
            names: Names::new(&prefix, config.scope.identity.namespace()),
            index: Index::new(MOST_BLOCKS),
            lengths: config.scope.lengths(),
            locally_visible: LocalChanges::default(),
            writer: Writer::default(),
            discovery: Discovery::default(),
            space: Space::default(),
            upkeep: Upkeep::new(&clock)?,
            config,
            clock,
        };
        if let Some(capacity) = objects.config.capacity {
            objects.check_limit(capacity)?;
        }
        Ok(Self {
            objects: Arc::new(objects),
            io,
        })
    }
}

impl Objects {
    /// Waits for something that the client does.
    fn call<T>(&self, deadline: MonotonicTime, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.upkeep.runtime.wait(&*self.clock, deadline, work)
    }

    fn now_ns(&self) -> u64 {
        self.clock.wall_ns()
    }

    /// Makes below the prefix what a writer needs. `Unhealthy` where the keys may only read.
    fn begin_writing(&self, deadline: MonotonicTime) -> Result<()> {
        self.look_for_conditions(deadline)?;
        let marker = self.marker(deadline)?;
        let limit = self
            .config
            .capacity
            .or(marker.map(|marker| marker.storage_capacity));
        self.open_space(limit.unwrap_or(space::DEFAULT_CAPACITY), deadline)?;
        self.describe(deadline)?;
        self.space.may_write.store(true, Ordering::Release);
        Ok(())
    }

    /// The marker that is there.
    fn stored_marker(&self, deadline: MonotonicTime) -> Result<Option<Marker>> {
        let found = self.call(deadline, self.bucket.get(&self.names.marker(), DOCUMENT))?;
        found.map(|(bytes, _)| Marker::parse(&bytes)).transpose()
    }

    /// The marker that is there, or a new one where something is to be stored.
    fn marker(&self, deadline: MonotonicTime) -> Result<Option<Marker>> {
        let (bucket, path) = (&self.bucket, self.names.marker());
        let fresh = Marker {
            format: FORMAT,
            uuid: crate::random_hex(),
            created: self.now_ns() / 1_000_000_000,
            storage_capacity: self.config.capacity.unwrap_or(space::DEFAULT_CAPACITY),
            layout: None,
        };
        let (writes, conditional) = (!self.config.scope.lookup_only, self.has_conditions());
        let found = self.call(deadline, async {
            if let Some((bytes, _)) = bucket.get(&path, DOCUMENT).await? {
                return Ok(Some(bytes));
            }
            if !writes {
                return Ok(None);
            }
            match conditional {
                true => _ = bucket.put_new(&path, fresh.to_bytes().into()).await?,
                false => bucket.put(&path, fresh.to_bytes().into()).await?,
            }
            // Of several that are put at the same time one stays.
            Ok(bucket.get(&path, DOCUMENT).await?.map(|(bytes, _)| bytes))
        })?;
        found.map(|bytes| Marker::parse(&bytes)).transpose()
    }

    /// Adds what this writer has to its part's manifest.
    fn describe(&self, deadline: MonotonicTime) -> Result<()> {
        let (config, bucket) = (&self.config, &self.bucket);
        let path = self.names.manifest(config.scope.part);
        let mut is_new = true;
        // Of several that begin at once each adds to what the others wrote.
        while is_new {
            let stored = self.call(deadline, bucket.get(&path, DOCUMENT))?;
            let known = stored
                .as_ref()
                .and_then(|(bytes, _)| serde_json::from_slice::<Manifest>(bytes).ok());
            let mut manifest = known.unwrap_or_else(|| {
                Manifest::new(&config.scope.identity, config.scope.labels.clone())
            });
            is_new = manifest.add(
                config.scope.part,
                &config.scope.record,
                &config.scope.geometry,
            );
            self.lengths.learn_from(&manifest);
            if !is_new {
                break;
            }
            let bytes = manifest.to_bytes().into();
            let done = match (self.has_conditions(), stored) {
                (true, Some((_, version))) => {
                    self.call(deadline, bucket.replace(&path, bytes, version))?
                }
                (true, None) => self.call(deadline, bucket.put_new(&path, bytes))?,
                (false, _) => self
                    .call(deadline, bucket.put(&path, bytes))
                    .map(|()| true)?,
            };
            is_new = !done;
        }
        Ok(())
    }

    /// Reads which lengths records may have, where one was met whose length is not known and it is
    /// time for that: those of writers that keep other side shards. Where it fails, those that are
    /// not known stay misses for now.
    fn learn_lengths(&self, deadline: MonotonicTime) {
        if !self.lengths.is_look_due(self.clock.now()) {
            return;
        }
        for part in self.lengths.parts() {
            let stored = self.call(
                deadline,
                self.bucket.get(&self.names.manifest(part), DOCUMENT),
            );
            if let Ok(Some((bytes, _))) = stored
                && let Ok(manifest) = serde_json::from_slice::<Manifest>(&bytes)
            {
                self.lengths.learn_from(&manifest);
            }
        }
    }

    /// Whether a record of this place is one of ours whole and with KV, by its length.
    fn presence(&self, hit: Option<Hit>) -> Presence {
        hit.map_or(Err(MissReason::Absent), |hit| {
            self.lengths.presence(hit.len)
        })
    }

    /// Whether a record of so many bytes can be one of ours whole, with KV or without.
    fn is_ours(&self, len: u64) -> bool {
        self.lengths.is_ours(len)
    }

    fn words(&self) -> String {
        let url = &self.config.place.url;
        let (blocks, segments) = (self.index.blocks(), self.index.segments());
        let how = match self.config.scope.lookup_only || self.may_write() {
            true => {
                let (size, age) = (self.room(), self.config.age.as_secs_f64());
                format!(
                    "segments of {size} bytes put after {age} s, {}",
                    self.bound()
                )
            }
            false => "only read, since the keys may not write".to_owned(),
        };
        format!("{url}, {how}; {blocks} blocks in {segments} segments found")
    }
}

impl Backend for ObjectBackend {
    fn open(&self, deadline: MonotonicTime) -> Result<String> {
        let objects = &self.objects;
        if objects.config.scope.lookup_only {
            objects.marker(deadline)?;
        } else {
            match objects.begin_writing(deadline) {
                // A store whose keys may only read serves what others have stored.
                Err(refused) if refused.kind() == ErrorKind::Unhealthy => {
                    objects.stored_marker(deadline)?.ok_or(refused)?;
                }
                begun => begun?,
            }
        }
        objects.find_all(deadline);
        objects.start();
        Ok(objects.words())
    }

    fn features(&self) -> Features<'_> {
        Features {
            name: "object",
            answers_at_once: true,
            own_touches: true,
            index: Some(self),
            local: Some(self),
            ..Features::default()
        }
    }

    fn lookup(&self, _io: &IoJob, ids: &[BlockId], stop_at_missing: bool) -> Result<Vec<Presence>> {
        self.objects.discovery.wanted(self.objects.clock.now());
        let mut found = Vec::with_capacity(ids.len());
        for &id in ids {
            let there = self.objects.presence(self.objects.index.find(id));
            found.push(there);
            if stop_at_missing && there == Err(MissReason::Absent) {
                break;
            }
        }
        Ok(found)
    }

    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        self.objects.read(io, run)
    }

    fn write(
        &self,
        io: &IoJob,
        id: BlockId,
        slot: Slot,
        options: WriteOptions,
        done: Done<Written>,
    ) {
        let write = Write {
            id,
            slot,
            options,
            deadline: io.deadline(),
            done,
        };
        if !options.replace && self.is_published(id) {
            return write.end(Ok(Written::Present));
        }
        if !self.objects.index.has_room(id) {
            let full =
                "the index of segments is full: this block could be written and never be found";
            return write.end(Err(Error::new(ErrorKind::NoSpace, full)));
        }
        self.objects.append(io, write);
    }

    fn touch(&self, ids: &[(BlockId, u32)], _deadline: MonotonicTime) {
        if !self.objects.config.scope.lookup_only {
            self.objects.touch(ids);
        }
    }

    /// Forgets records in this process. Their bytes stay until their segment goes.
    fn delete(&self, _io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        let mut removed = 0;
        for &id in ids {
            removed += usize::from(self.objects.index.remove(id));
            self.objects.locally_visible.lost(id);
        }
        Ok(removed)
    }

    fn list(&self, _io: &IoJob) -> Result<Vec<Listed>> {
        let all = self.objects.index.list().into_iter();
        Ok(all
            .map(|(id, len, used_ns)| Listed { id, len, used_ns })
            .collect())
    }

    fn flush(&self, how: Flush) {
        match how {
            Flush::Soon => self.objects.flush_soon(),
            Flush::Now => self.objects.flush(false),
            Flush::Last => self.objects.flush(true),
        }
    }

    fn stats(&self) -> MediumStats {
        self.objects.stats()
    }

    fn close(&self, drain: Duration) {
        let objects = &self.objects;
        let until = objects.clock.now().after(drain);
        let left = || until.since(objects.clock.now());
        objects.upkeep.close();
        objects.discovery.looks.end();
        objects.flush(true);
        objects.await_uploads(objects.clock.now().after(left() / 2));
        objects.leave_space(objects.clock.now().after(left() / 2));
        objects.wake();
        objects.upkeep.pool.shutdown(left() / 2);
        self.io.shutdown(left());
    }
}

impl Indexed for ObjectBackend {
    fn runs(&self, reads: &[&BlockRead], threads: usize) -> Vec<Vec<usize>> {
        runs(&self.objects.index, reads, threads, (LEAST, MOST))
    }

    fn look(&self, deadline: MonotonicTime, done: Done<()>) {
        self.objects.after_look(deadline, done);
    }

    fn is_published(&self, id: BlockId) -> bool {
        let there = self.objects.index.find(id);
        there.is_some_and(|hit| !hit.private && self.objects.is_ours(hit.len))
    }

    fn knows(&self, id: BlockId) -> bool {
        self.objects.index.find(id).is_some()
    }
}

impl Local for ObjectBackend {
    fn locally_visible(&self) -> LocallyVisible {
        self.objects.locally_visible.take(self.objects.clock.now())
    }
}

impl Drop for ObjectBackend {
    fn drop(&mut self) {
        self.objects.upkeep.close();
        self.objects.discovery.looks.end();
        self.objects.wake();
    }
}
