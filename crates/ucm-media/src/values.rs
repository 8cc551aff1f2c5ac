//! The second shape of medium: a map from record ids to bytes, as a server or a pool of memory
//! keeps one.
//!
//! An author of a medium implements the byte calls of [`Values`], and nothing else.
//! [`ValueRecords`] is the [`Backend`] above them, with every rule about records.

use std::sync::Arc;
use std::time::Duration;

use hashlink::LruCache;
use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Part, Result};
use ucm_device::Slot;
use ucm_infra::{Clock, LANE_LOOKUP, LANE_SPACE, MonotonicTime};
use ucm_io::{IoJob, IoPool};
use ucm_record::RecordHeader;

use crate::backend::{
    Backend, BlockRead, Done, Features, InPlace, Indexed, Listed, MediumStats, Outcome, Presence,
    ReadDone, WriteOptions, Written,
};
use crate::lengths::Lengths;
use crate::quota::Pause;
use crate::recency::Recency;
use crate::scope::Scope;

/// How often a part's manifest is written again, so that it outlives the records.
pub(crate) const DESCRIBE_AGAIN: Duration = Duration::from_secs(600);
/// Time between two calls of [`Values::refresh`], and how long one may take.
const REFRESH_AGAIN: Duration = Duration::from_secs(10);
const REFRESH: Duration = Duration::from_secs(5);
/// Most records that are assumed to be there; some 60 bytes each.
const MOST_ASSUMED: usize = 1 << 17;

/// Properties of a medium of this shape.
#[derive(Debug, Clone, Copy)]
pub struct ValuesTraits {
    /// Name in logs and metrics.
    pub name: &'static str,
    /// Bytes of small records that one thread reads by one [`Values::get`].
    pub batch: usize,
    /// Bytes of a record from which on [`Values::exists`] is called before it is put, because that
    /// costs less than to send it.
    pub exists_first: usize,
    /// How long a record that was written, read or found is assumed to be there. One evicted within
    /// that time costs a read that misses. Zero: every lookup calls.
    pub assumed: Duration,
    /// It notes uses and makes room by itself: nothing calls [`Values::touch`], or pauses writes.
    pub manages_itself: bool,
}

/// The result of [`Values::open`].
#[derive(Debug, Clone)]
pub struct ValuesOpened {
    /// A text for the log: what is used, and why.
    pub text: String,
    /// The values lie on several nodes. It opens also without the node that has the manifest.
    pub is_cluster: bool,
}

/// The value of an id on the medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Nothing.
    Absent,
    /// A value of this many bytes.
    Len(u64),
    /// A value whose length the medium does not report.
    Unmeasured,
    /// Something that can never be read as a value.
    Foreign,
}

/// One value to read.
pub struct Get {
    /// Its id.
    pub id: BlockId,
    /// Receives the first bytes of the value, from its start.
    pub slot: Slot,
    /// Most bytes of the value that are of use: no answer is buffered beyond them.
    pub most: usize,
    /// Whether the reader takes the record where it lies: [`ReadDone::lent`].
    pub in_place: InPlace,
}

/// A put that ended well.
pub struct Put {
    /// The slot, with the value as it was.
    pub slot: Slot,
    /// False where there is a value already, which was not to be replaced.
    pub stored: bool,
}

/// A map from record ids to bytes. A value appears whole or not at all. Calls block, check
/// [`IoJob::still_wanted`] or wait by the job, and end by its deadline; a slot belongs to a call
/// until the medium has no more use for it, also after a timeout. `ucm_testkit::check_values` tests
/// an implementation.
pub trait Values: Send + Sync {
    /// Its properties.
    fn traits(&self) -> ValuesTraits;

    /// Reaches the medium, or reports why that is not possible; again after a failure.
    fn open(&self, deadline: MonotonicTime) -> Result<ValuesOpened>;

    /// The value of each id, or why it is not known.
    fn exists(&self, io: &IoJob, ids: &[BlockId]) -> Result<Vec<Result<Existing>>>;

    /// Reads each value, or as much of it as its slot has room for; in the same order, whatever
    /// became of the others. [`ReadDone::stored_len`] is the length of the value, or
    /// [`Get::most`] if it has more bytes. `NotFound` where there is none, `Foreign` for something
    /// that can never be read as a record.
    fn get(&self, io: &IoJob, gets: Vec<Get>) -> Vec<Result<ReadDone>>;

