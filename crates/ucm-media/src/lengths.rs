//! Which lengths the records of a namespace may have on a medium, for all media: this alone judges
//! a length.
//!
//! Each part has lengths of its own: ranks and KV groups may hold different numbers of layers. Known
//! are those of the own parts, whose records this store writes, and of the parts that were named to
//! the store, from the start, and those that the manifest names: parts that were not named, and
//! writers that keep other side shards. A length of any part passes; the header of a record decides
//! whether it is the right one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ucm_core::sync::{Mutex, RwLock};
use ucm_core::{BlockId, Geometry, MissReason, Part, limits};
use ucm_infra::MonotonicTime;
use ucm_record::{Expect, RecordHeader, RecordLayout};

use crate::backend::Presence;
use crate::layout::{MAX_LENGTHS, Manifest};

/// Time between two reads of the manifest for unknown lengths.
const LOOK_AGAIN: Duration = Duration::from_secs(10);
/// The most bytes that any record can have.
pub(crate) const LONGEST_RECORD: u64 =
    RecordHeader::LONGEST as u64 + limits::MAX_BLOCK_BYTES + limits::MAX_SIDES_BYTES;
/// Most lengths that are kept. What the manifest names beyond that is not known.
const MOST: usize = 1024;

/// A part of a namespace, and where things lie in its records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartRecord {
    /// Which part.
    pub part: Part,
    /// Where things lie in its records.
    pub record: RecordLayout,
    /// Whether the store writes its records too, or only looks them up.
    pub own: bool,
}

/// A length that records have, and the length below which those of the same part have no KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Known {
    kv_len: u64,
    len: u64,
}

/// See the module.
pub(crate) struct Lengths {
    /// The first of the own parts.
    first: PartRecord,
    /// The other own parts, and those that were named.
    others: Vec<PartRecord>,
    /// Records may be shorter than the layout says, in another form that the caller can read.
    shorter: bool,
    known: RwLock<Vec<Known>>,
    /// Whether a record was met whose length is not known.
    met_unknown: AtomicBool,
    /// When the manifest may be read again for that.
    next_look: Mutex<MonotonicTime>,
}

impl Lengths {
    /// Those of the first of the own parts and of `others`. `shorter`: records may be shorter, in
    /// another form that the caller can read.
    pub(crate) fn new(
        part: Part,
        record: &RecordLayout,
        others: &[PartRecord],
        shorter: bool,
    ) -> Self {
        let others = others.iter().filter(|other| other.part != part).cloned();
        let lengths = Self {
            first: PartRecord {
                part,
                record: record.clone(),
                own: true,
            },
            others: others.collect(),
            shorter,
            known: RwLock::default(),
            met_unknown: AtomicBool::new(false),
            next_look: Mutex::default(),
        };
        for PartRecord { record, .. } in lengths.parts() {
            lengths.add(record.kv_len() as u64, &record.record_lengths());
        }
        lengths
    }

    /// The parts that are known by name, the first of the own ones first.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &PartRecord> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// The parts whose records this store writes.
    pub(crate) fn own(&self) -> impl Iterator<Item = &PartRecord> {
        self.parts().filter(|known| known.own)
    }

    /// Bytes of the longest record that this store writes.
    pub(crate) fn own_len(&self) -> u64 {
        let lens = self.own().map(|own| own.record.record_len() as u64);
        lens.max().unwrap_or(0)
    }

    /// Bytes of header and KV of the largest block that this store writes.
    pub(crate) fn kv_len_of_own(&self) -> usize {
        let lens = self.own().map(|own| own.record.kv_len());
        lens.max().unwrap_or(0)
    }

