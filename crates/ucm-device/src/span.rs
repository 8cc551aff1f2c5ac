//! The name of a piece of device memory: an address and a length. Its maker vouches for it once.
#![allow(
    unsafe_code,
    reason = "the constructor is where a caller vouches for an address; everything after it is safe"
)]

use ucm_core::{Error, Result};

/// `len` bytes at `addr` in the memory of a device (on `host`: of this process).
///
/// Copying the span copies the name, not the promise: the promise of [`DeviceSpan::new`] covers
/// every copy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DeviceSpan {
    addr: u64,
    len: u64,
}

impl DeviceSpan {
    /// Names `len` bytes at `addr`.
    ///
    /// # Safety
    /// Until every task and stream operation that names this span (or a part or copy of
    /// it) has ended, the memory must stay mapped, readable and, as the target of a scatter or
    /// copy, writable. Nothing may write to it while it is read or access it while it is written,
    /// and no Rust reference to it may be in use.
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

    /// The part of `len` bytes from `offset`; `InvalidInput` when it does not lie inside.
    pub fn part(self, offset: u64, len: u64) -> Result<Self> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(Self {
                addr: self.addr + offset,
                len,
            }),
            _ => Err(Error::invalid("a part of a device span lies outside of it")
                .with("offset", offset)
                .with("len", len)
                .with("span_len", self.len)),
        }
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

/// `len` bytes at `addr` in this process's memory, outside of this crate's ownership.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostSpan(DeviceSpan);

impl HostSpan {
    /// Names `len` bytes at `addr`.
    ///
    /// # Safety
    /// The conditions of [`DeviceSpan::new`], for this process's memory. If the span is
    /// registered with a device, the memory stays mapped until the registration has ended.
    pub const unsafe fn new(addr: u64, len: u64) -> Self {
        Self(DeviceSpan { addr, len })
    }

    /// First address.
    pub const fn addr(self) -> u64 {
        self.0.addr
    }

    /// Length in bytes.
    pub const fn len(self) -> u64 {
        self.0.len
    }

    /// Whether it names no byte at all.
    pub const fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// As [`DeviceSpan::is_sound`].
    pub(crate) const fn is_sound(self) -> bool {
        self.0.is_sound()
    }

    /// As [`DeviceSpan::check`].
    pub(crate) fn check(self) -> Result<()> {
        self.0.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_stay_inside() {
        // SAFETY: the span is never read or written.
        let span = unsafe { DeviceSpan::new(4096, 100) };
        let part = span.part(40, 60).unwrap();
        assert_eq!((part.addr(), part.len()), (4136, 60));
        assert!(span.part(41, 60).is_err());
        assert!(span.part(u64::MAX, 2).is_err());
        assert!(span.part(100, 0).unwrap().is_empty());
    }

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
