//! How well a tier is: its breakers, and what the log says when one opens or closes.
//!
//! A tier has a breaker, and a second one for writes alone: a medium that is read and takes no
//! writes is used for what it has.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tracing::{info, warn};
use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, MonotonicTime};
use ucm_io::{EROFS, IoPool};

use crate::breaker::{Breaker, BreakerConfig, Change};
use crate::stats::add;

/// Requests that failed last and are known apart.
const REQUESTS: usize = 16;

/// See the module.
pub(super) struct Health {
    /// The store and the tier, as log lines name them.
    store: u64,
    name: String,
    /// It is the only tier of its store.
    only: bool,
    clock: Arc<dyn Clock>,
    pool: Arc<IoPool>,
    /// It was usable once.
    ready: AtomicBool,
    breaker: Breaker,
    failed_requests: FailedRequests,
    writes: Breaker,
    failed_writes: FailedRequests,
    /// The log says that it takes no writes.
    writes_off_logged: AtomicBool,
    stats: HealthStats,
}

#[derive(Default)]
struct HealthStats {
    /// Operations that failed because of the medium.
    failures: AtomicU64,
    /// Times the breaker opened.
    opened: AtomicU64,
    /// The last write found a read-only file system, or no longer the root that was opened.
    refused: AtomicBool,
}

/// The requests that failed last: the operations of one request are one failure.
#[derive(Default)]
struct FailedRequests(Mutex<VecDeque<u64>>);

impl FailedRequests {
    /// Remembers a request; true if it was known already.
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

/// Whether an operation may go to a tier now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    Yes,
    No,
    /// Only after a probe.
    Probe,
}

/// Whether an error speaks of the medium and not of one block.
fn is_of_medium(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Io)
}

impl Health {
    /// Of a tier with these threads; `only`: the store has no other.
    pub(super) fn new(
        (store, name, only): (u64, String, bool),
        breaker: BreakerConfig,
        pool: Arc<IoPool>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self {
            store,
            name,
            only,
            clock,
            pool,
            ready: AtomicBool::new(false),
            breaker: Breaker::new(breaker),
            failed_requests: FailedRequests::default(),
            writes: Breaker::new(breaker),
            failed_writes: FailedRequests::default(),
            writes_off_logged: AtomicBool::new(false),
            stats: HealthStats::default(),
        }
    }

    /// Its name, unlike those of the other tiers.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Lets an operation of a request pass, or not; its outcome goes to [`Health::note`].
    pub(super) fn admit(&self, request: u64, now: MonotonicTime) -> Admission {
        if self.trip_if_overrun(now) || !self.breaker.allows(request, now) {
            Admission::No
        } else if self.is_ready() {
            Admission::Yes
        } else {
            Admission::Probe
        }
    }

    /// The same for a write that the tier itself lets pass.
    pub(super) fn admit_write(&self, request: u64, now: MonotonicTime) -> bool {
        self.writes.allows(request, now)
    }

    /// Whether an operation of that request would pass now, as far as the breaker knows.
    pub(super) fn may(&self, request: u64, now: MonotonicTime) -> bool {
        self.is_ready() && self.breaker.would_allow(request, now)
    }

    /// Whether a write of that request would pass now, as far as the breakers know.
    pub(super) fn may_write(&self, request: u64, now: MonotonicTime) -> bool {
        self.may(request, now) && self.writes_may(request, now)
    }

    /// The same as far as the breaker of writes knows.
    pub(super) fn writes_may(&self, request: u64, now: MonotonicTime) -> bool {
        self.writes.would_allow(request, now)
    }

    /// Whether it was usable once.
    pub(super) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Whether everything passes.
    pub(super) fn is_well(&self) -> bool {
        self.is_ready() && self.breaker.is_closed()
    }

    /// Whether it takes every write.
    pub(super) fn is_writable(&self) -> bool {
        self.is_well() && self.writes.is_closed() && !self.stats.refused.load(Ordering::Acquire)
    }

