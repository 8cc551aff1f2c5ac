//! Verification of what was read, and records that were refused.

use std::ops::Range;

use tracing::warn;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_record::{Expect, RecordHeader, Refusal, verify_layers, verify_rest};
use ucm_tier::backend::ReadDone;

use super::Core;
use crate::stats::Stats;

impl Core {
    /// Verifies what was read: why it is not the record asked for, if so. Its first `verified`
    /// layers were verified before.
    pub(super) fn verify(
        &self,
        id: BlockId,
        read: &ReadDone,
        verified: u32,
    ) -> Result<RecordHeader, Refusal> {
        verify_rest(read.bytes(), read.stored_len, &self.expect(id), verified)
    }

    /// The same of a read of some layers, those up to number `verified` verified before.
    pub(super) fn verify_layers(
        &self,
        id: BlockId,
        read: &ReadDone,
        layers: &Range<u32>,
        verified: u32,
    ) -> Result<RecordHeader, Refusal> {
        let parts = self.records.layout.parts(layers.clone());
        let len = parts.iter().map(Range::len).sum::<usize>();
        if read.read < len {
            return Err(Refusal::new(
                MissReason::Truncated,
                "length",
                read.read,
                len,
            ));
        }
        let rest = verified.max(layers.start)..layers.end;
        verify_layers(
            read.slot.as_slice(),
            read.stored_len,
            &self.expect(id),
            rest,
        )
    }

    /// What a record must be.
    pub(super) fn expect(&self, id: BlockId) -> Expect<'_> {
        Expect {
            id,
            namespace: *self.records.identity.digest(),
            part: self.records.part,
            layout: &self.records.layout,
        }
    }

    /// Remembers that a record is not what it should be, in the last tier that had it (`None`:
    /// where it was just written); the answer is the error for those who wanted it.
    pub(super) fn refuse(&self, id: BlockId, tier: Option<usize>, reason: MissReason) -> Error {
        let error = self.refuse_id(id, reason);
        Stats::add(&self.stats.records_refused, 1);
        let name = reason.name();
        warn!(
            store = self.records.writer,
            block = %id,
            reason = name,
            "record {id} was refused ({name}) and will be recomputed"
        );
        if let Some(tier) = tier {
            self.tiers.discard(tier, id, reason);
        }
        error
    }

    /// The same where the copy itself was reported and discarded before.
    pub(super) fn refuse_id(&self, id: BlockId, reason: MissReason) -> Error {
        self.stats.misses.add(reason, 1);
        self.refused.add(id, reason);
        refusal(reason)
    }

    /// The copy of one tier is not what it should be; a lower one is asked instead.
    pub(super) fn discard(&self, id: BlockId, tier: usize, reason: MissReason) {
        Stats::add(&self.stats.records_refused, 1);
        let name = reason.name();
        warn!(
            store = self.records.writer,
            block = %id,
            reason = name,
            "a copy of record {id} was refused ({name}); another tier is asked for it"
        );
        self.tiers.discard(tier, id, reason);
    }
}

/// What those are told who wanted a record that is refused.
pub(super) fn refusal(reason: MissReason) -> Error {
    let kind = match reason {
        MissReason::ForeignId
        | MissReason::ForeignIdentity
        | MissReason::ForeignPart
        | MissReason::ForeignShape
        | MissReason::NewerVersion
        | MissReason::WrongKey
        | MissReason::NotEncrypted
        | MissReason::IoError => ErrorKind::Foreign,
        _ => ErrorKind::Corrupt,
    };
    Error::new(kind, "the stored record is not what it should be").with("reason", reason.name())
}

/// Why a tier gave no record that is there: as it says itself, or because it could not be read.
pub(super) fn reason_named(error: &Error) -> MissReason {
    let named = error.context().iter().find(|(key, _)| *key == "reason");
    let reason = named.and_then(|(_, name)| {
        MissReason::ALL
            .into_iter()
            .find(|reason| reason.name() == name)
    });
    reason.unwrap_or(MissReason::IoError)
}

/// The miss reason of an operation that failed before anything could be verified.
pub(super) fn reason_of(error: &Error) -> MissReason {
    match error.kind() {
        ErrorKind::NotFound => MissReason::Absent,
        ErrorKind::Timeout => MissReason::Timeout,
        ErrorKind::Busy => MissReason::Busy,
        ErrorKind::Unhealthy => MissReason::Unhealthy,
        _ => MissReason::IoError,
    }
}
