//! One stage of a composition: its medium, how well that is, which of its copies were refused, and what it did.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, MissReason};
use ucm_infra::{IdSet, Mono};

use super::WritePolicy;
use crate::backend::{Backend, TierStats};
use crate::health::{Breaker, BreakerConfig, Change};

/// Most refused copies remembered of a stage. To forget one is safe: every copy is verified when it is read.
const REMEMBERED: usize = 1 << 16;

/// Requests that failed last that are told apart.
const REQUESTS: usize = 16;
/// Records from above that are published together at the latest.
const TOGETHER: usize = 16;

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
    /// Deadlines of the requests that failed last: the operations of one share theirs, and are one failure.
    failed_requests: Mutex<VecDeque<Mono>>,
    refused: IdSet<BlockId>,
    /// Records that the stage above gives up and that are not published here yet.
    demoting: AtomicUsize,
    /// Refused because they are of a newer version: no hits, and never replaced.
    newer: IdSet<BlockId>,
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
            failed_requests: Mutex::default(),
            refused: IdSet::default(),
            demoting: AtomicUsize::new(0),
            newer: IdSet::default(),
            counts: Counts::default(),
        }
    }

    /// A record comes down from the stage above, which keeps its place until it is published here; that few are on their
    /// way at once is the bound there. True where a medium that publishes many together should wait for no more.
    pub(super) fn demotion_begins(&self) -> bool {
        let before = self.demoting.fetch_add(1, Ordering::AcqRel);
        before % TOGETHER == TOGETHER - 1
    }

    /// It is published, or was dropped.
    pub(super) fn demotion_ended(&self) {
        self.demoting.fetch_sub(1, Ordering::AcqRel);
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

    /// An operation of the request that had time until `deadline` failed. `true` in front if that speaks of the medium.
    pub(super) fn failed(&self, error: &Error, deadline: Mono, now: Mono) -> (bool, Option<Change>) {
        let of_medium = matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Io);
        if of_medium {
            let mut requests = self.failed_requests.lock();
            if requests.contains(&deadline) {
                return (of_medium, None); // the pieces of one request are one failure
            }
            if requests.len() == REQUESTS {
                requests.pop_front();
            }
            requests.push_back(deadline);
        }
        (of_medium, self.breaker.failure(error, now))
    }

    /// This copy is no hit until another takes its place.
    pub(super) fn refuse(&self, id: BlockId, reason: MissReason) {
        let ids = match reason {
            MissReason::NewerVersion => &self.newer,
            _ => &self.refused,
        };
        if ids.insert(id) && ids.len() > REMEMBERED {
            ids.clear();
        }
    }

    /// Another copy took the place of one that may have been refused.
    pub(super) fn forgive(&self, id: BlockId) {
        for ids in [&self.refused, &self.newer] {
            if !ids.is_empty() {
                ids.remove(&id);
            }
        }
    }

    pub(super) fn has_refused(&self, id: BlockId) -> bool {
        self.replaces(id) || (!self.newer.is_empty() && self.newer.contains(&id))
    }

    /// Whether the next copy takes the place of the one that is there.
    pub(super) fn replaces(&self, id: BlockId) -> bool {
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
            memory: self.memory,
            used_bytes: usage.used,
            capacity_bytes: usage.capacity,
            healthy: self.is_well(),
            compression: self.backend.compression(),
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
    fn what_fails_of_one_request_is_one_failure() {
        for kind in [ErrorKind::Timeout, ErrorKind::Io] {
            let (stage, error) = (stage(2), Error::new(kind, "late, or unreadable"));
            for _ in 0..8 {
                assert_eq!(stage.failed(&error, Mono(100), Mono(100)), (true, None));
            }
            assert!(stage.is_well());
            assert_eq!(
                stage.failed(&error, Mono(200), Mono(200)),
                (true, Some(Change::Opened))
            );
            assert!(!stage.may(Mono(200)) && stage.may(Mono(2_000_000_000)));
        }
    }

    #[test]
    fn a_late_operation_that_had_much_time_hides_no_later_failure() {
        let stage = stage(2);
        let late = Error::new(ErrorKind::Timeout, "the server did not answer");
        assert_eq!(stage.failed(&late, Mono(30_000), Mono(100)), (true, None));
        assert_eq!(
            stage.failed(&late, Mono(250), Mono(250)),
            (true, Some(Change::Opened)),
            "another request, though its time was over sooner"
        );
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
    fn a_copy_of_a_newer_version_is_no_hit_and_is_not_replaced() {
        let (stage, id) = (stage(1), BlockId([4; 16]));
        stage.refuse(id, MissReason::NewerVersion);
        assert!(stage.has_refused(id) && !stage.replaces(id));
        stage.forgive(id);
        assert!(
            !stage.has_refused(id),
            "it was gone, or another could not have been published"
        );
    }

    #[test]
    fn a_refused_copy_is_forgiven_with_the_next() {
        let stage = stage(1);
        let id = BlockId([3; 16]);
        stage.refuse(id, MissReason::BadChecksum);
        assert!(stage.has_refused(id) && stage.replaces(id));
        stage.forgive(id);
        assert!(!stage.has_refused(id));
        for n in 0..=REMEMBERED as u128 {
            stage.refuse(BlockId(n.to_le_bytes()), MissReason::BadChecksum);
            assert!(stage.refused.len() <= REMEMBERED);
        }
    }
}
