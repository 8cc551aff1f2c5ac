//! The layout of a region: a page of header, the index, the entries, the record slots.
//!
//! All fields are 64-bit words. The index is open addressing by record id, at most half full: a
//! word is 0 (free) or 32 bits of the id's hash above the slot's number plus 1. It is a hint; the
//! slot's entry is authoritative: generation, id (two words), length and ordinal. Record slots are
//! page aligned.

use std::ops::Range;

use ucm_core::{BlockId, Error, ErrorKind, PAGE, Result, round_up};

/// First word of a region.
const MAGIC: u64 = u64::from_le_bytes(*b"UCMREGN1");
/// Version: changes with this layout and with the protocol of generations.
pub(crate) const VERSION: u64 = 1;
/// Used words of the header.
pub(crate) const HEADER_WORDS: usize = 16;
/// Bytes of a word.
pub(crate) const WORD: usize = 8;
/// Words of an entry.
pub(crate) const ENTRY: usize = 4;
/// The header word with the generation of the index; excluded from the checksum.
pub(crate) const MOVES: usize = HEADER_WORDS;
/// Fewest slots of a region.
const FEWEST: u64 = 4;
/// Most bytes of index and entry for a slot: four index words and an entry.
const OVERHEAD: u64 = ((4 + ENTRY) * WORD) as u64;

/// The sizes of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Shape {
    pub(crate) namespace: [u8; 32],
    pub(crate) record_len: usize,
    pub(crate) slots: usize,
    /// Words of the index, a power of two.
    pub(crate) buckets: usize,
    /// A random number that identifies this region.
    pub(crate) nonce: u64,
}

impl Shape {
    /// As many slots for records of `record_len` bytes as fit in `capacity` bytes, with index and
    /// entries.
    pub(crate) fn fitting(
        capacity: u64,
        record_len: usize,
        namespace: [u8; 32],
        nonce: u64,
    ) -> Result<Self> {
        if record_len == 0 || record_len as u64 > u64::from(u32::MAX) {
            return Err(Error::invalid("a record has between 1 byte and 4 GiB")
                .with("record_len", record_len));
        }
        let stride = round_up(record_len as u64, PAGE);
        let slots = capacity.saturating_sub(3 * PAGE) / (stride + OVERHEAD);
        let most = u64::from(u32::MAX / 4);
        if slots < FEWEST || capacity > isize::MAX as u64 {
            let least = FEWEST * (stride + OVERHEAD) + 3 * PAGE;
            let text = "the memory tier must hold at least 4 blocks; raise cache_size";
            return Err(Error::new(ErrorKind::Config, text)
                .with("cache_size", capacity)
                .with("at_least", least));
        }
        let slots = slots.min(most) as usize;
        Ok(Self {
            namespace,
            record_len,
            slots,
            buckets: (2 * slots).next_power_of_two(),
            nonce,
        })
    }

    /// Bytes from the start of one record slot to the next.
    pub(crate) fn stride(&self) -> usize {
        round_up(self.record_len as u64, PAGE) as usize
    }

    /// First word of the index.
    pub(crate) fn index(&self) -> usize {
        PAGE as usize / WORD
    }

    fn entries(&self) -> usize {
        self.index() + round_up((self.buckets * WORD) as u64, PAGE) as usize / WORD
    }

    /// First word of the record slots.
    pub(crate) fn records(&self) -> usize {
        self.entries() + round_up((self.slots * ENTRY * WORD) as u64, PAGE) as usize / WORD
    }

    /// Bytes of the whole region.
    pub(crate) fn len(&self) -> usize {
        self.records() * WORD + self.slots * self.stride()
    }

    /// The words of a slot's entry.
    pub(crate) fn entry(&self, slot: usize) -> Range<usize> {
        let start = self.entries() + slot * ENTRY;
        start..start + ENTRY
    }

    /// The words of a slot's record.
    pub(crate) fn record(&self, slot: usize) -> Range<usize> {
        let (start, words) = (self.records(), self.stride() / WORD);
        start + slot * words..start + (slot + 1) * words
    }

    /// The first bucket of a search for an id, and the bits in its index word.
    pub(crate) fn place(&self, id: BlockId) -> (usize, u64) {
        let [low, high] = halves(id);
        // Ids are parts of hashes; the products only spread hand-made ones.
        let mut hash =
            low.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ high.wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
        hash ^= hash >> 29;
        hash = hash.wrapping_mul(0x1656_67b1_9e37_79f9);
        (hash as usize & (self.buckets - 1), hash >> 32 << 32)
    }

