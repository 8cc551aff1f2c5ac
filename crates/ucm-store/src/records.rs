//! What the records of a store are, part by part: the same for everything that makes, verifies or
//! moves one.

use std::borrow::Cow;
use std::iter;
use std::sync::Arc;

use ucm_core::{BlockId, Error, ErrorKind, Geometry, IdMask, Identity, MissReason, Part, Result};
use ucm_record::{Expect, RecordHeader, RecordLayout, SideSpec, verify_stored};

/// The records of one part.
pub(crate) struct StoredRecords {
    /// Sizes of a block on the device.
    pub(crate) geometry: Geometry,
    /// Where things lie in a record.
    pub(crate) layout: RecordLayout,
    /// Whose KV it is.
    pub(crate) identity: Identity,
    /// Which part of a block.
    pub(crate) part: Part,
}

/// The parts whose blocks a store loads and dumps. Slots have the length of their longest record.
pub(crate) struct OwnParts {
    /// Side shards belong to this one.
    pub(crate) first: Arc<StoredRecords>,
    others: Vec<Arc<StoredRecords>>,
    /// Number of the store in its headers and log lines.
    pub(crate) writer: u64,
}

impl OwnParts {
    /// `Config` where a part is named twice.
    pub(crate) fn new(
        first: Arc<StoredRecords>,
        others: Vec<Arc<StoredRecords>>,
        writer: u64,
    ) -> Result<Self> {
        let own = Self {
            first,
            others,
            writer,
        };
        for (at, records) in own.all().enumerate() {
            if own.all().take(at).any(|one| one.part == records.part) {
                let text = "a store loads and dumps each of its parts once";
                return Err(Error::new(ErrorKind::Config, text).with("part", records.part));
            }
        }
        Ok(own)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<StoredRecords>> {
        iter::once(&self.first).chain(&self.others)
    }

    /// Bytes of the longest record.
    pub(crate) fn record_len(&self) -> usize {
        let lens = self.all().map(|records| records.layout.record_len());
        lens.max().unwrap_or(0)
    }

    /// Bytes of the longest header.
    pub(crate) fn header_len(&self) -> usize {
        let lens = self.all().map(|records| records.layout.header_len());
        lens.max().unwrap_or(0)
    }

    /// The part that the header of a record names, of a record that is known by its id alone; the
    /// first, which this header then contradicts, where that is none of them.
    pub(crate) fn of(&self, record: &[u8]) -> &Arc<StoredRecords> {
        let named = RecordHeader::part_of(record);
        let own = self.all().find(|records| Some(records.part) == named);
        own.unwrap_or(&self.first)
    }
}

/// The mask between the id of a block's record and the id of the record with this side shard alone.
pub(crate) fn side_mask(side: &SideSpec) -> IdMask {
    IdMask::of_side(&side.name, side.version)
}

impl StoredRecords {
    /// What a record of this id must be.
    pub(crate) fn expect(&self, id: BlockId) -> Expect<'_> {
        Expect {
            id,
            namespace: *self.identity.digest(),
            part: self.part,
            layout: &self.layout,
        }
    }

    /// Verifies a whole record, with KV or without; its ordinal if it is sound and neither
    /// compressed nor encrypted.
    pub(crate) fn verify(
        &self,
        id: BlockId,
        bytes: &[u8],
        stored_len: u64,
    ) -> Result<u32, MissReason> {
        let header = verify_stored(bytes, stored_len, &self.expect(id))?;
        if header.key.is_some() {
            return Err(MissReason::WrongKey);
        }
        if !header.codec.is_as_is() {
            return Err(MissReason::NewerVersion);
        }
        Ok(header.meta.ordinal)
    }

    /// The number of the side shard of this name. `InvalidInput` if the store has none.
    pub(crate) fn side_index(&self, name: &str) -> Result<usize> {
        let sides = self.layout.sides();
        if let Some(index) = sides.iter().position(|side| side.name == name) {
            return Ok(index);
        }
        let known: Vec<&str> = sides.iter().map(|side| side.name.as_str()).collect();
        let unknown = Error::invalid("this store has no side shard of that name");
        Err(unknown.with("name", name).with("known", known.join(", ")))
    }

    /// These records, each followed by those in which its side shards may lie alone.
    pub(crate) fn with_sides<'a>(&self, ids: &'a [(BlockId, u32)]) -> Cow<'a, [(BlockId, u32)]> {
        if self.layout.sides().is_empty() {
            return Cow::Borrowed(ids);
        }
        let mut all = Vec::with_capacity(ids.len() * (1 + self.layout.sides().len()));
        for &(id, ordinal) in ids {
            all.push((id, ordinal));
            let sides = self.layout.sides().iter();
            all.extend(sides.map(|side| (id.xor(side_mask(side)), ordinal)));
        }
        Cow::Owned(all)
    }
}
