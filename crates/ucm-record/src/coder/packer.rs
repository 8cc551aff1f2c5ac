//! One plane made shorter, and back: by zstd or lz4.

use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};
use ucm_core::{Error, Result};
use zstd_safe::{CCtx, CParameter, DCtx, ParamSwitch, Strategy};

use crate::codec::Algorithm;

/// How far apart repetitions are looked for.
const STRIDE: u32 = 64;

/// What the algorithms keep between planes.
pub(super) struct Packer {
    compressor: CCtx<'static>,
    decompressor: DCtx<'static>,
    table: CompressTable,
    /// What lz4 makes of one plane, which may be longer than that.
    packed: Vec<u8>,
}

impl Packer {
    /// `Internal` when there is no memory.
    pub(super) fn new() -> Result<Self> {
        let none = || Error::internal("there is no memory to compress with");
        let mut compressor = CCtx::try_create().ok_or_else(none)?;
        // Exponents hardly repeat, so looking for repetitions is nearly skipped; the entropy coder
        // does the work. Three times as fast as level 1 on them, and shorter.
        for parameter in [
            CParameter::CompressionLevel(1),
            CParameter::Strategy(Strategy::ZSTD_fast),
            CParameter::TargetLength(STRIDE),
            CParameter::LiteralCompressionMode(ParamSwitch::Enable),
        ] {
            compressor.set_parameter(parameter).map_err(|_| none())?;
        }
        Ok(Self {
            compressor,
            decompressor: DCtx::try_create().ok_or_else(none)?,
            table: CompressTable::default(),
            packed: Vec::new(),
        })
    }

    /// Writes the shorter form of a plane at the start of `room`: its length, or `None` where it
    /// does not fit.
    pub(super) fn pack(
        &mut self,
        algorithm: Algorithm,
        plane: &[u8],
        room: &mut [u8],
    ) -> Option<usize> {
        match algorithm {
            Algorithm::Zstd => self.compressor.compress2(room, plane).ok(),
            Algorithm::Lz4 => {
                self.packed.resize(get_maximum_output_size(plane.len()), 0);
                let len =
                    compress_into_with_table(plane, &mut self.packed, &mut self.table).ok()?;
                room.get_mut(..len)?.copy_from_slice(&self.packed[..len]);
                Some(len)
            }
        }
    }

    /// Writes a plane from its shorter form; false, with anything in `plane`, where that is none of
    /// it.
    pub(super) fn unpack(&mut self, algorithm: Algorithm, packed: &[u8], plane: &mut [u8]) -> bool {
        let whole = plane.len();
        match algorithm {
            Algorithm::Zstd => self.decompressor.decompress(plane, packed) == Ok(whole),
            Algorithm::Lz4 => decompress_into(packed, plane).is_ok_and(|len| len == whole),
        }
    }
}
