//! The rows of a load or dump: checked, grouped by block, and where each lies in a record.
//!
//! A side shard lies in the record of its block, behind the KV; of a block that was stored without,
//! it may lie alone in a record of its own ([`side_mask`]), which is made and written as any other.

use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::sync::Arc;

use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_device::{Event, Piece};

use super::config::{Pieces, Row, RowSides};
use crate::records::{StoredRecords, side_mask};

/// Number of a row, its shard, and its device pieces.
pub(super) type BlockRow = (usize, u32, Pieces);

/// The rows of one block, the side shards that some of them bring (by shard), and the events that
/// copies of them wait for.
#[derive(Default)]
pub(super) struct BlockRowList {
    rows: Vec<BlockRow>,
    pub(super) sides: Vec<(u32, RowSides)>,
    pub(super) ready: Vec<Arc<dyn Event>>,
}

impl BlockRowList {
    /// Whether all of them bring this side shard and nothing else; `None`: whether all of them
    /// bring KV.
    pub(super) fn are_of(&self, alone: Option<usize>) -> bool {
        let brought = self.sides.iter().filter_map(|(_, sides)| sides.alone());
        match alone {
            Some(index) => brought.filter(|&one| one == index).count() == self.rows.len(),
            None => brought.count() == 0,
        }
    }
}

impl Deref for BlockRowList {
    type Target = [BlockRow];

    fn deref(&self) -> &Self::Target {
        &self.rows
    }
}

/// Groups rows by block, keeping the order of first appearance.
pub(super) fn by_block(rows: Vec<Row>) -> Vec<(BlockId, BlockRowList)> {
    let mut index: HashMap<BlockId, usize> = HashMap::with_capacity(rows.len());
    let mut blocks: Vec<(BlockId, BlockRowList)> = Vec::new();
    for (number, row) in rows.into_iter().enumerate() {
        let at = *index.entry(row.id).or_insert_with(|| {
            blocks.push((row.id, BlockRowList::default()));
            blocks.len() - 1
        });
        let block = &mut blocks[at].1;
        block.rows.push((number, row.shard, row.pieces));
        block.ready.extend(row.ready);
        if !matches!(row.sides, RowSides::None) {
            block.sides.push((row.shard, row.sides));
        }
    }
    blocks
}

impl StoredRecords {
    /// `Config` unless every row of a block can bring a share of every side shard.
    pub(super) fn check_shares(&self) -> Result<()> {
        let shards = u64::from(self.geometry.shards());
        for side in self.layout.sides() {
            if !side.len.is_multiple_of(shards) {
                let text = "a side shard has a whole number of bytes for each shard of a block";
                let error = Error::new(ErrorKind::Config, text).with("name", &side.name);
                return Err(error.with("bytes", side.len).with("shards", shards));
            }
        }
        Ok(())
    }

    /// Whether these rows can be loaded or dumped; `in_slots`: whether they may be wanted in their
    /// slots alone.
    pub(super) fn check_rows(&self, rows: &[Row], in_slots: bool) -> Result<()> {
        let (shards, pieces) = (self.geometry.shards(), self.geometry.tensors_per_shard());
        for (number, row) in rows.iter().enumerate() {
            if row.shard >= shards {
                return Err(Error::invalid("shard index out of range")
                    .with("row", number)
                    .with("shard", row.shard)
                    .with("shards", shards));
            }
            let given = match &row.pieces {
                Pieces::Listed(spans) => spans.len(),
                Pieces::Block(layout, _) => layout.pieces() / shards as usize,
                Pieces::Slot if in_slots || row.sides.alone().is_some() => pieces,
                Pieces::Slot => 0,
            };
            if given != pieces {
                return Err(Error::invalid("a row must name every tensor of its shard")
                    .with("row", number)
                    .with("given", given)
                    .with("expected", pieces));
            }
            self.check_sides(number, row)?;
            if let Pieces::Block(layout, block) = &row.pieces
                && *block >= layout.blocks()
            {
                return Err(Error::invalid("there is no device block of that number")
                    .with("row", number)
                    .with("block", block)
                    .with("blocks", layout.blocks()));
            }
        }
        Ok(())
    }

