//! The quota agent: the thread on which a writer agrees with the others of its root. Nothing here
//! is on the way of a write.
//!
//! It wakes about once a second, at once when the grant runs low, and ten times a second while a
//! write waits for an answer. Every turn lists one small directory and reads what changed there.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;

use super::agent_state::{GrantsRead, HEARTBEAT_INTERVAL, LEASE, QuotaAgent};
use super::count::Why;
use super::documents::{Grants, Name, Note, hex};
use super::documents_io::Look;
use super::grant_table::{GrantTable, ahead};
use super::remove::high;
use super::writer_quota::{Answers, Free, HOLDS};
use super::{LANE_AGENT, Quota, answer};

/// Time between two turns when nothing happens, and while a write waits for an answer.
const IDLE: Duration = Duration::from_secs(1);
const ACTIVE: Duration = Duration::from_millis(100);
/// Time between two notes of a writer that wants nothing, and least time between two of one that
/// does.
const NOTE: Duration = Duration::from_secs(60);
const NOTE_AGAIN: Duration = Duration::from_millis(50);
/// How long the quota agent's steps may take together.
const TURN: Duration = Duration::from_secs(5);
/// Longest time between two counts.
const COUNT_AGAIN: Duration = Duration::from_secs(3600);
/// The same where age or a quota decides.
const COUNT_RULES: Duration = Duration::from_secs(300);
/// Pause after counts that could not do what was wanted; it doubles up to the longest.
const VAIN: Duration = Duration::from_millis(50);
const LONGEST_VAIN: Duration = Duration::from_secs(60);

/// How long a medium may take until what was removed is free: btrfs and ZFS give it back with their
/// next commit.
const SETTLES: Duration = Duration::from_secs(30);

impl Quota {
    /// Starts the thread.
    pub(super) fn start_agent(self: &Arc<Self>) {
        let (weak, notify, clock) = (
            Arc::downgrade(self),
            self.notify.clone(),
            Arc::clone(&self.clock),
        );
        let work = move || loop {
            let seen = notify.seen();
            let Some(space) = weak.upgrade() else { return };
            if let Some(&until) = space.life.leaving.get() {
                return space.resign(until);
            }
            let next = space.turn();
            drop(space);
            clock.sleep(&notify, seen, Some(next));
        };
        // A pool that is shut down keeps nothing any more.
        let _ = self
            .worker
            .submit(LANE_AGENT, MonotonicTime::NEVER, work, |_| {});
    }

    /// One look around; when to look next.
    fn turn(self: &Arc<Self>) -> MonotonicTime {
        let now = self.clock.now();
        let mut agent = self.agent.lock();
        if self.writer_quota.lock().renew(now, ucm_infra::random_u64) {
            agent.note = Note::default();
        }
        let looked = self.look_around(&mut agent, now);
        let mut answers = Answers::new();
        let mut quota = self.writer_quota.lock();
        let failed = looked.is_err();
        quota.trouble = looked
            .as_ref()
            .err()
            .or(agent.counts.trouble.as_ref())
            .cloned();
        let now = self.clock.now();
        quota.answer_waiting(now, &mut answers);
        let late = quota.next_late();
        drop(quota);
        drop(agent);
        answer(answers);
        let active = !failed && (late.is_some() || looked.unwrap_or_default());
        let next = now.after(if active { ACTIVE } else { IDLE });
        late.map_or(next, |late| late.min(next))
    }