    /// Operations that failed because of the medium.
    pub(super) fn failures(&self) -> u64 {
        self.stats.failures.load(Ordering::Relaxed)
    }

    /// Times the breaker opened.
    pub(super) fn opened(&self) -> u64 {
        self.stats.opened.load(Ordering::Relaxed)
    }

    /// Switches the tier off while too many of its threads are lost; true if they are.
    pub(super) fn trip_if_overrun(&self, now: MonotonicTime) -> bool {
        let overrun = self.overrun();
        if overrun {
            self.changed(self.breaker.trip(now), None);
        }
        overrun
    }

    fn overrun(&self) -> bool {
        self.pool.stuck() >= self.breaker.max_stuck()
    }

    /// A probe of a request found it usable; true the first time. A breaker whose cool-down is over
    /// lets the probe pass; one that is held open longer stays open.
    pub(super) fn usable(&self, request: u64) -> bool {
        let first = !self.ready.swap(true, Ordering::AcqRel);
        self.breaker.allows(request, self.clock.now());
        self.answered();
        first
    }

    /// A probe found it not usable.
    pub(super) fn unusable(&self, error: &Error) {
        self.changed(self.breaker.trip(self.clock.now()), Some(error));
    }

    /// A record in it was damaged: too many in a minute switch it off.
    pub(super) fn damaged(&self) {
        if let change @ Some(_) = self.breaker.damaged(self.clock.now()) {
            let sick = Error::new(ErrorKind::Corrupt, "too many damaged records in a minute");
            self.changed(change, Some(&sick));
        }
    }

    /// Notes how an operation of a request ended.
    pub(super) fn note(&self, request: u64, error: Option<&Error>) {
        let Some(error) = error else {
            return self.answered();
        };
        let of_medium = is_of_medium(error);
        add(&self.stats.failures, u64::from(of_medium));
        if of_medium && self.failed_requests.note(request) && self.breaker.is_closed() {
            return; // the pieces of one request are one failure
        }
        self.changed(self.breaker.failure(error, self.clock.now()), Some(error));
    }

    /// An operation ended without saying anything of the medium: another may probe it at once.
    pub(super) fn undecided(&self) {
        self.breaker.undecided(self.clock.now());
    }

    fn answered(&self) {
        if self.breaker.is_closed() || !self.overrun() {
            self.changed(self.breaker.success(), None);
        }
    }

    /// Notes how a write of a request ended, for the writes after it; `None` where that says
    /// nothing of writes. While the whole tier is off the log says that instead.
    pub(super) fn note_write(&self, request: u64, ended: Option<Result<(), &Error>>) {
        let (store, tier) = (self.store, &self.name);
        if let Some(ended) = ended {
            let refused = ended.is_err_and(|error| {
                error.kind() == ErrorKind::Foreign || error.os_code() == Some(EROFS)
            });
            self.stats.refused.store(refused, Ordering::Release);
        }
        let error = match ended {
            Some(Err(error)) => error,
            Some(Ok(())) => {
                if self.writes.success().is_some()
                    && self.writes_off_logged.swap(false, Ordering::AcqRel)
                {
                    info!(store, tier, "{tier} takes blocks again");
                }
                return;
            }
            None => return self.writes.undecided(self.clock.now()),
        };
        let of_medium = is_of_medium(error);
        if of_medium && self.failed_writes.note(request) && self.writes.is_closed() {
            return;
        }
        self.writes.write_failure(error, self.clock.now());
        let of_writes = of_medium || error.kind() == ErrorKind::Unhealthy;
        if of_writes
            && !self.writes.is_closed()
            && self.is_well()
            && !self.writes_off_logged.swap(true, Ordering::AcqRel)
        {
            let kind = error.kind().name();
            warn!(
                store,
                tier,
                error = kind,
                "{tier} takes no blocks for now, and its blocks are read; it is tried again now \
                 and then: {error}"
            );
        }
    }

