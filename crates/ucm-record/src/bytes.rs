//! Reads and writes at an offset of records and segments; numbers are little-endian. The caller has
//! checked the length.

use ucm_core::Part;

/// The `N` bytes at an offset.
pub fn array<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[offset..offset + N]);
    out
}

/// A number of four bytes.
pub fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(array(bytes, offset))
}

/// A number of eight bytes.
pub fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(array(bytes, offset))
}

/// A part: its group and its two ranks, one after the other.
pub fn part_at(bytes: &[u8], offset: usize) -> Part {
    Part {
        group: u32_at(bytes, offset),
        pipeline_rank: u32_at(bytes, offset + 4),
        tensor_rank: u32_at(bytes, offset + 8),
    }
}

/// Writes bytes at an offset.
pub fn put(out: &mut [u8], offset: usize, bytes: &[u8]) {
    out[offset..offset + bytes.len()].copy_from_slice(bytes);
}
