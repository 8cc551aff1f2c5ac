//! What every part of an engine uses: its records, tiers and device, its counters, and whether it
//! accepts work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tracing::{info, warn};
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result, limits};
use ucm_infra::{Clock, MonotonicTime, WorkerPool};

use super::config::{Deadlines, Row};
use super::task::{OpenTasks, TaskState};
use super::transfer::DeviceSide;
use crate::records::{OwnParts, StoredRecords};
use crate::rejected::RejectedRecords;
use crate::stats::{Stats, add};
use crate::tiers::{Request, Tiers};

/// Lanes of the pool of lookups: lookups, and starting the reads of loads and of side shards.
pub(super) const LANE_ASK: usize = 0;
pub(super) const LANE_LOADS: usize = 1;
pub(super) const LANE_SIDES: usize = 2;

/// Fewest slots of an engine that moves blocks.
pub(super) const LEAST_SLOTS: usize = 4;
/// Times a copy worker that hangs is replaced; as many stuck copies open the breaker.
pub(super) const COPY_REPLACEMENTS: usize = 4;

/// Longest deadline a load may have: no wait is without one.
const LONGEST_LOAD: Duration = Duration::from_secs(600);

/// How long starting reads can take at most on a machine that gives every thread a turn.
const MOMENTS: Duration = Duration::from_secs(1);

/// See the module.
pub(super) struct Core {
    pub(super) parts: Arc<OwnParts>,
    pub(super) deadlines: Deadlines,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) tiers: Arc<Tiers>,
    pub(super) device: DeviceSide,
    /// Threads for lookups that the caller polls, and for starting reads.
    pub(super) asks: Arc<WorkerPool>,
    pub(super) refused: RejectedRecords,
    pub(super) open_tasks: Arc<OpenTasks>,
    pub(super) stats: Stats,
    /// Too many slots are lost in calls that do not return, so nothing more is begun.
    pub(super) overrun: AtomicBool,
    pub(super) closed: AtomicBool,
    /// The process that opened the engine.
    pub(super) pid: u32,
}

