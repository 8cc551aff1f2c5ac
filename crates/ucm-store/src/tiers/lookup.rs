//! Which records are there and where: the upper stage first, the lower ones only for what is missing above.
//!
//! The stages share one deadline: each of those that must be waited for gets half of what is left while another comes
//! below it, and the last a little less than all, so that what the upper ones said still arrives in time.

use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_infra::Mono;

use super::Shared;
use super::stage::add;
use crate::backend::{Done, Place, Presence};

/// What the last stage leaves of the time it has: this part of it.
const SPARED: u32 = 8;

/// A lookup on its way down.
struct Asking {
    ids: Vec<BlockId>,
    found: Vec<Place>,
    stop_at_missing: bool,
    deadline: Mono,
    /// A stage answered.
    answered: bool,
    /// The first stage that did not, and why.
    failed: Option<Error>,
    done: Done<Vec<Place>>,
}

impl Shared {
    /// Where each record is, or why it is nowhere.
    pub(super) fn locate(
        self: &Arc<Self>,
        ids: Vec<BlockId>,
        stop_at_missing: bool,
        deadline: Mono,
        done: Done<Vec<Place>>,
    ) {
        let asking = Asking {
            found: vec![Err(MissReason::Absent); ids.len()],
            ids,
            stop_at_missing,
            deadline,
            answered: false,
            failed: None,
            done,
        };
        self.ask(asking, 0);
    }

    /// Asks the stages from number `from` on for what is missing.
    fn ask(self: &Arc<Self>, mut asking: Asking, from: usize) {
        for number in from..self.stages.len() {
            let missing: Vec<usize> = (0..asking.ids.len())
                .filter(|&i| asking.found[i].is_err())
                .collect();
            if missing.is_empty() {
                break;
            }
            let now = self.clock.now();
            if !self.admits(number, now) {
                let off = Error::new(ErrorKind::Unhealthy, "a tier is switched off for now");
                asking.fail(&missing, off.with("tier", &self.stages[number].name));
                continue;
            }
            let last = number + 1 == self.stages.len();
            let ids = missing.iter().map(|&i| asking.ids[i]).collect();
            let stop = asking.stop_at_missing && last;
            let until = self.share(number, last, now, asking.deadline);
            let shared = Arc::clone(self);
            let answered = move |result: Result<Vec<Presence>>| {
                shared.note(number, asking.deadline, result.as_ref().err());
                match result {
                    Ok(found) => asking.take(&shared, number, &missing, &found),
                    Err(error) => asking.fail(&missing, error),
                }
                shared.ask(asking, number + 1);
            };
            return self.stages[number]
                .backend
                .lookup(ids, stop, until, Box::new(answered));
        }
        asking.end();
    }

    /// Until when a stage may take.
    fn share(&self, number: usize, last: bool, now: Mono, deadline: Mono) -> Mono {
        let left = deadline.since(now);
        if self.stages[number].memory || left == Duration::ZERO {
            deadline
        } else if last {
            now.after(left - left / SPARED)
        } else {
            now.after(left / 2)
        }
    }
}

impl Asking {
    /// What a stage said of those that were missing; the answer may end early.
    fn take(&mut self, shared: &Shared, number: usize, missing: &[usize], found: &[Presence]) {
        self.answered = true;
        let stage = &shared.stages[number];
        let mut hits = 0;
        for (&i, &there) in missing.iter().zip(found) {
            match there {
                Ok(()) if stage.has_refused(self.ids[i]) => self.miss(i, MissReason::Refused),
                Ok(()) => {
                    hits += 1;
                    self.found[i] = Ok(number as u8);
                }
                Err(reason) => self.miss(i, reason),
            }
        }
        add(&stage.counts.hits, hits);
    }

    /// A stage was not asked, or did not answer.
    fn fail(&mut self, missing: &[usize], error: Error) {
        let reason = match error.kind() {
            ErrorKind::Timeout => MissReason::LookupLate,
            ErrorKind::Unhealthy => MissReason::Unhealthy,
            ErrorKind::Busy => MissReason::Busy,
            _ => MissReason::IoError,
        };
        missing.iter().for_each(|&i| self.miss(i, reason));
        self.failed.get_or_insert(error);
    }

    /// The first that is more than "not there" is the reason.
    fn miss(&mut self, i: usize, reason: MissReason) {
        if self.found[i] == Err(MissReason::Absent) {
            self.found[i] = Err(reason);
        }
    }

    fn end(mut self) {
        if let (false, Some(error)) = (self.answered, self.failed) {
            return (self.done)(Err(error));
        }
        if self.stop_at_missing {
            let first = self.found.iter().position(std::result::Result::is_err);
            self.found
                .truncate(first.map_or(self.ids.len(), |first| first + 1));
        }
        (self.done)(Ok(self.found));
    }
}