    /// The length of a value and its first `len` bytes, fewer if it has fewer; none where there is
    /// no value.
    fn start(&self, io: &IoJob, id: BlockId, len: usize) -> Result<Option<(u64, Vec<u8>)>>;

    /// Stores the first `len` bytes of the slot, in place of what is there if `replace`. `NoSpace`
    /// where there is no room.
    fn put(&self, io: &IoJob, id: BlockId, slot: Slot, len: usize, replace: bool) -> Result<Put>;

    /// Removes values; how many there were.
    fn delete(&self, io: &IoJob, ids: &[BlockId]) -> Result<usize>;

    /// Every value of this namespace. `Unsupported` where the medium has no listing.
    fn list(&self, io: &IoJob) -> Result<Vec<Listed>>;

    /// Notes that these are used now; for each whether it is there.
    fn touch(&self, _io: &IoJob, _ids: &[BlockId]) -> Result<Vec<bool>> {
        Ok(Vec::new())
    }

    /// The manifest of a part, where the medium keeps some.
    fn manifest(&self, _io: &IoJob, _part: Part) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    /// Replaces the manifest of a part.
    fn put_manifest(&self, _io: &IoJob, _part: Part, _manifest: &[u8]) -> Result<()> {
        Ok(())
    }

    /// Reads again what [`Values::stats`] reports; called in the background now and then.
    fn refresh(&self, _io: &IoJob) -> Result<()> {
        Ok(())
    }

    /// Its statistics, from memory.
    fn stats(&self) -> MediumStats {
        MediumStats::default()
    }

    /// Ends within `drain`; what is left of that time.
    fn close(&self, drain: Duration) -> Duration {
        drain
    }
}

/// The record adapter: a [`Backend`] over [`Values`].
pub struct ValueRecords {
    rules: Arc<RecordRules>,
    pool: Arc<IoPool>,
}

/// Shared with jobs in the background.
struct RecordRules {
    values: Box<dyn Values>,
    traits: ValuesTraits,
    scope: Scope,
    clock: Arc<dyn Clock>,
    lengths: Lengths,
    recency: Recency,
    assumed: Assumed,
    pause: Mutex<Pause>,
    /// When the medium was last opened or refreshed.
    refreshed: Mutex<Option<MonotonicTime>>,
    /// When the manifest was last written.
    described: Mutex<MonotonicTime>,
}

impl ValueRecords {
    /// The records of `scope` in these values, over these threads. Nothing is reached before
    /// [`Backend::open`].
    pub fn new(
        values: Box<dyn Values>,
        scope: Scope,
        pool: Arc<IoPool>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let traits = values.traits();
        let rules = RecordRules {
            lengths: scope.lengths(),
            assumed: Assumed::new(traits.assumed),
            recency: Recency::default(),
            pause: Mutex::default(),
            refreshed: Mutex::default(),
            described: Mutex::default(),
            values,
            traits,
            scope,
            clock,
        };
        Self {
            rules: Arc::new(rules),
            pool,
        }
    }

    /// Refreshes in the background, now and then once it is open.
    fn refresh(&self) {
        let now = self.rules.clock.now();
        {
            let mut refreshed = self.rules.refreshed.lock();
            if refreshed.is_none_or(|last| now.since(last) < REFRESH_AGAIN) {
                return;
            }
            *refreshed = Some(now);
        }
        let rules = Arc::clone(&self.rules);
        let refresh = move |io: &IoJob| rules.values.refresh(io);
        let deadline = now.after(REFRESH);
        self.pool.job(LANE_LOOKUP, deadline, refresh, |_| {});
    }
}

impl Backend for ValueRecords {
    fn open(&self, deadline: MonotonicTime) -> Result<String> {
        let opened = self.rules.values.open(deadline)?;
        let now = self.rules.clock.now();
        *self.rules.refreshed.lock() = Some(now);
        if !self.rules.scope.lookup_only {
            let until = match opened.is_cluster {
                true => now.after(deadline.since(now) / 2),
                false => deadline,
            };
            let is_away = |kind| matches!(kind, ErrorKind::Io | ErrorKind::Timeout);
            match self.rules.describe(&self.pool.here(LANE_SPACE, until)) {
                // The node of the manifest may be down; a use of a block writes it again.
                Err(error) if opened.is_cluster && is_away(error.kind()) => {}
                described => described?,
            }
        }
        Ok(opened.text)
    }

