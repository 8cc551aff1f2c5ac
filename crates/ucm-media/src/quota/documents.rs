//! The documents in `<root>/space/`, by which the writers of a root agree on the collector and on
//! how much each may write.
//!
//! `collector-<term>.json` is made without replacing: exactly one writer owns a term, and the owner
//! of the highest term is the collector. Only its owner writes it again (the heartbeat).
//! `grants-<term>.json` is what that collector counted and granted. `writer-<id>.json` is what one
//! writer used and needs.

use std::collections::BTreeMap;
use std::ffi::OsStr;

use serde::{Deserialize, Serialize};
use ucm_io::Process;

use crate::layout::{FORMAT, parse_hex};

/// Directory below the root.
pub(crate) const DIRECTORY: &str = "space";

/// A file in that directory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Name {
    Collector(u64),
    Grants(u64),
    Writer(u64),
}

impl Name {
    pub(crate) fn parse(name: &OsStr) -> Option<Self> {
        let (kind, number) = name.to_str()?.strip_suffix(".json")?.split_once('-')?;
        let number = parse_hex(number)?;
        match kind {
            "collector" => Some(Self::Collector(number)),
            "grants" => Some(Self::Grants(number)),
            "writer" => Some(Self::Writer(number)),
            _ => None,
        }
    }

    pub(crate) fn text(self) -> String {
        match self {
            Self::Collector(term) => format!("collector-{term:016x}.json"),
            Self::Grants(term) => format!("grants-{term:016x}.json"),
            Self::Writer(id) => format!("writer-{id:016x}.json"),
        }
    }
}

/// A collector's heartbeat.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub(crate) struct Heartbeat {
    pub(crate) format: u32,
    /// Writer id of the process, 16 hex digits.
    pub(crate) writer: String,
    pub(crate) process: Process,
    /// Grows with every heartbeat.
    pub(crate) sequence: u64,
    /// It resigned; the next term is free.
    pub(crate) resigned: bool,
}

impl Heartbeat {
    /// Whether its collector writes no more.
    pub(crate) fn is_over(&self) -> bool {
        self.resigned || self.process.is_gone()
    }
}

/// What a writer used and wants. Totals are bytes since it took its id, and never go down while it
/// writes.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Note {
    pub(crate) format: u32,
    pub(crate) process: Process,
    /// Grows with every note.
    pub(crate) sequence: u64,
    /// Total of the writes that were begun.
    #[serde(rename = "admitted")]
    pub(crate) reserved: u64,
    /// Total of the writes that have ended too.
    #[serde(rename = "settled")]
    pub(crate) committed: u64,
    /// The grant it knows of, a total as well.
    pub(crate) granted: u64,
    /// Bytes it needs at once; 0: nothing.
    pub(crate) wanted: u64,
    /// How often the medium was full for it.
    pub(crate) full: u64,
    /// It ended and writes no more.
    pub(crate) closed: bool,
}

/// A collector's grant table: what was counted, and what each writer may have written beyond that.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Grants {
    pub(crate) format: u32,
    /// The limit on bytes below the root.
    pub(crate) limit: u64,
    /// Bytes counted below the root, less what was removed since; none before the first count.
    pub(crate) counted: Option<u64>,
    /// Bytes used as far as the collector knew when it wrote this.
    pub(crate) used: u64,
    /// Records counted.
    pub(crate) records: u64,
    /// By writer id, 16 hex digits.
    pub(crate) writers: BTreeMap<String, Granted>,
}

/// One writer in a grant table.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Granted {
    /// The total up to which it may write.
    pub(crate) granted: u64,
    /// The total that the count has seen.
    pub(crate) seen: u64,
}

/// A document as bytes.
pub(crate) fn to_bytes(document: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(document).unwrap_or_default()
}

/// A document of a format we know, if it is one.
pub(crate) fn parse<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Option<T> {
    #[derive(Deserialize)]
    struct Head {
        format: u32,
    }
    let head: Head = serde_json::from_slice(bytes).ok()?;
    (head.format <= FORMAT).then(|| serde_json::from_slice(bytes).ok())?
}

/// A writer's id as it is written.
pub(crate) fn hex(writer: u64) -> String {
    format!("{writer:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_exact() {
        for name in [
            Name::Collector(1),
            Name::Grants(u64::MAX),
            Name::Writer(0xab),
        ] {
            assert_eq!(Name::parse(OsStr::new(&name.text())), Some(name));
        }
        for bad in [
            "collector-1.json",
            "writer-00000000000000AB.json",
            "other-0000000000000001.json",
            "x",
        ] {
            assert_eq!(Name::parse(OsStr::new(bad)), None, "{bad}");
        }
    }

    #[test]
    fn a_newer_format_is_not_read() {
        let note = Note {
            format: FORMAT,
            granted: 5,
            ..Note::default()
        };
        assert_eq!(parse::<Note>(&to_bytes(&note)), Some(note.clone()));
        let newer = Note {
            format: FORMAT + 1,
            ..note
        };
        assert_eq!(parse::<Note>(&to_bytes(&newer)), None);
    }
}
