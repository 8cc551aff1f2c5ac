//! Methods and directions of transfers between a device and the host.

use ucm_core::{Error, ErrorKind, Result};

ucm_core::named! {
    /// Which copies to use.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Transfer {
        /// The cheapest method by the device's measured costs.
        #[default]
        Auto = "auto",
        /// Plain copies, one for each run of bytes.
        Dma = "dma",
        /// Kernels that reach the host's memory.
        Sm = "sm",
        /// Kernels between the pieces and a buffer on the device, and copies of that.
        Staging = "staging",
    }
}

impl Transfer {
    /// Parses the value of the configuration key; `Config` for any other text.
    pub fn from_word(word: &str) -> Result<Self> {
        Self::of_name(word).ok_or_else(|| {
            let unknown = "transfer is one of auto, dma, sm, staging";
            Error::new(ErrorKind::Config, unknown).with("transfer", word)
        })
    }
}

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From the host to the device: a load.
    ToDevice,
    /// From the device to the host: a dump.
    ToHost,
}
