//! Which blocks are stored, within one deadline per call.

use std::sync::{Arc, Weak};
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result, limits};
use ucm_infra::{Completion, MonotonicTime};

use super::{Core, LANE_ASK};
use crate::stats::Stats;
use crate::tiers::{LEAST_WINDOW, Place, Request, WINDOW};

/// How long a lookup that no one waits for may wait for its turn at least, and the pool to tell
/// that it hangs.
const QUEUED: Duration = Duration::from_secs(1);

/// What [`Core::locate_on_prefix`] answers.
pub type Located = Result<(Vec<u8>, Option<MissReason>)>;

/// A lookup on a thread of the engine. Once this is dropped, it is not begun any more.
pub struct Asked(Arc<Completion<(Located, Duration)>>);

impl Asked {
    /// The answer, and how long after the question it was there; `None` until then.
    pub fn answer(&self) -> Option<(Located, Duration)> {
        self.0.peek()
    }
}

impl Core {
    /// Which of these blocks are stored whole, as far as the lookup deadline lets us know; exact
    /// per id.
    pub fn lookup(self: &Arc<Self>, ids: &[BlockId]) -> Result<Vec<bool>> {
        let (now, asked) = self.begin(ids)?;
        if !asked {
            return Ok(vec![false; ids.len()]);
        }
        let request = self.tiers.request(now.after(self.deadlines.lookup));
        let found = self.ask(ids, false, request);
        let found: Vec<bool> = found.into_iter().map(|answer| answer.is_ok()).collect();
        self.end(now, found.iter().filter(|&&present| present).count());
        Ok(found)
    }

    /// How many ids from the first on are stored without a gap. Every id counted was checked.
    pub fn lookup_on_prefix(self: &Arc<Self>, ids: &[BlockId]) -> Result<usize> {
        Ok(self.explain_on_prefix(ids)?.0)
    }

    /// The same, and why the next id is no hit; `None` if every id is one.
    pub fn explain_on_prefix(
        self: &Arc<Self>,
        ids: &[BlockId],
    ) -> Result<(usize, Option<MissReason>)> {
        let (tiers, reason) = self.locate_on_prefix(ids)?;
        Ok((tiers.len(), reason))
    }

    /// The tier, counted from the top, that each id from the first on would be read from without a
    /// gap, and why the next one is no hit. Where a record is may change until it is read.
    pub fn locate_on_prefix(self: &Arc<Self>, ids: &[BlockId]) -> Located {
        let (now, asked) = self.begin(ids)?;
        if !asked {
            return Ok((
                Vec::new(),
                (!ids.is_empty()).then_some(MissReason::Unhealthy),
            ));
        }
        let request = self.tiers.request(now.after(self.deadlines.lookup)); // one for all windows
        let (mut tiers, mut window, mut reason) = (Vec::new(), LEAST_WINDOW, None);
        while tiers.len() < ids.len() {
            let known = tiers.len();
            let end = ids.len().min(known + window);
            let found = self.ask(&ids[known..end], true, request);
            tiers.extend(found.iter().map_while(|answer| answer.ok()));
            reason = found.into_iter().find_map(std::result::Result::err);
            if reason.is_some() {
                break;
            }
            window = (window * 2).min(WINDOW);
        }
        self.end(now, tiers.len());
        Ok((tiers, reason))
    }

    /// The same on a thread of the engine; Busy when too many wait for it.
    pub fn begin_locate_on_prefix(self: &Arc<Self>, ids: Vec<BlockId>) -> Result<Asked> {
        self.usable()?;
        let (asked, core) = (Asked(Completion::new()), Arc::clone(self));
        let (begun, answer) = (self.clock.now(), Arc::downgrade(&asked.0));
        let turn = QUEUED.max(self.deadlines.lookup);
        let work = {
            let (core, answer) = (Arc::clone(&core), Weak::clone(&answer));
            move || match answer.strong_count() > 0 && core.clock.now() < begun.after(turn) {
                true => core.locate_on_prefix(&ids),
                false => Err(Error::new(
                    ErrorKind::Timeout,
                    "the lookup had no turn in time",
                )),
            }
        };
        let tell = move |located: Result<Located>| {
            if let Some(answer) = answer.upgrade() {
                answer.complete((located.flatten(), core.clock.now().since(begun)));
            }
        };
        // none that had its turn takes so long
        let deadline = begun.after(turn + self.deadlines.lookup + QUEUED);
        self.asks.submit(LANE_ASK, deadline, work, tell)?;
        Ok(asked)
    }

    /// Whether lookups are answered from memory, without a system call. May change: a layout is
    /// decided by the first writer.
    pub fn answers_at_once(&self) -> bool {
        self.tiers.answers_at_once()
    }

    /// Checks and counts a call; false if there is nothing to ask or no one to be asked.
    fn begin(self: &Arc<Self>, ids: &[BlockId]) -> Result<(MonotonicTime, bool)> {
        self.usable()?;
        if ids.len() > limits::MAX_IDS_PER_CALL {
            return Err(Error::invalid("too many ids in one call")
                .with("ids", ids.len())
                .with("most", limits::MAX_IDS_PER_CALL));
        }
        let now = self.clock.now();
        Stats::add(&self.stats.lookups, 1);
        Stats::add(&self.stats.lookup_ids, ids.len() as u64);
        if ids.is_empty() {
            return Ok((now, false));
        }
        let asked = self.check_available(now).is_ok();
        if !asked {
            self.stats
                .misses
                .add(MissReason::Unhealthy, ids.len() as u64);
        }
        Ok((now, asked))
    }

    fn end(&self, started: MonotonicTime, hits: usize) {
        Stats::add(&self.stats.lookup_hits, hits as u64);
        let took = self.clock.now().since(started);
        self.stats.lookup_latency.observe(took.as_nanos() as u64);
    }

    /// Asks for ids, in order; what was not answered in time, or not asked after a missing one, is
    /// not there.
    fn ask(
        self: &Arc<Self>,
        ids: &[BlockId],
        stop_at_missing: bool,
        request: Request,
    ) -> Vec<Place> {
        let mut found = self.tiers.locate(ids, stop_at_missing, request);
        for (&id, place) in ids.iter().zip(&mut found) {
            if place.is_ok() && self.refused.contains(id) {
                *place = Err(MissReason::Refused);
            }
            if let Err(reason) = *place {
                self.stats.misses.add(reason, 1);
                let unanswered = matches!(
                    reason,
                    MissReason::LookupLate | MissReason::IoError | MissReason::Busy
                );
                if stop_at_missing && !unanswered {
                    break; // what follows is no hit whatever it is
                }
            }
        }
        found
    }
}
