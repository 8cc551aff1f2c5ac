//! Why a block was not served from the cache. The whole product uses this one enum.

crate::named! {
    /// The reason of a miss. The order is frozen: new reasons are appended.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    #[non_exhaustive]
    pub enum MissReason {
        /// Not stored.
        Absent = "absent",
        /// Stored with a length that no manifest lists.
        WrongLength = "wrong_length",
        /// Shorter on the medium than its header states.
        Truncated = "truncated",
        /// Not a record (wrong magic).
        NotARecord = "not_a_record",
        /// The header fails its own checksum.
        BadHeader = "bad_header",
        /// A payload checksum failed.
        BadChecksum = "bad_checksum",
        /// A record of a newer format version. It is neither replaced nor deleted.
        NewerVersion = "newer_version",
        /// A block file in the format of the seed.
        SeedForm = "seed_form",
        /// The record names another id than its file.
        ForeignId = "foreign_id",
        /// The record names another identity.
        ForeignIdentity = "foreign_identity",
        /// The record names another part.
        ForeignPart = "foreign_part",
        /// The record's shapes are not ours.
        ForeignShape = "foreign_shape",
        /// This process has refused this record, and no dump has replaced it yet.
        Refused = "refused",
        /// A deadline passed.
        Timeout = "timeout",
        /// No slot or worker was free in time.
        Busy = "busy",
        /// The operating system reported an error.
        IoError = "io_error",
        /// The breaker is open.
        Unhealthy = "unhealthy",
        /// Another rank does not have the block.
        OtherRank = "other_rank",
        /// The identity (weights) or the content of the request's adapter is not known yet.
        IdentityPending = "identity_pending",
        /// The identity cannot be known; the cache is off.
        IdentityUnknown = "identity_unknown",
        /// The hit is shorter than `min_hit_tokens`.
        TooShort = "too_short",
        /// The lookup did not end in time.
        LookupLate = "lookup_late",
        /// Another block of the same load failed, or a load failed earlier in this request: no
        /// block at or past that one is used or claimed again.
        LoadFailed = "load_failed",
        /// The cache is switched off.
        Disabled = "disabled",
        /// Stored, but it holds the last token of the request, which is always computed.
        LastToken = "last_token",
        /// The request has no block keys: an adapter or an item of it has no known content.
        Unkeyable = "unkeyable",
        /// ucm does not cache this kind of model, engine or request.
        Unsupported = "unsupported",
        /// Offered to the engine as a hit; the engine did not use it.
        NotTaken = "not_taken",
        /// The request ended before its blocks were requested or loaded.
        Aborted = "aborted",
        /// A bug in ucm or in a store; the log has the details.
        Internal = "internal",
        /// Loading it would have been slower than computing it, or `admission: never`.
        Declined = "declined",
        /// Encrypted with a key that this process does not have. It is not replaced.
        WrongKey = "wrong_key",
        /// Not encrypted, on a medium where this process accepts only encrypted records.
        NotEncrypted = "not_encrypted",
    }
}

impl MissReason {
    /// Index in [`MissReason::ALL`], for counters.
    pub fn index(self) -> usize {
        self as usize
    }

    /// True if the stored bytes are damaged. A complete record of another identity, part or id is
    /// not damaged.
    pub fn is_damage(self) -> bool {
        matches!(
            self,
            Self::WrongLength
                | Self::Truncated
                | Self::NotARecord
                | Self::BadHeader
                | Self::BadChecksum
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_whole_and_in_order() {
        for (i, reason) in MissReason::ALL.into_iter().enumerate() {
            assert_eq!(reason.index(), i);
        }
        let mut names: Vec<_> = MissReason::ALL.iter().map(|r| r.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), MissReason::ALL.len());
    }
}
