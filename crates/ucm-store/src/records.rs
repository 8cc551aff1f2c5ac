//! What the records of one store are: the same for everything that makes, verifies or moves one.

use ucm_core::{Geometry, Identity, Part};
use ucm_record::RecordLayout;

/// See the module.
pub(crate) struct StoredRecords {
    /// Sizes of a block on the device.
    pub(crate) geometry: Geometry,
    /// Where things lie in a record.
    pub(crate) layout: RecordLayout,
    /// Whose KV it is.
    pub(crate) identity: Identity,
    /// Which part of a block.
    pub(crate) part: Part,
    /// The store, as its headers and log lines name it.
    pub(crate) writer: u64,
}
