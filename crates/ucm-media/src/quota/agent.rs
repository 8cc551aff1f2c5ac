//! The quota agent: the thread on which a writer agrees with the others of its root. Nothing here
//! is on the way of a write.
//!
//! It wakes about once a second, at once when the grant runs low, and ten times a second while a
//! write waits. Every turn lists one small directory and reads the documents that changed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::Serialize;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{MonotonicTime, WorkerPool};
use ucm_io::FileMeta;

use super::count::{Counter, Why};
use super::documents::{Grants, Heartbeat, Name, Note, hex};
use super::documents_io::{Look, SpaceFiles};
use super::grant_table::{GrantTable, ahead};
use super::remove::high;
use super::state::SpaceState;
use super::writer_quota::{Free, HOLDS};

/// The first lane of the background threads, which is the quota agent's.
const LANE_AGENT: usize = 0;
/// Time between two turns when nothing happens, and while a write waits for an answer.
const IDLE: Duration = Duration::from_secs(1);
const ACTIVE: Duration = Duration::from_millis(100);
/// Time between two notes of a writer that wants nothing, and at least between two of another.
const NOTE: Duration = Duration::from_secs(60);
const NOTE_AGAIN: Duration = Duration::from_millis(50);
/// How long the quota agent's steps may take together.
const TURN: Duration = Duration::from_secs(5);
/// Longest time between two counts.
const COUNT_AGAIN: Duration = Duration::from_secs(3600);
/// The same where age or a quota decides.
const COUNT_RULES: Duration = Duration::from_secs(300);
/// Pause after counts that freed too little; it doubles up to the longest.
const BACKOFF: Duration = Duration::from_millis(50);
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);

/// How long what was removed may not be free yet: btrfs and ZFS free it with their next commit.
const SETTLES: Duration = Duration::from_secs(30);

/// Time between heartbeats, and between two reads of the free space.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// How long after its last heartbeat a collector may grant.
const LEASE: Duration = Duration::from_secs(10);
/// A note is read again after this, changed or not: a network file system may hide the change.
const READ_AGAIN: Duration = Duration::from_secs(30);

/// Silence after which a writer has no grant any more, by the collector's clock; twice what the
/// writer allows itself.
const SILENCE: Duration = Duration::from_secs(600);
/// Time to resign in, at least: others wait for a writer that ends without a note.
const RESIGN: Duration = Duration::from_secs(2);

/// See the module.
pub(super) struct QuotaAgent {
    pub(super) state: Arc<SpaceState>,
    pub(super) files: Arc<SpaceFiles>,
    pub(super) counter: Arc<Counter>,
    pub(super) watched: Watched,
    pub(super) heartbeat: LastHeartbeat,
    /// Notes of others, as last read.
    pub(super) notes: BTreeMap<u64, Seen>,
    /// When each writer last wrote a note.
    pub(super) active: BTreeMap<u64, MonotonicTime>,
    /// This writer's last note, and when it was written.
    pub(super) own_note: (Note, MonotonicTime),
    pub(super) published: Option<Grants>,
    /// The grants as last read: their term, their file, and when.
    pub(super) grants_read: Option<(u64, FileMeta, MonotonicTime)>,
    pub(super) medium: Medium,
    pub(super) counts: Counts,
}

/// The last heartbeat as the collector: its number, and when it was written.
#[derive(Default)]
pub(super) struct LastHeartbeat {
    pub(super) sequence: u64,
    pub(super) at: MonotonicTime,
}

/// The room on the medium, as the quota agent knows it.
#[derive(Default)]
pub(super) struct Medium {
    /// When the free space was last read.
    pub(super) measured: Option<MonotonicTime>,
    /// It was full for a writer, and how often it had been for this writer.
    pub(super) full: bool,
    pub(super) own_full: u64,
    pub(super) below_floor: bool,
    /// Until when what was removed for the floor may not show yet.
    pub(super) settles_until: MonotonicTime,
}

