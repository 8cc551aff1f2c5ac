//! Device memory allocated by ucm; the KV of a model is never of this kind.

use std::any::Any;

/// Some bytes of a device, freed on drop. Nothing may use them at that time.
pub struct DeviceMemory {
    address: u64,
    len: usize,
    /// Frees them on drop.
    _owner: Box<dyn Any + Send + Sync>,
}

impl DeviceMemory {
    /// `len` bytes at `address`, which live as long as `owner`.
    pub(crate) fn new(address: u64, len: usize, owner: impl Any + Send + Sync) -> Self {
        Self {
            address,
            len,
            _owner: Box::new(owner),
        }
    }

    /// Address of the first byte, on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many bytes.
    #[allow(clippy::len_without_is_empty, reason = "there is always at least one")]
    pub fn len(&self) -> usize {
        self.len
    }
}
