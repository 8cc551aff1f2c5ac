//! Where things lie below a root, and the two documents that explain it: the root marker and the
//! manifest.
//!
//! ```text
//! <root>/ucm-root.json                              this directory belongs to ucm: format, UUID, capacity
//! <root>/space/                                     who counts, and who may write how much: see `quota/documents.rs`
//! <root>/<namespace>/manifest.json                  the identity in words, the parts and their record lengths
//! <root>/<namespace>/blocks/<hh>/<32 hex>.bin       one record
//! <root>/<namespace>/segments/<16 hex>-<16 hex>.seg  many records: writer, sequence; see [`crate::segment`]
//! <root>/<namespace>/tmp/<16 hex>-<16 hex>.tmp      a record or a segment being written
//! <root>/<namespace>/quarantine/<32 hex>.<reason>.<unix seconds>.bin    a damaged record, as older versions kept it
//! ```
//! Only names of exactly these patterns are ever removed.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use ucm_core::{BlockId, Error, ErrorKind, Identity, MissReason, Part, Result};
use ucm_record::RecordLayout;

/// Permission bits of what we make; the process's umask takes away from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Modes {
    /// Of files.
    pub file: u32,
    /// Of directories.
    pub dir: u32,
}

impl Default for Modes {
    /// For the owner alone: the blocks of a prompt reveal it.
    fn default() -> Self {
        Self {
            file: 0o600,
            dir: 0o700,
        }
    }
}

/// Format number of the root and of the manifest.
pub const FORMAT: u32 = 1;
/// Name of the root marker.
pub const MARKER: &str = "ucm-root.json";
/// Name of the directory below a namespace in which older versions kept damaged records.
pub const QUARANTINE: &str = "quarantine";
/// Name of a namespace's manifest.
pub const MANIFEST: &str = "manifest.json";

/// Bytes that a record's path has besides those of the root and the namespace, or a few more.
const RECORD_BELOW: usize = "//blocks/hh/.bin".len() + 2 * BlockId::LEN;

/// Paths of one namespace below one root.
#[derive(Debug, Clone)]
pub struct Layout {
    root: PathBuf,
    namespace: String,
}

impl Layout {
    /// The layout of a namespace (32 hex digits) below a root.
    pub fn new(root: &Path, identity: &Identity) -> Self {
        Self {
            root: root.to_owned(),
            namespace: identity.namespace(),
        }
    }

    /// The root directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The marker that makes a directory a root.
    pub fn marker(&self) -> PathBuf {
        self.root.join(MARKER)
    }

    /// The namespace's directory.
    pub fn namespace(&self) -> PathBuf {
        self.root.join(&self.namespace)
    }

    /// The namespace's manifest.
    pub fn manifest(&self) -> PathBuf {
        self.namespace().join(MANIFEST)
    }

    /// Where private files of this namespace lie.
    pub fn tmp(&self) -> PathBuf {
        self.namespace().join("tmp")
    }

    /// A private file's path, unique by writer and sequence.
    pub fn private(&self, writer: u64, sequence: u64) -> PathBuf {
        self.tmp()
            .join(format!("{writer:016x}-{sequence:016x}.tmp"))
    }

    /// Where the segments of this namespace lie.
    pub fn segments(&self) -> PathBuf {
        self.namespace().join(SEGMENTS)
    }

    /// A segment's path.
    pub fn segment(&self, name: SegmentName) -> PathBuf {
        self.segments().join(name.file_name())
    }

    /// The directory that holds a record.
    pub fn shard_dir(&self, id: BlockId) -> PathBuf {
        let shard = format!("{:02x}", id.0[0]);
        self.namespace().join(BLOCKS).join(shard)
    }

    /// A record's path. Made for every block of a lookup, hence in one piece.
    pub fn record(&self, id: BlockId) -> PathBuf {
        let (root, id) = (self.root.as_os_str(), id.to_hex());
        let mut path = PathBuf::with_capacity(root.len() + self.namespace.len() + RECORD_BELOW);
        path.push(root);
        for name in [&self.namespace, BLOCKS, &id[..2], &id] {
            path.push(name);
        }
        path.as_mut_os_string().push(".bin");
        path
    }
}

/// A number that is written as 16 digits.
pub fn parse_hex(text: &str) -> Option<u64> {
    let digits = is_hex(text, 16).then_some(text)?;
    u64::from_str_radix(digits, 16).ok()
}

fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whether a directory name is that of a namespace.
pub fn is_namespace(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| is_hex(name, 32))
}

/// The first byte of the ids in a directory of records, by its name.
pub fn shard_name(name: &OsStr) -> Option<u8> {
    let name = name.to_str().filter(|name| is_hex(name, 2))?;
    u8::from_str_radix(name, 16).ok()
}

/// The id in a record's file name, if it is one and lies in the directory of its first byte.
pub fn record_name(shard: u8, name: &OsStr) -> Option<BlockId> {
    let id: BlockId = name.to_str()?.strip_suffix(".bin")?.parse().ok()?;
    (id.0[0] == shard).then_some(id)
}

/// Directory of the records in files below a namespace.
pub const BLOCKS: &str = "blocks";
/// Directory of the segments below a namespace.
pub const SEGMENTS: &str = "segments";

/// Which segment of a namespace: the number of its writer and that writer's number for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentName {
    /// Random number of the writing process.
    pub writer: u64,
    /// Its own number for the segment.
    pub sequence: u64,
}

impl SegmentName {
    /// The name in the file name of a segment.
    pub fn parse(name: &OsStr) -> Option<Self> {
        Self::split(name.to_str()?.strip_suffix(".seg")?)
    }

    /// The name of the segment that a private file may become.
    pub fn parse_private(name: &OsStr) -> Option<Self> {
        Self::split(name.to_str()?.strip_suffix(".tmp")?)
    }

    fn split(text: &str) -> Option<Self> {
        let (writer, sequence) = text.split_once('-')?;
        Some(Self {
            writer: parse_hex(writer)?,
            sequence: parse_hex(sequence)?,
        })
    }

    /// Its file name.
    pub fn file_name(self) -> String {
        format!("{:016x}-{:016x}.seg", self.writer, self.sequence)
    }

    /// The name that [`SegmentName::as_id`] made an id of.
    pub fn from_id(id: BlockId) -> Self {
        let both = u128::from_be_bytes(id.0);
        Self {
            writer: (both >> 64) as u64,
            sequence: both as u64,
        }
    }

    /// The name as an id, under which its time of use is kept.
    pub fn as_id(self) -> BlockId {
        let both = u128::from(self.writer) << 64 | u128::from(self.sequence);
        BlockId(both.to_be_bytes())
    }
}

/// Whether a file name is that of a private file.
pub fn is_private(name: &OsStr) -> bool {
    SegmentName::parse_private(name).is_some()
}

/// Whether a file name below [`QUARANTINE`] is that of a damaged record.
pub fn is_quarantined(name: &OsStr) -> bool {
    let parts = name.to_str().and_then(|name| {
        let (id, rest) = name.strip_suffix(".bin")?.split_once('.')?;
        let (reason, seconds) = rest.split_once('.')?;
        Some((id.parse::<BlockId>().ok()?, reason, seconds))
    });
    parts.is_some_and(|(_, reason, seconds)| {
        let mut reasons = MissReason::ALL.into_iter();
        reasons.any(|known| known.is_damage() && known.name() == reason)
            && seconds.parse::<u64>().is_ok()
            && seconds.bytes().all(|c| c.is_ascii_digit())
    })
}

/// Whether a file name in the root is that of a marker being written.
pub fn is_marker_private(name: &OsStr) -> bool {
    name.to_str()
        .and_then(|name| name.strip_prefix('.')?.strip_suffix(".tmp"))
        .is_some_and(|uuid| is_hex(uuid, 32))
}

/// The root marker's content.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Marker {
    /// Format of the root.
    pub format: u32,
    /// Identity of this root, 32 hex digits.
    pub uuid: String,
    /// Unix time of its creation, seconds.
    pub created: u64,
    /// The limit on bytes below the root.
    pub storage_capacity: u64,
    /// Which layout was decided on here; see docs/configuration-directory.md.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<serde_json::Value>,
}

impl Marker {
    /// One of a root that is made at this time, ns of Unix time.
    pub fn new(uuid: String, wall_ns: u64, storage_capacity: u64) -> Self {
        Self {
            format: FORMAT,
            uuid,
            created: wall_ns / 1_000_000_000,
            storage_capacity,
            layout: None,
        }
    }