/// The counts of this process as collector, and when the next one makes sense.
#[derive(Default)]
pub(super) struct Counts {
    /// One ended since this process opened the root.
    pub(super) done: bool,
    pub(super) last: MonotonicTime,
    pub(super) not_before: MonotonicTime,
    /// What all writers had begun when that was last seen to have changed, and when.
    pub(super) reserved: u64,
    pub(super) quiet_since: MonotonicTime,
    /// Counts in a row that freed too little.
    pub(super) failed: u32,
    pub(super) trouble: Option<Error>,
}

/// A note of another writer, as last read.
pub(super) struct Seen {
    pub(super) meta: FileMeta,
    pub(super) read_at: MonotonicTime,
    pub(super) note: Note,
}

/// The collector of the highest term as a writer sees it.
#[derive(Default)]
pub(super) struct Watched {
    pub(super) term: u64,
    pub(super) sequence: u64,
    /// When its sequence moved last, on this clock.
    pub(super) moved: MonotonicTime,
    pub(super) heartbeat: Option<Heartbeat>,
    /// The writer of this process's last heartbeat.
    pub(super) own_writer: String,
    /// A term this process owns and has not begun yet.
    pub(super) claimed: Option<u64>,
}

/// When a turn began, and by when its steps end.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    pub(super) now: MonotonicTime,
    pub(super) deadline: MonotonicTime,
}

impl QuotaAgent {
    pub(super) fn new(state: Arc<SpaceState>, counter: Arc<Counter>) -> Self {
        Self {
            files: Arc::clone(&state.files),
            state,
            counter,
            watched: Watched::default(),
            heartbeat: LastHeartbeat::default(),
            notes: BTreeMap::new(),
            active: BTreeMap::new(),
            own_note: <(Note, MonotonicTime)>::default(),
            published: None,
            grants_read: None,
            medium: Medium::default(),
            counts: Counts::default(),
        }
    }

    /// Starts its thread on this pool; it ends with the pool's owner.
    pub(super) fn start(mut self, worker: &Arc<WorkerPool>) {
        let weak = Arc::downgrade(worker);
        let work = move || loop {
            let seen = self.state.notify.seen();
            let Some(pool) = weak.upgrade() else { return };
            if let Some(&until) = self.state.leaving.get() {
                return self.resign(until);
            }
            let next = self.turn();
            drop(pool);
            let notify = &self.state.notify;
            self.files.clock.sleep(notify, seen, Some(next));
        };
        // A pool that is shut down keeps nothing any more.
        let _ = worker.submit(LANE_AGENT, MonotonicTime::NEVER, work, |_| {});
    }

    /// One turn; the time of the next one.
    fn turn(&mut self) -> MonotonicTime {
        let now = self.files.clock.now();
        let random = ucm_infra::random_u64;
        if self.state.writer_quota.lock().renew(now, random) {
            self.own_note.0 = Note::default();
        }
        let deadline = now.after(TURN);
        let done = self.refresh(Turn { now, deadline });
        let mut quota = self.state.writer_quota.lock();
        let trouble = done.as_ref().err().or(self.counts.trouble.as_ref());
        quota.report.trouble = trouble.cloned();
        let waits = quota.asking.waiting > 0;
        drop(quota);
        self.state.granted.notify();
        let active = done.is_ok_and(|wants| wants || waits);
        let now = self.files.clock.now();
        now.after(if active { ACTIVE } else { IDLE })
    }

