//! What is decided about the layout of a root, as it stands in the root's marker.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use ucm_quota::layout::Marker;

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
    /// Nothing spoke for another one.
    Default,
    /// The root held records in this layout, and none in files if it is the other.
    Records,
    /// Both were measured, by an early version.
    Measured,
    /// Blocks were so large that a file for each cost next to nothing, to an early version.
    Large,
}

/// The decision: `layout` in the marker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kept {
    pub(crate) kind: LayoutKind,
    pub(crate) why: Why,
    /// Unix time of the decision, seconds.
    pub(crate) decided: u64,
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
        let why = match self.why {
            Why::Default => "the default",
            Why::Records => "the root had records in it",
            Why::Measured => "measured on this root",
            Why::Large => "blocks are large",
        };
        format!("layout {} (auto: {why})", self.kind.name())
    }
}
