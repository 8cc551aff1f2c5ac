//! One plane compressed by zstd, and back.

use ucm_core::{Error, Result};
use zstd_safe::{CCtx, CParameter, DCtx, ParamSwitch, Strategy};

/// How far apart repetitions are looked for.
const STRIDE: u32 = 64;

/// What zstd keeps between planes.
pub(super) struct Packer {
    compressor: CCtx<'static>,
    decompressor: DCtx<'static>,
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
        })
    }

    /// Writes the shorter form of a plane at the start of `room`: its length, or `None` where it
    /// does not fit.
    pub(super) fn pack(&mut self, plane: &[u8], room: &mut [u8]) -> Option<usize> {
        self.compressor.compress2(room, plane).ok()
    }

    /// Writes a plane from its shorter form; false, with anything in `plane`, where that is none of
    /// it.
    pub(super) fn unpack(&mut self, packed: &[u8], plane: &mut [u8]) -> bool {
        self.decompressor.decompress(plane, packed) == Ok(plane.len())
    }
}