    /// Reads what changed and writes what is due. Whether a write waits for an answer.
    fn refresh(&mut self, turn: Turn) -> Result<bool> {
        let Turn { now, deadline } = turn;
        self.take_outcome(now);
        if self.files.check_root(deadline).is_err() {
            self.files.tend(deadline)?;
        }
        let measured = self.medium.measured;
        if measured.is_none_or(|at| now.since(at) >= HEARTBEAT_INTERVAL)
            || self.state.writer_quota.lock().is_half_free()
        {
            let (free, floor) = self.files.free_and_floor(deadline)?;
            let mut quota = self.state.writer_quota.lock();
            quota.free = Free {
                bytes: Some(free),
                floor,
                at: quota.reserved,
            };
            drop(quota);
            self.medium.measured = Some(now);
            self.medium.below_floor = free < floor;
        }
        let full = self.state.writer_quota.lock().pause.full;
        self.medium.full |= std::mem::replace(&mut self.medium.own_full, full) < full;
        let look = self.files.look(deadline)?;
        let term = self.state.term();
        if term > 0 && look.highest().is_none_or(|highest| highest <= term) {
            return self.lead(term, &look, turn);
        }
        self.state.set_term(0);
        if let Some(term) = self.elect(&look, turn)? {
            self.state.set_term(term);
            let look = self.files.look(deadline)?;
            return self.lead(term, &look, turn);
        }
        self.follow(&look, turn)
    }

    /// Takes the result of the last count, and sets when another one makes sense.
    fn take_outcome(&mut self, now: MonotonicTime) {
        let failed = match self.counter.outcome.lock().take() {
            None => return,
            Some(Ok(outcome)) => {
                self.counts.trouble = None;
                self.counts.done = true;
                self.counts.last = now;
                if outcome.floor && outcome.freed > 0 {
                    self.medium.settles_until = now.after(SETTLES);
                    self.medium.measured = None; // most give it back at once
                }
                outcome.is_short && outcome.freed == 0
            }
            Some(Err(error)) => {
                // A count that timed out had its pause already.
                let at_once = error.kind() != ErrorKind::Timeout;
                self.counts.trouble = Some(error);
                at_once
            }
        };
        self.counts.failed = if failed { self.counts.failed + 1 } else { 0 };
        // The first one is tried again at once.
        let times = self.counts.failed;
        let pause = BACKOFF * if times > 1 { 1 << times.min(16) } else { 0 };
        self.counts.not_before = now.after(pause.min(LONGEST_BACKOFF));
    }

    /// A turn of a writer that is not collector.
    fn follow(&mut self, look: &Look, turn: Turn) -> Result<bool> {
        let Turn { now, deadline } = turn;
        self.counts.trouble = None; // only the collector counts
        let Some(term) = look.highest() else {
            return Ok(true);
        };
        let (limit, writers) = match &self.published {
            Some(grants) => (grants.limit, grants.writers.len()),
            None => (self.state.writer_quota.lock().report.limit, 1),
        };
        let (writer, mut note) = self.state.my_note(now, ahead(limit, writers));
        let is_there = look.files.contains_key(&Name::Writer(writer));
        note.sequence = self.own_note.0.sequence;
        let wants = note.wanted > 0;
        let asks =
            wants && (self.own_note.0.wanted == 0 || now.since(self.own_note.1) >= NOTE_AGAIN);
        let changed = note != self.own_note.0 && (asks || note.full > self.own_note.0.full);
        if !is_there || changed || now.since(self.own_note.1) >= NOTE {
            note.sequence += 1;
            self.files
                .write(Name::Writer(writer), &note, true, deadline)?;
            self.state.writer_quota.lock().holds_until = now.after(HOLDS);
            self.own_note = (note, now);
        }
        let needy = wants || self.state.writer_quota.lock().asking.waiting > 0;
        if let Some(meta) = look.files.get(&Name::Grants(term))
            && (needy || self.grants_read.is_none_or(|(of, file, at)| {
                (of, file) != (term, *meta) || now.since(at) >= READ_AGAIN
            }))
            && let Some(grants) = self.files.read::<Grants>(look, Name::Grants(term), deadline)?
            // A grant counts only if its term was still the highest after it was read: the next
            // collector reads it later.
            && self.files.look(deadline)?.highest() == Some(term)
        {
            let mut quota = self.state.writer_quota.lock();
            match grants.writers.get(&hex(writer)) {
                Some(mine) => quota.adopt(mine.granted),
                // Not in the grant table, so not counted on: it was forgotten (this machine slept),
                // or its document removed.
                None => quota.granted = quota.granted.min(quota.reserved),
            }
            quota.report.limit = grants.limit;
            quota.report.counted = grants.counted.is_some();
            (quota.report.others, quota.report.seen, quota.report.records) =
                (grants.used, quota.reserved, grants.records);
            drop(quota);
            self.published = Some(grants);
            self.grants_read = Some((term, *meta, now));
        }
        let waits = self.state.writer_quota.lock().asking.waiting > 0;
        Ok(
            waits
                || (self.own_note.0.wanted > 0 && now.since(self.own_note.1) < HEARTBEAT_INTERVAL),
        )
    }

