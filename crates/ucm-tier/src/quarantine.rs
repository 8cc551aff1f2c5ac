//! Evidence of damage: records that proved to be damaged are moved aside, so that somebody can look
//! at them.
//!
//! Healing never needs this; the next dump replaces a refused record whatever became of the old
//! one. So everything here is best effort, on the lane of housekeeping, and must not eat a good
//! store: a record is moved only after one more look at it past every cache, not while another host
//! may still be writing it, and only a few a minute; when more are damaged the medium is sick, not
//! the records, and the breaker opens. What was moved is bounded in number, in bytes and by age.
//! What evidence is and how much of it is kept: [`ucm_quota::evidence`].

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, Error, MissReason, Result};
use ucm_infra::MonotonicTime;
use ucm_io::{FileMeta, ReadMode};
use ucm_quota::evidence::{DIR, Evidence, evidence_name, evidence_time, is_damage, too_much};
use ucm_quota::layout::is_namespace;
use ucm_record::RecordHeader;

use crate::backend::{Done, Quarantined};
use crate::shared::Shared;

/// Most records waiting to be looked at; damage beyond that leaves no evidence.
const MAX_WAITING: usize = 64;
/// How long all of one record may take.
const STEP: Duration = Duration::from_secs(30);
/// How long the move itself may take: a dump of the same record waits for it.
const MOVE: Duration = Duration::from_secs(5);
/// Age below which damage in another writer's record may be a write not seen whole yet.
pub(crate) const YOUNG_NS: u64 = 60_000_000_000;

impl Shared {
    /// Lets the background job look at a record that was refused for damage, and keep it.
    pub(crate) fn quarantine(self: &Arc<Self>, id: BlockId, done: Done<Quarantined>) {
        let start = {
            let mut inner = self.waiting.inner.lock();
            if self.config.lookup_only || inner.queue.len() >= MAX_WAITING {
                drop(inner);
                return done(Ok(Quarantined::LeftAlone));
            }
            inner.queue.push_back((id, done));
            !std::mem::replace(&mut inner.running, true)
        };
        if start {
            let shared = Arc::clone(self);
            let work = move || {
                shared.drain();
                Ok(())
            };
            let shared = Arc::clone(self);
            let ended = move |result: Result<()>| {
                if let Err(error) = result {
                    shared.give_up(&error);
                }
            };
            // The job is never late as a whole: every step in it has its own deadline.
            self.space
                .in_background(MonotonicTime::NEVER, work, Box::new(ended));
        }
    }

    fn drain(&self) {
        loop {
            let next = {
                let mut inner = self.waiting.inner.lock();
                inner.running = !inner.queue.is_empty();
                let next = inner.queue.pop_front();
                inner.looking = next.as_ref().map(|(id, _)| *id);
                inner.overtaken = false;
                next
            };
            let Some((id, done)) = next else { return };
            done(self.examine(id, self.clock.now().after(STEP)));
        }
    }

    /// The job did not run: those who wait are told.
    fn give_up(&self, error: &Error) {
        let queue = {
            let mut inner = self.waiting.inner.lock();
            inner.running = false;
            std::mem::take(&mut inner.queue)
        };
        queue
            .into_iter()
            .for_each(|(_, done)| done(Err(error.clone())));
    }

