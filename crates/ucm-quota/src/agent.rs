//! The keeper: the thread on which a writer agrees with the others of its root. Nothing here is on the way of a write.
//!
//! It wakes about once a second, at once when the grant runs low, and ten times a second while somebody waits for an
//! answer. Every turn lists one small directory and reads what changed there.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;

use super::agent_state::{BEAT, GrantsRead, LEASE, QuotaAgent};
use super::count::Why;
use super::documents::{Grants, Name, Note, hex};
use super::documents_io::Look;
use super::grant_table::{GrantTable, ahead};
use super::remove::high;
use super::writer_quota::{Answers, Free, HOLDS};
use super::{LANE_KEEP, Quota, answer};

/// Time between two turns when nothing happens, and while somebody waits for an answer.
const IDLE: Duration = Duration::from_secs(1);
const ACTIVE: Duration = Duration::from_millis(100);
/// Time between two notes of a writer that wants nothing, and least time between two of one that does.
const NOTE: Duration = Duration::from_secs(60);
const NOTE_AGAIN: Duration = Duration::from_millis(50);
/// How long the keeper's steps may take together.
const TURN: Duration = Duration::from_secs(5);
/// Longest time between two counts.
const COUNT_AGAIN: Duration = Duration::from_secs(3600);
/// The same where age or a quota decides.
const COUNT_RULES: Duration = Duration::from_secs(300);
/// Pause after counts that could not do what was wanted; it doubles up to the longest.
const VAIN: Duration = Duration::from_millis(50);
const LONGEST_VAIN: Duration = Duration::from_secs(60);

/// How long a medium may take until what was removed is free: btrfs and ZFS give it back with their next commit.
const SETTLES: Duration = Duration::from_secs(30);

impl Quota {
    /// Starts the thread.
    pub(super) fn keep(self: &Arc<Self>) {
        let (weak, notify, clock) = (Arc::downgrade(self), self.notify.clone(), Arc::clone(&self.clock));
        let work = move || loop {
            let seen = notify.seen();
            let Some(space) = weak.upgrade() else { return };
            if space.life.leaving.load(Ordering::Acquire) {
                return space.resign();
            }
            let next = space.turn();
            drop(space);
            clock.sleep(&notify, seen, Some(next));
        };
        // A pool that is shut down keeps nothing any more.
        let _ = self.worker.submit(LANE_KEEP, MonotonicTime::NEVER, work, |_| {});
    }

    /// One look around; when to look next.
    fn turn(self: &Arc<Self>) -> MonotonicTime {
        let now = self.clock.now();
        let mut keeper = self.keeper.lock();
        if self.ledger.lock().renew(now, ucm_infra::random_u64) {
            keeper.note = Note::default();
        }
        let looked = self.look_around(&mut keeper, now);
        let mut answers = Answers::new();
        let mut ledger = self.ledger.lock();
        let failed = looked.is_err();
        ledger.trouble = looked.as_ref().err().or(keeper.counts.trouble.as_ref()).cloned();
        let now = self.clock.now();
        ledger.settle_waiting(now, &mut answers);
        let late = ledger.next_late();
        drop(ledger);
        drop(keeper);
        answer(answers);
        let active = !failed && (late.is_some() || looked.unwrap_or_default());
        let next = now.after(if active { ACTIVE } else { IDLE });
        late.map_or(next, |late| late.min(next))
    }

    /// One look around, as collector or not. Whether somebody waits for an answer.
    fn look_around(self: &Arc<Self>, keeper: &mut QuotaAgent, now: MonotonicTime) -> Result<bool> {
        self.take_outcome(keeper, now);
        let deadline = now.after(TURN);
        if self.check_root(deadline).is_err() {
            self.tend(deadline)?;
        }
        if keeper.medium.looked.is_none_or(|at| now.since(at) >= BEAT) || self.ledger.lock().is_half_free() {
            let (free, floor) = self.free_and_floor(deadline)?;
            let mut ledger = self.ledger.lock();
            ledger.free = Free {
                bytes: Some(free),
                floor,
                at: ledger.admitted,
            };
            drop(ledger);
            keeper.medium.looked = Some(now);
            keeper.medium.below_floor = free < floor;
        }
        let full = self.ledger.lock().pause.full;
        keeper.medium.full |= std::mem::replace(&mut keeper.medium.own_full, full) < full;
        let look = self.look(deadline)?;
        let office = self.office.load(Ordering::Acquire);
        if office > 0 && look.highest().is_none_or(|highest| highest <= office) {
            return self.lead(keeper, office, &look, now);
        }
        self.office.store(0, Ordering::Release);
        if let Some(term) = self.elect(keeper, &look, now, deadline)? {
            self.office.store(term, Ordering::Release);
            let look = self.look(deadline)?;
            return self.lead(keeper, term, &look, now);
        }
        self.follow(keeper, &look, now, deadline)
    }

