//! One tier: its medium and the threads that work on it, how well that is, which of its copies were
//! refused, and what it did.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_infra::{IdSet, MonotonicTime};
use ucm_io::IoPool;
use ucm_record::{Keys, RecordLayout};
use ucm_tier::backend::Backend;

use super::codec::TierCodec;
use super::{TierConfig, TierStats, WritePolicy};
use crate::breaker::{Breaker, BreakerConfig, Change};

/// Most refused copies remembered of a tier. To forget one is safe: every copy is verified when it
/// is read.
const REMEMBERED: usize = 1 << 16;

/// Requests that failed last that are told apart.
const REQUESTS: usize = 16;
/// Records from above that are published together at the latest.
const TOGETHER: usize = 16;

/// One tier.
pub(crate) struct Tier {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) pool: Arc<IoPool>,
    pub(super) name: String,
    /// Its level, counted from the top.
    pub(super) level: usize,
    pub(super) policy: WritePolicy,
    /// What makes its records shorter, if anything.
    pub(super) codec: Option<TierCodec>,
    /// What its records are encrypted with.
    pub(super) keys: Option<Arc<Keys>>,
    pub(super) breaker: Breaker,
    pub(super) state: State,
    copies: KnownCopies,
    /// Records that the tier above gives up and that are not published here yet.
    demoting: AtomicUsize,
    pub(super) counts: Counts,
}

/// How well a tier is.
pub(super) struct State {
    /// What it said when it was opened.
    pub(super) words: Mutex<String>,
    /// It was usable once.
    pub(super) ready: AtomicBool,
    /// Somebody looks at it for the first time, or again.
    pub(super) probing: AtomicBool,
    failed_requests: FailedRequests,
    pub(super) writes: Writes,
}

impl State {
    fn new(writes: BreakerConfig) -> Self {
        Self {
            words: Mutex::default(),
            ready: AtomicBool::new(false),
            probing: AtomicBool::new(false),
            failed_requests: FailedRequests::default(),
            writes: Writes {
                breaker: Breaker::new(writes),
                failed_requests: FailedRequests::default(),
                said: AtomicBool::new(false),
            },
        }
    }
}

/// How well a tier takes what is written, apart from how well it is read.
pub(super) struct Writes {
    pub(super) breaker: Breaker,
    failed_requests: FailedRequests,
    /// The log says that it takes none.
    said: AtomicBool,
}

/// The requests that failed last: what fails of one is one failure.
#[derive(Default)]
struct FailedRequests(Mutex<VecDeque<u64>>);

impl FailedRequests {
    /// Whether this one is among them; it is from now on.
    fn note(&self, request: u64) -> bool {
        let mut requests = self.0.lock();
        if requests.contains(&request) {
            return true;
        }
        if requests.len() == REQUESTS {
            requests.pop_front();
        }
        requests.push_back(request);
        false
    }
}

/// What is known of single copies of a tier.
#[derive(Default)]
struct KnownCopies {
    /// They are no hits.
    refused: IdSet<BlockId>,
    /// Whether there was ever one: mostly there was none, and every id of a lookup asks.
    any_refused: AtomicBool,
    /// Refused because they are of a newer version: never replaced.
    newer: IdSet<BlockId>,
    /// Of a tier that encrypts: one of the keys is known to fit.
    key_fits: IdSet<BlockId>,
}

/// What [`TierStats`] says, as it is counted.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) hits: AtomicU64,
    pub(super) blocks_read: AtomicU64,
    pub(super) bytes_read: AtomicU64,
    pub(super) sides_read: AtomicU64,
    pub(super) blocks_written: AtomicU64,
    pub(super) bytes_written: AtomicU64,
    pub(super) failures: AtomicU64,
    pub(super) copies_refused: AtomicU64,
    pub(super) promotions: AtomicU64,
    pub(super) demotions: AtomicU64,
    pub(super) copies_dropped: AtomicU64,
    pub(super) quota_removed: AtomicU64,
}

/// Adds to a counter.
pub(super) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Whether an operation may go to a tier now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    Yes,
    No,
    /// Not before somebody looked at it.
    Look,
}