    /// Looks at one record once more and moves it aside if it is damaged, its own and old enough.
    fn examine(&self, id: BlockId, deadline: MonotonicTime) -> Result<Quarantined> {
        let path = self.layout.record(id);
        let paths = [self.layout.marker(), path.clone()];
        let metas = self.call(deadline, move |io| io.stat(&paths, false))?;
        let (marker, meta) = (
            metas.first().copied().flatten(),
            metas.get(1).copied().flatten(),
        );
        self.check_root(marker)?;
        let Some(meta) = meta else {
            return Ok(Quarantined::LeftAlone); // removed or not to be seen: nothing to keep
        };
        let Some(reason) = self.damage(id, &path, &meta, deadline)? else {
            return Ok(Quarantined::LeftAlone);
        };
        let bounds = self.config.quarantine;
        if !self.waiting.count(self.clock.now(), bounds.max_per_minute) {
            return Ok(Quarantined::Stopped);
        }
        if !bounds.enabled {
            return Ok(Quarantined::LeftAlone);
        }
        let dir = self.layout.namespace().join(DIR);
        self.make_dir(dir.clone(), deadline)?;
        let to = dir.join(evidence_name(
            id,
            reason,
            self.clock.wall_ns() / 1_000_000_000,
        ));
        let deadline = self.clock.now().after(MOVE);
        let rename = || self.call(deadline, move |io| io.rename(&path, &to, meta.ino));
        if self.waiting.moved(id, rename).transpose()? != Some(true) {
            return Ok(Quarantined::LeftAlone); // replaced meanwhile
        }
        self.sweep_quarantine(self.space.usage().capacity, deadline)?;
        Ok(Quarantined::Kept)
    }

    /// What is wrong with a record by one more read past every cache; `None` if nothing is, if it
    /// is not damage, or if another writer may be about to finish it.
    fn damage(
        &self,
        id: BlockId,
        path: &Path,
        meta: &FileMeta,
        deadline: MonotonicTime,
    ) -> Result<Option<MissReason>> {
        let len = self.config.record.record_len();
        let path = path.to_owned();
        let read = self.call(deadline, move |io| {
            io.read_piece(&path, 0, len, ReadMode::FreshDirect)
        })?;
        let Some((bytes, file_len)) = read else {
            return Ok(None);
        };
        let bytes = &bytes[..];
        let Err(reason) = self.verify(id, bytes, file_len) else {
            return Ok(None);
        };
        // The header says who wrote it and when; a damaged one does not, and the file's time is cut
        // to the minute.
        let (ours, written) = match RecordHeader::decode(bytes) {
            Ok(header) => (
                header.meta.writer == self.config.writer,
                header.meta.time_ns,
            ),
            Err(_) => {
                let stamp = u64::try_from(meta.mtime_ns).unwrap_or(0);
                (false, stamp.saturating_add(YOUNG_NS))
            }
        };
        let young = self.clock.wall_ns() < written.saturating_add(YOUNG_NS);
        Ok(Some(reason).filter(|&reason| is_damage(reason) && (ours || !young)))
    }

    /// What lies in a directory; nothing in one that is not there.
    fn entries(&self, dir: PathBuf, deadline: MonotonicTime) -> Result<Vec<(OsString, FileMeta)>> {
        self.call(deadline, move |io| io.list_if_there(&dir))
    }

    /// Removes evidence below the root that is too old or too much.
    pub(crate) fn sweep_quarantine(&self, limit: u64, deadline: MonotonicTime) -> Result<()> {
        let mut found = Vec::new();
        for (name, meta) in self.entries(self.layout.root().to_owned(), deadline)? {
            if !meta.is_dir || !is_namespace(&name) {
                continue;
            }
            let dir = self.layout.root().join(&name).join(DIR);
            for (name, meta) in self.entries(dir.clone(), deadline)? {
                if let Some(seconds) = evidence_time(&name).filter(|_| !meta.is_dir) {
                    let (path, len) = (dir.join(&name), meta.len);
                    found.push(Evidence { path, seconds, len });
                }
            }
        }
        let now = self.clock.wall_ns() / 1_000_000_000;
        let dead = too_much(found, &self.config.quarantine, limit, now);
        if dead.is_empty() {
            return Ok(());
        }
        let before = self.space.counts();
        let paths: Vec<_> = dead.iter().map(|one| one.path.clone()).collect();
        let answers = self.call(deadline, move |io| io.remove(&paths))?;
        let gone = dead
            .iter()
            .zip(answers)
            .filter(|(_, answer)| matches!(answer, Ok(true)));
        let freed = gone.map(|(one, _)| one.len).sum();
        self.space.deleted(freed, before);
        Ok(())
    }
}
