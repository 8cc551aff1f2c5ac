//! Comparing what should be the same: the self-audit, and the second look of `verify: paranoid`.
//!
//! The engine that computes declines one hit in N and marks the blocks; when they are dumped, what
//! was computed is compared with what is stored. A difference beyond the tolerance is counted and
//! told, and that is all: the record proved itself by its checksums, so the fault may as well lie
//! with the identity, with the engine that wrote it, or with the one that computes now.

use std::sync::Arc;

use tracing::warn;
use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_device::{Piece, Slot, Stream};
use ucm_tier::backend::{BlockRead, ReadDone, WriteOptions, Written};

use super::Core;
use super::block_builder::BlockBuilder;
use crate::numeric_diff::{numeric_diff, tolerance};
use crate::stats::Stats;
use crate::tiers::TierRead;

/// Most blocks marked at once. To forget one is to skip its audit.
const MOST_MARKED: usize = 1 << 16;

impl Core {
    /// The next dump of each of these blocks is compared with what is stored, where it would only
    /// find it there. The outcome is counted (`audits`, `audit_deviations`); nothing is refused or
    /// replaced by it.
    pub fn audit(&self, ids: &[BlockId]) -> Result<()> {
        self.usable()?;
        for &id in ids {
            if self.dumps.marked.insert(id) && self.dumps.marked.len() > MOST_MARKED {
                self.dumps.marked.clear();
            }
        }
        Ok(())
    }

    /// The difference up to which two computations of a block count as the same.
    pub fn audit_tolerance(&self) -> f64 {
        tolerance(self.records.layout.dtype())
    }

    /// Reads the stored block and compares it with the whole record in `slot`; writes as usual if
    /// there is none to compare with, or no slot to read it into.
    pub(super) fn write_audited(
        self: &Arc<Self>,
        builder: &Arc<BlockBuilder>,
        slot: Slot,
        options: WriteOptions,
    ) {
        let (id, request) = (builder.id, builder.request);
        let tier = self.tiers.place(id, None, request.number);
        let room = tier.and_then(|_| {
            self.device
                .slots
                .try_acquire_above(self.device.reserved_slots)
        });
        let (Some(tier), Some(room)) = (tier, room) else {
            return self.write(builder, slot, options, None);
        };
        let (core, builder) = (Arc::clone(self), Arc::clone(builder));
        let ended = Arc::new(move |slot: Slot, result: Result<ReadDone>| match result {
            Ok(stored) if core.verify(id, &stored, 0).is_ok() => {
                core.audited(
                    id,
                    core.numeric_diff(stored.slot.as_slice(), slot.as_slice()),
                );
                drop((stored, slot));
                core.write_done(&builder, None, Ok(Written::Present));
            }
            answer => {
                drop(answer); // with the slot that was read into
                core.write(&builder, slot, options, None);
            }
        });
        let read = TierRead {
            read: BlockRead::whole(id, room, request.deadline),
            request,
            whose: slot,
        };
        self.tiers.read(tier, vec![read], &ended);
    }

    /// The largest difference of any tensor of two records.
    fn numeric_diff(&self, stored: &[u8], computed: &[u8]) -> f64 {
        let mut most = 0f64;
        for layer in 0..self.records.geometry.layers() {
            let mut at = self.records.layout.layer_data(layer).start;
            for &size in self.records.geometry.tensors() {
                let tensor = at..at + size as usize;
                at = tensor.end;
                most = most.max(numeric_diff(
                    self.records.layout.dtype(),
                    &stored[tensor.clone()],
                    &computed[tensor],
                ));
            }
        }
        most
    }

    fn audited(&self, id: BlockId, diff: f64) {
        Stats::add(&self.stats.audits, 1);
        let tolerance = self.audit_tolerance();
        if diff <= tolerance {
            return;
        }
        Stats::add(&self.stats.audit_deviations, 1);
        warn!(
            store = self.records.writer,
            block = %id,
            deviation = diff,
            tolerance,
            "block {id}, computed again, differs from the stored one by {diff:.3} of its largest \
             value (up to \
             {tolerance} is usual): look at what writes and what computes before blaming the record"
        );
    }
}

/// Whether the device holds what was copied to it.
pub(super) fn compare(stream: &mut dyn Stream, pieces: &[Piece], record: &[u8]) -> Result<()> {
    let mut arrived = vec![0; record.len()];
    stream.gather(pieces, &mut arrived, &mut |_, _| {})?;
    let differs = |piece: &Piece| {
        let bytes = piece.at..piece.at + piece.span.len() as usize;
        arrived[bytes.clone()] != record[bytes]
    };
    match pieces.iter().position(differs) {
        Some(piece) => {
            let wrong = "the device does not hold what was copied to it";
            Err(Error::new(ErrorKind::Io, wrong).with("piece", piece))
        }
        None => Ok(()),
    }
}
