//! Which blocks are stored, within one deadline per call.

use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_infra::{Completion, MonotonicTime};

use super::core::{Core, LANE_ASK};
use crate::stats::add;
use crate::tiers::{LEAST_WINDOW, LookupResult, Request, WINDOW};

/// How long a lookup that the caller polls may be queued at least, and the time in which the pool
/// reports that it hangs.
const QUEUED: Duration = Duration::from_secs(1);

/// Stands for the tier of an id that is no hit.
pub const NOWHERE: u8 = u8::MAX;

/// The answer of [`Engine::locate`](super::Engine::locate) and
/// [`Engine::locate_on_prefix`](super::Engine::locate_on_prefix).
pub type Located = Result<(Vec<u8>, Option<MissReason>)>;

/// A lookup on a thread of the engine. Once this is dropped, it is not begun any more.
pub struct Asked(Arc<Completion<(Located, Duration)>>);

impl Asked {
    /// The answer, and how long it took; `None` until then.
    pub fn answer(&self) -> Option<(Located, Duration)> {
        self.0.peek()
    }
}

/// See the module.
pub(super) struct Lookups {
    pub(super) core: Arc<Core>,
}

impl Lookups {
    /// The tier, counted from the top, that each id would be read from, [`NOWHERE`] for one that is
    /// no hit, and why the first of these is none; as far as the lookup deadline allows.
    pub(super) fn locate(&self, ids: &[BlockId]) -> Located {
        let (now, request) = self.request(ids)?;
        let Some(request) = request else {
            let reason = (!ids.is_empty()).then_some(MissReason::Unhealthy);
            return Ok((vec![NOWHERE; ids.len()], reason));
        };
        let found = self.find(ids, false, request);
        self.end(now, found.iter().filter(|answer| answer.is_ok()).count());
        let reason = found.iter().find_map(|answer| answer.err());
        let tiers = found.into_iter().map(|answer| answer.unwrap_or(NOWHERE));
        Ok((tiers.collect(), reason))
    }

    /// The tier, counted from the top, that each id from the first on would be read from without a
    /// gap, and why the next one is no hit.
    pub(super) fn locate_on_prefix(&self, ids: &[BlockId]) -> Located {
        let (now, request) = self.request(ids)?;
        let Some(request) = request else {
            let reason = (!ids.is_empty()).then_some(MissReason::Unhealthy);
            return Ok((Vec::new(), reason));
        };
        let (mut tiers, mut window, mut reason) = (Vec::new(), LEAST_WINDOW, None);
        while tiers.len() < ids.len() && reason.is_none() {
            let known = tiers.len();
            let end = ids.len().min(known + window);
            for answer in self.find(&ids[known..end], true, request) {
                match answer {
                    Ok(tier) => tiers.push(tier),
                    Err(why) => {
                        reason = Some(why);
                        break;
                    }
                }
            }
            window = (window * 2).min(WINDOW);
        }
        self.end(now, tiers.len());
        Ok((tiers, reason))
    }

    /// One of the two lookups on a thread of the engine; Busy when too many wait for it.
    pub(super) fn begin(
        self: &Arc<Self>,
        lookup: fn(&Self, &[BlockId]) -> Located,
        ids: Vec<BlockId>,
    ) -> Result<Asked> {
        self.core.check_open()?;
        let (asked, begun) = (Asked(Completion::new()), self.core.clock.now());
        let turn = QUEUED.max(self.core.deadlines.lookup);
        let (this, answer) = (Arc::clone(self), Arc::downgrade(&asked.0));
        let work = move || {
            if answer.strong_count() > 0 && this.core.clock.now() < begun.after(turn) {
                return lookup(&this, &ids);
            }
            let text = "the lookup had no turn in time";
            Err(Error::new(ErrorKind::Timeout, text))
        };
        let (core, answer) = (Arc::clone(&self.core), Arc::downgrade(&asked.0));
        let ended = move |located: Result<Located>| {
            if let Some(answer) = answer.upgrade() {
                answer.complete((located.flatten(), core.clock.now().since(begun)));
            }
        };
        // none that had its turn takes so long
        let deadline = begun.after(turn + self.core.deadlines.lookup + QUEUED);
        self.core.asks.submit(LANE_ASK, deadline, work, ended)?;
        Ok(asked)
    }

    /// Checks and counts a call; without a request there is nothing to look up, or no tier that
    /// may answer. One request is for all windows of a call.
    fn request(&self, ids: &[BlockId]) -> Result<(MonotonicTime, Option<Request>)> {
        let core = &self.core;
        core.check_call("ids", ids.len())?;
        let now = core.clock.now();
        add(&core.stats.lookups, 1);
        add(&core.stats.lookup_ids, ids.len() as u64);
        if ids.is_empty() {
            return Ok((now, None));
        }
        if core.check_available(now).is_err() {
            core.stats
                .misses
                .add(MissReason::Unhealthy, ids.len() as u64);
            return Ok((now, None));
        }
        let request = core.tiers.table.request(now.after(core.deadlines.lookup));
        Ok((now, Some(request)))
    }

    fn end(&self, started: MonotonicTime, hits: usize) {
        add(&self.core.stats.lookup_hits, hits as u64);
        let took = self.core.clock.now().since(started);
        self.core
            .stats
            .lookup_latency
            .observe(took.as_nanos() as u64);
    }

    /// Looks ids up, in order. An id without an answer in time, or after a missing one, is not
    /// there.
    fn find(&self, ids: &[BlockId], stop_at_missing: bool, request: Request) -> Vec<LookupResult> {
        let core = &self.core;
        let mut found = core.tiers.lookups.locate(ids, stop_at_missing, request);
        for (&id, place) in ids.iter().zip(&mut found) {
            if place.is_ok() && core.refused.contains(id) {
                *place = Err(MissReason::Refused);
            }
            if let Err(reason) = *place {
                core.stats.misses.add(reason, 1);
                let unanswered = matches!(
                    reason,
                    MissReason::LookupLate | MissReason::IoError | MissReason::Busy
                );
                if stop_at_missing && !unanswered {
                    break; // later ids are no hits
                }
            }
        }
        found
    }
}