    fn features(&self) -> Features<'_> {
        Features {
            name: self.rules.traits.name,
            waits_by_itself: true,
            index: Some(self),
            ..Features::default()
        }
    }

    fn lookup(&self, io: &IoJob, ids: &[BlockId], _stop_at_missing: bool) -> Result<Vec<Presence>> {
        self.rules.lookup(io, ids)
    }

    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        let done = self.rules.read(io, run);
        done.into_iter().map(Outcome::Read).collect()
    }

    fn write(&self, io: &IoJob, id: BlockId, slot: Slot, options: WriteOptions) -> Result<Written> {
        self.rules.write(io, id, slot, options)
    }

    fn touch(&self, ids: &[(BlockId, u32)], deadline: MonotonicTime) {
        if self.rules.traits.manages_itself || self.rules.scope.lookup_only {
            return;
        }
        let due = self.rules.recency.due(ids, self.rules.clock.wall_ns());
        if due.is_empty() {
            return;
        }
        let rules = Arc::clone(&self.rules);
        let ids: Vec<BlockId> = due.into_iter().map(|(id, _)| id).collect();
        let touch = move |io: &IoJob| rules.touch(io, &ids);
        self.pool.job(LANE_SPACE, deadline, touch, |_| {});
    }

    fn delete(&self, io: &IoJob, ids: &[BlockId]) -> Result<usize> {
        self.rules.assumed.remove(ids);
        self.rules.values.delete(io, ids)
    }

    fn list(&self, io: &IoJob) -> Result<Vec<Listed>> {
        self.rules.values.list(io)
    }

    fn stats(&self) -> MediumStats {
        self.refresh();
        let mut stats = self.rules.values.stats();
        let now = self.rules.clock.now();
        stats.usage.paused = self.rules.pause.lock().check(now).is_err();
        stats.blocks_touched = self.rules.recency.touched();
        stats
    }

    fn close(&self, drain: Duration) {
        let left = self.rules.values.close(drain);
        self.pool.shutdown(left);
    }
}

impl Indexed for ValueRecords {
    /// Small records in runs that one call reads, large ones each by itself, so that every thread
    /// has some.
    fn runs(&self, reads: &[&BlockRead], threads: usize) -> Vec<Vec<usize>> {
        let record_len = (self.rules.lengths.own_len() as usize).max(1);
        let together = (self.rules.traits.batch / record_len).max(1);
        let share = reads.len().div_ceil(threads.max(1)).clamp(1, together);
        let numbers: Vec<usize> = (0..reads.len()).collect();
        numbers.chunks(share).map(<[usize]>::to_vec).collect()
    }

    fn look(&self, _deadline: MonotonicTime, done: Done<()>) {
        done(Ok(())); // every read calls the medium
    }

    /// False: a record may have been evicted since, and a dump that is not made must not be a hit.
    fn is_published(&self, _id: BlockId) -> bool {
        false
    }

    /// True where every lookup calls the medium.
    fn knows(&self, id: BlockId) -> bool {
        self.rules.traits.assumed.is_zero() || self.rules.assumed.has(id, self.rules.clock.now())
    }
}

