//! Who may pass: the breaker, the first look at the backend and the later ones, records that were refused.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_infra::Mono;

use super::{COPY_REPLACEMENTS, Core, LANE_LOOKUP};
use crate::backend::{Quarantined, ReadDone};
use crate::events::Level;
use crate::evidence::is_damage;
use crate::health::Change;
use crate::record::{Expect, RecordHeader, verify, verify_layers};
use crate::stats::Stats;

impl Core {
    /// Whether work may go to the backend now. An open breaker past its cool-down lets one through; a backend that
    /// was never ready is looked at again, in the background; while too much is stuck nothing passes.
    pub(super) fn admit(self: &Arc<Self>, now: Mono) -> Result<()> {
        self.usable()?;
        let unhealthy = || {
            Err(Error::new(
                ErrorKind::Unhealthy,
                "the storage does not answer; treated as empty for now",
            ))
        };
        if let Some(error) = self.overrun() {
            self.change(self.breaker.trip(now), Some(&error));
            return unhealthy();
        }
        if !self.breaker.allows(now) {
            return unhealthy();
        }
        if !self.ready.load(Ordering::Acquire) {
            let core = Arc::clone(self);
            let deadline = now.after(self.deadlines.probe.saturating_mul(2));
            let probe = move || core.probe(core.clock.now().after(core.deadlines.probe));
            // A full lane means that a probe is on its way already.
            let _ = self.copies.submit(LANE_LOOKUP, deadline, probe, |_| {});
            return unhealthy();
        }
        Ok(())
    }

    /// The error that says that too many threads or slots are lost in calls that do not return.
    fn overrun(&self) -> Option<Error> {
        let slots = self.slots.capacity();
        // Each stuck operation may hold a slot: half of them is too many. One slot: opened for lookups only.
        let of_slots = if self.looks_up_only() {
            usize::MAX
        } else {
            slots / 2 + 1
        };
        let (io, copies) = (self.backend.stuck(), self.copies.stuck());
        // A composition switches its stages off one by one; what is left to judge here is how many slots are lost.
        let of_threads = match self.backend.health() {
            Some(_) => usize::MAX,
            None => self.breaker.max_stuck(),
        };
        (io >= of_threads.min(of_slots) || copies >= COPY_REPLACEMENTS).then(|| {
            Error::new(ErrorKind::Timeout, "too many operations never returned")
                .with("stuck", io + copies)
                .with("slots", slots)
        })
    }

    /// Looks at the backend; when it is ready for the first time, tells the log what is used and why.
    pub(super) fn probe(&self, deadline: Mono) {
        match self.backend.probe(deadline) {
            Ok(()) => {
                if !self.ready.swap(true, Ordering::AcqRel) {
                    self.say(Level::Info, self.opening());
                }
                self.healthy();
            }
            Err(error) => {
                self.change(self.breaker.trip(self.clock.now()), Some(&error));
            }
        }
    }

    fn opening(&self) -> String {
        let (slots, bytes) = (self.slots.capacity(), self.layout.record_len());
        let staging = if self.looks_up_only() {
            "lookups only".to_owned()
        } else {
            let (reserved, pages) = (self.reserved_slots, self.pages);
            format!("{slots} staging slots of {bytes} bytes on {pages}, {reserved} of them kept for loads")
        };
        format!("open: {}; {staging}", self.backend.describe())
    }

    /// The backend answered.
    pub(super) fn healthy(&self) {
        // While too much is stuck a single answer means little; asked only when the breaker is not closed.
        if self.breaker.is_closed() || self.overrun().is_none() {
            self.change(self.breaker.success(), None);
        }
    }

    /// An operation failed; opens the breaker when the medium is to blame. A composition judged it already.
    pub(super) fn observe(&self, error: &Error) {
        if self.backend.health().is_some() {
            return self.breaker.undecided(self.clock.now());
        }
        self.change(self.breaker.failure(error, self.clock.now()), Some(error));
    }

    fn change(&self, change: Option<Change>, error: Option<&Error>) {
        let name = self.backend.name();
        match change {
            Some(Change::Opened) => {
                Stats::add(&self.stats.breaker_opened, 1);
                let why = error.map(ToString::to_string).unwrap_or_default();
                let text = format!("{name} is switched off for now, every lookup misses: {why}");
                self.say(Level::Warning, text);
            }
            Some(Change::Recovered) => self.say(Level::Info, format!("{name} answers again")),
            None => {}
        }
    }

    pub(super) fn say(&self, level: Level, text: String) {
        self.events.push(level, text, self.clock.now());
    }

