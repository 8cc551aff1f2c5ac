//! Who is collector: the owner of the highest term.
//!
//! A term is a file that is made without replacing, so it has one owner, and only its owner writes it again. A writer
//! that finds no term, or whose collector resigned, died on this host, or did not move for [`STILL`] on the writer's
//! own clock, takes the next term, reads the grants of the one before *after that*, and goes on from there. A grant
//! counts for a writer only if its term was still the highest after the grant was read, and a collector grants only for
//! a while after its last heartbeat; so whatever was granted by two collectors is in the book of the later one.

use std::sync::Arc;
use std::time::Duration;

use ucm_core::{ErrorKind, Result};
use ucm_infra::MonotonicTime;

use super::Quota;
use super::agent_state::QuotaAgent;
use super::count::Why;
use super::documents::{Grants, Heartbeat, Name, Who, hex};
use super::documents_io::Look;
use super::grant_table::GrantTable;
use crate::layout::FORMAT;

/// Silence of a collector after which another one takes over.
const STILL: Duration = Duration::from_secs(20);

impl Quota {
    /// Becomes collector if nobody is. The answer: the term, once its book is there.
    pub(super) fn elect(
        self: &Arc<Self>,
        keeper: &mut QuotaAgent,
        look: &Look,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) -> Result<Option<u64>> {
        let highest = look.highest();
        if let Some(term) = highest {
            if keeper.watched.claimed == Some(term) {
                return self.take_up(keeper, term, now, deadline);
            }
            if !self.is_free(keeper, term, look, now, deadline)? {
                return Ok(None);
            }
        }
        // Beyond every term that was, even where somebody removed the files of it.
        let term = highest
            .unwrap_or(0)
            .saturating_add(1)
            .max(self.clock.wall_ns() / 1_000_000);
        keeper.beat_sequence = 0;
        let beat = self.heartbeat(keeper, false);
        match self.write(Name::Collector(term), &beat, false, deadline) {
            Ok(true) => {}
            Ok(false) => return Ok(None), // somebody was faster
            Err(error) => {
                if error.kind() == ErrorKind::NoSpace {
                    // So full that nobody can be collector: removing needs no office.
                    self.start_count(Why {
                        term: None,
                        short: false,
                        full: true,
                        floor: false,
                    });
                }
                return Err(error);
            }
        }
        keeper.beat_at = now;
        keeper.watched.claimed = Some(term);
        self.take_up(keeper, term, now, deadline)
    }

    /// Whether the highest term's owner is gone.
    fn is_free(
        &self,
        keeper: &mut QuotaAgent,
        term: u64,
        look: &Look,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) -> Result<bool> {
        let len = look.files.get(&Name::Collector(term)).map_or(0, |meta| meta.len);
        // Read every time: a network file system may hide that it changed from those who only look at its times.
        let beat = self.read::<Heartbeat>(Name::Collector(term), len, deadline)?;
        let watched = &mut keeper.watched;
        let sequence = beat.as_ref().map_or(watched.sequence, |beat| beat.sequence);
        if (term, sequence) != (watched.term, watched.sequence) {
            (watched.term, watched.sequence, watched.moved) = (term, sequence, now);
        }
        let left = beat
            .as_ref()
            .is_some_and(|beat| beat.resigned || beat.process.is_gone());
        watched.beat = beat;
        Ok(left || now.since(watched.moved) >= STILL)
    }

    /// Opens the book of a term that is ours.
    fn take_up(
        &self,
        keeper: &mut QuotaAgent,
        term: u64,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) -> Result<Option<u64>> {
        let look = self.look(deadline)?;
        if look.highest() != Some(term) {
            // Several started at once, and another one's term is higher.
            keeper.watched.claimed = None;
            self.drop_documents(&[Name::Collector(term)], deadline);
            return Ok(None);
        }
        let mut left = None;
        for before in look.grants().filter(|&before| before < term) {
            let len = look.files.get(&Name::Grants(before)).map_or(0, |meta| meta.len);
            left = self.read::<Grants>(Name::Grants(before), len, deadline)?;
            if left.is_some() {
                break;
            }
        }
        let mut book = GrantTable::taken_over(left.as_ref());
        book.limit = self.ledger.lock().told.limit;
        if let Some(beat) = keeper.watched.beat.take()
            && (beat.resigned || beat.process.is_gone())
            && let Ok(writer) = u64::from_str_radix(&beat.writer, 16)
        {
            book.gone(writer);
        }
        *self.book.lock() = book;
        keeper.published = None;
        keeper.heard.clear();
        keeper.medium.full = false; // that was for the one before
        keeper.watched.claimed = None;
        if now.since(keeper.beat_at) > Duration::ZERO {
            self.beat(keeper, term, false, now, deadline)?;
        }
        self.introduce_myself(keeper, now, deadline);
        Ok(Some(term))
    }

    fn heartbeat(&self, keeper: &mut QuotaAgent, resigned: bool) -> Heartbeat {
        keeper.beat_sequence += 1;
        let writer = hex(self.ledger.lock().writer);
        keeper.watched.said.clone_from(&writer);
        Heartbeat {
            format: FORMAT,
            writer,
            process: Who::of(&self.config.process),
            sequence: keeper.beat_sequence,
            resigned,
        }
    }

    /// The next heartbeat, never over another owner's file: somebody may have removed ours. Whether the term is ours
    /// still.
    pub(super) fn beat_on(
        &self,
        keeper: &mut QuotaAgent,
        term: u64,
        look: &Look,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) -> Result<bool> {
        let name = Name::Collector(term);
        let there = look.files.get(&name);
        if let Some(meta) = there
            && let Some(beat) = self.read::<Heartbeat>(name, meta.len, deadline)?
            && beat.writer != keeper.watched.said
        {
            return Ok(false);
        }
        let beat = self.heartbeat(keeper, false);
        let ours = self.write(name, &beat, there.is_some(), deadline)?;
        if ours {
            keeper.beat_at = now;
        }
        Ok(ours)
    }

    /// Says that the collector is there, as of `now`.
    pub(super) fn beat(
        &self,
        keeper: &mut QuotaAgent,
        term: u64,
        resigned: bool,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) -> Result<()> {
        let beat = self.heartbeat(keeper, resigned);
        self.write(Name::Collector(term), &beat, true, deadline)?;
        keeper.beat_at = now;
        Ok(())
    }

    /// Removes what earlier terms left, once this one's grants are there.
    pub(super) fn drop_old_terms(&self, look: &Look, term: u64, deadline: MonotonicTime) {
        let old = |name: &&Name| matches!(**name, Name::Collector(old) | Name::Grants(old) if old < term);
        let names: Vec<Name> = look.files.keys().filter(old).copied().collect();
        self.drop_documents(&names, deadline);
    }
}
