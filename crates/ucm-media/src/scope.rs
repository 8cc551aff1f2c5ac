//! Whose records a medium keeps, whichever medium it is.

use std::collections::BTreeMap;

use ucm_core::{Identity, Part};
use ucm_record::RecordLayout;

use crate::layout::Manifest;
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

    /// The manifest that is stored, or a new one, with these parts added, and whether that changed
    /// it. Its lengths are known from then on.
    pub(crate) fn describe<'a>(
        &self,
        lengths: &Lengths,
        parts: impl IntoIterator<Item = &'a PartRecord>,
        stored: Option<&[u8]>,
    ) -> (Vec<u8>, bool) {
        let stored = stored.and_then(|bytes| serde_json::from_slice(bytes).ok());
        let new = || Manifest::new(&self.identity, self.labels.clone());
        let (mut manifest, mut changed) = (stored.unwrap_or_else(new), false);
        for known in parts {
            changed |= manifest.add(known.part, &known.record);
        }
        lengths.learn_from(&manifest);
        (manifest.to_bytes(), changed)
    }
}