    /// Counts and logs what an observation changed.
    fn changed(&self, change: Option<Change>, error: Option<&Error>) {
        let (store, name) = (self.store, &self.name);
        let (tier, rest) = match self.only {
            true => ("", "every lookup misses"),
            false => ("tier ", "the others are used without it"),
        };
        match change {
            Some(Change::Opened) => {
                add(&self.stats.opened, 1);
                let (kind, why) = match error {
                    Some(error) => (error.kind().name(), error.to_string()),
                    None => ("timeout", "too many operations never returned".to_owned()),
                };
                let text = match self.is_ready() {
                    true => format!("is switched off for now, {rest}: {why}"),
                    false => format!(
                        "is switched off until it can be used, {rest}, and nothing is stored \
                         there: {why}; mend that, or configure another place. It is tried again \
                         by itself"
                    ),
                };
                warn!(store, tier = name, error = kind, "{tier}{name} {text}");
            }
            Some(Change::Recovered) => info!(store, tier = name, "{tier}{name} answers again"),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ucm_infra::ManualClock;
    use ucm_io::IoOptions;

    use super::*;

    fn health(threshold: u32) -> (Arc<ManualClock>, Health) {
        let breaker = BreakerConfig {
            threshold,
            window: Duration::from_secs(60),
            cool_down: Duration::from_secs(1),
            max_stuck: 4,
            ..BreakerConfig::default()
        };
        let pool = IoPool::psync(false, &IoOptions::with_workers(2)).unwrap();
        let clock = ManualClock::new();
        let health = Health::new((1, "nothing".into(), true), breaker, pool, clock.clone());
        health.usable(0);
        (clock, health)
    }

    #[test]
    fn the_failures_of_one_request_are_one_failure() {
        for kind in [ErrorKind::Timeout, ErrorKind::Io] {
            let ((clock, health), error) = (health(2), Error::new(kind, "late, or unreadable"));
            for _ in 0..8 {
                health.note(7, Some(&error));
            }
            assert!(health.is_well());
            assert_eq!((health.failures(), health.opened()), (8, 0));
            health.note(8, Some(&error));
            assert_eq!((health.failures(), health.opened()), (9, 1));
            assert!(!health.may(9, clock.now()));
            assert!(health.may(9, clock.now().after(Duration::from_secs(2))));
        }
    }

    #[test]
    fn errors_that_do_not_speak_of_the_medium_open_nothing() {
        let (clock, health) = health(1);
        for kind in [ErrorKind::NotFound, ErrorKind::Busy, ErrorKind::NoSpace] {
            health.note(1, Some(&Error::new(kind, "x")));
            assert_eq!((health.failures(), health.opened()), (0, 0), "{kind:?}");
        }
        assert_eq!(health.admit(1, clock.now()), Admission::Yes);
    }

    #[test]
    fn a_root_that_is_lost_or_read_only_takes_no_writes_and_no_breaker_opens() {
        let (clock, health) = health(1);
        let lost = Error::new(ErrorKind::Foreign, "the root lost its marker");
        let read_only = Error::from_io(std::io::Error::from_raw_os_error(EROFS), "x");
        for error in [lost, read_only] {
            health.note_write(1, Some(Err(&error)));
            health.note_write(1, None);
            assert!(!health.is_writable() && health.is_well());
            assert!(
                health.may_write(2, clock.now()),
                "it is tried with every dump"
            );
            health.note_write(2, Some(Ok(())));
            assert!(health.is_writable());
        }
    }

    #[test]
    fn a_tier_that_was_never_ready_is_probed_first() {
        let (clock, health) = health(1);
        health.ready.store(false, Ordering::Release);
        assert_eq!(health.admit(1, clock.now()), Admission::Probe);
        assert!(!health.may(1, clock.now()));
    }
}
