//! What writers may write, in one document that each of them changes by compare-and-swap: for media
//! that can replace an object only where it is still the one that was read. The rules are those of
//! [`super::grant_table`]: what was counted, and what every writer may still write beyond that, never exceeds the limit.
//!
//! ```text
//! a writer:  read → note what it used and wants → grant → replace
//! a count:   read → claim → replace → list and remove → read → note what was found → replace
//! ```
//! A writer that loses a race reads again. A writer without a heartbeat for long is dropped by the
//! writer that counts, on its own clock ([`Silence`]); its grant has expired before ([`HOLDS`]).

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;

use super::documents::{Grants, Note, hex, to_bytes};
use super::grant_table::{GrantTable, Snapshot};
pub use super::writer_quota::HOLDS;
use crate::layout::FORMAT;

/// Time without a heartbeat after which a writer is dropped, or a count is made by another writer.
const SILENT: Duration = Duration::from_secs(600);
const COUNTS_FOR: Duration = Duration::from_secs(120);

/// See the module.
#[derive(Serialize, Deserialize, Debug, Clone, Default)]
pub struct SpaceDocument {
    format: u32,
    grants: Grants,
    /// By writer id, 16 hex digits.
    writers: BTreeMap<String, Writer>,
    /// The writer that counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    counting: Option<Counting>,
}

/// The entry of a writer; totals of bytes since it took its id.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Writer {
    /// Of writes that were begun.
    #[serde(rename = "admitted")]
    reserved: u64,
    /// Of those that have ended too.
    #[serde(rename = "settled")]
    committed: u64,
    /// Grows with every entry.
    #[serde(rename = "beat")]
    heartbeat: u64,
}

#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
struct Counting {
    writer: String,
    #[serde(rename = "beat")]
    heartbeat: u64,
}

/// The use of one writer, and its request.
#[derive(Debug, Clone, Copy, Default)]
pub struct Use {
    /// Bytes of writes that were begun, since it took its id.
    pub reserved: u64,
    /// Bytes of those that have ended.
    pub committed: u64,
    /// Up to where it knows that it may write.
    pub granted: u64,
    /// Bytes that it needs at once; 0: nothing.
    pub wanted: u64,
}

impl Use {
    fn note(self, closed: bool) -> Note {
        Note {
            reserved: self.reserved,
            committed: self.committed,
            granted: self.granted,
            wanted: self.wanted,
            closed,
            ..Note::default()
        }
    }
}

impl SpaceDocument {
    /// Reads a document. `Foreign` for one of a newer format, `Config` for one that is none.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let damaged = |error| {
            let text = "the document of the space that is used is damaged; remove it, and it is \
                        counted anew";
            Error::new(ErrorKind::Config, text).caused_by(error)
        };
        let document: Self = serde_json::from_slice(bytes).map_err(damaged)?;
        if document.format > FORMAT {
            let text = "the space here is kept by a newer ucm; upgrade, or use another place";
            return Err(Error::new(ErrorKind::Foreign, text).with("format", document.format));
        }
        Ok(document)
    }

    /// The document as it is written.
    pub fn to_bytes(&self) -> Vec<u8> {
        let written = Self {
            format: FORMAT,
            ..self.clone()
        };
        to_bytes(&written)
    }

    fn table(&self) -> GrantTable {
        let mut table = GrantTable::taken_over(Some(&self.grants));
        for (id, writer) in &self.writers {
            let note = Note {
                reserved: writer.reserved,
                committed: writer.committed,
                ..Note::default()
            };
            if let Ok(id) = u64::from_str_radix(id, 16) {
                table.note(id, &note);
            }
        }
        table
    }

    fn set_table(&mut self, table: &GrantTable) {
        self.grants = table.document();
        let known = table.writers();
        self.writers
            .retain(|id, _| u64::from_str_radix(id, 16).is_ok_and(|id| known.contains(&id)));
    }

    /// Whether this writer is known: one that is not, and has a grant, was dropped, and is to take
    /// another id.
    pub fn knows(&self, writer: u64) -> bool {
        self.writers.contains_key(&hex(writer))
    }

    /// Enters what a writer used and needs, below this limit; returns the total up to which it may
    /// write.
    pub fn ask(&mut self, writer: u64, used: Use, limit: u64) -> u64 {
        let entry = self.writers.entry(hex(writer)).or_default();
        *entry = Writer {
            reserved: used.reserved,
            committed: used.committed,
            heartbeat: entry.heartbeat + 1,
        };
        let mut table = self.table();
        table.limit = limit;
        table.note(writer, &used.note(false));
        if used.wanted > 0 {
            table.grant();
        }
        self.set_table(&table);
        let granted = self.grants.writers.get(&hex(writer));
        granted.map_or(used.granted, |granted| granted.granted)
    }

    /// A writer ends, and writes no more.
    pub fn leave(&mut self, writer: u64, used: Use) {
        let mut table = self.table();
        table.note(writer, &used.note(true));
        // What it was granted and did not use is free at once; what it used is, with the next
        // count.
        self.set_table(&table);
        if let Some(entry) = self.writers.get_mut(&hex(writer)) {
            (entry.reserved, entry.committed) = (used.reserved, used.committed);
        }
    }

    /// Bytes used as far as is known, the limit, and whether all was ever counted.
    pub fn usage(&self) -> (u64, u64, bool) {
        let (limit, counted) = (self.grants.limit, self.grants.counted.is_some());
        (self.table().used(), limit, counted)
    }

    /// The most that can lie there, whatever the writers do with their grants; none before a count.
    pub fn bound(&self) -> Option<u64> {
        self.table().bound()
    }

    /// This writer counts, unless another one does and has a recent heartbeat; what the count will
    /// see for sure.
    pub fn begin_count(
        &mut self,
        writer: u64,
        silence: &mut Silence,
        now: MonotonicTime,
    ) -> Option<Snapshot> {
        let mine = hex(writer);
        let heartbeat = match &self.counting {
            Some(other)
                if other.writer != mine
                    && !silence.is_over(&other.writer, other.heartbeat, COUNTS_FOR, now) =>
            {
                return None;
            }
            before => before.as_ref().map_or(0, |before| before.heartbeat) + 1,
        };
        self.counting = Some(Counting {
            writer: mine,
            heartbeat,
        });
        let mut table = self.table();
        for (id, said) in &self.writers {
            let number = u64::from_str_radix(id, 16).unwrap_or(0);
            if number != writer && silence.is_over(id, said.heartbeat, SILENT, now) {
                table.gone(number);
            }
        }
        Some(table.begin_count())
    }

    /// A count that began with `before` found `total` bytes in `objects` objects.
    pub fn end_count(&mut self, before: &Snapshot, total: u64, objects: u64) {
        let mut table = self.table();
        for forgotten in table.end_count(before, total, objects) {
            self.writers.remove(&hex(forgotten));
        }
        self.set_table(&table);
        self.counting = None;
    }
}