    /// Reads a marker; a newer format or damage is an error with advice.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let marker: Self = serde_json::from_slice(bytes).map_err(|error| {
            let text = "the root marker is damaged; restore it or empty the directory";
            Error::new(ErrorKind::Config, text).caused_by(error)
        })?;
        if marker.format > FORMAT {
            let text = "the root was made by a newer ucm; upgrade or use another directory";
            let newer = Error::new(ErrorKind::Foreign, text).with("format", marker.format);
            return Err(newer.with("newest_known", FORMAT));
        }
        Ok(marker)
    }

    /// The marker as a document.
    pub fn to_bytes(&self) -> Vec<u8> {
        document(self)
    }
}

/// One part in the manifest.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct PartEntry {
    /// Bytes of the tensors of one layer, in order.
    pub tensors: Vec<u64>,
    /// Layers in a block.
    pub layers: u32,
    /// Tokens in a block, 0 if unknown.
    pub block_tokens: u32,
    /// Element type.
    pub dtype: String,
    /// Lengths that records of this part may have, those of every writer, in order. At most
    /// [`MAX_LENGTHS`].
    pub record_lengths: Vec<u64>,
}

/// Most lengths that the manifest names for a part.
pub const MAX_LENGTHS: usize = 64;

/// A namespace's manifest: what its digest stands for.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct Manifest {
    /// Format of the manifest.
    pub format: u32,
    /// The identity digest, 64 hex digits.
    pub digest: String,
    /// The identity, letter by letter as it was hashed.
    pub identity: Box<RawValue>,
    /// Texts outside the digest, such as the model name the user typed.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The parts seen so far, by name (`g0p0t0`).
    pub parts: BTreeMap<String, PartEntry>,
}

impl Manifest {
    /// A manifest without parts.
    pub fn new(identity: &Identity, labels: BTreeMap<String, String>) -> Self {
        let digest = identity.digest().iter();
        let digest = digest.map(|byte| format!("{byte:02x}")).collect();
        let text = RawValue::from_string(identity.json().to_owned()).unwrap_or_default();
        Self {
            format: FORMAT,
            digest,
            identity: text,
            labels,
            parts: BTreeMap::new(),
        }
    }

    /// Adds a part, or the lengths of this writer's records to it; whether that changed anything.
    pub fn add(&mut self, part: Part, layout: &RecordLayout) -> bool {
        let own = layout.record_lengths();
        let others = self.lengths(part).iter().filter(|len| !own.contains(len));
        let all = own.iter().chain(others).copied();
        let mut record_lengths: Vec<u64> = all.take(MAX_LENGTHS).collect();
        record_lengths.sort_unstable();
        let entry = PartEntry {
            tensors: layout.tensors().to_vec(),
            layers: layout.layers(),
            block_tokens: layout.block_tokens(),
            dtype: layout.dtype().to_string(),
            record_lengths,
        };
        self.parts.insert(part.to_string(), entry.clone()) != Some(entry)
    }

    /// Lengths that records of a part may have.
    pub fn lengths(&self, part: Part) -> &[u64] {
        let entry = self.parts.get(&part.to_string());
        entry.map_or(&[], |entry| &entry.record_lengths)
    }

    /// The manifest as a document.
    pub fn to_bytes(&self) -> Vec<u8> {
        document(self)
    }
}

