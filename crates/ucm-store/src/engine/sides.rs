//! Side shards: what is kept beside the KV of a block, written with it or later, and read without
//! it ([`super::side_reads`]).
//!
//! A side shard lies in the record of its block, behind the KV; of a block that was stored without,
//! it may lie alone in a record of its own ([`IdMask::of_side`]), which is made and written as any
//! other.

use std::borrow::Cow;
use std::sync::Arc;

use ucm_core::{BlockId, Error, ErrorKind, Geometry, IdMask, Result};
use ucm_record::{RecordLayout, SideSpec};

use super::block_builder::BlockBuilder;
use super::load::BlockRowList;
use super::task::Task;
use super::{Core, Pieces, Row, RowSides};

/// What makes a block's record id that of the record in which this side shard lies alone.
pub(super) fn mask(side: &SideSpec) -> IdMask {
    IdMask::of_side(&side.name, side.version)
}

/// Whether every row of a block can bring a share of every side shard.
pub(super) fn check_shares(layout: &RecordLayout, geometry: &Geometry) -> Result<()> {
    let shards = u64::from(geometry.shards());
    match layout
        .sides()
        .iter()
        .find(|side| !side.len.is_multiple_of(shards))
    {
        None => Ok(()),
        Some(side) => {
            let text = "a side shard has a whole number of bytes for each shard of a block";
            let error = Error::new(ErrorKind::Config, text).with("name", &side.name);
            Err(error.with("bytes", side.len).with("shards", shards))
        }
    }
}

impl Core {
    /// Starts writing side shards of blocks that are stored without them, each as a record of its
    /// own: for each of these, by name, the bytes of every block, one behind the other. Or refuses
    /// at once, as [`Core::dump`]. The task has a row for each, those of one name after those of
    /// another.
    ///
    /// # Errors
    /// `InvalidInput` for a name that the store was not opened with, and where there are not as
    /// many bytes as belong there.
    pub fn dump_sides(self: &Arc<Self>, ids: &[BlockId], sides: &[(&str, &[u8])]) -> Result<Task> {
        let mut rows = Vec::with_capacity(ids.len() * sides.len());
        for &(name, bytes) in sides {
            let index = self.side_index(name)?;
            let side = &self.records.layout.sides()[index];
            let (len, mask) = (side.len as usize, mask(side));
            if bytes.len() != ids.len() * len {
                let wrong =
                    Error::invalid("a side shard has other bytes than it was declared with");
                let wrong = wrong.with("name", name).with("given", bytes.len());
                return Err(wrong.with("expected", ids.len() * len));
            }
            let row = |(id, bytes): (&BlockId, &[u8])| Row {
                id: id.xor(mask),
                shard: 0,
                pieces: Pieces::Slot,
                ready: None,
                sides: RowSides::Alone(index, bytes.into()),
            };
            rows.extend(ids.iter().zip(bytes.chunks_exact(len)).map(row));
        }
        self.dump(rows)
    }

    /// Side shards of this store, in order.
    pub fn sides(&self) -> &[SideSpec] {
        self.records.layout.sides()
    }

    pub(super) fn side_index(&self, name: &str) -> Result<usize> {
        let sides = self.records.layout.sides();
        sides
            .iter()
            .position(|side| side.name == name)
            .ok_or_else(|| {
                let known: Vec<&str> = sides.iter().map(|side| side.name.as_str()).collect();
                let error =
                    Error::invalid("this store has no side shard of that name").with("name", name);
                error.with("known", known.join(", "))
            })
    }

    /// These records, and behind each those in which its side shards may lie alone.
    pub(super) fn with_sides<'a>(&self, ids: &'a [(BlockId, u32)]) -> Cow<'a, [(BlockId, u32)]> {
        if self.records.layout.sides().is_empty() {
            return Cow::Borrowed(ids);
        }
        let masks: Vec<IdMask> = self.records.layout.sides().iter().map(mask).collect();
        let with = |&(id, ordinal): &(BlockId, u32)| {
            let sides = masks.iter().map(move |&mask| (id.xor(mask), ordinal));
            std::iter::once((id, ordinal)).chain(sides)
        };
        ids.iter().flat_map(with).collect()
    }

    /// The record of the block that a record in the making belongs to.
    pub(super) fn block_of(&self, builder: &BlockBuilder) -> BlockId {
        let side = builder
            .alone
            .and_then(|index| self.records.layout.sides().get(index));
        side.map_or(builder.id, |side| builder.id.xor(mask(side)))
    }

    /// Whether what a row brings beside its KV are its shares, or one whole side shard and nothing
    /// else.
    pub(super) fn check_sides(&self, number: usize, row: &Row) -> Result<()> {
        let (sides, shards) = (self.records.layout.sides(), self.records.geometry.shards());
        let (given, expected) = match &row.sides {
            RowSides::None => return Ok(()),
            RowSides::Beside(_) if sides.is_empty() => {
                return Err(
                    Error::invalid("this store was opened without side shards").with("row", number)
                );
            }
            RowSides::Beside(bytes) => {
                let all: u64 = sides.iter().map(|side| side.len).sum();
                (bytes.len(), all / u64::from(shards))
            }
            RowSides::Alone(index, bytes) => {
                let len = sides.get(*index).map_or(0, |side| side.len);
                (
                    bytes.len(),
                    if row.pieces.in_slot() && row.shard == 0 {
                        len
                    } else {
                        0
                    },
                )
            }
        };
        if given as u64 == expected {
            return Ok(());
        }
        let wrong = Error::invalid(
            "a row brings its share of every side shard, or one whole side shard alone",
        );
        Err(wrong
            .with("row", number)
            .with("given", given)
            .with("expected", expected))
    }

    /// Puts what rows bring beside the KV to its place in the record; the shards that brought
    /// something.
    pub(super) fn place_sides(&self, rows: &BlockRowList, record: &mut [u8]) -> Vec<u32> {
        let layout = &self.records.layout;
        for (shard, sides) in &rows.sides {
            match sides {
                RowSides::None => {}
                RowSides::Alone(index, bytes) => {
                    if let Some(range) = layout.side_alone(*index) {
                        record[range].copy_from_slice(bytes);
                    }
                }
                RowSides::Beside(bytes) => {
                    let mut rest = &bytes[..];
                    for range in
                        (0..layout.sides().len()).filter_map(|index| layout.side_data(index))
                    {
                        let share = range.len() / self.records.geometry.shards() as usize;
                        let (mine, others) = rest.split_at(share);
                        let at = range.start + *shard as usize * share;
                        record[at..at + share].copy_from_slice(mine);
                        rest = others;
                    }
                }
            }
        }
        rows.sides.iter().map(|(shard, _)| *shard).collect()
    }
}
