//! What is decided about the layout of a root, as it stands in the root's marker.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::measure::Figures;
use crate::layout::Marker;

/// How records lie below a root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LayoutKind {
    /// One record per file.
    File,
    /// Many records per file.
    Segment,
}

impl LayoutKind {
    /// Its name, as in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Segment => "segment",
        }
    }
}

/// Why it was decided so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Why {
    /// Both were measured.
    Measured,
    /// The root held records in this layout, and none in files if it is the other.
    Records,
    /// Blocks are so large that a file for each costs next to nothing.
    Large,
}

/// The decision: `layout` in the marker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kept {
    pub(crate) kind: LayoutKind,
    pub(crate) why: Why,
    /// Unix time of the decision, seconds.
    pub(crate) decided: u64,
    /// What was measured, if it was.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(crate) figures: Option<Figures>,
}

impl Kept {
    /// The decision in a marker. The error: there is one, of another version.
    pub(crate) fn of(marker: &Marker) -> Result<Option<Self>, ()> {
        match &marker.layout {
            None => Ok(None),
            Some(value) => Self::deserialize(value).map(Some).map_err(|_| ()),
        }
    }

    /// As it is kept in a marker.
    pub(crate) fn to_value(self) -> Option<Value> {
        serde_json::to_value(self).ok()
    }

    /// For the log.
    pub(crate) fn words(&self) -> String {
        let name = self.kind.name();
        match (self.why, self.figures) {
            (Why::Large, _) => format!("layout {name} (auto: blocks are large)"),
            (Why::Records, _) => format!("layout {name} (auto: the root had records in it)"),
            (Why::Measured, None) => format!("layout {name} (auto: measured on this root)"),
            (Why::Measured, Some(figures)) => {
                let rate = |bytes: u64| bytes / 1_000_000;
                let (appended, filed) = (rate(figures.segment_bytes_per_s), rate(figures.file_bytes_per_s));
                let len = figures.record_bytes;
                format!(
                    "layout {name} (auto: on this root records of {len} bytes were appended at {appended} MB/s and \
                     written at {filed} MB/s into a file each)"
                )
            }
        }
    }
}