fn document(value: &impl Serialize) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).unwrap_or_default();
    text.push(b'\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_patterns_are_ours() {
        let id = BlockId([0xab; 16]);
        let name = format!("{id}.bin");
        assert_eq!(record_name(0xab, OsStr::new(&name)), Some(id));
        assert_eq!(
            record_name(0xac, OsStr::new(&name)),
            None,
            "in the directory of another byte"
        );
        for bad in ["x.bin", "README", &name[1..], &name.to_uppercase()] {
            assert_eq!(record_name(0xab, OsStr::new(bad)), None, "{bad}");
        }
        assert!(is_private(OsStr::new(
            "0123456789abcdef-0123456789abcdef.tmp"
        )));
        let segment = SegmentName {
            writer: 0x0123_4567_89ab_cdef,
            sequence: 7,
        };
        assert_eq!(segment.file_name(), "0123456789abcdef-0000000000000007.seg");
        assert_eq!(
            SegmentName::parse(OsStr::new(&segment.file_name())),
            Some(segment)
        );
        assert_eq!(SegmentName::from_id(segment.as_id()), segment);
        for bad in [
            "0123456789abcdef-7.seg",
            "0123456789abcdef-0000000000000007.tmp",
            "x.seg",
        ] {
            assert_eq!(SegmentName::parse(OsStr::new(bad)), None, "{bad}");
        }
        assert!(
            !is_private(OsStr::new("0123456789abcdef.tmp")) && !is_private(OsStr::new("a-b.tmp"))
        );
        assert!(
            is_namespace(OsStr::new(&"0a".repeat(16))) && !is_namespace(OsStr::new("lost+found"))
        );
    }

    #[test]
    fn only_exact_names_in_quarantine_are_ours() {
        let id = "ab".repeat(16);
        let name = format!("{id}.bad_checksum.1700000000.bin");
        assert!(is_quarantined(OsStr::new(&name)));
        for bad in [
            format!("{id}.bin"),
            format!("{id}.1700000000.bin"),
            format!("{id}.no_reason.1700000000.bin"),
            format!("{id}.foreign_id.1700000000.bin"),
            format!("{id}.bad_header.+170.bin"),
            format!("{id}.bad_header..bin"),
            format!("{id}.bad_header.1.2.bin"),
            "x.bad_header.1.bin".to_owned(),
            name.replace(".bin", ".tmp"),
        ] {
            assert!(!is_quarantined(OsStr::new(&bad)), "{bad}");
        }
    }

    #[test]
    fn records_lie_where_the_first_paragraph_says() {
        let layout = Layout {
            root: PathBuf::from("/r"),
            namespace: "0a".repeat(16),
        };
        let id = BlockId([0x0b; 16]);
        let at = format!("/r/{}/blocks/0b/{}.bin", "0a".repeat(16), "0b".repeat(16));
        let path = layout.record(id);
        assert_eq!(path, Path::new(&at));
        assert_eq!(path.parent(), Some(&*layout.shard_dir(id)));
        assert!(path.as_os_str().len() <= "/r".len() + layout.namespace.len() + RECORD_BELOW);
    }

    #[test]
    fn writers_add_the_lengths_of_their_records() {
        use ucm_core::Geometry;
        use ucm_record::SideSpec;

        let plain = RecordLayout::new(&Geometry::new(vec![4096], 1, 1).unwrap());
        let sided = |len| {
            let name = "mean-k".to_owned();
            plain
                .clone()
                .with_sides(vec![SideSpec {
                    name,
                    version: 0,
                    len,
                }])
                .unwrap()
        };
        let text = r#"{"format_version":1,"architecture":"A","world_size":1,"dtype":"f32","weights":"w","model_config":{}"#;
        let more = r#","position":{},"kv_dtype":"f32","attention_backend":"a","kv_packing":{},"kv_layout":"l","kv_groups":[],"#;
        let last = r#""block_tokens":16,"tensor_parallel":1,"pipeline_parallel":1,"decode_context_parallel":1}"#;
        let identity = Identity::parse(&[text, more, last].concat()).unwrap();
        let (part, mut manifest) = (Part::default(), Manifest::new(&identity, BTreeMap::new()));
        assert_eq!(manifest.lengths(part), [0; 0]);
        assert!(manifest.add(part, &plain) && !manifest.add(part, &plain));
        assert_eq!(manifest.lengths(part), [8192]);
        assert!(manifest.add(part, &sided(8192)));
        assert_eq!(manifest.lengths(part), [8192, 12288, 16384]);
        assert!(!manifest.add(part, &plain), "what others write stays");
        for pages in 3..200 {
            manifest.add(part, &sided(pages * 4096));
            assert!(manifest.lengths(part).len() <= MAX_LENGTHS);
            assert!(
                manifest.lengths(part).contains(&(8192 + pages * 4096)),
                "its own are always there"
            );
        }
    }

    #[test]
    fn a_newer_root_is_left_alone() {
        let marker = Marker {
            format: 1,
            uuid: "u".into(),
            created: 1,
            storage_capacity: 2,
            layout: None,
        };
        assert_eq!(Marker::parse(&marker.to_bytes()).unwrap(), marker);
        let newer = Marker {
            format: 2,
            ..marker
        };
        assert_eq!(
            Marker::parse(&newer.to_bytes()).unwrap_err().kind(),
            ErrorKind::Foreign
        );
        assert_eq!(Marker::parse(b"{").unwrap_err().kind(), ErrorKind::Config);
    }
}
