//! The layouts of a root, and what was decided for one.

use serde::{Deserialize, Serialize};

use crate::layout::{BLOCKS, SEGMENTS};

ucm_core::named! {
    /// How records lie below a root.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum LayoutKind {
        /// One record per file.
        File = "file",
        /// Many records per file.
        Segment = "segment",
    }
}

impl LayoutKind {
    /// Where its records lie below their namespace.
    pub(crate) fn directory(self) -> &'static str {
        match self {
            Self::File => BLOCKS,
            Self::Segment => SEGMENTS,
        }
    }
}

/// The decided layout: `layout` in the marker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RootLayout {
    pub(crate) kind: LayoutKind,
    /// `default` where the root was new, `records` where it held records in this layout, and none
    /// in files if it is the other; early versions had other reasons too.
    pub(crate) why: String,
    /// Unix time of the decision, seconds.
    pub(crate) decided: u64,
}

/// The layout that this process uses for a root.
pub(crate) struct Decision {
    pub(crate) kind: LayoutKind,
    /// Which layout and why, for the log.
    pub(crate) words: String,
}

impl Decision {
    /// Files, until the next start.
    pub(crate) fn for_now(why: &str) -> Self {
        Self {
            kind: LayoutKind::File,
            words: format!("layout file for now ({why})"),
        }
    }
}

impl RootLayout {
    pub(crate) fn decision(&self) -> Decision {
        Decision {
            kind: self.kind,
            words: format!("layout {} (marked: {})", self.kind.name(), self.why),
        }
    }
}