    /// Judges what was read: why it is not the record asked for, if so.
    pub(super) fn verify(&self, id: BlockId, read: &ReadDone) -> Result<RecordHeader, MissReason> {
        let expect = Expect {
            id,
            namespace: *self.identity.digest(),
            part: self.part,
            layout: &self.layout,
        };
        verify(&read.slot.as_slice()[..read.read], read.stored_len, &expect)
    }

    /// The same of a read of some layers.
    pub(super) fn verify_layers(
        &self,
        id: BlockId,
        read: &ReadDone,
        layers: Range<u32>,
    ) -> Result<RecordHeader, MissReason> {
        if read.read
            < self
                .layout
                .parts(layers.clone())
                .iter()
                .map(Range::len)
                .sum::<usize>()
        {
            return Err(MissReason::Truncated);
        }
        let expect = Expect {
            id,
            namespace: *self.identity.digest(),
            part: self.part,
            layout: &self.layout,
        };
        verify_layers(read.slot.as_slice(), read.stored_len, &expect, layers)
    }

    /// Remembers that a record is not what it should be, in the last stage that had it (`None`: where it was just
    /// written); the answer is the error for those who wanted it.
    pub(super) fn refuse(self: &Arc<Self>, id: BlockId, stage: Option<usize>, reason: MissReason) -> Error {
        let error = self.refuse_id(id, reason);
        Stats::add(&self.stats.records_refused, 1);
        let name = reason.name();
        self.say(
            Level::Warning,
            format!("record {id} was refused ({name}) and will be recomputed"),
        );
        self.set_aside(id, stage, reason);
        error
    }

    /// The same where the copy itself was told of and set aside before.
    pub(super) fn refuse_id(&self, id: BlockId, reason: MissReason) -> Error {
        self.stats.misses.add(reason, 1);
        let kind = match reason {
            MissReason::ForeignId
            | MissReason::ForeignIdentity
            | MissReason::ForeignPart
            | MissReason::ForeignShape
            | MissReason::NewerVersion
            | MissReason::IoError => ErrorKind::Foreign,
            _ => ErrorKind::Corrupt,
        };
        self.refused.add(id, reason);
        Error::new(kind, "the stored record is not what it should be").with("reason", reason.name())
    }

    /// The copy of one stage is not what it should be; a lower stage is asked instead.
    pub(super) fn discard(self: &Arc<Self>, id: BlockId, stage: usize, reason: MissReason) {
        Stats::add(&self.stats.records_refused, 1);
        let name = reason.name();
        self.say(
            Level::Warning,
            format!("a copy of record {id} was refused ({name}); another tier is asked for it"),
        );
        self.set_aside(id, Some(stage), reason);
    }

    fn set_aside(self: &Arc<Self>, id: BlockId, stage: Option<usize>, reason: MissReason) {
        let (core, name) = (Arc::downgrade(self), reason.name());
        let done = Box::new(move |ended| {
            if let Some(core) = core.upgrade() {
                core.quarantined(id, name, ended);
            }
        });
        match stage {
            Some(stage) => self.backend.discard(stage, id, reason, done),
            None if is_damage(reason) => self.backend.quarantine(id, done),
            None => {}
        }
    }

    /// Evidence of damage was kept or not. Too much of it speaks against the medium.
    fn quarantined(&self, id: BlockId, reason: &str, ended: Result<Quarantined>) {
        match ended {
            Ok(Quarantined::LeftAlone) => {}
            Ok(Quarantined::Kept) => {
                Stats::add(&self.stats.records_quarantined, 1);
                self.say(
                    Level::Info,
                    format!("record {id} was moved to quarantine ({reason})"),
                );
            }
            Ok(Quarantined::Stopped) => {
                Stats::add(&self.stats.quarantine_stopped, 1);
                if self.backend.health().is_some() {
                    return; // the stage it came from is off, and the others are not
                }
                let sick = Error::new(ErrorKind::Corrupt, "too many damaged records in a minute");
                self.change(self.breaker.hold(self.clock.now()), Some(&sick));
            }
            Err(error) => {
                let text = format!("record {id} ({reason}) could not be moved to quarantine: {error}");
                self.say(Level::Info, text);
            }
        }
    }
}

/// The miss reason of an operation that failed before anything could be verified.
pub(super) fn reason_of(error: &Error) -> MissReason {
    match error.kind() {
        ErrorKind::NotFound => MissReason::Absent,
        ErrorKind::Timeout => MissReason::Timeout,
        ErrorKind::Busy => MissReason::Busy,
        ErrorKind::Unhealthy => MissReason::Unhealthy,
        _ => MissReason::IoError,
    }
}
