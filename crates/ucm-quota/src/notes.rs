//! What writers say of themselves: this one's note, the notes of others, last words.

use std::sync::atomic::Ordering;
use std::time::Duration;

use ucm_core::Result;
use ucm_infra::MonotonicTime;

use super::Quota;
use super::agent_state::{HEARTBEAT_INTERVAL, LEASE, QuotaAgent, READ_AGAIN, Seen};
use super::documents::{Name, Note, Who};
use super::documents_io::Look;
use super::grant_table::GrantTable;
use crate::layout::FORMAT;

/// Silence after which a writer has no grant any more, by the collector's clock; twice what the
/// writer allows itself.
const SILENCE: Duration = Duration::from_secs(600);
/// Time to resign in, at least: on a busy disk a document takes its time, and a writer that leaves
/// without a note is waited for.
const RESIGN: Duration = Duration::from_secs(2);

impl Quota {
    /// What this writer would say of itself in a note.
    pub(super) fn my_note(&self, now: MonotonicTime, ahead: u64) -> (u64, Note) {
        let quota = self.writer_quota.lock();
        let note = Note {
            format: FORMAT,
            process: Who::of(&self.config.process),
            sequence: 0,
            reserved: quota.reserved,
            committed: quota.committed(),
            granted: quota.granted,
            wanted: if quota.is_low(ahead, now) {
                quota.wanted()
            } else {
                0
            },
            full: quota.pause.full,
            closed: false,
        };
        (quota.writer, note)
    }

    /// Enters this writer into the collector's grant table.
    pub(super) fn tell_of_myself(&self, table: &mut GrantTable) {
        let (writer, note) = self.my_note(self.clock.now(), table.ahead());
        table.note(writer, &note);
    }

    /// Leaves a note although this writer is the collector now: the collector after the next one
    /// finds no heartbeat of it any more, and learns from this that its process is gone.
    pub(super) fn introduce_myself(
        &self,
        agent: &mut QuotaAgent,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) {
        let (writer, mut note) = self.my_note(now, 0);
        note.sequence = agent.note.sequence + 1;
        // Best effort, as on a full medium: without it the silence tells.
        if self
            .write(Name::Writer(writer), &note, true, deadline)
            .is_ok()
        {
            (agent.note, agent.note_at) = (note, now);
        }
    }

    /// Reads the notes that changed. Whether one of them was heard of lately.
    pub(super) fn read_notes(
        &self,
        agent: &mut QuotaAgent,
        look: &Look,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) -> Result<bool> {
        let me = self.writer_quota.lock().writer;
        for (id, meta) in look.writers().filter(|(id, _)| *id != me) {
            let known = agent.notes.get(&id);
            if known.is_none_or(|seen| seen.meta != meta || now.since(seen.read_at) >= READ_AGAIN) {
                let Some(note) = self.read::<Note>(Name::Writer(id), meta.len, deadline)? else {
                    continue;
                };
                if known.is_none_or(|seen| note.sequence != seen.note.sequence) {
                    agent.heard.insert(id, now);
                }
                agent.medium.full |= known.is_some_and(|seen| note.full > seen.note.full);
                self.grant_table.lock().note(id, &note);
                agent.notes.insert(
                    id,
                    Seen {
                        meta,
                        read_at: now,
                        note,
                    },
                );
            }
        }
        agent
            .notes
            .retain(|id, _| look.files.contains_key(&Name::Writer(*id)));
        let mut table = self.grant_table.lock();
        for id in table.writers() {
            if id == me || table.is_gone(id) {
                continue;
            }
            let heard = *agent.heard.entry(id).or_insert(now);
            let dead = agent
                .notes
                .get(&id)
                .is_some_and(|seen| seen.note.process.is_gone());
            if dead || now.since(heard) >= SILENCE {
                table.gone(id);
            }
        }
        agent.heard.retain(|id, _| table.knows(*id));
        Ok(agent
            .heard
            .values()
            .any(|at| now.since(*at) < HEARTBEAT_INTERVAL))
    }

    /// Says that this writer is not there any more, so that no collector waits for it.
    pub(super) fn resign(&self, until: MonotonicTime) {
        let now = self.clock.now();
        let deadline = until.max(now.after(RESIGN));
        let mut agent = self.agent.lock();
        let (writer, note) = self.my_note(now, 0);
        // Who still writes has not ended; and nothing is said in the place of another root.
        if note.committed < note.reserved || self.check_root(deadline).is_err() {
            return;
        }
        let mut note = Note {
            closed: true,
            wanted: 0,
            ..note
        };
        let office = self.office.swap(0, Ordering::AcqRel);
        // Best effort: who finds nothing waits for the silence.
        if office > 0 {
            let mut table = self.grant_table.lock();
            table.note(writer, &note);
            let grants = table.document();
            drop(table);
            if now.since(agent.heartbeat_at) < LEASE {
                // What stays there when this fails grants more than was used: too careful for the
                // next.
                let _ = again(|| self.write(Name::Grants(office), &grants, true, deadline));
                let _ = again(|| self.write_heartbeat(&mut agent, office, true, now, deadline));
            }
        }
        if agent.note_at != MonotonicTime::default() || agent.note.sequence > 0 {
            note.sequence = agent.note.sequence + 1;
            let _ = again(|| self.write(Name::Writer(writer), &note, true, deadline));
        }
    }
}

/// The last words of a writer are worth a second and a third try.
fn again<T>(mut say: impl FnMut() -> Result<T>) -> Result<T> {
    say().or_else(|_| say()).or_else(|_| say())
}
