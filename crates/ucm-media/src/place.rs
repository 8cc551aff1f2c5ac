//! A place that is no directory, as tools see it: the objects there, and their removal. Engines do
//! not use this.

use ucm_core::{BlockId, MissReason, Part, Result};

use crate::layout::is_namespace;
use crate::lengths::LONGEST_RECORD;
use crate::segment::format::Trailer;

/// Something that lies at a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// Where it would lie below a root (`docs/format-files.md`):
    /// `<namespace>/blocks/<hh>/<id>.bin`, `<namespace>/segments/<name>`,
    /// `<namespace>/manifest-<part>.json`, `ucm-root.json`, `space/<name>`. Empty: it is not ours.
    pub path: String,
    /// Its name on the server.
    pub name: String,
    /// Bytes.
    pub len: u64,
    /// When it was last used, ns of Unix time, as far as the place has it; 0 where it never does.
    pub used_ns: u64,
    /// A value that changes when it is replaced; empty if there is none.
    pub version: String,
}

/// The use of a place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Room {
    /// Most bytes that it takes; 0: not known.
    pub limit: u64,
    /// Bytes that it has; 0: not known.
    pub used: u64,
    /// A text for people.
    pub words: String,
}

/// See the module. Every call waits for the server, for a minute at most.
pub trait Place: Send + Sync {
    /// Its use.
    fn room(&self) -> Result<Room>;

    /// Everything that lies there, of every namespace.
    fn list(&self) -> Result<Vec<Item>>;

    /// Bytes of the object of this name, fewer where it ends before; `None` where there is none.
    fn read(&self, name: &str, start: u64, len: u64) -> Result<Option<Vec<u8>>>;

    /// Removes one of our objects; false where it was removed, used or replaced since it was
    /// listed.
    fn remove(&self, item: &Item) -> Result<bool>;
}

/// The path of a record below a root; none for names that are not ours.
pub fn record_path(namespace: &str, id: &str) -> Option<String> {
    let id = id.parse::<BlockId>().ok()?.to_string();
    is_namespace(namespace.as_ref()).then(|| format!("{namespace}/blocks/{}/{id}.bin", &id[..2]))
}

/// The records of a segment, by its footer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentListing {
    /// Its file name.
    pub name: String,
    /// Digest of the identity.
    pub namespace: [u8; 32],
    /// The part that its records are of.
    pub part: Part,
    /// Id, offset and length of every record, bytes.
    pub records: Vec<(BlockId, u64, u64)>,
}

/// The contents of the last bytes of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SegmentTail {
    /// The whole footer.
    Listed(SegmentListing),
    /// The footer has this many bytes, and begins before the tail.
    Longer(u64),
}

/// Verifies the footer of a segment of `file_len` bytes, of which `tail` are the last.
pub fn list_segment(tail: &[u8], file_len: u64) -> std::result::Result<SegmentTail, MissReason> {
    let trailer = Trailer::decode(tail, file_len)?;
    let footer = match trailer.footer_in(tail) {
        Ok(footer) => footer,
        Err(len) => return Ok(SegmentTail::Longer(len)),
    };
    let entries = trailer.entries(footer, LONGEST_RECORD)?;
    let records = entries.iter();
    let records = records.map(|entry| (entry.id, entry.offset, entry.len));
    Ok(SegmentTail::Listed(SegmentListing {
        name: trailer.owner.name.file_name(),
        namespace: trailer.owner.namespace,
        part: trailer.owner.part,
        records: records.collect(),
    }))
}