/// Time since the last heartbeat of each other writer, on the own clock.
#[derive(Debug, Default)]
pub struct Silence(HashMap<String, (u64, MonotonicTime)>);

impl Silence {
    /// Whether this writer had no heartbeat for `span`.
    fn is_over(&mut self, who: &str, heartbeat: u64, span: Duration, now: MonotonicTime) -> bool {
        let (seen, since) = self.0.entry(who.to_owned()).or_insert((heartbeat, now));
        if *seen != heartbeat {
            (*seen, *since) = (heartbeat, now);
        }
        now.since(*since) >= span
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn again(document: &SpaceDocument) -> SpaceDocument {
        SpaceDocument::parse(&document.to_bytes()).unwrap()
    }

    fn counted(limit: u64) -> SpaceDocument {
        let mut document = SpaceDocument::default();
        document.ask(1, Use::default(), limit);
        let before = document
            .begin_count(1, &mut Silence::default(), MonotonicTime(0))
            .unwrap();
        document.end_count(&before, 0, 0);
        document
    }

    #[test]
    fn one_counts_at_a_time_and_a_silent_one_is_followed() {
        let (mut document, mut silence) = (counted(1600), Silence::default());
        let at = |seconds: u64| MonotonicTime(seconds * 1_000_000_000);
        document
            .begin_count(2, &mut Silence::default(), at(0))
            .unwrap();
        document = again(&document);
        assert!(document.begin_count(3, &mut silence, at(0)).is_none());
        assert!(document.begin_count(3, &mut silence, at(119)).is_none());
        let before = document.begin_count(3, &mut silence, at(120)).unwrap();
        document.end_count(&before, 5, 1);
        assert_eq!(document.usage(), (5, 1600, true));
        assert!(
            document.begin_count(1, &mut silence, at(121)).is_some(),
            "no writer counts"
        );
    }

    #[test]
    fn a_writer_that_was_not_heard_of_is_dropped_with_its_grant() {
        let (mut document, mut silence) = (counted(1600), Silence::default());
        let want = |wanted| Use {
            wanted,
            ..Use::default()
        };
        assert!(document.ask(7, want(50), 1600) >= 50);
        let bound = document.bound().unwrap();
        assert!(bound >= 50);
        let late = MonotonicTime::default().after(SILENT);
        for now in [MonotonicTime::default(), late] {
            let before = document.begin_count(1, &mut silence, now).unwrap();
            document.end_count(&before, 10, 1);
            document = again(&document);
        }
        assert!(!document.knows(7));
        assert_eq!(document.bound(), Some(10));
    }

    #[test]
    fn who_leaves_gives_back_what_it_did_not_use() {
        let mut document = counted(1600);
        let granted = document.ask(
            7,
            Use {
                wanted: 10,
                ..Use::default()
            },
            1600,
        );
        let used = Use {
            reserved: 10,
            committed: 10,
            granted,
            wanted: 0,
        };
        document.leave(7, used);
        assert_eq!(again(&document).bound(), Some(10));
    }

    proptest! {
        /// Writers use what they were granted, as late as may be; counts begin and end, and some
        /// are overtaken.
        #[test]
        fn the_limit_holds(acts in prop::collection::vec((1..4u64, 0..5u8, 1..200u64), 1..200)) {
            let limit = 2000;
            let (mut document, mut silence) = (counted(limit), Silence::default());
            let mut uses: BTreeMap<u64, Use> = BTreeMap::new();
            let mut count: Option<(u64, Snapshot, u64)> = None;
            for (writer, act, bytes) in acts {
                let total: u64 = uses.values().map(|used| used.reserved).sum();
                let used = uses.entry(writer).or_default();
                match act {
                    0 => used.reserved = (used.reserved + bytes).min(used.granted.max(used.reserved)),
                    1 => used.committed = used.reserved,
                    2 => {
                        let asked = Use { wanted: bytes, ..*used };
                        used.granted = document.ask(writer, asked, limit).max(used.granted);
                    }
                    3 => {
                        let now = MonotonicTime::default();
                        if let Some(before) = document.begin_count(writer, &mut silence, now) {
                            count = Some((writer, before, total));
                        }
                    }
                    _ => if let Some((_, before, found)) = count.take() {
                        document.end_count(&before, found, 1);
                    },
                }
                document = again(&document);
                let written: u64 = uses.values().map(|used| used.reserved).sum();
                prop_assert!(written <= limit);
                prop_assert!(document.bound().is_some_and(|bound| written <= bound.max(limit)));
            }
        }
    }
}