impl Core {
    /// Fails with `Forked` in a child process: nothing else of the store may be called there.
    pub(super) fn check_process(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Forked,
            "this store was opened before a fork; open another in the child",
        ))
    }

    /// Fails in a child process, and once the engine is closed.
    pub(super) fn check_open(&self) -> Result<()> {
        self.check_process()?;
        if self.closed.load(Ordering::Acquire) {
            return Err(closed());
        }
        Ok(())
    }

    /// The same, and for too many items in one call.
    pub(super) fn check_call(&self, what: &'static str, count: usize) -> Result<()> {
        self.check_open()?;
        if count > limits::MAX_IDS_PER_CALL {
            let many = Error::invalid("too many items in one call").with(what, count);
            return Err(many.with("most", limits::MAX_IDS_PER_CALL));
        }
        Ok(())
    }

    /// The same for a call that moves this many rows.
    pub(super) fn check_count(&self, rows: usize) -> Result<()> {
        self.check_call("rows", rows)?;
        if self.is_lookup_only() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "this store was opened for lookups only (device_id -1)",
            ));
        }
        Ok(())
    }

    /// The same, and whether these rows of a part can be loaded or dumped; `in_slots`: whether they
    /// may be wanted in their slots alone.
    pub(super) fn check_rows(
        &self,
        records: &StoredRecords,
        rows: &[Row],
        in_slots: bool,
    ) -> Result<()> {
        self.check_count(rows.len())?;
        records.check_rows(rows, in_slots)
    }

    /// Whether it was opened for lookups only, with one slot for what a lookup may need.
    pub(super) fn is_lookup_only(&self) -> bool {
        self.device.slots.capacity() < LEAST_SLOTS
    }

    /// Whether work may go to the tiers now: one of them may answer, and not too much is lost.
    pub(super) fn check_available(&self, now: MonotonicTime) -> Result<()> {
        self.check_open()?;
        let (lost, store) = (self.lost(), self.parts.writer);
        let was = self.overrun.swap(lost.is_some(), Ordering::AcqRel);
        match &lost {
            Some(error) if !was => warn!(
                store,
                error = error.kind().name(),
                "{error}: the store is switched off until enough of them have, every lookup misses"
            ),
            None if was => info!(store, "the store answers again"),
            _ => {}
        }
        if lost.is_none() && self.tiers.probes.may_answer(now) {
            return Ok(());
        }
        let text = "the storage does not answer; treated as empty for now";
        Err(Error::new(ErrorKind::Unhealthy, text))
    }

    /// The state and the request of a load of this many rows that begins now. `deadline`: from now,
    /// the configured one if `None`.
    pub(super) fn begin_load(
        &self,
        rows: usize,
        deadline: Option<Duration>,
    ) -> (Arc<TaskState>, Request) {
        let now = self.clock.now();
        let deadline = deadline.unwrap_or(self.deadlines.load).min(LONGEST_LOAD);
        let deadline = now.after(deadline);
        let state = TaskState::new(rows, now, deadline);
        self.open_tasks.add(&state);
        (state, self.tiers.table.request(deadline))
    }

    /// Starts waiting reads on a thread of this lane. Nothing in it waits, so it has no deadline. A
    /// full lane has a job that has not begun and starts these too.
    pub(super) fn start(&self, lane: usize, pump: impl FnOnce() + Send + 'static) {
        if let Err(refused) = self.asks.offer(lane, MonotonicTime::NEVER, pump, |_| {})
            && refused.error.kind() != ErrorKind::Busy
        {
            (refused.work)(); // the pool is closed
        }
    }

    /// The error that says that too many slots are lost in calls that do not return: each of these
    /// may hold one, and half of them is too many.
    pub(super) fn lost(&self) -> Option<Error> {
        let slots = self.device.slots.capacity();
        let (io, copies) = (self.tiers.stuck(), self.copies_stuck());
        let many = !self.is_lookup_only() && io > slots / 2 || copies >= COPY_REPLACEMENTS;
        many.then(|| {
            Error::new(ErrorKind::Timeout, "too many operations never returned")
                .with("stuck", io + copies)
                .with("slots", slots)
        })
    }

    /// Threads that hang in copies from the device. Those that hang in a write of their own count
    /// for their tier.
    pub(super) fn copies_stuck(&self) -> usize {
        let stuck = self.device.copies.stuck();
        stuck.saturating_sub(self.tiers.stuck_guests())
    }

    /// Remembers that a record is not what it should be, in the last tier that had it (`None`:
    /// where it was just written); the answer is the error for those who wanted it.
    pub(super) fn refuse(&self, id: BlockId, tier: Option<usize>, reason: MissReason) -> Error {
        let error = self.refuse_id(id, reason);
        add(&self.stats.records_refused, 1);
        let (store, name) = (self.parts.writer, reason.name());
        warn!(
            store,
            block = %id,
            reason = name,
            "record {id} was refused ({name}) and will be recomputed"
        );
        if let Some(tier) = tier {
            self.tiers.discard(tier, id, reason);
        }
        error
    }

    /// The same where the copy itself was reported and discarded before.
    pub(super) fn refuse_id(&self, id: BlockId, reason: MissReason) -> Error {
        self.stats.misses.add(reason, 1);
        self.refused.add(id, reason);
        refusal(reason)
    }

    /// The copy of one tier is not what it should be; a lower tier is next.
    pub(super) fn discard(&self, id: BlockId, tier: usize, reason: MissReason) {
        add(&self.stats.records_refused, 1);
        let (store, name) = (self.parts.writer, reason.name());
        warn!(
            store,
            block = %id,
            reason = name,
            "a copy of record {id} was refused ({name}); it is read from another tier"
        );
        self.tiers.discard(tier, id, reason);
    }
}

/// Waits until no thread starts reads any more, which takes moments.
pub(super) fn await_end(pumping: impl Fn() -> bool) {
    let begun = Instant::now();
    while pumping() && begun.elapsed() < MOMENTS {
        std::thread::yield_now();
    }
}

pub(super) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the store is closed")
}

/// A block is named as of one part, and is loaded or dumped as of another one now.
pub(super) fn other_part() -> Error {
    Error::invalid("a block has the id of one of another part; the ids of two parts never agree")
}

/// The error of a record that is refused.
pub(super) fn refusal(reason: MissReason) -> Error {
    let kind = match reason {
        MissReason::ForeignId
        | MissReason::ForeignIdentity
        | MissReason::ForeignPart
        | MissReason::ForeignShape
        | MissReason::NewerVersion
        | MissReason::WrongKey
        | MissReason::NotEncrypted
        | MissReason::IoError => ErrorKind::Foreign,
        _ => ErrorKind::Corrupt,
    };
    Error::new(kind, "the stored record is not what it should be").with("reason", reason.name())
}

/// Why a tier did not return a record that is there: as its error names it, or because it could not
/// be read.
pub(super) fn reason_named(error: &Error) -> MissReason {
    for (key, name) in error.context() {
        for reason in MissReason::ALL {
            if *key == "reason" && reason.name() == name {
                return reason;
            }
        }
    }
    MissReason::IoError
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
