//! A segment's footer as those read it who did not write the segment: from the bytes at its end,
//! and by a second read where it is longer than those.

use ucm_core::{MissReason, Part};

use super::format::{Entry, Trailer};
use crate::layout::SegmentName;
use crate::lengths::Lengths;

/// Bytes read of a segment's end at first: the footer of a thousand records.
pub(crate) const TAIL: u64 = 32 << 10;
/// Longest footer that is read, bytes.
const LONGEST: u64 = 64 << 20;

/// The contents of a segment's footer.
pub(crate) struct Footer {
    /// When it was sealed, by its writer's clock, ns of Unix time.
    pub(crate) sealed_ns: u64,
    pub(crate) part: Part,
    pub(crate) entries: Vec<Entry>,
}

/// The contents of the bytes at the end of a segment.
pub(crate) enum Tail {
    /// The footer, which lies in them.
    Whole(Footer),
    /// That it begins before them, where [`Trailer::footer`] says; [`Footer::of`] verifies it.
    Longer(Trailer),
}

impl Footer {
    /// Verifies the last bytes of the segment of this name, which has `file_len` bytes, in this
    /// namespace.
    pub(crate) fn in_tail(
        tail: &[u8],
        file_len: u64,
        name: SegmentName,
        namespace: &[u8; 32],
        lengths: &Lengths,
    ) -> Result<Tail, MissReason> {
        let trailer = Trailer::decode(tail, file_len)?;
        if trailer.owner.namespace != *namespace {
            return Err(MissReason::ForeignIdentity);
        }
        if trailer.owner.name != name {
            return Err(MissReason::ForeignId);
        }
        match trailer.footer_in(tail) {
            Ok(footer) => Self::of(&trailer, footer, lengths).map(Tail::Whole),
            Err(len) if len <= LONGEST => Ok(Tail::Longer(trailer)),
            Err(_) => Err(MissReason::BadHeader),
        }
    }

    /// The footer that these bytes are. None of its records is longer than one of its part can be.
    pub(crate) fn of(
        trailer: &Trailer,
        footer: &[u8],
        lengths: &Lengths,
    ) -> Result<Self, MissReason> {
        let entries = trailer.entries(footer, lengths.bound(trailer.owner.part))?;
        Ok(Self {
            sealed_ns: trailer.owner.time_ns,
            part: trailer.owner.part,
            entries,
        })
    }
}
