//! Evidence of damage in a segment: the damaged record is copied aside, for its segment goes or
//! stays whole.
//!
//! The same rules as for block files ([`crate::quarantine`]): one more look past every cache,
//! nothing while another host may still be writing, few a minute, bounded. A copy that was found
//! damaged twice is no hit here any more; an older one takes its place.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ucm_core::{BlockId, ErrorKind, MissReason, Result};
use ucm_infra::MonotonicTime;
use ucm_io::{IoJob, Publish, ReadMode};
use ucm_quota::evidence::{DIR, evidence_name, is_damage};

use super::Segments;
use super::index::Hit;
use crate::backend::{Done, Quarantined};
use crate::quarantine::YOUNG_NS;

/// How long all of one record may take.
const STEP: Duration = Duration::from_secs(30);

impl Segments {
    /// Looks at a record that was refused for damage, in the background, and keeps a copy of it.
    pub(super) fn keep_evidence(self: &Arc<Self>, id: BlockId, done: Done<Quarantined>) {
        if self.shared.config.lookup_only {
            return done(Ok(Quarantined::LeftAlone));
        }
        let segments = Arc::clone(self);
        let work = move || segments.examine(id, segments.shared.clock.now().after(STEP));
        let told = move |result: Result<Quarantined>| match result {
            // Too many wait already: they leave no evidence.
            Err(error) if error.kind() == ErrorKind::Busy => done(Ok(Quarantined::LeftAlone)),
            result => done(result),
        };
        self.shared
            .space
            .in_background(MonotonicTime::NEVER, work, Box::new(told));
    }

    fn examine(&self, id: BlockId, deadline: MonotonicTime) -> Result<Quarantined> {
        if self.closing.load(Ordering::Acquire) {
            return Ok(Quarantined::LeftAlone);
        }
        let Some(hit) = self.index.find(id) else {
            return Ok(Quarantined::LeftAlone); // removed or replaced
        };
        let Some((reason, bytes)) = self.damage(id, &hit, deadline)? else {
            return Ok(Quarantined::LeftAlone);
        };
        let bounds = self.shared.config.quarantine;
        if !self
            .shared
            .waiting
            .count(self.shared.clock.now(), bounds.max_per_minute)
        {
            return Ok(Quarantined::Stopped);
        }
        if !bounds.enabled {
            // it stays where it is, as a file would: refused until it is replaced
            return Ok(Quarantined::LeftAlone);
        }
        self.shared.check_marker(deadline)?;
        self.index.drop_copy(id, &hit);
        self.copy_aside(id, reason, bytes, deadline)?;
        self.shared
            .sweep_quarantine(self.shared.space.usage().capacity, deadline)?;
        Ok(Quarantined::Kept)
    }

    /// What is wrong with a record by one more read past every cache, and its bytes; `None` if
    /// nothing is, if it is not damage, or if another writer may be about to finish it.
    fn damage(
        &self,
        id: BlockId,
        hit: &Hit,
        deadline: MonotonicTime,
    ) -> Result<Option<(MissReason, Vec<u8>)>> {
        // A footer may name more than a record can have: that much is not read.
        let most = hit.len.min(self.shared.lengths.range().1);
        let len = usize::try_from(most).unwrap_or(usize::MAX);
        let (path, offset) = (self.path(hit), hit.offset);
        let read = move |io: &IoJob| io.read_piece(&path, offset, len, ReadMode::FreshDirect);
        let Some((bytes, _)) = self.shared.call(deadline, read)? else {
            return Ok(None);
        };
        let Err(reason) = self.shared.verify(id, &bytes, hit.len) else {
            return Ok(None);
        };
        let ours = hit.name.writer == self.shared.config.writer;
        let young = self.shared.clock.wall_ns() < hit.sealed_ns.saturating_add(YOUNG_NS);
        Ok(Some((reason, bytes)).filter(|(reason, _)| is_damage(*reason) && (ours || !young)))
    }

    fn copy_aside(
        &self,
        id: BlockId,
        reason: MissReason,
        bytes: Vec<u8>,
        deadline: MonotonicTime,
    ) -> Result<()> {
        let dir = self.shared.layout.namespace().join(DIR);
        self.shared.make_dir(dir.clone(), deadline)?;
        let seconds = self.shared.clock.wall_ns() / 1_000_000_000;
        let reservation = self
            .shared
            .space
            .reserve_blocking(bytes.len() as u64, deadline)?;
        let private = self.shared.next_private();
        let target = dir.join(evidence_name(id, reason, seconds));
        let mode = self.shared.config.modes.file;
        let publish = move |io: &IoJob| {
            io.publish(Publish {
                private: &private,
                target: &target,
                replace: true,
                bytes: &bytes,
                mode,
                mtime_ns: None,
                durable: false,
            })
        };
        let copied = self.shared.call(deadline, publish);
        self.shared.space.ended(reservation, copied.as_ref().err());
        copied.map(|_| ())
    }
}