    /// What the record that begins with these bytes must be: one of the own part that its header
    /// names, else of the first, which its header then contradicts.
    pub(crate) fn expect(&self, id: BlockId, namespace: [u8; 32], bytes: &[u8]) -> Expect<'_> {
        let named = RecordHeader::part_of(bytes);
        let own = self.own().find(|own| Some(own.part) == named);
        let PartRecord { part, record, .. } = own.unwrap_or(&self.first);
        Expect {
            id,
            namespace,
            part: *part,
            layout: record,
        }
    }

    /// Whether a record of this length can be whole in the form in which it is used.
    pub(crate) fn is_record(&self, len: u64) -> bool {
        let is_known = self.known.read().iter().any(|known| known.len == len);
        if !is_known {
            self.met_unknown.store(true, Ordering::Relaxed);
        }
        is_known
    }

    /// Whether a record of this length can be whole, in any form, with KV or without.
    pub(crate) fn is_ours(&self, len: u64) -> bool {
        self.is_shorter(len) || self.is_record(len)
    }

    /// Whether a record of this length can be a hit: it has KV and is whole.
    pub(crate) fn presence(&self, len: u64) -> Presence {
        let has_kv = |known: &Known| known.len == len && len >= known.kv_len;
        if self.is_shorter(len) || self.known.read().iter().any(has_kv) {
            return Ok(());
        }
        self.is_record(len); // or the manifest is read for it
        Err(MissReason::WrongLength)
    }

    /// Whether a copy of a record of an own part may have this length. Side shards of other writers
    /// for which the own layout has no room may be cut off.
    pub(crate) fn is_copy(&self, len: u64) -> bool {
        let fits = |own: &PartRecord| {
            let (kv_len, longest) = (own.record.kv_len(), own.record.record_len());
            (kv_len as u64..=longest as u64).contains(&len)
        };
        self.own().any(fits) || self.is_record(len)
    }

    /// The first of the own parts, which the writer's segments name.
    pub(crate) fn own_part(&self) -> Part {
        self.first.part
    }

    /// The length of the longest record that is known.
    pub(crate) fn longest(&self) -> u64 {
        let known = self.known.read();
        known.iter().map(|known| known.len).max().unwrap_or(0)
    }

    /// The least and the most bytes that the longest record of a part can have.
    pub(crate) fn range(&self) -> (u64, u64) {
        let known = self.known.read();
        let kv_lens = known.iter().map(|known| known.kv_len);
        let most = kv_lens.clone().max().unwrap_or(0) + limits::MAX_SIDES_BYTES;
        (kv_lens.min().unwrap_or(0), most)
    }

    /// The most bytes that a record among those of this part can have: as of the largest part, or,
    /// where this part is not known by name, the limit of every record.
    pub(crate) fn bound(&self, part: Part) -> u64 {
        self.kv_len(part).map_or(LONGEST_RECORD, |_| self.range().1)
    }

    /// A record of an own part may have this length too, by its header.
    pub(crate) fn learn(&self, part: Part, len: u64) {
        let kv_len = self.kv_len(part);
        let kv_len = kv_len.unwrap_or(self.first.record.kv_len() as u64);
        self.add(kv_len, &[len]);
    }

    /// The same of a manifest as it is stored; of what is none nothing is learned.
    pub(crate) fn learn_from_document(&self, manifest: &[u8]) {
        if let Ok(manifest) = serde_json::from_slice(manifest) {
            self.learn_from(&manifest);
        }
    }

    /// Records may have the lengths that this manifest names for any part. One that is not as it
    /// should be is left out.
    pub(crate) fn learn_from(&self, manifest: &Manifest) {
        for (name, entry) in &manifest.parts {
            let Ok(part) = name.parse::<Part>() else {
                continue;
            };
            let described = || {
                let geometry = Geometry::new(entry.tensors.clone(), entry.layers, 1).ok()?;
                Some(RecordLayout::new(&geometry).kv_len() as u64)
            };
            if let Some(kv_len) = self.kv_len(part).or_else(described) {
                let count = entry.record_lengths.len().min(MAX_LENGTHS);
                self.add(kv_len, &entry.record_lengths[..count]);
            }
        }
    }

    /// Whether a record of an unknown length was met and it is time to read the manifest for it;
    /// the next time is some time later.
    pub(crate) fn is_look_due(&self, now: MonotonicTime) -> bool {
        let mut next = self.next_look.lock();
        let due = now >= *next && self.met_unknown.swap(false, Ordering::Relaxed);
        if due {
            *next = now.after(LOOK_AGAIN);
        }
        due
    }

    /// Whether a record of this length can be one in a shorter form.
    fn is_shorter(&self, len: u64) -> bool {
        self.shorter && len < self.longest()
    }

    /// Bytes of header and payload of a part that is known by name.
    fn kv_len(&self, part: Part) -> Option<u64> {
        let known = self.parts().find(|known| known.part == part)?;
        Some(known.record.kv_len() as u64)
    }

    /// Adds lengths of a part whose records have `kv_len` bytes without side shards.
    fn add(&self, kv_len: u64, lengths: &[u64]) {
        let mut known = self.known.write();
        for &len in lengths {
            let one = Known { kv_len, len };
            let fits = len <= kv_len + limits::MAX_SIDES_BYTES;
            if fits && known.len() < MOST && !known.contains(&one) {
                known.push(one);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ucm_core::Identity;

    use super::*;

    /// A record of `layers` pages of KV.
    fn layout(layers: u32) -> RecordLayout {
        RecordLayout::new(&Geometry::new(vec![4096], layers, 1).unwrap())
    }

    fn part(pipeline_rank: u32) -> Part {
        Part {
            pipeline_rank,
            ..Part::default()
        }
    }

    fn has_kv(lengths: &Lengths, len: u64) -> bool {
        lengths.presence(len).is_ok()
    }

    #[test]
    fn what_is_not_known_is_looked_up_now_and_then() {
        let lengths = Lengths::new(part(0), &layout(1), &[], false);
        let at = |seconds: u64| MonotonicTime(seconds * 1_000_000_000);
        assert!(has_kv(&lengths, 8192) && lengths.is_record(8192) && !lengths.is_look_due(at(1)));
        assert!(!has_kv(&lengths, 12288) && !has_kv(&lengths, 4096) && lengths.longest() == 8192);
        assert!(
            lengths.is_look_due(at(1)) && !lengths.is_look_due(at(1)),
            "nothing was met since"
        );
        assert!(
            !lengths.is_record(12288)
                && !lengths.is_look_due(at(10))
                && lengths.is_look_due(at(11))
        );
        for len in [12288, 4096, u64::MAX, 12288] {
            lengths.learn(part(0), len);
        }
        assert!(has_kv(&lengths, 12288) && lengths.is_record(4096) && lengths.longest() == 12288);
        assert!(!has_kv(&lengths, 4096), "too short for KV");
    }

    #[test]
    fn a_length_of_any_part_passes_whichever_is_larger() {
        for (own, other) in [(1, 3), (3, 1)] {
            let named = PartRecord {
                part: part(1),
                record: layout(other),
                own: false,
            };
            let lengths = Lengths::new(part(0), &layout(own), &[named], false);
            assert!(
                has_kv(&lengths, 8192) && has_kv(&lengths, 16384),
                "{own} {other}"
            );
            assert!(!has_kv(&lengths, 12288) && !has_kv(&lengths, 4096));
            assert_eq!(
                lengths.longest(),
                16384,
                "the largest part bounds what is read"
            );
            assert_eq!(lengths.range(), (8192, 16384 + limits::MAX_SIDES_BYTES));
            let parts: Vec<Part> = lengths.parts().map(|known| known.part).collect();
            assert_eq!(parts, [part(0), part(1)]);
            assert!(lengths.is_copy(u64::from(own + 1) * 4096) && !lengths.is_copy(12288));
            let most = 16384 + limits::MAX_SIDES_BYTES;
            assert_eq!(
                (lengths.bound(part(0)), lengths.bound(part(1))),
                (most, most)
            );
            assert_eq!(lengths.bound(part(2)), LONGEST_RECORD);
        }
    }

    #[test]
    fn a_shorter_form_is_shorter_than_the_longest_of_all_parts() {
        let named = [PartRecord {
            part: part(1),
            record: layout(3),
            own: false,
        }];
        let lengths = Lengths::new(part(0), &layout(1), &named, true);
        assert!(has_kv(&lengths, 12288) && lengths.is_ours(4096));
        assert!(!lengths.is_record(12288) && !has_kv(&lengths, 20480));
    }

    #[test]
    fn the_manifest_names_the_lengths_of_parts_that_were_not_named() {
        let text = r#"{"format_version":1,"architecture":"A","world_size":1,"dtype":"f32","weights":"w","model_config":{},"position":{},"kv_dtype":"f32","attention_backend":"a","kv_packing":{},"kv_layout":"l","kv_groups":[],"block_tokens":16,"tensor_parallel":1,"pipeline_parallel":1,"decode_context_parallel":1}"#;
        let mut manifest = Manifest::new(&Identity::parse(text).unwrap(), BTreeMap::new());
        manifest.add(part(1), &layout(3));
        let lengths = Lengths::new(part(0), &layout(1), &[], false);
        assert!(!has_kv(&lengths, 16384));
        lengths.learn_from(&manifest);
        assert!(has_kv(&lengths, 16384) && has_kv(&lengths, 8192) && !has_kv(&lengths, 12288));
        // What another process wrote is believed within limits.
        let entry = manifest.parts.get_mut("g0p1t0").unwrap();
        entry.record_lengths = vec![u64::MAX, 1 << 40];
        lengths.learn_from(&manifest);
        assert_eq!(lengths.longest(), 16384);
        let wrong = |layers| {
            let mut entry = manifest.parts["g0p1t0"].clone();
            entry.layers = layers;
            entry
        };
        manifest.parts = (0..4000)
            .map(|n| (part(n).to_string(), wrong(u32::MAX)))
            .collect();
        lengths.learn_from(&manifest);
        assert_eq!(lengths.longest(), 16384);
        let many = |n: u32| {
            let mut entry = manifest.parts["g0p1t0"].clone();
            (entry.layers, entry.record_lengths) =
                (1, (0..64).map(|k| u64::from(64 * n + k)).collect());
            (part(n).to_string(), entry)
        };
        manifest.parts = (0..200).map(many).collect();
        lengths.learn_from(&manifest);
        assert!(lengths.known.read().len() <= MOST);
    }
}