    /// What the last count came to, and when another one makes sense.
    fn take_outcome(&self, keeper: &mut QuotaAgent, now: MonotonicTime) {
        let Some(outcome) = self.counting.outcome() else {
            return;
        };
        let vain = match outcome {
            Ok(outcome) => {
                keeper.counts.trouble = None;
                keeper.counts.done = true;
                keeper.counts.last = now;
                if outcome.floor && outcome.freed > 0 {
                    keeper.medium.settles_until = now.after(SETTLES);
                    keeper.medium.looked = None; // most give it back at once
                }
                outcome.in_vain && outcome.freed == 0
            }
            Err(error) => {
                // One that came too late had its pause.
                let at_once = error.kind() != ErrorKind::Timeout;
                keeper.counts.trouble = Some(error);
                at_once
            }
        };
        keeper.counts.vain = if vain { keeper.counts.vain + 1 } else { 0 };
        // The first one is tried again at once.
        let pause = match keeper.counts.vain {
            0 | 1 => Duration::ZERO,
            times => VAIN.saturating_mul(1 << times.min(16)).min(LONGEST_VAIN),
        };
        keeper.counts.not_before = now.after(pause);
    }

    /// A turn of a writer that is not collector.
    fn follow(
        &self,
        keeper: &mut QuotaAgent,
        look: &Look,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) -> Result<bool> {
        keeper.counts.trouble = None; // that is the collector's, and this is not it any more
        let Some(term) = look.highest() else {
            return Ok(true);
        };
        let (limit, writers) = keeper
            .published
            .as_ref()
            .map_or((self.ledger.lock().told.limit, 1), |grants| {
                (grants.limit, grants.writers.len())
            });
        let (writer, mut note) = self.my_note(now, ahead(limit, writers));
        let told = look.files.contains_key(&Name::Writer(writer));
        note.sequence = keeper.note.sequence;
        let wants = note.wanted > 0;
        let asks = wants && (keeper.note.wanted == 0 || now.since(keeper.note_at) >= NOTE_AGAIN);
        let changed = note != keeper.note && (asks || note.full > keeper.note.full);
        if !told || changed || now.since(keeper.note_at) >= NOTE {
            note.sequence += 1;
            self.write(Name::Writer(writer), &note, true, deadline)?;
            self.ledger.lock().holds_until = now.after(HOLDS);
            (keeper.note, keeper.note_at) = (note, now);
        }
        let needy = wants || self.ledger.lock().next_late().is_some();
        if let Some(meta) = look.files.get(&Name::Grants(term))
            && (needy || keeper.grants_read.is_none_or(|read| read.is_old(term, meta, now)))
            && let Some(grants) = self.read::<Grants>(Name::Grants(term), meta.len, deadline)?
            // A grant counts only if its collector was still in office after it was read: the next one reads it later.
            && self.look(deadline)?.highest() == Some(term)
        {
            let mut ledger = self.ledger.lock();
            match grants.writers.get(&hex(writer)) {
                Some(mine) => ledger.adopt(mine.granted),
                // Not in the book, so not counted on: it was forgotten (this machine slept), or its document removed.
                None => ledger.granted = ledger.granted.min(ledger.admitted),
            }
            ledger.told.limit = grants.limit;
            ledger.told.counted = grants.counted.is_some();
            (ledger.told.others, ledger.told.seen, ledger.told.records) =
                (grants.used, ledger.admitted, grants.records);
            drop(ledger);
            keeper.published = Some(grants);
            keeper.grants_read = Some(GrantsRead {
                term,
                meta: *meta,
                at: now,
            });
        }
        let waits = self.ledger.lock().next_late().is_some();
        Ok(waits || (keeper.note.wanted > 0 && now.since(keeper.note_at) < BEAT))
    }