impl Tier {
    /// A tier for records of this layout, encrypted with these keys unless it is memory.
    /// `Unsupported` if it has a codec that this build has not.
    pub(super) fn new(
        config: TierConfig,
        name: String,
        level: usize,
        breaker: BreakerConfig,
        layout: &RecordLayout,
        keys: Option<Arc<Keys>>,
    ) -> Result<Self> {
        let breaker = BreakerConfig {
            max_stuck: config.max_stuck,
            ..breaker
        };
        let codec = if config.compressed {
            Some(TierCodec::new(layout, &config.pool)?)
        } else {
            None
        };
        let memory = config.backend.features().memory.is_some();
        Ok(Self {
            codec,
            keys: keys.filter(|_| !memory),
            backend: config.backend,
            pool: config.pool,
            name,
            level,
            policy: config.policy,
            breaker: Breaker::new(breaker),
            state: State::new(breaker),
            copies: KnownCopies::default(),
            demoting: AtomicUsize::new(0),
            counts: Counts::default(),
        })
    }

    /// What it says when it was opened: what its medium says, and how records get there.
    pub(super) fn told(&self, words: String) -> String {
        let codec = self
            .codec
            .as_ref()
            .map(TierCodec::words)
            .unwrap_or_default();
        let cipher = self
            .keys
            .as_ref()
            .map_or("", |_| "encrypted by AES-256-GCM, into ");
        codec + cipher + &words
    }

    /// Whether it answers at once and ends with its processes.
    pub(super) fn is_memory(&self) -> bool {
        self.backend.features().memory.is_some()
    }

    /// Whether records lie in another form here than they are used in.
    pub(super) fn recodes(&self) -> bool {
        self.codec.is_some() || self.keys.is_some()
    }

    /// A record comes down from the tier above, which keeps its place until it is published here;
    /// that few are on their way at once is the bound there. True where a medium that publishes
    /// many together should wait for no more.
    pub(super) fn demotion_begins(&self) -> bool {
        let before = self.demoting.fetch_add(1, Ordering::AcqRel);
        before % TOGETHER == TOGETHER - 1
    }

    /// It is published, or was dropped.
    pub(super) fn demotion_ended(&self) {
        self.demoting.fetch_sub(1, Ordering::AcqRel);
    }

    /// Lets an operation of a request pass, or not; what it brings is told by [`Tier::answered`] or
    /// [`Tier::failed`].
    pub(super) fn admit(&self, request: u64, now: MonotonicTime) -> (Admission, Option<Change>) {
        if self.overrun() {
            return (Admission::No, self.trip_if_overrun(now));
        }
        if !self.breaker.allows(request, now) {
            return (Admission::No, None);
        }
        if !self.state.ready.load(Ordering::Acquire) {
            return (Admission::Look, None);
        }
        (Admission::Yes, None)
    }

    /// Whether an operation of that request would pass now, as far as the breaker knows.
    pub(super) fn may(&self, request: u64, now: MonotonicTime) -> bool {
        self.state.ready.load(Ordering::Acquire) && self.breaker.would_allow(request, now)
    }

    /// Whether a write of that request would pass now, as far as the breakers know.
    pub(super) fn may_write(&self, request: u64, now: MonotonicTime) -> bool {
        self.may(request, now) && self.state.writes.breaker.would_allow(request, now)
    }

    /// Whether a read has a chance, without asking the medium: false only where it is known that
    /// the record is not here.
    pub(super) fn may_have(&self, id: BlockId) -> bool {
        self.backend
            .features()
            .memory
            .is_none_or(|memory| memory.has(id))
    }

    /// Whether lookups are answered without asking the medium, so that they say nothing of its
    /// health.
    pub(super) fn knows_by_itself(&self) -> bool {
        !self.is_memory() && self.backend.features().answers_at_once
    }

    /// Whether everything passes.
    pub(super) fn is_well(&self) -> bool {
        self.state.ready.load(Ordering::Acquire) && self.breaker.is_closed()
    }

