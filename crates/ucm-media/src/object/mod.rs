//! Objects in a bucket: records lie in segments, as below a directory, and a segment is one object.
//!
//! An object is put whole and costs a request, so a segment grows in memory and is put when it is
//! large or old enough, or when a caller waits for it ([`blobs`], below
//! [`crate::segment::writer`]). Its footer is the index, in the format of [`crate::segment`]; a
//! process finds segments by listing their names, which begin with a time, and reads their footers
//! ([`discovery`]), so lookups are answered from memory. A read is a range of an object, neighbours
//! together ([`crate::segment::reader`]). What is written is bounded by one document that writers
//! change by compare-and-swap, where the server has that ([`space`]); what was used longest ago
//! goes ([`collector`], [`uses`]). [`bucket`] has the client, [`names`] where things lie.
//!
//! A segment is put once, under a name that no other writer uses, and never changed; it is removed
//! as a whole. Records that a writer had not put before it died were never published.

mod blobs;
mod bucket;
mod collector;
mod credentials;
mod discovery;
mod errors;
#[cfg(test)]
mod hostile;
mod http;
mod names;
mod place;
mod remote;
mod space;
mod uses;

use std::sync::{Arc, Once};
use std::time::Duration;

use ucm_core::{BlockId, ErrorKind, Result, in_units};
use ucm_device::Slot;
use ucm_infra::{Clock, Lane, MonotonicTime, WorkerPool};
use ucm_io::{IoJob, IoPool, Process};

use crate::backend::{
    Backend, BlockRead, Features, Flush, Listed, MediumStats, OnSealed, Outcome, Presence,
    WriteOptions, Written,
};
use crate::segment::cache::SegmentCache;
use crate::segment::writer::{SegmentWriter, WriterConfig};
use crate::turns::{NextTurn, run};
use blobs::{BucketBlobs, UPLOADS};
pub use bucket::BucketConfig;
use discovery::{Discovery, TURN};
pub(crate) use place::ObjectPlace;
pub use remote::ObjectConfig;
use remote::Remote;
use space::Space;

/// Lanes of the background threads: one keeps the time of writes and waits, one lists others'
/// segments, one counts and makes room. In [`blobs::LANE_UPLOAD`] segments are put.
const LANE_TIMER: usize = 0;
const LANE_DISCOVERY: usize = 1;
const LANE_SPACE: usize = 2;
/// How long after a segment was put others must have found it, beside the time between two of their
/// listings.
const FOUND_WITHIN: Duration = Duration::from_secs(10);
/// Most records in the index in memory; further ones are misses.
const MOST_BLOCKS: usize = 1 << 24;

/// See the module.
pub struct ObjectBackend {
    objects: Arc<Objects>,
    /// The threads that wait for the server.
    io: Arc<IoPool>,
}

/// The parts, shared by the handle and the background threads.
struct Objects {
    remote: Arc<Remote>,
    cache: Arc<SegmentCache<BucketBlobs>>,
    writer: Arc<SegmentWriter<BucketBlobs>>,
    discovery: Discovery,
    pool: Arc<WorkerPool>,
    started: Once,
}

impl ObjectBackend {
    /// A backend over these threads; nothing is touched before [`Backend::open`]. `Config` for an
    /// address that is none, or too small a limit.
    pub fn new(config: ObjectConfig, io: Arc<IoPool>, clock: Arc<dyn Clock>) -> Result<Self> {
        let (lengths, capacity) = (Arc::new(config.scope.lengths()), config.capacity);
        let namespace = *config.scope.identity.digest();
        let remote = Arc::new(Remote::new(config, clock)?);
        let lane = |name, max_running| Lane {
            name,
            capacity: 8,
            max_running,
        };
        let (space, upload) = (lane("space", 1), lane("upload", UPLOADS));
        let pool = WorkerPool::builder("ucm-object")
            .size(3 + UPLOADS)
            .lanes(&[lane("timer", 1), lane("finder", 1), space, upload])
            .clock(Arc::clone(&remote.clock))
            .build()?;
        let blobs = Arc::new(BucketBlobs::new(&remote, &lengths, &pool));
        if let Some(capacity) = capacity {
            blobs.check_limit(capacity)?;
        }
        let cache = SegmentCache::new(blobs, lengths, namespace, MOST_BLOCKS, &remote.clock);
        let how = WriterConfig {
            size: remote.config.size,
            age: remote.config.age,
            found_within: remote.config.refresh + FOUND_WITHIN,
            process: Process::this(),
            on_sealed: Arc::default(),
        };
        let writer = SegmentWriter::new(&cache, how);
        let objects = Objects {
            discovery: Discovery::new(&cache),
            writer,
            cache,
            remote,
            pool,
            started: Once::new(),
        };
        Ok(Self {
            objects: Arc::new(objects),
            io,
        })
    }
}

impl Objects {
    fn space(&self) -> &Space {
        &self.cache.blobs.space
    }

