//! Compression and decompression of one plane by zstd.

use ucm_core::{Error, Result};
use zstd_safe::{CCtx, CParameter, DCtx, ParamSwitch, Strategy};

/// Window of the search for repetitions.
const STRIDE: u32 = 64;

/// State of zstd between planes.
pub(super) struct Packer {
    compressor: CCtx<'static>,
    decompressor: DCtx<'static>,
}

impl Packer {
    /// `Internal` without memory.
    pub(super) fn new() -> Result<Self> {
        let none = || Error::internal("there is no memory to compress with");
        let mut compressor = CCtx::try_create().ok_or_else(none)?;
        // Exponents hardly repeat, so the search for repetitions is nearly skipped and the entropy
        // coder does the work. On them it is three times as fast as level 1, and shorter.
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

    /// Writes the compressed plane to the start of `room`. Returns its length, or `None` if it does
    /// not fit.
    pub(super) fn pack(&mut self, plane: &[u8], room: &mut [u8]) -> Option<usize> {
        self.compressor.compress2(room, plane).ok()
    }

    /// Decompresses a plane. Returns false, with undefined bytes in `plane`, if the input is
    /// invalid.
    pub(super) fn unpack(&mut self, packed: &[u8], plane: &mut [u8]) -> bool {
        self.decompressor.decompress(plane, packed) == Ok(plane.len())
    }
}
