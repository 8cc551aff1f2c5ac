//! Which records are there and where: the upper level first, the lower ones only for those that are
//! missing above.
//!
//! The levels share one deadline: each that must be waited for gets half of what is left while
//! another is below it, and the last a little less than all, so that the answers of the upper ones
//! are still in time. The tiers of one level are waited for together.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_infra::{LANE_LOOKUP, MonotonicTime};
use ucm_io::{IoJob, Pending};
use ucm_media::backend::Presence;

use super::config::{LookupResult, Request};
use super::level::{Level, TierTable};
use super::probes::Probes;
use super::tier::Tier;
use crate::stats::add;

/// The last tier leaves this part of the time it has.
const SPARED: u32 = 8;
/// Time that threads may take to report that the time is over.
const GRACE: Duration = Duration::from_millis(5);
/// Ids of one job when a lookup is spread over threads, most of one job, and jobs of one lookup.
const CHUNK: usize = 64;
const CHUNK_MAX: usize = 1024;
const SPREAD: usize = 4;
/// Most ids of one lookup that its threads share evenly.
pub(crate) const WINDOW: usize = CHUNK_MAX * SPREAD;
/// Ids that are not worth another thread.
pub(crate) const LEAST_WINDOW: usize = CHUNK;

/// See the module.
pub(crate) struct TierLookups {
    pub(super) table: Arc<TierTable>,
    pub(super) probes: Arc<Probes>,
}

impl TierLookups {
    /// Where each record is, or why it is nowhere; in order. With `stop_at_missing` records after
    /// the first that is missing may be absent without a lookup.
    pub(crate) fn locate(
        &self,
        ids: &[BlockId],
        stop_at_missing: bool,
        request: Request,
    ) -> Vec<LookupResult> {
        let mut found = vec![Err(MissReason::Absent); ids.len()];
        let levels = &self.table.levels;
        for (number, level) in levels.iter().enumerate() {
            let missing: Vec<usize> = (0..ids.len()).filter(|&i| found[i].is_err()).collect();
            let wanted: Cow<'_, [BlockId]> = match number {
                0 => Cow::Borrowed(ids),
                _ => missing.iter().map(|&i| ids[i]).collect(),
            };
            if wanted.is_empty() {
                break;
            }
            let until = self.share(number, request.deadline);
            let stop = stop_at_missing && number + 1 == levels.len();
            let answers = match level.is_spread() {
                true => self.locate_beside(level, &wanted, stop, until, request),
                false => self
                    .begin(level.members().start, wanted, stop, until, request)
                    .end(),
            };
            for (at, answer) in missing.into_iter().zip(answers) {
                merge(&mut found[at], answer);
            }
        }
        found
    }

    /// Which of these records the tiers side by side have: first those with an index, each for the
    /// records still missing, then the others together, each for those that would lie there.
    fn locate_beside(
        &self,
        level: &Level,
        ids: &[BlockId],
        stop_at_missing: bool,
        until: MonotonicTime,
        request: Request,
    ) -> Vec<LookupResult> {
        let Some(&first) = ids.first() else {
            return Vec::new();
        };
        let mut found = vec![Err(MissReason::Absent); ids.len()];
        let indexed = |&number: &usize| self.table.tiers[number].backend.features().answers_at_once;
        let (indexed, others): (Vec<_>, Vec<_>) = level.order(first).partition(indexed);
        let missing = |found: &[LookupResult]| -> Vec<usize> {
            (0..ids.len()).filter(|&at| found[at].is_err()).collect()
        };
        let begin = |number, places: &[usize], stop| {
            let wanted = places.iter().map(|&at| ids[at]).collect();
            self.begin(number, wanted, stop, until, request)
        };
        for number in indexed {
            let places = missing(&found);
            for (&at, answer) in places.iter().zip(begin(number, &places, false).end()) {
                merge(&mut found[at], answer);
            }
        }
        let now = self.table.clock.now();
        let may = |number: usize| self.table.tiers[number].health.may(request.number, now);
        // A record that is missing where it would lie is missing.
        let stop = stop_at_missing && level.keeps_home();
        let mut begun = Vec::with_capacity(others.len());
        for number in others {
            let mut places = missing(&found);
            places.retain(|&at| self.table.expects(number, ids[at], may));
            let lookup = begin(number, &places, stop);
            begun.push((places, lookup));
        }
        for (places, lookup) in begun {
            for (at, answer) in places.into_iter().zip(lookup.end()) {
                if found[at].is_err() {
                    merge(&mut found[at], answer);
                }
            }
        }
        found
    }

    /// Begins a lookup in one tier.
    fn begin<'a>(
        &'a self,
        number: usize,
        ids: Cow<'a, [BlockId]>,
        stop_at_missing: bool,
        until: MonotonicTime,
        request: Request,
    ) -> BegunLookup<'a> {
        let tier = &self.table.tiers[number];
        let beside = self.table.level_of(number).is_spread();
        let now = self.table.clock.now();
        let answers = match ids.is_empty() || self.probes.admits_lookup(number, request, now) {
            true => Answers::begin(beside, tier, &ids, stop_at_missing, until),
            false => Answers::Off,
        };
        BegunLookup {
            tier,
            number,
            ids,
            request,
            answers,
        }
    }

    /// Until when a level may take.
    fn share(&self, number: usize, deadline: MonotonicTime) -> MonotonicTime {
        let (levels, now) = (&self.table.levels, self.table.clock.now());
        let left = deadline.since(now);
        if levels.len() == 1 || levels[number].memory || left == Duration::ZERO {
            deadline
        } else if number + 1 == levels.len() {
            now.after(left - left / SPARED)
        } else {
            now.after(left / 2)
        }
    }
}