impl RecordRules {
    /// Adds the layouts of this writer to the manifests of its parts.
    fn describe(&self, io: &IoJob) -> Result<()> {
        let scope = &self.scope;
        for own in self.lengths.own() {
            let stored = self.values.manifest(io, own.part)?;
            let (manifest, _) = scope.describe(&self.lengths, [own], stored.as_deref());
            let put = self.values.put_manifest(io, own.part, &manifest);
            if let Err(error) = put
                // A medium that takes no writes now can be read, and may take them again.
                && !matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::Unhealthy)
            {
                return Err(error);
            }
        }
        *self.described.lock() = self.clock.now();
        Ok(())
    }

    /// Reads the lengths of records from the manifests, if that is due: writers that keep other
    /// side shards add theirs. True if any was read.
    fn learn_lengths(&self, io: &IoJob) -> bool {
        if !self.lengths.is_look_due(self.clock.now()) {
            return false;
        }
        let mut any = false;
        for known in self.lengths.parts() {
            // On an error, records of unknown lengths stay misses for now.
            if let Ok(Some(manifest)) = self.values.manifest(io, known.part) {
                self.lengths.learn_from_document(&manifest);
                any = true;
            }
        }
        any
    }

    fn lookup(&self, io: &IoJob, ids: &[BlockId]) -> Result<Vec<Presence>> {
        let now = self.clock.now();
        let is_unknown = |id: &BlockId| !self.assumed.has(*id, now);
        let unknown: Vec<BlockId> = ids.iter().copied().filter(is_unknown).collect();
        if unknown.is_empty() {
            return Ok(vec![Ok(()); ids.len()]);
        }
        let existing = self.values.exists(io, &unknown)?;
        // The records of a node that is down are misses, unless nothing else is known.
        if let Some(Err(error)) = existing.first()
            && existing.len() == ids.len()
            && existing.iter().all(Result::is_err)
        {
            return Err(error.clone());
        }
        let mut found = self.presence(&existing);
        if found.contains(&Err(MissReason::WrongLength)) && self.learn_lengths(io) {
            found = self.presence(&existing);
        }
        let there = unknown.iter().zip(&found);
        let there = there.filter(|(_, found)| found.is_ok());
        self.assumed.add(there.map(|(id, _)| *id), self.clock.now());
        let mut found = unknown.into_iter().zip(found).peekable();
        let answer = |id: &BlockId| match found.next_if(|(unknown, _)| unknown == id) {
            Some((_, presence)) => presence,
            None => Ok(()),
        };
        Ok(ids.iter().map(answer).collect())
    }

    /// Whether each of these can be a whole record with KV.
    fn presence(&self, existing: &[Result<Existing>]) -> Vec<Presence> {
        let one = |existing: &Result<Existing>| match existing {
            Ok(Existing::Len(len)) => self.lengths.presence(*len),
            Ok(Existing::Unmeasured) => Ok(()),
            Ok(Existing::Absent) => Err(MissReason::Absent),
            Ok(Existing::Foreign) => Err(MissReason::WrongLength),
            Err(_) => Err(MissReason::IoError),
        };
        existing.iter().map(one).collect()
    }

    fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Result<ReadDone>> {
        let longest = self.lengths.longest();
        let wanted: Vec<_> = run.iter().map(|read| (read.id, read.in_place)).collect();
        let get = |read: BlockRead| self.get_of(read.id, read.slot, read.in_place, longest);
        let mut done = self.values.get(io, run.into_iter().map(get).collect());
        // A writer that keeps other side shards may have added a length to the manifest since.
        let is_longer = |done: &Result<ReadDone>| {
            let len = done.as_ref().map_or(0, |done| done.stored_len);
            len > longest && !self.lengths.is_record(len)
        };
        let longer: Vec<bool> = done.iter().map(is_longer).collect();
        if longer.contains(&true) && self.learn_lengths(io) {
            let longest = self.lengths.longest();
            let again = |((done, longer), &(id, in_place)): ((_, bool), &(_, _))| match done {
                Ok(ReadDone { slot, .. }) if longer => {
                    self.get_one(io, self.get_of(id, slot, in_place, longest))
                }
                done => done,
            };
            let all = done.into_iter().zip(longer).zip(&wanted);
            done = all.map(again).collect();
        }
        for ((id, _), done) in wanted.iter().zip(&done) {
            match done {
                Ok(_) => self.assumed.add([*id], self.clock.now()),
                Err(error) if error.kind() == ErrorKind::NotFound => self.assumed.remove(&[*id]),
                Err(_) => {}
            }
        }
        let named = |(done, (id, _)): (Result<ReadDone>, (BlockId, InPlace))| {
            done.map_err(|error| error.with("block", id))
        };
        done.into_iter().zip(wanted).map(named).collect()
    }

    /// A read of as much of a record as its slot has room for, if that is known to be less than
    /// all; else of all of it. Of a longer value one byte more than the longest record is read.
    fn get_of(&self, id: BlockId, slot: Slot, in_place: InPlace, longest: u64) -> Get {
        let most = match slot.len() < self.lengths.kv_len_of_own() {
            true => slot.len(),
            false => usize::try_from(longest + 1).unwrap_or(usize::MAX),
        };
        Get {
            id,
            slot,
            most,
            in_place,
        }
    }

    fn get_one(&self, io: &IoJob, get: Get) -> Result<ReadDone> {
        let done = self.values.get(io, vec![get]).pop();
        done.unwrap_or_else(|| Err(Error::internal("a read of one value has no result")))
    }

    fn write(&self, io: &IoJob, id: BlockId, slot: Slot, options: WriteOptions) -> Result<Written> {
        self.pause.lock().check(self.clock.now())?;
        let written = self.store(io, id, slot, options);
        let now = self.clock.now();
        if !self.traits.manages_itself {
            self.pause.lock().record(written.as_ref().err(), now);
        }
        if let Ok(Written::Published | Written::Present) = written {
            self.assumed.add([id], now);
        }
        written
    }

    /// Stores a record unless there is one; a value that is no record is replaced.
    fn store(&self, io: &IoJob, id: BlockId, slot: Slot, options: WriteOptions) -> Result<Written> {
        let len = options.len;
        let is_assumed = || self.assumed.has(id, self.clock.now());
        if !options.replace && (len >= self.traits.exists_first || is_assumed()) {
            for existing in self.values.exists(io, &[id])? {
                if matches!(existing?, Existing::Len(len) if self.lengths.is_ours(len)) {
                    return Ok(Written::Present);
                }
            }
        }
        let (stored, replace) = (false, options.replace);
        let put = match replace {
            false => self.values.put(io, id, slot, len, false)?,
            true => Put { slot, stored },
        };
        if !put.stored {
            if let Some(kept) = self.kept(io, id, replace)? {
                return Ok(kept);
            }
            self.values.put(io, id, put.slot, len, true)?;
        }
        let wall_ns = self.clock.wall_ns();
        self.recency.published(id, options.ordinal, wall_ns);
        Ok(Written::Published)
    }

    /// The result of a write where the value there is not replaced: a record of a newer version, or
    /// in a form that this store does not read; unless `refused`, also one with a length of ours.
    fn kept(&self, io: &IoJob, id: BlockId, refused: bool) -> Result<Option<Written>> {
        let (len, start) = match self.values.start(io, id, RecordHeader::LONGEST) {
            Ok(Some(start)) => start,
            Ok(None) => return Ok(None),
            Err(error) if error.kind() == ErrorKind::Foreign => return Ok(None),
            Err(error) => return Err(error),
        };
        let newer = match RecordHeader::decode(&start) {
            Ok(header) => {
                // With the length that its header says it is of a writer that keeps other side
                // shards.
                if len == header.record_len {
                    self.lengths.learn(header.meta.part, len);
                }
                !header.codec.is_as_is() && !self.scope.shorter
            }
            Err(refusal) => refusal.reason == MissReason::NewerVersion,
        };
        if newer {
            return Ok(Some(Written::InTheWay(MissReason::NewerVersion)));
        }
        Ok((!refused && self.lengths.is_ours(len)).then_some(Written::Present))
    }

    /// Notes that these were used, and writes the manifest again when it is time.
    fn touch(&self, io: &IoJob, ids: &[BlockId]) -> Result<()> {
        let touched = self.values.touch(io, ids)?;
        let (there, gone): (Vec<_>, Vec<_>) = ids.iter().zip(touched).partition(|(_, is)| *is);
        let gone: Vec<BlockId> = gone.into_iter().map(|(id, _)| *id).collect();
        self.assumed.remove(&gone);
        self.recency.count(there.len() as u64);
        let there = there.into_iter().map(|(id, _)| *id);
        self.assumed.add(there, self.clock.now());
        let described = *self.described.lock();
        if self.clock.now().since(described) >= DESCRIBE_AGAIN {
            self.describe(io)?;
        }
        Ok(())
    }
}