    /// A turn of the collector.
    fn lead(&mut self, term: u64, look: &Look, turn: Turn) -> Result<bool> {
        let Turn { now, deadline } = turn;
        let lost = !look.files.contains_key(&Name::Collector(term));
        let heartbeat = lost || now.since(self.heartbeat.at) >= HEARTBEAT_INTERVAL;
        if heartbeat {
            if !self.renew_heartbeat(term, look, turn)? {
                self.state.set_term(0);
                return Ok(true);
            }
            if self.published.is_some() {
                self.drop_old_terms(look, term, deadline);
            }
        }
        if now.since(self.heartbeat.at) >= LEASE {
            return Err(Error::new(
                ErrorKind::Timeout,
                "the collector's heartbeat is late; nothing is granted",
            ));
        }
        let waited_for = self.read_notes(look, turn)?;
        let mut table = self.state.grant_table.lock();
        self.state.enter_self(&mut table);
        let short = table.grant();
        let mut document = table.document();
        let first = self.published.is_none();
        let is_there = look.files.contains_key(&Name::Grants(term));
        if is_there
            && !heartbeat
            && let Some(published) = &self.published
        {
            document.used = published.used; // for others to show only
        }
        if !is_there || self.published.as_ref() != Some(&document) {
            drop(table); // a count may want it while this is written
            let until = self.heartbeat.at.after(LEASE).min(deadline);
            self.files
                .write(Name::Grants(term), &document, true, until)?;
            let highest = self.files.look(deadline)?.highest();
            if highest.is_some_and(|highest| highest > term) {
                self.state.set_term(0);
                return Ok(true); // nothing of it counts
            }
            self.published = Some(document.clone());
            if first {
                self.drop_old_terms(look, term, deadline);
            }
            table = self.state.grant_table.lock();
        }
        let mut quota = self.state.writer_quota.lock();
        let mine = document.writers.get(&hex(quota.writer));
        quota.adopt(mine.map_or(0, |mine| mine.granted));
        quota.holds_until = self.heartbeat.at.after(HOLDS);
        quota.report.counted |= self.counts.done;
        drop(quota);
        self.state.show(&table);
        if std::mem::replace(&mut self.counts.reserved, table.reserved()) != self.counts.reserved {
            self.counts.quiet_since = now;
        }
        let due = self.is_count_due(&table, short, now);
        drop(table);
        if due
            && self.counter.begin(Why {
                term: Some(term),
                short,
                full: self.medium.full,
                floor: self.is_below_floor(now),
            })
        {
            self.medium.full = false;
        }
        Ok(waited_for)
    }

    fn is_count_due(&self, table: &GrantTable, short: bool, now: MonotonicTime) -> bool {
        if now < self.counts.not_before {
            return false;
        }
        let rules = &self.files.config.rules;
        let again = match (rules.expire_after, rules.namespace_quota) {
            (None, None) => COUNT_AGAIN,
            (expire, _) => COUNT_RULES.min(expire.unwrap_or(COUNT_RULES) / 4).max(IDLE),
        };
        !self.counts.done
            || short
            || self.medium.full
            || self.is_below_floor(now)
            || table.bound().is_none_or(|bound| bound > high(table.limit))
            || table.has_gone_unseen()
            || table.in_doubt
            || table.since_count() > table.limit / 16
            || table.is_blurred() && now.since(self.counts.quiet_since) >= HEARTBEAT_INTERVAL
            || now.since(self.counts.last) >= again
    }
    /// Whether records should be removed because too little of the medium is free.
    fn is_below_floor(&self, now: MonotonicTime) -> bool {
        self.medium.below_floor && now >= self.medium.settles_until
    }

