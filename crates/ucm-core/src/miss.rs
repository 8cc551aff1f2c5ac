//! Why a block was not served from the cache. The whole product uses this one enum.

/// The reason of a miss. The order is frozen: new reasons are appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum MissReason {
    /// Not stored.
    Absent,
    /// Stored with a length that no manifest lists.
    WrongLength,
    /// Shorter on the medium than its header states.
    Truncated,
    /// Not a record (wrong magic).
    NotARecord,
    /// The header fails its own checksum.
    BadHeader,
    /// A payload checksum failed.
    BadChecksum,
    /// A record of a newer format version. It is neither replaced nor deleted.
    NewerVersion,
    /// A block file in the format of the seed.
    SeedForm,
    /// The record names another id than its file.
    ForeignId,
    /// The record names another identity.
    ForeignIdentity,
    /// The record names another part.
    ForeignPart,
    /// The record's shapes are not ours.
    ForeignShape,
    /// This process has refused this record, and no dump has replaced it yet.
    Refused,
    /// A deadline passed.
    Timeout,
    /// No slot or worker was free in time.
    Busy,
    /// The operating system reported an error.
    IoError,
    /// The breaker is open.
    Unhealthy,
    /// Another rank does not have the block.
    OtherRank,
    /// The identity (weights) or the content of the request's adapter is not known yet.
    IdentityPending,
    /// The identity cannot be known; the cache is off.
    IdentityUnknown,
    /// The hit is shorter than `min_hit_tokens`.
    TooShort,
    /// The lookup did not end in time.
    LookupLate,
    /// Another block of the same load failed, or a load failed earlier in this request: no block at
    /// or past that one is used or claimed again.
    LoadFailed,
    /// The cache is switched off.
    Disabled,
    /// Stored, but it holds the last token of the request, which is always computed.
    LastToken,
    /// The request has no block keys: an adapter or an item of it has no known content.
    Unkeyable,
    /// ucm does not cache this kind of model, engine or request.
    Unsupported,
    /// Offered to the engine as a hit; the engine did not use it.
    NotTaken,
    /// The request ended before its blocks were requested or loaded.
    Aborted,
    /// A bug in ucm or in a store; the log has the details.
    Internal,
    /// Loading it would have been slower than computing it, or `admission: never`.
    Declined,
    /// Encrypted with a key that this process does not have. It is not replaced.
    WrongKey,
    /// Not encrypted, on a medium where this process accepts only encrypted records.
    NotEncrypted,
}

impl MissReason {
    /// Every reason, in order.
    pub const ALL: [Self; 33] = [
        Self::Absent,
        Self::WrongLength,
        Self::Truncated,
        Self::NotARecord,
        Self::BadHeader,
        Self::BadChecksum,
        Self::NewerVersion,
        Self::SeedForm,
        Self::ForeignId,
        Self::ForeignIdentity,
        Self::ForeignPart,
        Self::ForeignShape,
        Self::Refused,
        Self::Timeout,
        Self::Busy,
        Self::IoError,
        Self::Unhealthy,
        Self::OtherRank,
        Self::IdentityPending,
        Self::IdentityUnknown,
        Self::TooShort,
        Self::LookupLate,
        Self::LoadFailed,
        Self::Disabled,
        Self::LastToken,
        Self::Unkeyable,
        Self::Unsupported,
        Self::NotTaken,
        Self::Aborted,
        Self::Internal,
        Self::Declined,
        Self::WrongKey,
        Self::NotEncrypted,
    ];

    /// Name in metrics, logs and Python.
    pub fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::WrongLength => "wrong_length",
            Self::Truncated => "truncated",
            Self::NotARecord => "not_a_record",
            Self::BadHeader => "bad_header",
            Self::BadChecksum => "bad_checksum",
            Self::NewerVersion => "newer_version",
            Self::SeedForm => "seed_form",
            Self::ForeignId => "foreign_id",
            Self::ForeignIdentity => "foreign_identity",
            Self::ForeignPart => "foreign_part",
            Self::ForeignShape => "foreign_shape",
            Self::Refused => "refused",
            Self::Timeout => "timeout",
            Self::Busy => "busy",
            Self::IoError => "io_error",
            Self::Unhealthy => "unhealthy",
            Self::OtherRank => "other_rank",
            Self::IdentityPending => "identity_pending",
            Self::IdentityUnknown => "identity_unknown",
            Self::TooShort => "too_short",
            Self::LookupLate => "lookup_late",
            Self::LoadFailed => "load_failed",
            Self::Disabled => "disabled",
            Self::LastToken => "last_token",
            Self::Unkeyable => "unkeyable",
            Self::Unsupported => "unsupported",
            Self::NotTaken => "not_taken",
            Self::Aborted => "aborted",
            Self::Internal => "internal",
            Self::Declined => "declined",
            Self::WrongKey => "wrong_key",
            Self::NotEncrypted => "not_encrypted",
        }
    }

    /// Index in [`MissReason::ALL`], for counters.
    pub fn index(self) -> usize {
        self as usize
    }

    /// True if the reason concerns the stored bytes. Such a record is refused (no hit in this
    /// process) until the next dump replaces it. Records of a newer version and records encrypted
    /// with another key are excepted: they are not replaced.
    pub fn refuses(self) -> bool {
        self.is_damage()
            || matches!(
                self,
                Self::SeedForm
                    | Self::ForeignId
                    | Self::ForeignIdentity
                    | Self::ForeignPart
                    | Self::ForeignShape
                    | Self::NotEncrypted
            )
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

    /// True if the stored bytes are valid for other processes but not readable here. They are no
    /// hit and are never replaced.
    pub fn leaves_alone(self) -> bool {
        matches!(self, Self::NewerVersion | Self::WrongKey)
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
