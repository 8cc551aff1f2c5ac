//! Who is collector: the owner of the highest term.
//!
//! A term is a file that is made without replacing, so it has one owner, and only its owner writes
//! it again. A writer that finds no term, or whose collector resigned, died on this host, or did
//! not move for [`STILL`] on the writer's own clock, takes the next term, reads the grants of the
//! one before *after that*, and goes on from there. A grant counts for a writer only if its term
//! was still the highest after the grant was read, and a collector grants only for a while after
//! its last heartbeat; so whatever was granted by two collectors is in the grant table of the later
//! one.

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
    /// Becomes collector if there is none. The answer: the term, once its grant table is there.
    pub(super) fn elect(
        self: &Arc<Self>,
        agent: &mut QuotaAgent,
        look: &Look,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) -> Result<Option<u64>> {
        let highest = look.highest();
        if let Some(term) = highest {
            if agent.watched.claimed == Some(term) {
                return self.take_up(agent, term, now, deadline);
            }
            if !self.is_free(agent, term, look, now, deadline)? {
                return Ok(None);
            }
        }
        // Beyond every term that was, even where its files were removed.
        let term = highest
            .unwrap_or(0)
            .saturating_add(1)
            .max(self.clock.wall_ns() / 1_000_000);
        agent.heartbeat_sequence = 0;
        let heartbeat = self.heartbeat(agent, false);
        match self.write(Name::Collector(term), &heartbeat, false, deadline) {
            Ok(true) => {}
            Ok(false) => return Ok(None), // another writer was faster
            Err(error) => {
                if error.kind() == ErrorKind::NoSpace {
                    // So full that no writer can be collector: removing needs no office.
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
        agent.heartbeat_at = now;
        agent.watched.claimed = Some(term);
        self.take_up(agent, term, now, deadline)
    }

    /// Whether the highest term's owner is gone.
    fn is_free(
        &self,
        agent: &mut QuotaAgent,
        term: u64,
        look: &Look,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) -> Result<bool> {
        let len = look
            .files
            .get(&Name::Collector(term))
            .map_or(0, |meta| meta.len);
        // Read every time: a network file system may hide that it changed from those who only look
        // at its times.
        let heartbeat = self.read::<Heartbeat>(Name::Collector(term), len, deadline)?;
        let watched = &mut agent.watched;
        let sequence = heartbeat
            .as_ref()
            .map_or(watched.sequence, |heartbeat| heartbeat.sequence);
        if (term, sequence) != (watched.term, watched.sequence) {
            (watched.term, watched.sequence, watched.moved) = (term, sequence, now);
        }
        let left = heartbeat
            .as_ref()
            .is_some_and(|heartbeat| heartbeat.resigned || heartbeat.process.is_gone());
        watched.heartbeat = heartbeat;
        Ok(left || now.since(watched.moved) >= STILL)
    }

    /// Opens the grant table of a term that is ours.
    fn take_up(
        &self,
        agent: &mut QuotaAgent,
        term: u64,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) -> Result<Option<u64>> {
        let look = self.look(deadline)?;
        if look.highest() != Some(term) {
            // Several started at once, and another one's term is higher.
            agent.watched.claimed = None;
            self.drop_documents(&[Name::Collector(term)], deadline);
            return Ok(None);
        }
        let mut left = None;
        for before in look.grants().filter(|&before| before < term) {
            let len = look
                .files
                .get(&Name::Grants(before))
                .map_or(0, |meta| meta.len);
            left = self.read::<Grants>(Name::Grants(before), len, deadline)?;
            if left.is_some() {
                break;
            }
        }
        let mut table = GrantTable::taken_over(left.as_ref());
        table.limit = self.writer_quota.lock().told.limit;
        if let Some(heartbeat) = agent.watched.heartbeat.take()
            && (heartbeat.resigned || heartbeat.process.is_gone())
            && let Ok(writer) = u64::from_str_radix(&heartbeat.writer, 16)
        {
            table.gone(writer);
        }
        *self.grant_table.lock() = table;
        agent.published = None;
        agent.heard.clear();
        agent.medium.full = false; // that was for the one before
        agent.watched.claimed = None;
        if now.since(agent.heartbeat_at) > Duration::ZERO {
            self.write_heartbeat(agent, term, false, now, deadline)?;
        }
        self.introduce_myself(agent, now, deadline);
        Ok(Some(term))
    }

    fn heartbeat(&self, agent: &mut QuotaAgent, resigned: bool) -> Heartbeat {
        agent.heartbeat_sequence += 1;
        let writer = hex(self.writer_quota.lock().writer);
        agent.watched.said.clone_from(&writer);
        Heartbeat {
            format: FORMAT,
            writer,
            process: Who::of(&self.config.process),
            sequence: agent.heartbeat_sequence,
            resigned,
        }
    }

    /// The next heartbeat, never over another owner's file: ours may have been removed. Whether the
    /// term is ours still.
    pub(super) fn renew_heartbeat(
        &self,
        agent: &mut QuotaAgent,
        term: u64,
        look: &Look,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) -> Result<bool> {
        let name = Name::Collector(term);
        let there = look.files.get(&name);
        if let Some(meta) = there
            && let Some(heartbeat) = self.read::<Heartbeat>(name, meta.len, deadline)?
            && heartbeat.writer != agent.watched.said
        {
            return Ok(false);
        }
        let heartbeat = self.heartbeat(agent, false);
        let ours = self.write(name, &heartbeat, there.is_some(), deadline)?;
        if ours {
            agent.heartbeat_at = now;
        }
        Ok(ours)
    }

    /// Says that the collector is there, as of `now`.
    pub(super) fn write_heartbeat(
        &self,
        agent: &mut QuotaAgent,
        term: u64,
        resigned: bool,
        now: MonotonicTime,
        deadline: MonotonicTime,
    ) -> Result<()> {
        let heartbeat = self.heartbeat(agent, resigned);
        self.write(Name::Collector(term), &heartbeat, true, deadline)?;
        agent.heartbeat_at = now;
        Ok(())
    }

    /// Removes what earlier terms left, once this one's grants are there.
    pub(super) fn drop_old_terms(&self, look: &Look, term: u64, deadline: MonotonicTime) {
        let old =
            |name: &&Name| matches!(**name, Name::Collector(old) | Name::Grants(old) if old < term);
        let names: Vec<Name> = look.files.keys().filter(old).copied().collect();
        self.drop_documents(&names, deadline);
    }
}