    /// Switches it off while too many of its threads are lost.
    pub(super) fn trip_if_overrun(&self, now: MonotonicTime) -> Option<Change> {
        self.overrun().then(|| self.breaker.trip(now)).flatten()
    }

    fn overrun(&self) -> bool {
        self.pool.stuck() >= self.breaker.max_stuck()
    }

    /// The medium answered.
    pub(super) fn answered(&self) -> Option<Change> {
        if self.breaker.is_closed() || !self.overrun() {
            return self.breaker.success();
        }
        None
    }

    /// An operation of a request failed. `true` in front if that speaks of the medium.
    pub(super) fn failed(
        &self,
        error: &Error,
        request: u64,
        now: MonotonicTime,
    ) -> (bool, Option<Change>) {
        let of_medium = matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Io);
        if of_medium && self.state.failed_requests.note(request) && self.breaker.is_closed() {
            return (of_medium, None); // the pieces of one request are one failure
        }
        (of_medium, self.breaker.failure(error, now))
    }

    /// A write of a request ended well.
    pub(super) fn wrote(&self) -> Option<Change> {
        let change = self.state.writes.breaker.success()?;
        self.state
            .writes
            .said
            .swap(false, Ordering::AcqRel)
            .then_some(change)
    }

    /// A write of a request failed: whether writes are switched off, and that is still to be said.
    /// While the whole tier is off that was said instead.
    pub(super) fn write_failed(&self, error: &Error, request: u64, now: MonotonicTime) -> bool {
        let of_medium = matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Io);
        if of_medium
            && self.state.writes.failed_requests.note(request)
            && self.state.writes.breaker.is_closed()
        {
            return false;
        }
        let writes = &self.state.writes;
        writes.breaker.write_failure(error, now);
        let of_writes = of_medium || error.kind() == ErrorKind::Unhealthy;
        of_writes
            && !writes.breaker.is_closed()
            && self.is_well()
            && !writes.said.swap(true, Ordering::AcqRel)
    }

    /// This record was written here, or read by one of the keys.
    pub(super) fn note_key_fits(&self, id: BlockId) {
        if self.keys.is_some()
            && self.copies.key_fits.insert(id)
            && self.copies.key_fits.len() > REMEMBERED
        {
            self.copies.key_fits.clear();
        }
    }

    /// Whether a record that is present here may be of a key that this store has not.
    pub(super) fn may_be_of_another_key(&self, id: BlockId) -> bool {
        self.keys.is_some() && !self.copies.key_fits.contains(&id)
    }

    /// This copy is no hit until another takes its place.
    pub(super) fn refuse(&self, id: BlockId, reason: MissReason) {
        self.copies.key_fits.remove(&id);
        let ids = if reason.leaves_alone() {
            &self.copies.newer
        } else {
            &self.copies.refused
        };
        self.copies.any_refused.store(true, Ordering::Release);
        if ids.insert(id) && ids.len() > REMEMBERED {
            ids.clear();
        }
    }

    /// Another copy took the place of one that may have been refused.
    pub(super) fn clear_bad(&self, id: BlockId) {
        if self.copies.any_refused.load(Ordering::Acquire) {
            self.copies.refused.remove(&id);
            self.copies.newer.remove(&id);
        }
    }

    pub(super) fn has_refused(&self, id: BlockId) -> bool {
        self.replaces(id)
            || self.copies.any_refused.load(Ordering::Acquire) && self.copies.newer.contains(&id)
    }

    /// Whether the next copy takes the place of the one that is there.
    pub(super) fn replaces(&self, id: BlockId) -> bool {
        self.copies.any_refused.load(Ordering::Acquire) && self.copies.refused.contains(&id)
    }

    pub(super) fn stats(&self) -> TierStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let usage = self.backend.stats().usage;
        TierStats {
            name: self.name.clone(),
            level: self.level,
            hits: get(&self.counts.hits),
            blocks_read: get(&self.counts.blocks_read),
            bytes_read: get(&self.counts.bytes_read),
            sides_read: get(&self.counts.sides_read),
            blocks_written: get(&self.counts.blocks_written),
            bytes_written: get(&self.counts.bytes_written),
            failures: get(&self.counts.failures),
            copies_refused: get(&self.counts.copies_refused),
            promotions: get(&self.counts.promotions),
            demotions: get(&self.counts.demotions),
            copies_dropped: get(&self.counts.copies_dropped),
            quota_removed: get(&self.counts.quota_removed),
            memory: self.is_memory(),
            used_bytes: usage.used,
            capacity_bytes: usage.capacity,
            healthy: self.is_well(),
            writable: self.is_well() && self.state.writes.breaker.is_closed(),
            compression: self.codec.as_ref().map(TierCodec::stats),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ucm_core::Geometry;
    use ucm_io::IoOptions;
    use ucm_testkit::Nothing;

    use super::*;

    fn tier(threshold: u32) -> Tier {
        let breaker = BreakerConfig {
            threshold,
            window: Duration::from_secs(60),
            cool_down: Duration::from_secs(1),
            max_stuck: 4,
            ..BreakerConfig::default()
        };
        let config = TierConfig {
            backend: Arc::new(Nothing),
            pool: IoPool::psync(false, &IoOptions::with_workers(2)).unwrap(),
            policy: WritePolicy::Through,
            compressed: false,
            max_stuck: 4,
        };
        let layout = RecordLayout::new(&Geometry::new(vec![64], 1, 1).unwrap());
        let tier = Tier::new(config, "nothing".into(), 0, breaker, &layout, None).unwrap();
        tier.state.ready.store(true, Ordering::Release);
        tier
    }

    #[test]
    fn what_fails_of_one_request_is_one_failure() {
        for kind in [ErrorKind::Timeout, ErrorKind::Io] {
            let (tier, error) = (tier(2), Error::new(kind, "late, or unreadable"));
            for _ in 0..8 {
                assert_eq!(tier.failed(&error, 7, MonotonicTime(100)), (true, None));
            }
            assert!(tier.is_well());
            assert_eq!(
                tier.failed(&error, 8, MonotonicTime(200)),
                (true, Some(Change::Opened))
            );
            assert!(!tier.may(9, MonotonicTime(200)) && tier.may(9, MonotonicTime(2_000_000_000)));
        }
    }

    #[test]
    fn what_is_no_fault_of_the_medium_opens_nothing() {
        let tier = tier(1);
        for kind in [ErrorKind::NotFound, ErrorKind::Busy, ErrorKind::NoSpace] {
            let (of_medium, change) = tier.failed(&Error::new(kind, "x"), 1, MonotonicTime(1));
            assert!(!of_medium && change.is_none(), "{kind:?}");
        }
        assert_eq!(tier.admit(1, MonotonicTime(2)).0, Admission::Yes);
    }

    #[test]
    fn before_it_was_ready_somebody_must_look() {
        let tier = tier(1);
        tier.state.ready.store(false, Ordering::Release);
        assert_eq!(tier.admit(1, MonotonicTime(0)).0, Admission::Look);
        assert!(!tier.may(1, MonotonicTime(0)));
    }

    #[test]
    fn a_copy_of_a_newer_version_or_another_key_is_no_hit_and_is_not_replaced() {
        for reason in [MissReason::NewerVersion, MissReason::WrongKey] {
            let (tier, id) = (tier(1), BlockId([4; 16]));
            tier.refuse(id, reason);
            assert!(tier.has_refused(id) && !tier.replaces(id));
            tier.clear_bad(id);
            assert!(
                !tier.has_refused(id),
                "it was gone, or another could not have been published"
            );
        }
    }

    #[test]
    fn a_refused_copy_is_forgiven_with_the_next() {
        let tier = tier(1);
        let id = BlockId([3; 16]);
        tier.refuse(id, MissReason::BadChecksum);
        assert!(tier.has_refused(id) && tier.replaces(id));
        tier.clear_bad(id);
        assert!(!tier.has_refused(id));
        for n in 0..=REMEMBERED as u128 {
            tier.refuse(BlockId(n.to_le_bytes()), MissReason::BadChecksum);
            assert!(tier.copies.refused.len() <= REMEMBERED);
        }
    }
}
