//! Which records are there and where: the upper level first, the lower ones only for what is
//! missing above.
//!
//! The levels share one deadline: each that must be waited for gets half of what is left while
//! another comes below it, and the last a little less than all, so that what the upper ones said
//! still arrives in time. The tiers of one level are waited for together.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_infra::{LANE_LOOKUP, MonotonicTime};
use ucm_io::{IoJob, Pending};
use ucm_tier::backend::Presence;

use super::level::Level;
use super::tier::{Tier, add};
use super::{Place, Request, Tiers};

/// What the last tier leaves of the time it has: this part of it.
const SPARED: u32 = 8;
/// What the threads may take to tell that the time is over.
const GRACE: Duration = Duration::from_millis(5);
/// Ids of one job when a lookup is spread over threads, most of one job, and jobs of one lookup.
const CHUNK: usize = 64;
const CHUNK_MAX: usize = 1024;
const SPREAD: usize = 4;
/// Most ids of one lookup that its threads share evenly.
pub(crate) const WINDOW: usize = CHUNK_MAX * SPREAD;
/// Ids that are not worth another thread.
pub(crate) const LEAST_WINDOW: usize = CHUNK;

impl Tiers {
    /// Whether lookups are answered from memory, without a system call.
    pub(crate) fn answers_at_once(&self) -> bool {
        self.is_ready()
            && self
                .tiers
                .iter()
                .all(|tier| tier.backend.features().answers_at_once)
    }

    /// Where each record is, or why it is nowhere; in order. With `stop_at_missing` what follows
    /// the first that is missing may not have been asked for, and is absent then.
    pub(crate) fn locate(
        self: &Arc<Self>,
        ids: &[BlockId],
        stop_at_missing: bool,
        request: Request,
    ) -> Vec<Place> {
        let mut found: Vec<Place> = Vec::new();
        for (number, level) in self.levels.iter().enumerate() {
            let (missing, wanted) = match number {
                0 => (None, Cow::Borrowed(ids)),
                _ => {
                    let missing: Vec<usize> =
                        (0..ids.len()).filter(|&i| found[i].is_err()).collect();
                    let wanted = missing.iter().map(|&i| ids[i]).collect();
                    (Some(missing), Cow::Owned(wanted))
                }
            };
            if wanted.is_empty() {
                break;
            }
            let until = self.share(number, request.deadline);
            let stop = stop_at_missing && number + 1 == self.levels.len();
            let answers = match level.is_spread() {
                true => self.ask_beside(level, &wanted, stop, until, request),
                false => self
                    .begin_asking(level.members().start, wanted, stop, until, request)
                    .end(self),
            };
            match missing {
                None => found = answers,
                Some(missing) => missing
                    .iter()
                    .zip(answers)
                    .for_each(|(&i, answer)| merge(&mut found[i], answer)),
            }
        }
        found
    }

    /// Which of these records the tiers side by side have: those first that know it, each for what
    /// is missing yet, then the others together, each for what would lie there.
    fn ask_beside(
        self: &Arc<Self>,
        level: &Level,
        ids: &[BlockId],
        stop_at_missing: bool,
        until: MonotonicTime,
        request: Request,
    ) -> Vec<Place> {
        let mut found: Vec<Place> = vec![Err(MissReason::Absent); ids.len()];
        let order: Vec<usize> = ids
            .first()
            .into_iter()
            .flat_map(|&id| level.order(id))
            .collect();
        let knows = |&number: &usize| self.tiers[number].backend.features().answers_at_once;
        let (knowing, asked): (Vec<usize>, Vec<usize>) = order.into_iter().partition(knows);
        let take = |found: &mut [Place], places: Vec<usize>, answers: Vec<Place>| {
            for (at, answer) in places.into_iter().zip(answers) {
                if found[at].is_err() {
                    merge(&mut found[at], answer);
                }
            }
        };
        let begin = |number, found: &[Place], stop, wants: &dyn Fn(BlockId) -> bool| {
            let places = (0..ids.len()).filter(|&at| found[at].is_err() && wants(ids[at]));
            let places: Vec<usize> = places.collect();
            let wanted = places.iter().map(|&at| ids[at]).collect();
            let asking = self.begin_asking(number, Cow::Owned(wanted), stop, until, request);
            (places, asking)
        };
        for number in knowing {
            let (places, asking) = begin(number, &found, false, &|_| true);
            take(&mut found, places, asking.end(self));
        }
        let now = self.clock.now();
        let may = |number: usize| self.tiers[number].may(request.number, now);
        // Where each is asked for what would lie there, what is missing there is missing.
        let stop = stop_at_missing && level.keeps_home();
        let begun = asked
            .into_iter()
            .map(|number| begin(number, &found, stop, &|id| self.expects(number, id, may)));
        for (places, asking) in begun.collect::<Vec<_>>() {
            take(&mut found, places, asking.end(self));
        }
        found
    }

