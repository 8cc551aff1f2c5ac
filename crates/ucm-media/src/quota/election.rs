//! The election of the collector: it is the owner of the highest term.
//!
//! A term is a file that is made without replacing, so it has one owner, and only its owner writes
//! it again. A writer that finds no term, or whose collector resigned, died on this host, or did
//! not move for [`STILL`] on the writer's own clock, takes the next term, reads the grants of the
//! previous term *after that*, and continues from them. A grant counts for a writer only if its
//! term was still the highest after the grant was read, and a collector grants only for a while
//! after its last heartbeat; so whatever was granted by two collectors is in the grant table of the
//! later one.

use std::time::Duration;

use ucm_core::{ErrorKind, Result};
use ucm_infra::MonotonicTime;

use super::agent::{QuotaAgent, Turn};
use super::count::Why;
use super::documents::{Grants, Heartbeat, Name, hex};
use super::documents_io::Look;
use super::grant_table::GrantTable;
use crate::layout::FORMAT;

/// Silence of a collector after which another one takes over.
const STILL: Duration = Duration::from_secs(20);

impl QuotaAgent {
    /// Becomes collector if there is none. Returns the term once its grant table is read.
    pub(super) fn elect(&mut self, look: &Look, turn: Turn) -> Result<Option<u64>> {
        let highest = look.highest();
        if let Some(term) = highest {
            if self.watched.claimed == Some(term) {
                return self.take_up(term, turn);
            }
            if !self.is_free(term, look, turn)? {
                return Ok(None);
            }
        }
        // Beyond every term that was, even where its files were removed.
        let term = highest
            .unwrap_or(0)
            .saturating_add(1)
            .max(self.files.clock.wall_ns() / 1_000_000);
        self.heartbeat.sequence = 0;
        let heartbeat = self.heartbeat(false);
        // So full that no writer can be collector: removing needs no term.
        if !self.write_heartbeat(term, &heartbeat, false, None, turn)? {
            return Ok(None); // another writer was faster
        }
        self.heartbeat.at = turn.now;
        self.watched.claimed = Some(term);
        self.take_up(term, turn)
    }

    /// Whether the owner of the highest term has ended.
    fn is_free(&mut self, term: u64, look: &Look, turn: Turn) -> Result<bool> {
        // Read every time: the times on a network file system may not show that it changed.
        let name = Name::Collector(term);
        let heartbeat: Option<Heartbeat> = self.files.read(look, name, turn.deadline)?;
        let watched = &mut self.watched;
        let read = heartbeat.as_ref();
        let sequence = read.map_or(watched.sequence, |heartbeat| heartbeat.sequence);
        if (term, sequence) != (watched.term, watched.sequence) {
            (watched.term, watched.sequence, watched.moved) = (term, sequence, turn.now);
        }
        let left = read.is_some_and(Heartbeat::is_over);
        watched.heartbeat = heartbeat;
        Ok(left || turn.now.since(watched.moved) >= STILL)
    }

    /// Opens the grant table of a term that is ours.
    fn take_up(&mut self, term: u64, turn: Turn) -> Result<Option<u64>> {
        let look = self.files.look(turn.deadline)?;
        if look.highest() != Some(term) {
            // Several started at once, and another one's term is higher.
            self.watched.claimed = None;
            self.files
                .drop_documents(&[Name::Collector(term)], turn.deadline);
            return Ok(None);
        }
        let mut left: Option<Grants> = None;
        let mut before = look.grants().filter(|&before| before < term);
        while left.is_none()
            && let Some(before) = before.next()
        {
            left = self
                .files
                .read(&look, Name::Grants(before), turn.deadline)?;
        }
        let mut table = GrantTable::taken_over(left.as_ref());
        table.limit = self.state.writer_quota.lock().report.limit;
        if let Some(heartbeat) = self.watched.heartbeat.take()
            && heartbeat.is_over()
            && let Ok(writer) = u64::from_str_radix(&heartbeat.writer, 16)
        {
            table.gone(writer);
        }
        *self.state.grant_table.lock() = table;
        self.published = None;
        self.active.clear();
        self.medium.full = false; // that was for the one before
        self.watched.claimed = None;
        if turn.now.since(self.heartbeat.at) > Duration::ZERO {
            let heartbeat = self.heartbeat(false);
            let name = Name::Collector(term);
            self.files.write(name, &heartbeat, true, turn.deadline)?;
            self.heartbeat.at = turn.now;
        }
        self.write_first_note(turn);
        Ok(Some(term))
    }

    pub(super) fn heartbeat(&mut self, resigned: bool) -> Heartbeat {
        self.heartbeat.sequence += 1;
        let writer = hex(self.state.writer_quota.lock().writer);
        self.watched.own_writer.clone_from(&writer);
        Heartbeat {
            format: FORMAT,
            writer,
            process: self.files.config.process.clone(),
            sequence: self.heartbeat.sequence,
            resigned,
        }
    }

    /// The next heartbeat, never over another owner's file: ours may have been removed. Whether the
    /// term is ours still.
    pub(super) fn renew_heartbeat(&mut self, term: u64, look: &Look, turn: Turn) -> Result<bool> {
        let name = Name::Collector(term);
        let is_there = look.files.contains_key(&name);
        if is_there
            && let Some(heartbeat) = self.files.read::<Heartbeat>(look, name, turn.deadline)?
            && heartbeat.writer != self.watched.own_writer
        {
            return Ok(false);
        }
        let heartbeat = self.heartbeat(false);
        let ours = self.write_heartbeat(term, &heartbeat, is_there, Some(term), turn)?;
        if ours {
            self.heartbeat.at = turn.now;
        }
        Ok(ours)
    }

    /// Writes a heartbeat; where the medium is full, room is made for the collector of that term.
    fn write_heartbeat(
        &self,
        term: u64,
        heartbeat: &Heartbeat,
        replace: bool,
        collector: Option<u64>,
        turn: Turn,
    ) -> Result<bool> {
        let name = Name::Collector(term);
        let written = self.files.write(name, heartbeat, replace, turn.deadline);
        written.inspect_err(|error| {
            if error.kind() == ErrorKind::NoSpace {
                self.counter.begin(Why::full(collector));
            }
        })
    }

    /// Removes what earlier terms left, once this one's grants are there.
    pub(super) fn drop_old_terms(&self, look: &Look, term: u64, deadline: MonotonicTime) {
        let old =
            |name: &&Name| matches!(**name, Name::Collector(old) | Name::Grants(old) if old < term);
        let names: Vec<Name> = look.files.keys().filter(old).copied().collect();
        self.files.drop_documents(&names, deadline);
    }
}