    /// The bucket and its use, for the log.
    fn describe(&self) -> String {
        let config = &self.remote.config;
        let index = &self.cache.index;
        let (blocks, segments) = (index.blocks(), index.segments());
        let how = if config.scope.lookup_only || self.space().may_write() {
            let (size, age) = (in_units(self.writer.room()), config.age.as_secs_f64());
            let bound = self.space().bound();
            format!("segments of {size} put after {age} s, {bound}")
        } else {
            "only read, since the keys may not write".to_owned()
        };
        let url = &config.place.url;
        format!("{url}, {how}; {blocks} blocks in {segments} segments found")
    }

    /// Starts the threads, once.
    fn start(self: &Arc<Self>) {
        self.started.call_once(|| {
            let (pool, clock, looks) = (&self.pool, &self.remote.clock, &self.cache.looks);
            run(pool, LANE_DISCOVERY, clock, &looks.due, self, Self::find);
            run(pool, LANE_TIMER, clock, &looks.timer, self, |objects| {
                objects.writer.turn()
            });
            if !self.remote.config.scope.lookup_only {
                run(
                    pool,
                    LANE_SPACE,
                    clock,
                    &self.space().wanted,
                    self,
                    |objects| {
                        objects.cache.looks.unless_closed().ok()?;
                        Some(Some(objects.space().turn()))
                    },
                );
            }
        });
    }

    fn find(self: &Arc<Self>) -> Option<NextTurn> {
        self.cache.looks.unless_closed().ok()?;
        let now = self.remote.clock.now();
        let due = self.discovery.next_turn(now);
        if due.is_none_or(|due| due > now) {
            return Some(due);
        }
        self.discovery.find(now.after(TURN));
        Some(self.discovery.next_turn(self.remote.clock.now()))
    }
}

impl Backend for ObjectBackend {
    fn open(&self, deadline: MonotonicTime) -> Result<String> {
        let objects = &self.objects;
        if objects.remote.config.scope.lookup_only {
            objects.remote.stored_marker(deadline)?;
        } else {
            match objects.cache.blobs.begin_writing(deadline) {
                // A store whose keys may only read serves what others have stored.
                Err(refused) if refused.kind() == ErrorKind::Unhealthy => {
                    objects.remote.stored_marker(deadline)?.ok_or(refused)?;
                }
                begun => begun?,
            }
        }
        objects.discovery.find_all(deadline);
        objects.start();
        Ok(objects.describe())
    }

    fn features(&self) -> Features<'_> {
        Features {
            name: "object",
            answers_at_once: true,
            own_touches: true,
            index: Some(&*self.objects.cache),
            local: Some(&*self.objects.cache),
            ..Features::default()
        }
    }

    fn lookup(&self, _io: &IoJob, ids: &[BlockId], stop_at_missing: bool) -> Result<Vec<Presence>> {
        self.objects.discovery.wanted();
        Ok(self.objects.cache.lookup(ids, stop_at_missing))
    }

    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        self.objects.cache.read(io, run)
    }

    fn write(&self, io: &IoJob, id: BlockId, slot: Slot, options: WriteOptions) -> Result<Written> {
        let record = &slot.as_slice()[..options.len];
        self.objects.writer.write(io, id, record, &options)
    }

    fn on_sealed(&self, hook: OnSealed) {
        let _ = self.objects.writer.config.on_sealed.set(hook); // it is set once
    }

    fn touch(&self, ids: &[(BlockId, u32)], _deadline: MonotonicTime) {
        if !self.objects.remote.config.scope.lookup_only {
            let objects = &self.objects;
            objects.space().uses.touch(&objects.cache.index, ids);
        }
    }

    /// Forgets records in this process. Their bytes stay until their segment goes.
    fn delete(&self, _io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        Ok(self.objects.cache.delete(ids))
    }

    fn list(&self, _io: &IoJob) -> Result<Vec<Listed>> {
        Ok(self.objects.cache.list())
    }

    fn flush(&self, how: Flush) {
        self.objects.writer.flush(how);
    }

    fn stats(&self) -> MediumStats {
        let objects = &self.objects;
        let (space, writer) = (objects.space(), &objects.writer);
        let removed = space.removed();
        MediumStats {
            usage: space.usage(objects.cache.index.blocks() as u64),
            records_removed: removed.0,
            bytes_removed: removed.1,
            blocks_touched: space.uses.count(),
            more: vec![
                ("segments_open", writer.taking_records() as u64),
                ("segments_uploading", writer.sealing() as u64),
            ],
        }
    }

    fn close(&self, drain: Duration) {
        let objects = &self.objects;
        let clock = &objects.remote.clock;
        let until = clock.now().after(drain);
        let left = || until.since(clock.now());
        objects.cache.looks.end();
        objects.writer.flush(Flush::Last);
        objects.writer.await_sealed(clock.now().after(left() / 2));
        objects.space().leave(clock.now().after(left() / 2));
        objects.writer.changed.notify();
        objects.space().wanted.notify();
        objects.pool.shutdown(left() / 2);
        self.io.shutdown(left());
    }
}

impl Drop for ObjectBackend {
    fn drop(&mut self) {
        self.objects.cache.looks.end();
        self.objects.space().wanted.notify();
    }
}