    /// One look around, as collector or not. Whether a write waits for an answer.
    fn look_around(self: &Arc<Self>, agent: &mut QuotaAgent, now: MonotonicTime) -> Result<bool> {
        self.take_outcome(agent, now);
        let deadline = now.after(TURN);
        if self.check_root(deadline).is_err() {
            self.tend(deadline)?;
        }
        if agent
            .medium
            .looked
            .is_none_or(|at| now.since(at) >= HEARTBEAT_INTERVAL)
            || self.writer_quota.lock().is_half_free()
        {
            let (free, floor) = self.free_and_floor(deadline)?;
            let mut quota = self.writer_quota.lock();
            quota.free = Free {
                bytes: Some(free),
                floor,
                at: quota.reserved,
            };
            drop(quota);
            agent.medium.looked = Some(now);
            agent.medium.below_floor = free < floor;
        }
        let full = self.writer_quota.lock().pause.full;
        agent.medium.full |= std::mem::replace(&mut agent.medium.own_full, full) < full;
        let look = self.look(deadline)?;
        let office = self.office.load(Ordering::Acquire);
        if office > 0 && look.highest().is_none_or(|highest| highest <= office) {
            return self.lead(agent, office, &look, now);
        }
        self.office.store(0, Ordering::Release);
        if let Some(term) = self.elect(agent, &look, now, deadline)? {
            self.office.store(term, Ordering::Release);
            let look = self.look(deadline)?;
            return self.lead(agent, term, &look, now);
        }
        self.follow(agent, &look, now, deadline)
    }

    /// What the last count came to, and when another one makes sense.
    fn take_outcome(&self, agent: &mut QuotaAgent, now: MonotonicTime) {
        let Some(outcome) = self.counting.outcome() else {
            return;
        };
        let vain = match outcome {
            Ok(outcome) => {
                agent.counts.trouble = None;
                agent.counts.done = true;
                agent.counts.last = now;
                if outcome.floor && outcome.freed > 0 {
                    agent.medium.settles_until = now.after(SETTLES);
                    agent.medium.looked = None; // most give it back at once
                }
                outcome.in_vain && outcome.freed == 0
            }
            Err(error) => {
                // One that came too late had its pause.
                let at_once = error.kind() != ErrorKind::Timeout;
                agent.counts.trouble = Some(error);
                at_once
            }
        };
        agent.counts.vain = if vain { agent.counts.vain + 1 } else { 0 };
        // The first one is tried again at once.
        let pause = match agent.counts.vain {
            0 | 1 => Duration::ZERO,
            times => VAIN.saturating_mul(1 << times.min(16)).min(LONGEST_VAIN),
        };
        agent.counts.not_before = now.after(pause);
    }

    /// A turn of a writer that is not collector.
    fn follow(
        &self,
        agent: &mut QuotaAgent,
        look: &Look,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) -> Result<bool> {
        agent.counts.trouble = None; // that is the collector's, and this is not it any more
        let Some(term) = look.highest() else {
            return Ok(true);
        };
        let (limit, writers) = agent
            .published
            .as_ref()
            .map_or((self.writer_quota.lock().told.limit, 1), |grants| {
                (grants.limit, grants.writers.len())
            });
        let (writer, mut note) = self.my_note(now, ahead(limit, writers));
        let told = look.files.contains_key(&Name::Writer(writer));
        note.sequence = agent.note.sequence;
        let wants = note.wanted > 0;
        let asks = wants && (agent.note.wanted == 0 || now.since(agent.note_at) >= NOTE_AGAIN);
        let changed = note != agent.note && (asks || note.full > agent.note.full);
        if !told || changed || now.since(agent.note_at) >= NOTE {
            note.sequence += 1;
            self.write(Name::Writer(writer), &note, true, deadline)?;
            self.writer_quota.lock().holds_until = now.after(HOLDS);
            (agent.note, agent.note_at) = (note, now);
        }
        let needy = wants || self.writer_quota.lock().next_late().is_some();
        if let Some(meta) = look.files.get(&Name::Grants(term))
            && (needy || agent.grants_read.is_none_or(|read| read.is_old(term, meta, now)))
            && let Some(grants) = self.read::<Grants>(Name::Grants(term), meta.len, deadline)?
            // A grant counts only if its collector was still in office after it was read: the next
            // one reads it later.
            && self.look(deadline)?.highest() == Some(term)
        {
            let mut quota = self.writer_quota.lock();
            match grants.writers.get(&hex(writer)) {
                Some(mine) => quota.adopt(mine.granted),
                // Not in the grant table, so not counted on: it was forgotten (this machine slept),
                // or its document removed.
                None => quota.granted = quota.granted.min(quota.reserved),
            }
            quota.told.limit = grants.limit;
            quota.told.counted = grants.counted.is_some();
            (quota.told.others, quota.told.seen, quota.told.records) =
                (grants.used, quota.reserved, grants.records);
            drop(quota);
            agent.published = Some(grants);
            agent.grants_read = Some(GrantsRead {
                term,
                meta: *meta,
                at: now,
            });
        }
        let waits = self.writer_quota.lock().next_late().is_some();
        Ok(waits || (agent.note.wanted > 0 && now.since(agent.note_at) < HEARTBEAT_INTERVAL))
    }

