//! Whose records a medium keeps, whichever medium it is.

use std::collections::BTreeMap;

use ucm_core::{Identity, Part};
use ucm_record::RecordLayout;

use crate::lengths::{Lengths, PartRecord};

/// Whose records these are, and what they look like.
#[derive(Debug, Clone)]
pub struct Scope {
    /// Whose KV it is.
    pub identity: Identity,
    /// Words for the manifest, outside the digest.
    pub labels: BTreeMap<String, String>,
    /// Which part this backend's writer brings, the first of several.
    pub part: Part,
    /// Where things lie in that part's records.
    pub record: RecordLayout,
    /// Its other parts, and those of the namespace whose records may be looked up.
    pub other_parts: Vec<PartRecord>,
    /// Whether records may be shorter than the layout says, in another form that the caller can
    /// read.
    pub shorter: bool,
    /// Never writes.
    pub lookup_only: bool,
    /// Number of the store in the log, in its headers and private names, unlike all others.
    pub writer: u64,
}

impl Scope {
    /// The lengths that its records may have.
    pub(crate) fn lengths(&self) -> Lengths {
        Lengths::new(self.part, &self.record, &self.other_parts, self.shorter)
    }
}
