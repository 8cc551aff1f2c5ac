//! One stage of a composition: its medium, how well that is, which of its copies were refused, and what it did.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind};
use ucm_infra::{IdSet, Mono};

use super::WritePolicy;
use crate::backend::{Backend, TierStats};
use crate::health::{Breaker, BreakerConfig, Change};

/// Most refused copies remembered of a stage. To forget one is safe: every copy is verified when it is read.
const REMEMBERED: usize = 1 << 16;

/// One stage.
pub(super) struct Stage {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) name: String,
    pub(super) policy: WritePolicy,
    /// Answers at once and ends with its processes.
    pub(super) memory: bool,
    pub(super) breaker: Breaker,
    /// It was usable once.
    pub(super) ready: AtomicBool,
    /// Somebody looks at it for the first time, or again.
    pub(super) probing: AtomicBool,
    /// Deadline of the operations that were late last. Those of one request share theirs, and are one failure.
    late: Mutex<Option<Mono>>,
    refused: IdSet<BlockId>,
    pub(super) counts: Counts,
}

/// What [`TierStats`] says, as it is counted.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) hits: AtomicU64,
    pub(super) blocks_read: AtomicU64,
    pub(super) bytes_read: AtomicU64,
    pub(super) blocks_written: AtomicU64,
    pub(super) bytes_written: AtomicU64,
    pub(super) failures: AtomicU64,
    pub(super) copies_refused: AtomicU64,
    pub(super) promotions: AtomicU64,
    pub(super) demotions: AtomicU64,
    pub(super) copies_dropped: AtomicU64,
}

/// Adds to a counter.
pub(super) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Whether an operation may go to a stage now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    Yes,
    No,
    /// Not before somebody looked at it.
    Look,
}

impl Stage {
    pub(super) fn new(
        backend: Arc<dyn Backend>,
        name: String,
        policy: WritePolicy,
        breaker: BreakerConfig,
    ) -> Self {
        Self {
            memory: backend.is_memory(),
            backend,
            name,
            policy,
            breaker: Breaker::new(breaker),
            ready: AtomicBool::new(false),
            probing: AtomicBool::new(false),
            late: Mutex::new(None),
            refused: IdSet::default(),
            counts: Counts::default(),
        }
    }

    /// Lets one operation pass, or not; what it brings is told by [`Stage::answered`] or [`Stage::failed`].
    pub(super) fn admit(&self, now: Mono) -> (Admission, Option<Change>) {
        if self.overrun() {
            return (Admission::No, self.breaker.trip(now));
        }
        if !self.breaker.allows(now) {
            return (Admission::No, None);
        }
        if !self.ready.load(Ordering::Acquire) {
            return (Admission::Look, None);
        }
        (Admission::Yes, None)
    }

    /// Whether an operation would pass now.
    pub(super) fn may(&self, now: Mono) -> bool {
        self.ready.load(Ordering::Acquire) && self.breaker.would_allow(now) && !self.overrun()
    }

    /// Whether everything passes.
    pub(super) fn is_well(&self) -> bool {
        self.ready.load(Ordering::Acquire) && self.breaker.is_closed()
    }

    fn overrun(&self) -> bool {
        self.backend.stuck() >= self.breaker.max_stuck()
    }

    /// The medium answered.
    pub(super) fn answered(&self) -> Option<Change> {
        if self.breaker.is_closed() || !self.overrun() {
            return self.breaker.success();
        }
        None
    }

