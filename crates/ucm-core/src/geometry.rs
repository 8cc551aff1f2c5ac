//! Sizes: tensor, layer, shard, block. Each divides the next; this module checks that, once.
//!
//! *tensor*: one contiguous piece on the device (K of one layer, or K and V of one layer where they
//! lie together). *layer*: the tensors of one layer of one block; the unit of the record's shard
//! table, so that the bytes on disk do not depend on how they were dumped. *shard*: what one row of
//! a load or dump names: one layer, or all layers where the caller does not split. *block*: all
//! shards of one token block of one part.

use crate::error::{Error, Result};
use crate::limits;

/// Alignment of a layer inside the payload.
pub const LAYER_ALIGN: u64 = 64;
/// Alignment of header, payload and record length; the unit of direct I/O.
pub const PAGE: u64 = 4096;

/// Validated sizes of one part's blocks, in bytes.
///
/// ```
/// use ucm_core::Geometry;
///
/// // K and V of 4 KiB each, eight layers, four of them in each row of a load or dump.
/// let geometry = Geometry::new(vec![4096, 4096], 8, 4).unwrap();
/// assert_eq!((geometry.shards(), geometry.layer_len(), geometry.raw_len()), (2, 8192, 65536));
/// assert!(Geometry::new(vec![4096], 8, 3).is_err(), "rows are alike");
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Geometry {
    tensors: Vec<u64>,
    layers: u32,
    layers_per_shard: u32,
}

/// Rounds `n` up to a multiple of `to` (a power of two).
pub const fn round_up(n: u64, to: u64) -> u64 {
    (n + to - 1) & !(to - 1)
}

impl Geometry {
    /// Sizes of one layer's tensors (bytes, in order), number of layers in a block, and how many of
    /// them one shard holds (1 = layerwise, `layers` = direct). Errors name the size that does not
    /// fit.
    pub fn new(tensors: Vec<u64>, layers: u32, layers_per_shard: u32) -> Result<Self> {
        let bad = |what: &str, value: u64| {
            Error::invalid(format!("geometry: {what}")).with("value", value)
        };
        if tensors.is_empty() || tensors.len() as u64 * u64::from(layers) > limits::MAX_TENSORS {
            return Err(bad(
                "a block needs between 1 and 65536 tensors",
                tensors.len() as u64,
            ));
        }
        if let Some(&size) = tensors
            .iter()
            .find(|&&size| size == 0 || size > limits::MAX_BLOCK_BYTES)
        {
            return Err(bad("a tensor has between 1 byte and 1 GiB", size));
        }
        if layers == 0 || layers > limits::MAX_LAYERS {
            return Err(bad(
                "a block has between 1 and 4096 layers",
                u64::from(layers),
            ));
        }
        if layers_per_shard == 0 || !layers.is_multiple_of(layers_per_shard) {
            return Err(bad(
                "the layers of a shard must divide the layers of a block",
                u64::from(layers_per_shard),
            ));
        }
        let geometry = Self {
            tensors,
            layers,
            layers_per_shard,
        };
        if geometry.payload_len() > limits::MAX_BLOCK_BYTES {
            return Err(bad("a block has at most 1 GiB", geometry.payload_len()));
        }
        Ok(geometry)
    }

    /// From the sizes of the public store API, in bytes: the tensors of one layer, `shard_size`,
    /// `block_size`. Each must divide the next.
    pub fn from_sizes(tensors: Vec<u64>, shard_size: u64, block_size: u64) -> Result<Self> {
        let layer: u64 = tensors.iter().sum();
        let pieces = |what: &str, key, small: u64, whole, big: u64| {
            if small == 0 || big == 0 || !big.is_multiple_of(small) {
                let text = format!("{whole} must be a positive multiple of {what}");
                return Err(Error::invalid(text).with(whole, big).with(key, small));
            }
            let many = |_| Error::invalid("geometry: too many pieces in a block");
            u32::try_from(big / small).map_err(many)
        };
        let sum = "the sum of the tensor sizes";
        let layers_per_shard = pieces(sum, "tensor_sizes", layer, "shard_size", shard_size)?;
        let shards = pieces(
            "shard_size",
            "shard_size",
            shard_size,
            "block_size",
            block_size,
        )?;
        let layers = layers_per_shard.saturating_mul(shards);
        Self::new(tensors, layers, layers_per_shard)
    }

    /// Sizes of one layer's tensors.
    pub fn tensors(&self) -> &[u64] {
        &self.tensors
    }

    /// Number of layers in a block.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Number of layers one shard of the caller holds.
    pub fn layers_per_shard(&self) -> u32 {
        self.layers_per_shard
    }

    /// Number of shards (rows of a load or dump) in a block.
    pub fn shards(&self) -> u32 {
        self.layers / self.layers_per_shard
    }

    /// Number of device pieces one row names.
    pub fn tensors_per_shard(&self) -> usize {
        self.tensors.len() * self.layers_per_shard as usize
    }

    /// Bytes of one layer.
    pub fn layer_len(&self) -> u64 {
        self.tensors.iter().sum()
    }

    /// Bytes of KV in one block, without alignment.
    pub fn raw_len(&self) -> u64 {
        self.layer_len() * u64::from(self.layers)
    }

    /// Offset of a layer from the start of the payload.
    pub fn layer_offset(&self, layer: u32) -> u64 {
        round_up(self.layer_len(), LAYER_ALIGN) * u64::from(layer)
    }

    /// Length of the payload, padded to a page.
    pub fn payload_len(&self) -> u64 {
        round_up(self.layer_offset(self.layers), PAGE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_must_divide() {
        let g = Geometry::from_sizes(vec![100, 100], 200, 800).unwrap();
        assert_eq!((g.layers(), g.shards(), g.tensors_per_shard()), (4, 4, 2));
        assert_eq!((g.layer_offset(1), g.payload_len()), (256, 4096));
        let direct = Geometry::from_sizes(vec![100, 100], 800, 800).unwrap();
        assert_eq!(
            (direct.layers(), direct.shards(), direct.tensors_per_shard()),
            (4, 1, 8)
        );
        assert_eq!(direct.payload_len(), g.payload_len());
        for (tensors, shard, block) in [
            (vec![100], 150, 300),
            (vec![100], 100, 250),
            (vec![], 1, 1),
            (vec![0], 0, 0),
            (vec![100], 100, 0),
        ] {
            assert!(Geometry::from_sizes(tensors, shard, block).is_err());
        }
    }
}