    /// The words of the header.
    pub(crate) fn header(&self) -> [u64; HEADER_WORDS] {
        let mut words = [0; HEADER_WORDS];
        words[0] = MAGIC;
        words[1] = VERSION;
        for (word, bytes) in words[2..6]
            .iter_mut()
            .zip(self.namespace.as_chunks::<WORD>().0)
        {
            *word = u64::from_le_bytes(*bytes);
        }
        let numbers = [
            self.record_len,
            self.slots,
            self.buckets,
            self.records(),
            self.len(),
        ];
        for (word, number) in words[6..11].iter_mut().zip(numbers) {
            *word = number as u64;
        }
        words[11] = self.nonce;
        words[12] = check(&words);
        words
    }

    /// Parses a header; `None` unless every word is as this version writes it.
    pub(crate) fn parse(words: &[u64; HEADER_WORDS]) -> Option<Self> {
        let mut namespace = [0; 32];
        for (bytes, word) in namespace.chunks_exact_mut(WORD).zip(&words[2..6]) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let shape = Self {
            namespace,
            record_len: usize::try_from(words[6]).ok().filter(|&len| len > 0)?,
            slots: usize::try_from(words[7]).ok().filter(|&slots| slots > 0)?,
            buckets: usize::try_from(words[8]).ok()?,
            nonce: words[11],
        };
        // Bounded first, for safe arithmetic, then compared word by word.
        let sane = words[6] <= u64::from(u32::MAX)
            && words[7] <= u64::from(u32::MAX / 4)
            && shape.buckets == (2 * shape.slots).next_power_of_two()
            && words[10] <= isize::MAX as u64
            && words[6]
                .checked_mul(words[7])
                .is_some_and(|bytes| bytes <= words[10]);
        (sane && shape.header() == *words).then_some(shape)
    }
}

/// An id as two words.
pub(crate) fn halves(id: BlockId) -> [u64; 2] {
    let (words, _) = id.0.as_chunks::<WORD>();
    [words[0], words[1]].map(u64::from_le_bytes)
}

/// The id of two words.
pub(crate) fn whole([low, high]: [u64; 2]) -> BlockId {
    let mut id = [0; BlockId::LEN];
    id[..WORD].copy_from_slice(&low.to_le_bytes());
    id[WORD..].copy_from_slice(&high.to_le_bytes());
    BlockId(id)
}

/// The checksum of the header's words before it.
fn check(words: &[u64; HEADER_WORDS]) -> u64 {
    let bytes: Vec<u8> = words[..12]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    u64::from(ucm_core::crc32c(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_never_takes_more_than_it_was_given() {
        for capacity in [1 << 16, 1 << 20, (1 << 20) + 4097, 1 << 30, 100 << 30] {
            for record_len in [1, 4096, 4097, 256 << 10, 1 << 20] {
                let Ok(shape) = Shape::fitting(capacity, record_len, [1; 32], 7) else {
                    assert!(
                        capacity < 4 * (round_up(record_len as u64, PAGE) + OVERHEAD) + 3 * PAGE
                    );
                    continue;
                };
                assert!(shape.len() as u64 <= capacity, "{shape:?}");
                let spare = shape.stride() as u64 + OVERHEAD + 32 * shape.slots as u64 + 3 * PAGE;
                assert!(shape.len() as u64 + spare > capacity, "{shape:?}");
                assert!(shape.buckets >= 2 * shape.slots);
                assert_eq!(shape.record(0).start * WORD % PAGE as usize, 0);
                assert_eq!(shape.record(shape.slots - 1).end * WORD, shape.len());
                assert!(shape.entry(shape.slots - 1).end <= shape.records());
            }
        }
    }

    #[test]
    fn sizes_that_are_none_are_errors() {
        assert!(Shape::fitting(1 << 20, 0, [0; 32], 0).is_err());
        assert!(Shape::fitting(u64::MAX, 4096, [0; 32], 0).is_err());
        let error = Shape::fitting(4 * 4096, 4096, [0; 32], 0).unwrap_err();
        assert!(error.to_string().contains("raise cache_size"), "{error}");
    }

    #[test]
    fn a_header_with_any_bit_changed_is_none() {
        let shape = Shape::fitting(1 << 20, 5000, [3; 32], 99).unwrap();
        let words = shape.header();
        assert_eq!(Shape::parse(&words), Some(shape));
        for bit in 0..64 * HEADER_WORDS {
            let mut changed = words;
            changed[bit / 64] ^= 1 << (bit % 64);
            assert_eq!(Shape::parse(&changed), None, "bit {bit}");
        }
        assert_eq!(Shape::parse(&[0; HEADER_WORDS]), None);
        assert_eq!(Shape::parse(&[u64::MAX; HEADER_WORDS]), None);
    }

    #[test]
    fn ids_are_two_words_and_back() {
        let id = BlockId(std::array::from_fn(|i| i as u8 + 1));
        assert_eq!(halves(id)[0], 0x0807_0605_0403_0201);
        assert_eq!(whole(halves(id)), id);
    }
}