    /// Writes a note although this writer is the collector now: the collector after the next one
    /// finds no heartbeat of it any more, and sees from the note whether its process has ended.
    pub(super) fn write_first_note(&mut self, turn: Turn) {
        let (writer, mut note) = self.state.my_note(turn.now, 0);
        note.sequence = self.own_note.0.sequence + 1;
        // Best effort, as on a full medium: without it its silence is waited for.
        let name = Name::Writer(writer);
        if self.files.write(name, &note, true, turn.deadline).is_ok() {
            self.own_note = (note, turn.now);
        }
    }

    /// Reads the notes that changed. Whether a writer wrote one lately.
    fn read_notes(&mut self, look: &Look, turn: Turn) -> Result<bool> {
        let Turn { now, deadline } = turn;
        let me = self.state.writer_quota.lock().writer;
        for (id, meta) in look.writers().filter(|(id, _)| *id != me) {
            let known = self.notes.get(&id);
            if known.is_none_or(|seen| seen.meta != meta || now.since(seen.read_at) >= READ_AGAIN) {
                let name = Name::Writer(id);
                let Some(note) = self.files.read::<Note>(look, name, deadline)? else {
                    continue;
                };
                if known.is_none_or(|seen| note.sequence != seen.note.sequence) {
                    self.active.insert(id, now);
                }
                self.medium.full |= known.is_some_and(|seen| note.full > seen.note.full);
                self.state.grant_table.lock().note(id, &note);
                let read_at = now;
                self.notes.insert(
                    id,
                    Seen {
                        meta,
                        read_at,
                        note,
                    },
                );
            }
        }
        self.notes
            .retain(|id, _| look.files.contains_key(&Name::Writer(*id)));
        let mut table = self.state.grant_table.lock();
        for id in table.writers() {
            if id == me || table.is_gone(id) {
                continue;
            }
            let active = *self.active.entry(id).or_insert(now);
            let note = self.notes.get(&id);
            let dead = note.is_some_and(|seen| seen.note.process.is_gone());
            if dead || now.since(active) >= SILENCE {
                table.gone(id);
            }
        }
        self.active.retain(|id, _| table.knows(*id));
        let mut active = self.active.values();
        Ok(active.any(|at| now.since(*at) < HEARTBEAT_INTERVAL))
    }

    /// Writes that this writer has ended, so that no collector waits for it.
    fn resign(&mut self, until: MonotonicTime) {
        let now = self.files.clock.now();
        let deadline = until.max(now.after(RESIGN));
        let (writer, note) = self.state.my_note(now, 0);
        // A writer that still writes has not ended; and nothing is written into another root.
        if note.committed < note.reserved || self.files.check_root(deadline).is_err() {
            return;
        }
        let mut note = Note {
            closed: true,
            wanted: 0,
            ..note
        };
        let term = self.state.term.swap(0, Ordering::AcqRel);
        // Best effort: without these the next collector waits for the silence of this one.
        if term > 0 {
            let mut table = self.state.grant_table.lock();
            table.note(writer, &note);
            let grants = table.document();
            drop(table);
            if now.since(self.heartbeat.at) < LEASE {
                // What stays there when this fails grants more than was used: too careful for the
                // next.
                self.write_last(Name::Grants(term), &grants, deadline);
                let heartbeat = self.heartbeat(true);
                self.write_last(Name::Collector(term), &heartbeat, deadline);
            }
        }
        if self.own_note.1 != MonotonicTime::default() || self.own_note.0.sequence > 0 {
            note.sequence = self.own_note.0.sequence + 1;
            self.write_last(Name::Writer(writer), &note, deadline);
        }
    }

    /// Writes a last document; that is worth a second and a third try.
    fn write_last(&self, name: Name, document: &impl Serialize, deadline: MonotonicTime) {
        for _ in 0..3 {
            if self.files.write(name, document, true, deadline).is_ok() {
                return;
            }
        }
    }
}