    /// A turn of the collector.
    fn lead(
        self: &Arc<Self>,
        keeper: &mut QuotaAgent,
        term: u64,
        look: &Look,
        now: MonotonicTime,
    ) -> Result<bool> {
        let deadline = now.after(TURN);
        let lost = !look.files.contains_key(&Name::Collector(term));
        let beat = lost || now.since(keeper.beat_at) >= BEAT;
        if beat {
            match self.beat_on(keeper, term, look, now, deadline) {
                Ok(true) => {}
                Ok(false) => {
                    self.office.store(0, Ordering::Release);
                    return Ok(true);
                }
                Err(error) => {
                    if error.kind() == ErrorKind::NoSpace {
                        self.start_count(Why {
                            term: Some(term),
                            short: false,
                            full: true,
                            floor: false,
                        });
                    }
                    return Err(error);
                }
            }
            if keeper.published.is_some() {
                self.drop_old_terms(look, term, deadline);
            }
        }
        if now.since(keeper.beat_at) >= LEASE {
            return Err(Error::new(
                ErrorKind::Timeout,
                "the collector's heartbeat is late; nothing is granted",
            ));
        }
        let waited_for = self.read_notes(keeper, look, now, deadline)?;
        let mut book = self.book.lock();
        self.tell_of_myself(&mut book);
        let (_, short) = book.grant();
        let mut document = book.document();
        let first = keeper.published.is_none();
        let there = look.files.contains_key(&Name::Grants(term));
        let same = keeper
            .published
            .as_ref()
            .filter(|_| there)
            .is_some_and(|published| {
                if !beat {
                    document.used = published.used; // for others to show only
                }
                *published == document
            });
        if !same {
            drop(book); // a count may want it while this is written
            let until = keeper.beat_at.after(LEASE).min(deadline);
            self.write(Name::Grants(term), &document, true, until)?;
            if self
                .look(deadline)?
                .highest()
                .is_some_and(|highest| highest > term)
            {
                self.office.store(0, Ordering::Release);
                return Ok(true); // nothing of it counts
            }
            keeper.published = Some(document.clone());
            if first {
                self.drop_old_terms(look, term, deadline);
            }
            book = self.book.lock();
        }
        let mut ledger = self.ledger.lock();
        let granted = document
            .writers
            .get(&hex(ledger.writer))
            .map_or(0, |mine| mine.granted);
        ledger.adopt(granted);
        ledger.holds_until = keeper.beat_at.after(HOLDS);
        ledger.told.counted |= keeper.counts.done;
        drop(ledger);
        self.show(&book);
        if std::mem::replace(&mut keeper.counts.admitted, book.admitted()) != keeper.counts.admitted {
            keeper.counts.quiet_since = now;
        }
        let due = self.is_count_due(keeper, &book, short, now);
        drop(book);
        if due && !self.counting.is_running() {
            let full = std::mem::take(&mut keeper.medium.full);
            self.start_count(Why {
                term: Some(term),
                short,
                full,
                floor: keeper.is_below_floor(now),
            });
        }
        Ok(waited_for)
    }

    fn is_count_due(&self, keeper: &QuotaAgent, book: &GrantTable, short: bool, now: MonotonicTime) -> bool {
        if now < keeper.counts.not_before {
            return false;
        }
        let rules = &self.config.rules;
        let again = match (rules.expire_after, rules.namespace_quota) {
            (None, None) => COUNT_AGAIN,
            (expire, _) => COUNT_RULES.min(expire.unwrap_or(COUNT_RULES) / 4).max(IDLE),
        };
        !keeper.counts.done
            || short
            || keeper.medium.full
            || keeper.is_below_floor(now)
            || book.bound().is_none_or(|bound| bound > high(book.limit))
            || book.has_gone_unseen()
            || book.is_in_doubt()
            || book.since_count() > book.limit / 16
            || book.is_blurred() && now.since(keeper.counts.quiet_since) >= BEAT
            || now.since(keeper.counts.last) >= again
    }
}