    /// Whether a row brings its share of every side shard beside its KV, or one whole side shard
    /// and nothing else.
    fn check_sides(&self, number: usize, row: &Row) -> Result<()> {
        let sides = self.layout.sides();
        let (given, expected) = match &row.sides {
            RowSides::None => return Ok(()),
            RowSides::Beside(_) if sides.is_empty() => {
                let text = "this store was opened without side shards";
                return Err(Error::invalid(text).with("row", number));
            }
            RowSides::Beside(bytes) => {
                let all: u64 = sides.iter().map(|side| side.len).sum();
                (bytes.len(), all / u64::from(self.geometry.shards()))
            }
            RowSides::Alone(index, bytes) => match sides.get(*index) {
                Some(side) if row.pieces.in_slot() && row.shard == 0 => (bytes.len(), side.len),
                _ => (bytes.len(), 0),
            },
        };
        if given as u64 == expected {
            return Ok(());
        }
        let text = "a row brings its share of every side shard, or one whole side shard alone";
        let wrong = Error::invalid(text).with("row", number);
        Err(wrong.with("given", given).with("expected", expected))
    }

    /// Rows that bring side shards in records of their own: for each of these, by name, the bytes
    /// of every block, one behind the other.
    pub(super) fn side_rows(&self, ids: &[BlockId], sides: &[(&str, &[u8])]) -> Result<Vec<Row>> {
        let mut rows = Vec::with_capacity(ids.len() * sides.len());
        for &(name, bytes) in sides {
            let index = self.side_index(name)?;
            let side = &self.layout.sides()[index];
            let len = side.len as usize;
            if bytes.len() != ids.len() * len {
                let text = "a side shard has other bytes than it was declared with";
                let wrong = Error::invalid(text).with("name", name);
                return Err(wrong
                    .with("given", bytes.len())
                    .with("expected", ids.len() * len));
            }
            for (id, bytes) in ids.iter().zip(bytes.chunks_exact(len)) {
                rows.push(Row {
                    id: id.xor(side_mask(side)),
                    shard: 0,
                    pieces: Pieces::Slot,
                    ready: None,
                    sides: RowSides::Alone(index, bytes.into()),
                });
            }
        }
        Ok(rows)
    }

    /// The block that a record belongs to in which the side shard of that index lies alone, or KV.
    pub(super) fn block_of(&self, id: BlockId, alone: Option<usize>) -> BlockId {
        match alone.and_then(|index| self.layout.sides().get(index)) {
            Some(side) => id.xor(side_mask(side)),
            None => id,
        }
    }

    /// Copies the side shards that rows bring to their places in the record; the shards that
    /// brought some.
    pub(super) fn place_sides(&self, rows: &BlockRowList, record: &mut [u8]) -> Vec<u32> {
        let (layout, shards) = (&self.layout, self.geometry.shards() as usize);
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
                    for index in 0..layout.sides().len() {
                        let Some(range) = layout.side_data(index) else {
                            continue;
                        };
                        let (share, others) = rest.split_at(range.len() / shards);
                        let at = range.start + *shard as usize * share.len();
                        record[at..at + share.len()].copy_from_slice(share);
                        rest = others;
                    }
                }
            }
        }
        rows.sides.iter().map(|(shard, _)| *shard).collect()
    }

    /// The layers of a shard.
    pub(super) fn layers_of(&self, shard: u32) -> Range<u32> {
        let count = self.geometry.layers_per_shard();
        shard * count..(shard + 1) * count
    }

    /// The device pieces of rows of one block, layer by layer, each with its place in the record.
    /// `InvalidInput` for a piece that is not as long as its tensor.
    pub(super) fn pieces<'a>(
        &self,
        rows: impl IntoIterator<Item = &'a BlockRow>,
    ) -> Result<Vec<Piece>> {
        let sizes = self.geometry.tensors();
        let mut all = Vec::new();
        for (row, shard, pieces) in rows {
            let spans = pieces.spans(*shard, self.geometry.tensors_per_shard());
            all.reserve(spans.len());
            for (layer, spans) in self.layers_of(*shard).zip(spans.chunks_exact(sizes.len())) {
                let mut at = self.layout.layer_data(layer).start;
                for (&span, &size) in spans.iter().zip(sizes) {
                    if span.len() != size {
                        let wrong = Error::invalid("a device piece is not as long as its tensor");
                        let wrong = wrong.with("row", row).with("layer", layer);
                        return Err(wrong.with("given", span.len()).with("expected", size));
                    }
                    all.push(Piece { at, span });
                    at += size as usize;
                }
            }
        }
        Ok(all)
    }
}
