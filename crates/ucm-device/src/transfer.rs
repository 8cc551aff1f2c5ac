//! Methods and directions of transfers between a device and the host.

use ucm_core::{Error, ErrorKind, Result};

/// Which copies to use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Transfer {
    /// The cheapest method by the device's measured costs.
    #[default]
    Auto,
    /// Plain copies, one for each run of bytes.
    Dma,
    /// Kernels that reach the host's memory.
    Sm,
    /// Kernels between the pieces and a buffer on the device, and copies of that.
    Staging,
}

impl Transfer {
    /// Parses the value of the configuration key; `Config` for any other text.
    pub fn from_word(word: &str) -> Result<Self> {
        match word {
            "auto" => Ok(Self::Auto),
            "dma" => Ok(Self::Dma),
            "sm" => Ok(Self::Sm),
            "staging" => Ok(Self::Staging),
            _ => {
                let unknown = "transfer is one of auto, dma, sm, staging";
                Err(Error::new(ErrorKind::Config, unknown).with("transfer", word))
            }
        }
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
