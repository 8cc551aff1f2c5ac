//! A build without the codec: nothing is compressed, and compressed records are not read.

use ucm_core::{Error, ErrorKind, Result};

/// There is none.
pub(super) enum Packer {}

impl Packer {
    /// `Unsupported`.
    pub(super) fn new() -> Result<Self> {
        let text =
            "this build has no codec; build with the feature \"compress\", or write codec: off";
        Err(Error::new(ErrorKind::Unsupported, text))
    }

    pub(super) fn pack(&mut self, _: &[u8], _: &mut [u8]) -> Option<usize> {
        match *self {}
    }

    pub(super) fn unpack(&mut self, _: &[u8], _: &mut [u8]) -> bool {
        match *self {}
    }
}