    /// An operation that had time until `deadline` failed. `true` in front if that speaks of the medium.
    pub(super) fn failed(&self, error: &Error, deadline: Mono, now: Mono) -> (bool, Option<Change>) {
        let of_medium = matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Io);
        if error.kind() == ErrorKind::Timeout {
            let mut late = self.late.lock();
            if late.is_some_and(|late| deadline <= late) {
                return (of_medium, None); // of a request that was counted
            }
            *late = Some(deadline);
        }
        (of_medium, self.breaker.failure(error, now))
    }

    /// This copy is no hit until another takes its place.
    pub(super) fn refuse(&self, id: BlockId) {
        if self.refused.insert(id) && self.refused.len() > REMEMBERED {
            self.refused.clear();
        }
    }

    /// What was configured and could not be had, with the stage's name.
    pub(super) fn warnings(&self) -> Vec<String> {
        let texts = self.backend.warnings().into_iter();
        texts.map(|text| format!("tier {}: {text}", self.name)).collect()
    }

    /// Another copy took the place of one that may have been refused.
    pub(super) fn forgive(&self, id: BlockId) {
        if !self.refused.is_empty() {
            self.refused.remove(&id);
        }
    }

    pub(super) fn has_refused(&self, id: BlockId) -> bool {
        !self.refused.is_empty() && self.refused.contains(&id)
    }

    pub(super) fn stats(&self) -> TierStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let usage = self.backend.usage();
        TierStats {
            name: self.name.clone(),
            hits: get(&self.counts.hits),
            blocks_read: get(&self.counts.blocks_read),
            bytes_read: get(&self.counts.bytes_read),
            blocks_written: get(&self.counts.blocks_written),
            bytes_written: get(&self.counts.bytes_written),
            failures: get(&self.counts.failures),
            copies_refused: get(&self.counts.copies_refused),
            promotions: get(&self.counts.promotions),
            demotions: get(&self.counts.demotions),
            copies_dropped: get(&self.counts.copies_dropped),
            used_bytes: usage.used,
            capacity_bytes: usage.capacity,
            healthy: self.is_well(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::tiers::tests_support::Nothing;

    fn stage(threshold: u32) -> Stage {
        let breaker = BreakerConfig {
            threshold,
            window: Duration::from_secs(60),
            cool_down: Duration::from_secs(1),
            max_stuck: 4,
        };
        let stage = Stage::new(Arc::new(Nothing), "nothing".into(), WritePolicy::Through, breaker);
        stage.ready.store(true, Ordering::Release);
        stage
    }

    #[test]
    fn operations_of_one_request_that_are_late_are_one_failure() {
        let stage = stage(2);
        let late = Error::new(ErrorKind::Timeout, "late");
        for _ in 0..8 {
            assert_eq!(stage.failed(&late, Mono(100), Mono(100)), (true, None));
        }
        assert!(stage.is_well());
        assert_eq!(
            stage.failed(&late, Mono(200), Mono(200)),
            (true, Some(Change::Opened))
        );
        assert!(!stage.may(Mono(200)) && stage.may(Mono(2_000_000_000)));
    }

    #[test]
    fn what_is_no_fault_of_the_medium_opens_nothing() {
        let stage = stage(1);
        for kind in [ErrorKind::NotFound, ErrorKind::Busy, ErrorKind::NoSpace] {
            let (of_medium, change) = stage.failed(&Error::new(kind, "x"), Mono(1), Mono(1));
            assert!(!of_medium && change.is_none(), "{kind:?}");
        }
        assert_eq!(stage.admit(Mono(2)).0, Admission::Yes);
    }

    #[test]
    fn before_it_was_ready_somebody_must_look() {
        let stage = stage(1);
        stage.ready.store(false, Ordering::Release);
        assert_eq!(stage.admit(Mono(0)).0, Admission::Look);
        assert!(!stage.may(Mono(0)));
    }

    #[test]
    fn a_refused_copy_is_forgiven_with_the_next() {
        let stage = stage(1);
        let id = BlockId([3; 16]);
        stage.refuse(id);
        assert!(stage.has_refused(id));
        stage.forgive(id);
        assert!(!stage.has_refused(id));
        for n in 0..=REMEMBERED as u128 {
            stage.refuse(BlockId(n.to_le_bytes()));
            assert!(stage.refused.len() <= REMEMBERED);
        }
    }
}
