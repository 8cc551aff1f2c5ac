//! CRC-32C (Castagnoli), by the CPU's instructions: the checksum of record headers and layers.
//!
//! It detects every error burst of up to 32 bits, hence every flipped byte. [`Crc32c`] takes its
//! input in pieces of any size, so that bytes can be checked while a copy still has them in cache.

use crc_fast::CrcAlgorithm::Crc32Iscsi;

/// Bytes that a copy moves and checks at a time: two of them fit a small level-2 cache.
pub const CRC_PIECE: usize = 64 * 1024;

/// CRC-32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// A running CRC-32C.
#[derive(Clone)]
pub struct Crc32c(crc_fast::Digest);

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

impl Crc32c {
    /// Nothing taken in yet.
    pub fn new() -> Self {
        Self(crc_fast::Digest::new(Crc32Iscsi))
    }

    /// Adds `bytes` to the checksum.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Copies `from` over the first bytes of `to` and adds the copied bytes, piece by piece while
    /// each piece is in cache. The checksum is of the bytes in `to`. Bytes of `from` beyond the
    /// length of `to` are neither copied nor added. Returns the number of bytes copied.
    pub fn copy(&mut self, from: &[u8], to: &mut [u8]) -> usize {
        for (from, to) in from.chunks(CRC_PIECE).zip(to.chunks_mut(CRC_PIECE)) {
            let len = from.len().min(to.len());
            to[..len].copy_from_slice(&from[..len]);
            self.update(&to[..len]);
        }
        from.len().min(to.len())
    }

    /// The checksum of all bytes added so far.
    pub fn finish(&self) -> u32 {
        self.0.finalize() as u32
    }
}

impl std::fmt::Debug for Crc32c {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Crc32c({:08x})", self.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bit by bit from the polynomial's definition.
    fn by_definition(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0u32, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |crc, _| {
                (crc >> 1) ^ (0x82f6_3b78 & 0u32.wrapping_sub(crc & 1))
            })
        })
    }

    fn noise(len: usize) -> Vec<u8> {
        let mut state = 1u32;
        let next = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..len).map(next).collect()
    }

    #[test]
    fn known_answers() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn every_length_agrees_with_the_definition() {
        let bytes = noise(700);
        for len in 0..bytes.len() {
            assert_eq!(
                crc32c(&bytes[..len]),
                by_definition(&bytes[..len]),
                "{len} bytes"
            );
        }
    }

    #[test]
    fn pieces_and_copies_agree_with_the_whole() {
        let bytes = noise(3 * CRC_PIECE + 17);
        let whole = crc32c(&bytes);
        for cut in [0, 1, 63, CRC_PIECE, CRC_PIECE + 1, bytes.len()] {
            let (a, b) = bytes.split_at(cut);
            let mut running = Crc32c::new();
            running.update(a);
            assert_eq!(running.finish(), crc32c(a));
            let mut to = vec![0; b.len() + 5];
            assert_eq!(running.copy(b, &mut to), b.len());
            assert_eq!(running.finish(), whole);
            assert_eq!(&to[..b.len()], b);
            assert_eq!(to[b.len()..], [0; 5]);
        }
    }

    #[test]
    fn a_copy_into_less_room_stops_there() {
        let bytes = noise(CRC_PIECE + 100);
        let mut to = vec![0; CRC_PIECE + 10];
        let mut running = Crc32c::default();
        assert_eq!(running.copy(&bytes, &mut to), to.len());
        assert_eq!(to, bytes[..to.len()]);
        assert_eq!(running.finish(), crc32c(&to));
    }
}
