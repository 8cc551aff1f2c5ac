//! Self-audit: blocks that were computed although they are stored are compared with what is stored.
//!
//! Whoever computes declines one hit in N and offers the result here. What differs beyond the tolerance is counted
//! and told, and that is all: the record proved itself by its checksums, so the fault may as well lie with the
//! identity, with the engine that wrote it, or with the one that computes now.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::Stream;
use ucm_infra::{Completion, Mono};

use super::guard::reason_of;
use super::load::{BlockRowList, by_block};
use super::{Core, Engine, LONGEST_LOAD, Row};
use crate::backend::ReadDone;
use crate::deviation::{deviation, tolerance};
use crate::events::Level;
use crate::stats::Stats;

/// One block of an audit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Audit {
    /// The block's record id.
    pub id: BlockId,
    /// How far the stored block lies from the offered one, as of [`deviation`]; or why they were not compared.
    pub outcome: std::result::Result<f64, MissReason>,
}

/// An answer of the backend that is handed on once although completions are shared.
type Answer = Arc<Mutex<Option<Result<ReadDone>>>>;

impl Engine {
    /// Compares blocks on the device with the stored ones, in order, and waits for that: at most `deadline` from now,
    /// the configured one of a load if `None`. The device memory of the rows must not change meanwhile. Nothing is
    /// refused or replaced by it. Errors: those of wrong rows; Unhealthy: the breaker is open.
    pub fn audit(&self, rows: Vec<Row>, deadline: Option<Duration>) -> Result<Vec<Audit>> {
        self.check_rows(&rows)?;
        let now = self.clock.now();
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        self.admit(now)?;
        let deadline = now.after(deadline.unwrap_or(self.deadlines.load).min(LONGEST_LOAD));
        let mut audits = Vec::new();
        for (id, rows) in by_block(rows) {
            let outcome = match self.audit_block(id, &rows, deadline) {
                Ok(outcome) => outcome,
                Err(error) => {
                    self.observe(&error);
                    Err(reason_of(&error))
                }
            };
            if let Ok(deviation) = outcome {
                self.audited(id, deviation);
            }
            audits.push(Audit { id, outcome });
        }
        Ok(audits)
    }

    /// The deviation up to which two computations of a block count as the same.
    pub fn audit_tolerance(&self) -> f64 {
        tolerance(self.layout.dtype())
    }

    fn audit_block(
        &self,
        id: BlockId,
        rows: &BlockRowList,
        deadline: Mono,
    ) -> Result<std::result::Result<f64, MissReason>> {
        if self.refused.contains(id) {
            return Ok(Err(MissReason::Refused));
        }
        let slot = self.slots.try_acquire();
        let slot =
            slot.ok_or_else(|| Error::new(ErrorKind::Busy, "no staging slot is free for this audit"))?;
        let completion: Arc<Completion<Answer>> = Completion::new();
        let answer = Arc::clone(&completion);
        let done = Box::new(move |result| {
            answer.complete(Arc::new(Mutex::new(Some(result))));
        });
        self.backend.read(id, slot, false, deadline, done);
        let late = || Error::new(ErrorKind::Timeout, "the stored block was not read in time");
        let answer = completion.wait(&*self.clock, Some(deadline)).ok_or_else(late)?;
        let read = answer.lock().take().ok_or_else(late)??;
        self.healthy();
        if let Err(reason) = self.verify(id, &read) {
            return Ok(Err(reason)); // the next load judges it
        }
        let record = read.slot.as_slice();
        let mut most = 0f64;
        self.with_stream(|stream| {
            let mut computed = Vec::new();
            for (_, shard, spans) in rows {
                for (layer, pieces) in self.layers_of(*shard, spans) {
                    let stored = &record[self.layout.layer_data(layer)];
                    computed.resize(stored.len(), 0);
                    stream.gather(pieces, &mut computed)?;
                    let mut at = 0;
                    for piece in pieces {
                        let tensor = at..at + piece.len() as usize;
                        at = tensor.end;
                        let dtype = self.layout.dtype();
                        most = most.max(deviation(dtype, &stored[tensor.clone()], &computed[tensor]));
                    }
                }
            }
            Ok(())
        })?;
        Ok(Ok(most))
    }

    fn audited(&self, id: BlockId, deviation: f64) {
        Stats::add(&self.stats.audits, 1);
        let tolerance = self.audit_tolerance();
        if deviation <= tolerance {
            return;
        }
        Stats::add(&self.stats.audit_deviations, 1);
        let text = format!(
            "block {id}, computed again, differs from the stored one by {deviation:.3} of its largest value (up to \
             {tolerance} is usual): look at what writes and what computes before blaming the record"
        );
        self.say(Level::Warning, text);
    }
}

impl Core {
    /// Whether the device holds what was copied to it.
    pub(super) fn compare(&self, stream: &mut dyn Stream, rows: &BlockRowList, record: &[u8]) -> Result<()> {
        let mut arrived = Vec::new();
        for (_, shard, spans) in rows {
            for (layer, pieces) in self.layers_of(*shard, spans) {
                let data = &record[self.layout.layer_data(layer)];
                arrived.resize(data.len(), 0);
                stream.gather(pieces, &mut arrived)?;
                if arrived != data {
                    let wrong = "the device does not hold what was copied to it";
                    return Err(Error::new(ErrorKind::Io, wrong).with("layer", layer));
                }
            }
        }
        Ok(())
    }
}
