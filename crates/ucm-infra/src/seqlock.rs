//! Bytes that one thread or process writes while others read them, without a lock: a generation
//! before and after.
//!
//! The writer makes the generation odd ([`begin`]), writes the bytes ([`fill`]) and makes it even
//! again ([`publish`]). A reader reads an even generation ([`enter`]), copies ([`copy`]) and checks
//! that the generation is still the same ([`unchanged`]); otherwise the copy is invalid and must be
//! discarded. Bytes are written and read as words by relaxed atomic operations, so a race yields a
//! copy to discard and never undefined behaviour.
//!
//! Why it is correct: a reader that saw one word of a later write has, by the fence of [`begin`]
//! and its own in [`unchanged`], also seen that write's odd generation, so the generations differ.
//! A reader that read the even generation of a write sees all its words, by release and acquire.
//! The caller ensures that there is one writer at a time.

use crate::sync::{Ordering, fence};

/// The shared words: the standard library's atomics, or loom's under loom.
pub use crate::sync::AtomicU64;

/// Begins a write. Readers that entered before will find the generation changed.
pub fn begin(generation: &AtomicU64) {
    // An abandoned write left it odd; no reader has entered since.
    let odd = generation.load(Ordering::Relaxed) | 1;
    generation.store(odd, Ordering::Relaxed);
    fence(Ordering::Release);
}

/// Writes `bytes` from the first word on and zeroes the rest of the last word. Bytes that do not
/// fit are left out.
pub fn fill(words: &[AtomicU64], bytes: &[u8]) {
    let (whole, rest) = bytes.as_chunks::<8>();
    for (word, bytes) in words.iter().zip(whole) {
        word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
    }
    if let (Some(word), false) = (words.get(whole.len()), rest.is_empty()) {
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        word.store(u64::from_ne_bytes(last), Ordering::Relaxed);
    }
}

/// Ends a write: the bytes are complete and readers may enter.
pub fn publish(generation: &AtomicU64) {
    let odd = generation.load(Ordering::Relaxed) | 1;
    generation.store(odd.wrapping_add(1), Ordering::Release);
}

/// The generation to compare with later; `None` during a write or before the first one.
pub fn enter(generation: &AtomicU64) -> Option<u64> {
    let seen = generation.load(Ordering::Acquire);
    (seen != 0 && seen.is_multiple_of(2)).then_some(seen)
}

/// Copies from the first word on until `out` is full or the words end. The copy is valid only if
/// [`unchanged`] then returns true.
pub fn copy(words: &[AtomicU64], out: &mut [u8]) {
    let (whole, rest) = out.as_chunks_mut::<8>();
    let copied = whole.len();
    for (word, bytes) in words.iter().zip(whole) {
        *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
    }
    if let Some(word) = words.get(copied) {
        let last = word.load(Ordering::Relaxed).to_ne_bytes();
        rest.iter_mut()
            .zip(last)
            .for_each(|(byte, last)| *byte = last);
    }
}

/// True if nothing was written since the reader entered: its copy is complete.
pub fn unchanged(generation: &AtomicU64, seen: u64) -> bool {
    fence(Ordering::Acquire);
    generation.load(Ordering::Relaxed) == seen
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_copied_and_a_write_under_way_shows() {
        let (generation, words) = (AtomicU64::new(0), [const { AtomicU64::new(u64::MAX) }; 3]);
        assert_eq!(enter(&generation), None, "nothing was written");
        begin(&generation);
        assert_eq!(enter(&generation), None);
        fill(&words, b"twelve bytes");
        publish(&generation);
        let seen = enter(&generation).unwrap();
        let mut out = [7; 20];
        copy(&words, &mut out);
        assert!(unchanged(&generation, seen));
        assert_eq!(&out[..12], b"twelve bytes");
        assert_eq!(
            out[12..],
            [0, 0, 0, 0, 255, 255, 255, 255],
            "padding, then the old bytes"
        );
        begin(&generation);
        assert!(!unchanged(&generation, seen), "a write began");
        begin(&generation);
        publish(&generation);
        assert!(
            !unchanged(&generation, seen) && enter(&generation) == Some(4),
            "another one ended"
        );
    }

    #[test]
    fn lengths_that_do_not_fit_are_cut() {
        let words = [const { AtomicU64::new(0) }; 1];
        fill(&words, b"more than eight");
        let mut out = [9; 12];
        copy(&words, &mut out);
        assert_eq!(&out, b"more tha\x09\x09\x09\x09");
        fill(&words[..0], b"x");
        copy(&words, &mut []);
    }
}