    /// Begins to ask a tier for records.
    fn begin_asking<'a>(
        self: &Arc<Self>,
        number: usize,
        ids: Cow<'a, [BlockId]>,
        stop_at_missing: bool,
        until: MonotonicTime,
        request: Request,
    ) -> Asking<'a> {
        let answers = match ids.is_empty() || self.admits_lookup(number, request, self.clock.now())
        {
            true => {
                let tier = &self.tiers[number];
                begin(
                    tier,
                    self.levels[tier.level].is_spread(),
                    &ids,
                    stop_at_missing,
                    until,
                )
            }
            false => Answers::Off,
        };
        Asking {
            number,
            ids,
            request,
            answers,
        }
    }

    /// Whether a lookup may go to a tier now. One that answers by itself is not asked for its
    /// health by it: where that is in question it is looked at in the background.
    fn admits_lookup(
        self: &Arc<Self>,
        number: usize,
        request: Request,
        now: MonotonicTime,
    ) -> bool {
        let tier = &self.tiers[number];
        if !tier.knows_by_itself() || !tier.state.ready.load(Ordering::Acquire) {
            return self.admits(number, request.number, now);
        }
        self.changed(number, tier.trip_if_overrun(now), None);
        let may = tier.may(request.number, now);
        if may && !tier.is_well() {
            self.look_later(number);
        }
        may
    }

    /// Until when a level may take.
    fn share(&self, number: usize, deadline: MonotonicTime) -> MonotonicTime {
        let now = self.clock.now();
        let left = deadline.since(now);
        if self.levels.len() == 1 || self.levels[number].memory || left == Duration::ZERO {
            deadline
        } else if number + 1 == self.levels.len() {
            now.after(left - left / SPARED)
        } else {
            now.after(left / 2)
        }
    }
}

/// A tier that was asked for records.
struct Asking<'a> {
    number: usize,
    ids: Cow<'a, [BlockId]>,
    request: Request,
    answers: Answers,
}

/// What it says, or will.
enum Answers {
    /// It is not asked now.
    Off,
    /// It has answered, with the error of a lookup that failed.
    There(Vec<Presence>, Option<Error>),
    /// In pieces that its threads share: of how many ids each is.
    Coming(Vec<(usize, Pending<Vec<Presence>>)>),
}

impl Asking<'_> {
    /// Which of the records it has, in order, one answer for each.
    fn end(self, tiers: &Tiers) -> Vec<Place> {
        let (tier, number) = (&tiers.tiers[self.number], self.number);
        let (there, failed) = match self.answers {
            Answers::Off => return vec![Err(MissReason::Unhealthy); self.ids.len()],
            Answers::There(there, failed) => (there, failed),
            Answers::Coming(pieces) => gather(
                pieces
                    .into_iter()
                    .map(|(asked, look)| (asked, look.wait_for(GRACE))),
            ),
        };
        if !self.ids.is_empty() && !tier.knows_by_itself() {
            tiers.note(number, self.request, failed.as_ref());
        }
        let place = |(&id, there): (&BlockId, Presence)| match there {
            Ok(()) if tier.has_refused(id) => Err(MissReason::Refused),
            Ok(()) => Ok(number as u8),
            Err(reason) => Err(reason),
        };
        let places: Vec<Place> = self.ids.iter().zip(there).map(place).collect();
        let hits = places.iter().filter(|place| place.is_ok()).count();
        add(&tier.counts.hits, hits as u64);
        places
    }
}

/// Asks a tier for records: here and now where that needs no thread of the tier, or in pieces that
/// its threads share. `beside` others one that must be waited for has a thread of its own, so that
/// all are waited for together.
fn begin(tier: &Tier, beside: bool, ids: &[BlockId], stop: bool, until: MonotonicTime) -> Answers {
    let features = tier.backend.features();
    if features.answers_at_once || features.waits_by_itself && !beside {
        let io = tier.pool.here(LANE_LOOKUP, until);
        let ask = |ids: &[BlockId]| (ids.len(), tier.backend.lookup(&io, ids, stop));
        let most = if features.answers_at_once {
            ids.len().max(1)
        } else {
            CHUNK_MAX
        };
        let (there, failed) = gather(ids.chunks(most).map(ask));
        return Answers::There(there, failed);
    }
    let chunk = ids.len().div_ceil(SPREAD).clamp(CHUNK, CHUNK_MAX);
    let begin = |ids: &[BlockId]| {
        let (backend, ids, asked) = (Arc::clone(&tier.backend), ids.to_vec(), ids.len());
        let look = move |io: &IoJob| backend.lookup(io, &ids, stop);
        (asked, tier.pool.begin(LANE_LOOKUP, until, look))
    };
    Answers::Coming(ids.chunks(chunk).map(begin).collect())
}

/// Puts the answers to the pieces of a lookup together. Where none was answered, the error of the
/// first beside them: one word on the medium for the whole lookup.
fn gather(
    pieces: impl Iterator<Item = (usize, Result<Vec<Presence>>)>,
) -> (Vec<Presence>, Option<Error>) {
    let (mut found, mut answered, mut failed) = (Vec::new(), false, None);
    for (asked, answer) in pieces {
        let end = found.len() + asked;
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

/// Adds what a lower tier says of a record that is missing above: the first that is more than "not
/// there" is the reason.
fn merge(place: &mut Place, below: Place) {
    if below.is_ok() || *place == Err(MissReason::Absent) {
        *place = below;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_answered_in_time_counts_and_the_rest_is_late() {
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