/// The records that are assumed to be there, each until a time: [`ValuesTraits::assumed`].
struct Assumed {
    time: Duration,
    until: Mutex<LruCache<BlockId, MonotonicTime>>,
}

impl Assumed {
    fn new(time: Duration) -> Self {
        let most = if time.is_zero() { 0 } else { MOST_ASSUMED };
        Self {
            time,
            until: Mutex::new(LruCache::new(most)),
        }
    }

    fn add(&self, ids: impl IntoIterator<Item = BlockId>, now: MonotonicTime) {
        if self.time.is_zero() {
            return;
        }
        let mut until = self.until.lock();
        for id in ids {
            until.insert(id, now.after(self.time));
        }
    }

    fn remove(&self, ids: &[BlockId]) {
        let mut until = self.until.lock();
        for id in ids {
            until.remove(id);
        }
    }

    fn has(&self, id: BlockId, now: MonotonicTime) -> bool {
        let known = self.until.lock();
        known.peek(&id).is_some_and(|until| now < *until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_assumed_to_be_there_for_a_while() {
        let (assumed, id) = (Assumed::new(Duration::from_secs(30)), BlockId([1; 16]));
        let at = |seconds: u64| MonotonicTime(seconds * 1_000_000_000);
        assert!(!assumed.has(id, at(0)));
        assumed.add([id], at(0));
        assert!(assumed.has(id, at(29)) && !assumed.has(id, at(30)));
        assumed.add([id], at(40));
        assumed.remove(&[id]);
        assert!(!assumed.has(id, at(41)));
    }
}
