//! What writers say of themselves: this one's note, the notes of others, last words.

use std::sync::atomic::Ordering;
use std::time::Duration;

use ucm_core::Result;
use ucm_infra::MonotonicTime;

use super::Quota;
use super::agent_state::{BEAT, LEASE, QuotaAgent, READ_AGAIN, Seen};
use super::documents::{Name, Note, Who};
use super::documents_io::Look;
use super::grant_table::GrantTable;
use crate::layout::FORMAT;

/// Silence after which a writer has no grant any more, by the collector's clock; twice what the writer allows itself.
const SILENCE: Duration = Duration::from_secs(600);
/// Time to resign in, about as much as closing a store takes at most: on a busy disk a document takes its time, and
/// whoever leaves without a word is waited for.
const RESIGN: Duration = Duration::from_secs(2);

impl Quota {
    /// What this writer would say of itself in a note.
    pub(super) fn my_note(&self, now: MonotonicTime, ahead: u64) -> (u64, Note) {
        let ledger = self.ledger.lock();
        let note = Note {
            format: FORMAT,
            process: Who::of(&self.config.process),
            sequence: 0,
            admitted: ledger.admitted,
            settled: ledger.settled(),
            granted: ledger.granted,
            wanted: if ledger.is_low(ahead, now) {
                ledger.wanted()
            } else {
                0
            },
            full: ledger.pause.full,
            closed: false,
        };
        (ledger.writer, note)
    }

    /// Enters this writer into the collector's book.
    pub(super) fn tell_of_myself(&self, book: &mut GrantTable) {
        let (writer, note) = self.my_note(self.clock.now(), book.ahead());
        book.note(writer, &note);
    }

    /// Leaves a note although this writer is the collector now: whoever comes after the next collector finds no heartbeat
    /// of it any more, and learns from this that its process is gone.
    pub(super) fn introduce_myself(
        &self,
        keeper: &mut QuotaAgent,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) {
        let (writer, mut note) = self.my_note(now, 0);
        note.sequence = keeper.note.sequence + 1;
        // Best effort, as on a full medium: without it the silence tells.
        if self.write(Name::Writer(writer), &note, true, deadline).is_ok() {
            (keeper.note, keeper.note_at) = (note, now);
        }
    }

    /// Reads the notes that changed. Whether one of them was heard of lately.
    pub(super) fn read_notes(
        &self,
        keeper: &mut QuotaAgent,
        look: &Look,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) -> Result<bool> {
        let me = self.ledger.lock().writer;
        for (id, meta) in look.writers().filter(|(id, _)| *id != me) {
            let known = keeper.notes.get(&id);
            if known.is_none_or(|seen| seen.meta != meta || now.since(seen.read_at) >= READ_AGAIN) {
                let Some(note) = self.read::<Note>(Name::Writer(id), meta.len, deadline)? else {
                    continue;
                };
                if known.is_none_or(|seen| note.sequence != seen.note.sequence) {
                    keeper.heard.insert(id, now);
                }
                keeper.medium.full |= known.is_some_and(|seen| note.full > seen.note.full);
                self.book.lock().note(id, &note);
                keeper.notes.insert(
                    id,
                    Seen {
                        meta,
                        read_at: now,
                        note,
                    },
                );
            }
        }
        keeper
            .notes
            .retain(|id, _| look.files.contains_key(&Name::Writer(*id)));
        let mut book = self.book.lock();
        for id in book.writers() {
            if id == me || book.is_gone(id) {
                continue;
            }
            let heard = *keeper.heard.entry(id).or_insert(now);
            let dead = keeper
                .notes
                .get(&id)
                .is_some_and(|seen| seen.note.process.is_gone());
            if dead || now.since(heard) >= SILENCE {
                book.gone(id);
            }
        }
        keeper.heard.retain(|id, _| book.knows(*id));
        Ok(keeper.heard.values().any(|at| now.since(*at) < BEAT))
    }

    /// Says that this writer is not there any more, so that nobody waits for it.
    pub(super) fn resign(&self) {
        let now = self.clock.now();
        let deadline = now.after(RESIGN);
        let mut keeper = self.keeper.lock();
        let (writer, note) = self.my_note(now, 0);
        // Who still writes has not ended; and nothing is said in the place of another root.
        if note.settled < note.admitted || self.check_root(deadline).is_err() {
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
            let mut book = self.book.lock();
            book.note(writer, &note);
            let grants = book.document();
            drop(book);
            if now.since(keeper.beat_at) < LEASE {
                // What stays there when this fails grants more than was used: too careful for the next.
                let _ = again(|| self.write(Name::Grants(office), &grants, true, deadline));
                let _ = again(|| self.beat(&mut keeper, office, true, now, deadline));
            }
        }
        if keeper.note_at != MonotonicTime::default() || keeper.note.sequence > 0 {
            note.sequence = keeper.note.sequence + 1;
            let _ = again(|| self.write(Name::Writer(writer), &note, true, deadline));
        }
    }
}

/// The last words of a writer are worth a second and a third try.
fn again<T>(mut say: impl FnMut() -> Result<T>) -> Result<T> {
    say().or_else(|_| say()).or_else(|_| say())
}
