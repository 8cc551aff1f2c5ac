//! The name of a piece of device memory: an address and a length. Its maker vouches for it once.
#![allow(
    unsafe_code,
    reason = "the constructor is where a caller vouches for an address; everything after it is safe"
)]

use ucm_core::{Error, Result};

/// `len` bytes at `addr` in the memory of a device (on `host`: of this process), or, with `HOST`,
/// in this process's memory, outside of this crate's ownership.
///
/// Copying the span copies the name, not the promise: the promise of [`Span::new`] covers every
/// copy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Span<const HOST: bool> {
    addr: u64,
    len: u64,
}

/// Memory of a device.
pub type DeviceSpan = Span<false>;
/// Memory of this process.
pub type HostSpan = Span<true>;

impl<const HOST: bool> Span<HOST> {
    /// Names `len` bytes at `addr`.
    ///
    /// # Safety
    /// Until every task and stream operation that names this span (or a part or copy of
    /// it) has ended, the memory must stay mapped, readable and, as the target of a scatter or
    /// copy, writable. Nothing may write to it while it is read or access it while it is written,
    /// and no Rust reference to it may be in use. If the span is registered with a device, the
    /// memory stays mapped until the registration has ended.
    pub const unsafe fn new(addr: u64, len: u64) -> Self {
        Self { addr, len }
    }

    /// First address.
    pub const fn addr(self) -> u64 {
        self.addr
    }

    /// Length in bytes.
    pub const fn len(self) -> u64 {
        self.len
    }

    /// Whether it names no byte at all.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// True if the span is valid: no null address unless empty, no end past the address space.
    pub(crate) const fn is_sound(self) -> bool {
        self.is_empty() || (self.addr != 0 && self.addr.checked_add(self.len).is_some())
    }

    /// The same as an error.
    pub(crate) fn check(self) -> Result<()> {
        if self.is_sound() {
            return Ok(());
        }
        Err(
            Error::invalid("an address is null, or its range wraps around")
                .with("addr", format_args!("{:#x}", self.addr))
                .with("len", self.len),
        )
    }
}

/// One fragment of a gather or scatter: a device piece and its offset in the host buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Offset in the host buffer, in bytes.
    pub at: usize,
    /// The device side.
    pub span: DeviceSpan,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_and_wrapping_spans_are_refused() {
        // SAFETY: the spans are never read or written.
        let (null, wraps, empty) = unsafe {
            (
                DeviceSpan::new(0, 1),
                DeviceSpan::new(u64::MAX, 2),
                DeviceSpan::new(0, 0),
            )
        };
        assert!(null.check().is_err());
        assert!(wraps.check().is_err());
        assert!(empty.check().is_ok());
    }
}
