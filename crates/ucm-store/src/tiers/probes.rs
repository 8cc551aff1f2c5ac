//! Probes of tiers: at the start, and whenever a request meets a tier that may be usable again.
//!
//! One that does not answer is written off by its pool and probed again later. The log names the
//! tiers in use once, as soon as one is usable; those that become usable later get a line each.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tracing::info;
use ucm_core::Result;
use ucm_infra::{Completion, MonotonicTime, WorkerPool};

use super::config::{LANE_PROBE, Request};
use super::health::Admission;
use super::level::TierTable;

/// How long after its time the first probe has to report.
const GRACE: Duration = Duration::from_millis(100);

/// See the module.
pub(crate) struct Probes {
    pub(super) table: Arc<TierTable>,
    pub(super) pool: Arc<WorkerPool>,
    pub(super) store: u64,
    /// How long a probe may take.
    pub(super) limit: Duration,
    /// What the log says of the engine when the first tier is usable.
    pub(super) staging: String,
    /// The first probes are under way: what they find is logged together.
    pub(super) opening: AtomicBool,
    /// The log names the tiers in use.
    pub(super) announced: AtomicBool,
}

impl Probes {
    /// Probes every tier at once, and waits for that until `deadline`; one that is usable is
    /// enough.
    pub(super) fn open(self: &Arc<Self>, deadline: MonotonicTime) {
        let count = self.table.tiers.len();
        if count == 1 {
            // it keeps its time by itself, and takes no thread
            self.probe(0, deadline, MonotonicTime::NEVER);
        } else {
            let probes: Vec<_> = (0..count)
                .map(|number| self.begin(number, deadline))
                .collect();
            for probe in probes {
                probe.wait(&*self.table.clock, Some(deadline.after(GRACE)));
            }
        }
        self.opening.store(false, Ordering::Release);
        self.announce();
    }

    /// Whether an operation may go to a tier now; its outcome must be noted there. A tier that was
    /// never usable is probed in the background.
    pub(super) fn admits(
        self: &Arc<Self>,
        number: usize,
        request: Request,
        now: MonotonicTime,
    ) -> bool {
        let admission = self.table.tiers[number].health.admit(request.number, now);
        if admission == Admission::Probe {
            self.begin_later(number);
        }
        admission == Admission::Yes
    }

    /// The same for a write.
    pub(super) fn admits_write(
        self: &Arc<Self>,
        number: usize,
        request: Request,
        now: MonotonicTime,
    ) -> bool {
        let health = &self.table.tiers[number].health;
        health.writes_may(request.number, now)
            && self.admits(number, request, now)
            && health.admit_write(request.number, now)
    }

    /// The same for a lookup. A tier that answers from its index is not judged by that: while it is
    /// not well it is probed in the background.
    pub(super) fn admits_lookup(
        self: &Arc<Self>,
        number: usize,
        request: Request,
        now: MonotonicTime,
    ) -> bool {
        let tier = &self.table.tiers[number];
        if !tier.answers_from_index() || !tier.health.is_ready() {
            return self.admits(number, request, now);
        }
        tier.health.trip_if_overrun(now);
        let may = tier.health.may(request.number, now);
        if may && !tier.health.is_well() {
            self.begin_later(number);
        }
        may
    }

    /// Whether a new request may be answered by a tier.
    pub(crate) fn may_answer(self: &Arc<Self>, now: MonotonicTime) -> bool {
        let mut any = false;
        for (number, tier) in self.table.tiers.iter().enumerate() {
            tier.health.trip_if_overrun(now);
            any |= tier.health.may(u64::MAX, now);
            if !tier.health.is_ready() && tier.health.admit(u64::MAX, now) == Admission::Probe {
                self.begin_later(number);
            }
        }
        any
    }

    /// Probes a tier in the background.
    pub(super) fn begin_later(self: &Arc<Self>, number: usize) {
        if !self.table.tiers[number].probing.load(Ordering::Acquire) {
            self.begin(number, self.table.clock.now().after(self.limit));
        }
    }

    /// Probes a tier on a thread, unless one does already. The thread has until `deadline` and is
    /// written off some time after that.
    fn begin(self: &Arc<Self>, number: usize, deadline: MonotonicTime) -> Arc<Completion<()>> {
        let ended = Completion::new();
        if self.table.tiers[number]
            .probing
            .swap(true, Ordering::AcqRel)
        {
            ended.complete(());
            return ended;
        }
        let late = deadline.after(self.limit.max(GRACE));
        let (prober, probes, answer) = (Arc::clone(self), Arc::clone(self), Arc::clone(&ended));
        let probe = move || prober.probe(number, deadline, late);
        let done = move |_: Result<()>| {
            probes.table.tiers[number]
                .probing
                .store(false, Ordering::Release);
            answer.complete(());
        };
        if let Err(refused) = self.pool.offer(LANE_PROBE, late, probe, done) {
            drop(refused.work);
            (refused.done)(Err(refused.error));
        }
        ended
    }

    /// Opens a tier, and notes whether it is usable; a failure after `late` says nothing.
    fn probe(&self, number: usize, deadline: MonotonicTime, late: MonotonicTime) {
        let tier = &self.table.tiers[number];
        let medium = match tier.backend.open(deadline) {
            Ok(medium) => medium,
            Err(error) if self.table.clock.now() < late => return tier.health.unusable(&error),
            Err(_) => return,
        };
        let description = tier.form.describe(&medium);
        tier.description.lock().clone_from(&description);
        let first = tier.health.usable(self.table.request(deadline).number);
        if first && self.announced.load(Ordering::Acquire) {
            let name = tier.health.name();
            info!(
                store = self.store,
                tier = name,
                "open: {name}: {description}"
            );
        } else if !self.opening.load(Ordering::Acquire) {
            self.announce();
        }
    }

    /// Names the version, the slots and each tier in the log, once, as soon as a tier is usable.
    fn announce(&self) {
        if !self.table.is_ready() || self.announced.swap(true, Ordering::AcqRel) {
            return;
        }
        let (store, version) = (self.store, env!("CARGO_PKG_VERSION"));
        info!(store, "ucm {version}: {}", self.staging);
        for tier in &self.table.tiers {
            let (name, policy) = (tier.health.name(), tier.policy.name());
            let description = tier.description.lock().clone();
            match tier.health.is_ready() {
                true if self.table.tiers.len() == 1 => info!(store, "open: {description}"),
                true => info!(
                    store,
                    tier = name,
                    "open: {name} (written {policy}): {description}"
                ),
                false => info!(
                    store,
                    tier = name,
                    "not usable yet: {name} (written {policy})"
                ),
            }
        }
    }
}