/// A lookup in one tier.
struct BegunLookup<'a> {
    tier: &'a Tier,
    number: usize,
    ids: Cow<'a, [BlockId]>,
    request: Request,
    answers: Answers,
}

/// The answers of a tier, now or later.
enum Answers {
    /// It is switched off.
    Off,
    /// They are there, with the error of a lookup that failed.
    There(Vec<Presence>, Option<Error>),
    /// In pieces that its threads share, each with its number of ids.
    Pending(Vec<(usize, Pending<Vec<Presence>>)>),
}

impl Answers {
    /// Begins a lookup in a tier: on this thread where that needs none of the tier's, or in pieces
    /// that its threads share. `beside` others, a tier that must be waited for uses a thread of its
    /// own, so that all are waited for together.
    fn begin(beside: bool, tier: &Tier, ids: &[BlockId], stop: bool, until: MonotonicTime) -> Self {
        let features = tier.backend.features();
        if features.answers_at_once || features.waits_by_itself && !beside {
            let io = tier.pool.here(LANE_LOOKUP, until);
            let look_up = |ids: &[BlockId]| (ids.len(), tier.backend.lookup(&io, ids, stop));
            let most = if features.answers_at_once {
                ids.len().max(1)
            } else {
                CHUNK_MAX
            };
            let (there, failed) = gather(ids.chunks(most).map(look_up));
            return Answers::There(there, failed);
        }
        let chunk = ids.len().div_ceil(SPREAD).clamp(CHUNK, CHUNK_MAX);
        let begin = |ids: &[BlockId]| {
            let (backend, ids, count) = (Arc::clone(&tier.backend), ids.to_vec(), ids.len());
            let look_up = move |io: &IoJob| backend.lookup(io, &ids, stop);
            (count, tier.pool.begin(LANE_LOOKUP, until, look_up))
        };
        Answers::Pending(ids.chunks(chunk).map(begin).collect())
    }
}

impl BegunLookup<'_> {
    /// Which of the records the tier has, in order, one answer for each.
    fn end(self) -> Vec<LookupResult> {
        let tier = self.tier;
        let (there, failed) = match self.answers {
            Answers::Off => return vec![Err(MissReason::Unhealthy); self.ids.len()],
            Answers::There(there, failed) => (there, failed),
            Answers::Pending(pieces) => {
                let pieces = pieces.into_iter();
                gather(pieces.map(|(count, lookup)| (count, lookup.wait_for(GRACE))))
            }
        };
        if !self.ids.is_empty() && !tier.answers_from_index() {
            tier.note(self.request, failed.as_ref());
        }
        let mut places = Vec::with_capacity(self.ids.len());
        for (&id, there) in self.ids.iter().zip(there) {
            places.push(match there {
                Ok(()) if tier.has_refused(id) => Err(MissReason::Refused),
                Ok(()) => Ok(self.number as u8),
                Err(reason) => Err(reason),
            });
        }
        let hits = places.iter().filter(|place| place.is_ok()).count();
        add(&tier.counts.hits, hits as u64);
        places
    }
}

/// Puts the answers to the pieces of a lookup together. Where all failed, with the error of the
/// first: one failure of the medium for the whole lookup.
fn gather(
    pieces: impl Iterator<Item = (usize, Result<Vec<Presence>>)>,
) -> (Vec<Presence>, Option<Error>) {
    let (mut found, mut answered, mut failed) = (Vec::new(), false, None);
    for (count, answer) in pieces {
        let end = found.len() + count;
        match answer {
            Ok(there) => {
                answered = true;
                found.extend(there);
                found.resize(end, Err(MissReason::Absent));
            }
            Err(error) => {
                found.resize(end, Err(reason_of(&error)));
                failed.get_or_insert(error);
            }
        }
    }
    (found, failed.filter(|_| !answered))
}

/// Why ids are no hits whose lookup failed.
fn reason_of(error: &Error) -> MissReason {
    match error.kind() {
        ErrorKind::Timeout => MissReason::LookupLate,
        ErrorKind::Unhealthy => MissReason::Unhealthy,
        ErrorKind::Busy => MissReason::Busy,
        _ => MissReason::IoError,
    }
}

/// Adds the answer of a lower tier for a record that is missing above: the first answer that is
/// more than "absent" is the reason.
fn merge(place: &mut LookupResult, below: LookupResult) {
    if below.is_ok() || *place == Err(MissReason::Absent) {
        *place = below;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_in_time_count_and_the_rest_is_late() {
        let late = || Error::new(ErrorKind::Timeout, "late");
        let pieces = vec![(2, Ok(vec![Ok(())])), (2, Err(late()))];
        let (found, failed) = gather(pieces.into_iter());
        let unanswered = Err(MissReason::LookupLate);
        assert_eq!(
            found,
            [Ok(()), Err(MissReason::Absent), unanswered, unanswered]
        );
        assert!(failed.is_none(), "the medium answers");
        let (found, failed) = gather(vec![(1, Err(late())), (1, Err(late()))].into_iter());
        assert_eq!(found, [unanswered; 2]);
        assert_eq!(failed.unwrap().kind(), ErrorKind::Timeout);
    }
}