    /// A turn of the collector.
    fn lead(
        self: &Arc<Self>,
        agent: &mut QuotaAgent,
        term: u64,
        look: &Look,
        now: MonotonicTime,
    ) -> Result<bool> {
        let deadline = now.after(TURN);
        let lost = !look.files.contains_key(&Name::Collector(term));
        let heartbeat = lost || now.since(agent.heartbeat_at) >= HEARTBEAT_INTERVAL;
        if heartbeat {
            match self.renew_heartbeat(agent, term, look, now, deadline) {
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
            if agent.published.is_some() {
                self.drop_old_terms(look, term, deadline);
            }
        }
        if now.since(agent.heartbeat_at) >= LEASE {
            return Err(Error::new(
                ErrorKind::Timeout,
                "the collector's heartbeat is late; nothing is granted",
            ));
        }
        let waited_for = self.read_notes(agent, look, now, deadline)?;
        let mut table = self.grant_table.lock();
        self.tell_of_myself(&mut table);
        let (_, short) = table.grant();
        let mut document = table.document();
        let first = agent.published.is_none();
        let there = look.files.contains_key(&Name::Grants(term));
        let same = agent
            .published
            .as_ref()
            .filter(|_| there)
            .is_some_and(|published| {
                if !heartbeat {
                    document.used = published.used; // for others to show only
                }
                *published == document
            });
        if !same {
            drop(table); // a count may want it while this is written
            let until = agent.heartbeat_at.after(LEASE).min(deadline);
            self.write(Name::Grants(term), &document, true, until)?;
            if self
                .look(deadline)?
                .highest()
                .is_some_and(|highest| highest > term)
            {
                self.office.store(0, Ordering::Release);
                return Ok(true); // nothing of it counts
            }
            agent.published = Some(document.clone());
            if first {
                self.drop_old_terms(look, term, deadline);
            }
            table = self.grant_table.lock();
        }
        let mut quota = self.writer_quota.lock();
        let granted = document
            .writers
            .get(&hex(quota.writer))
            .map_or(0, |mine| mine.granted);
        quota.adopt(granted);
        quota.holds_until = agent.heartbeat_at.after(HOLDS);
        quota.told.counted |= agent.counts.done;
        drop(quota);
        self.show(&table);
        if std::mem::replace(&mut agent.counts.reserved, table.reserved()) != agent.counts.reserved
        {
            agent.counts.quiet_since = now;
        }
        let due = self.is_count_due(agent, &table, short, now);
        drop(table);
        if due && !self.counting.is_running() {
            let full = std::mem::take(&mut agent.medium.full);
            self.start_count(Why {
                term: Some(term),
                short,
                full,
                floor: agent.is_below_floor(now),
            });
        }
        Ok(waited_for)
    }

    fn is_count_due(
        &self,
        agent: &QuotaAgent,
        table: &GrantTable,
        short: bool,
        now: MonotonicTime,
    ) -> bool {
        if now < agent.counts.not_before {
            return false;
        }
        let rules = &self.config.rules;
        let again = match (rules.expire_after, rules.namespace_quota) {
            (None, None) => COUNT_AGAIN,
            (expire, _) => COUNT_RULES.min(expire.unwrap_or(COUNT_RULES) / 4).max(IDLE),
        };
        !agent.counts.done
            || short
            || agent.medium.full
            || agent.is_below_floor(now)
            || table.bound().is_none_or(|bound| bound > high(table.limit))
            || table.has_gone_unseen()
            || table.is_in_doubt()
            || table.since_count() > table.limit / 16
            || table.is_blurred() && now.since(agent.counts.quiet_since) >= HEARTBEAT_INTERVAL
            || now.since(agent.counts.last) >= again
    }
}
