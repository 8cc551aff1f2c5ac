//! Which records are there and where: the upper tier first, the lower ones only for what is missing above.
//!
//! The tiers share one deadline: each of those that must be waited for gets half of what is left while another comes
//! below it, and the last a little less than all, so that what the upper ones said still arrives in time.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, MissReason};
use ucm_infra::{LANE_LOOKUP, MonotonicTime};
use ucm_io::IoJob;
use ucm_tier::backend::Presence;

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

    /// Where each record is, or why it is nowhere; in order. With `stop_at_missing` what follows the first that is missing
    /// may not have been asked for, and is absent then.
    pub(crate) fn locate(
        self: &Arc<Self>,
        ids: &[BlockId],
        stop_at_missing: bool,
        request: Request,
    ) -> Vec<Place> {
        let mut found: Vec<Place> = Vec::new();
        for (number, tier) in self.tiers.iter().enumerate() {
            let (missing, wanted) = match number {
                0 => (None, Cow::Borrowed(ids)),
                _ => {
                    let missing: Vec<usize> = (0..ids.len()).filter(|&i| found[i].is_err()).collect();
                    let wanted = missing.iter().map(|&i| ids[i]).collect();
                    (Some(missing), Cow::Owned(wanted))
                }
            };
            if wanted.is_empty() {
                break;
            }
            let answers = self.ask_tier(number, &wanted, stop_at_missing, request);
            let hits = answers.iter().filter(|answer| answer.is_ok()).count();
            add(&tier.counts.hits, hits as u64);
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

    /// Which of these records a tier has, in order, one answer for each.
    fn ask_tier(
        self: &Arc<Self>,
        number: usize,
        ids: &[BlockId],
        stop_at_missing: bool,
        request: Request,
    ) -> Vec<Place> {
        let (tier, now) = (&self.tiers[number], self.clock.now());
        if !self.admits_lookup(number, request, now) {
            return vec![Err(MissReason::Unhealthy); ids.len()];
        }
        let last = number + 1 == self.tiers.len();
        let until = self.share(number, last, now, request.deadline);
        let (there, failed) = ask(tier, ids, stop_at_missing && last, until);
        if !tier.knows_by_itself() {
            self.note(number, request, failed.as_ref());
        }
        let place = |(&id, there): (&BlockId, Presence)| match there {
            Ok(()) if tier.has_refused(id) => Err(MissReason::Refused),
            Ok(()) => Ok(number as u8),
            Err(reason) => Err(reason),
        };
        ids.iter().zip(there).map(place).collect()
    }

    /// Whether a lookup may go to a tier now. One that answers by itself is not asked for its health by it: where that is in
    /// question it is looked at in the background.
    fn admits_lookup(self: &Arc<Self>, number: usize, request: Request, now: MonotonicTime) -> bool {
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

    /// Until when a tier may take.
    fn share(&self, number: usize, last: bool, now: MonotonicTime, deadline: MonotonicTime) -> MonotonicTime {
        let left = deadline.since(now);
        let alone = self.tiers.len() == 1;
        if alone || self.tiers[number].memory || left == Duration::ZERO {
            deadline
        } else if last {
            now.after(left - left / SPARED)
        } else {
            now.after(left / 2)
        }
    }
}

/// Asks a tier for records, in pieces that its threads share. Where no piece was answered, the error of the first beside
/// it: one word on the medium for the whole lookup.
fn ask(tier: &Tier, ids: &[BlockId], stop: bool, until: MonotonicTime) -> (Vec<Presence>, Option<Error>) {
    if tier.backend.features().answers_at_once {
        let io = tier.pool.here(LANE_LOOKUP, until);
        return match tier.backend.lookup(&io, ids, stop) {
            Ok(mut there) => {
                there.resize(ids.len(), Err(MissReason::Absent));
                (there, None)
            }
            Err(error) => (vec![Err(reason_of(&error)); ids.len()], Some(error)),
        };
    }
    let chunk = ids.len().div_ceil(SPREAD).clamp(CHUNK, CHUNK_MAX);
    let begin = |ids: &[BlockId]| {
        let (backend, ids, asked) = (Arc::clone(&tier.backend), ids.to_vec(), ids.len());
        let look = move |io: &IoJob| backend.lookup(io, &ids, stop);
        (asked, tier.pool.begin(LANE_LOOKUP, until, look))
    };
    let begun: Vec<_> = ids.chunks(chunk).map(begin).collect();
    let answers = begun
        .into_iter()
        .map(|(asked, look)| (asked, look.wait_for(GRACE)));
    let (mut found, mut answered, mut failed) = (Vec::with_capacity(ids.len()), false, None);
    for (asked, answer) in answers {
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

/// Adds what a lower tier says of a record that is missing above: the first that is more than "not there" is the reason.
fn merge(place: &mut Place, below: Place) {
    if below.is_ok() || *place == Err(MissReason::Absent) {
        *place = below;
    }
}
