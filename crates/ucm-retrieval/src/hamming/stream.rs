//! Distances one register at a time: the kernel for processors that count bits in vectors.
//!
//! Contiguous codes are a stream of registers. After `REGISTERS` of them the positions of token and
//! head in a register repeat, so that many registers hold the repeated query. The counts of a
//! code's words are added within a register, and the least of each position is kept until the block
//! ends.

use super::{HammingJob, NONE};

/// A register of words of eight bytes.
///
/// # Safety
///
/// All functions require the type's instructions.
pub(super) trait Register: Copy {
    /// Bytes of a register.
    const WIDTH: usize;
    /// Loads `len` readable bytes at an address.
    unsafe fn load(from: *const u8) -> Self;
    /// Stores to a writable address.
    unsafe fn store(self, to: *mut u8);
    /// A word in every position.
    unsafe fn splat(word: u64) -> Self;
    /// In each word of a code of `WORDS` words: the number of different bits of the whole code.
    unsafe fn distances<const WORDS: usize>(self, query: Self) -> Self;
    /// The smaller word in each position; 32 bits of a word count.
    unsafe fn least(self, other: Self) -> Self;
    /// Prefetches memory.
    unsafe fn prefetch(at: *const u8);
}

/// Prefetch distance in bytes: the processor's own prefetcher stops at every page.
const AHEAD: usize = 4096;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Most bytes of a query's registers.
const MOST_BYTES: usize = 8 * 64;
/// Most words of a register.
const MOST_WORDS: usize = 8;

/// Scores a range of blocks of a row. Returns false, without effect, if codes of this size cannot
/// be cut into registers.
///
/// # Safety
///
/// As of [`super::Kernel`], for the processor of `R`.
#[inline(always)]
pub(super) unsafe fn score<R: Register>(job: HammingJob<'_>) -> bool {
    if job.spec.queries_per_head != 1 || job.spec.code_len > R::WIDTH {
        return false;
    }
    // SAFETY: as the caller vouches.
    unsafe {
        match job.spec.code_len {
            8 => of_words::<R, 1>(job),
            16 => of_words::<R, 2>(job),
            32 => of_words::<R, 4>(job),
            64 => of_words::<R, 8>(job),
            _ => false,
        }
    }
}

/// Codes of `WORDS` words, no longer than a register.
///
/// # Safety
///
/// As of [`score`].
#[inline(always)]
unsafe fn of_words<R: Register, const WORDS: usize>(job: HammingJob<'_>) -> bool {
    let token = job.spec.heads * job.spec.code_len;
    // SAFETY: as the caller vouches.
    unsafe {
        match token / greatest_common_divisor(token, R::WIDTH) {
            1 => of_registers::<R, WORDS, 1>(job),
            2 => of_registers::<R, WORDS, 2>(job),
            3 => of_registers::<R, WORDS, 3>(job),
            4 => of_registers::<R, WORDS, 4>(job),
            8 => of_registers::<R, WORDS, 8>(job),
            _ => return false,
        }
    }
    true
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

/// Bytes repeated over one period.
fn repeated(bytes: &[u8], period: usize) -> [u8; MOST_BYTES] {
    let mut filled = [0; MOST_BYTES];
    for part in filled[..period].chunks_mut(bytes.len()) {
        part.copy_from_slice(&bytes[..part.len()]);
    }
    filled
}

/// Lowers the least distances by those of the codes of a period. It is a function because a closure
/// with two callers would not be compiled for the processor, and a call for each instruction takes
/// ten times as long.
///
/// # Safety
///
/// A period can be read from the address, and the processor supports `R`.
#[inline(always)]
unsafe fn lower<R: Register, const WORDS: usize, const REGISTERS: usize>(
    least: &mut [R; REGISTERS],
    query: &[R; REGISTERS],
    from: *const u8,
) {
    for (register, (least, &query)) in least.iter_mut().zip(query).enumerate() {
        // SAFETY: as the caller vouches.
        unsafe {
            let keys = R::load(from.add(register * R::WIDTH));
            *least = least.least(keys.distances::<WORDS>(query));
        }
    }
}

/// Codes of `WORDS` words, whose positions repeat after `REGISTERS` registers.
///
/// # Safety
///
/// As of [`score`].
#[inline(always)]
unsafe fn of_registers<R: Register, const WORDS: usize, const REGISTERS: usize>(
    job: HammingJob<'_>,
) {
    let (token, period) = (job.spec.heads * job.spec.code_len, REGISTERS * R::WIDTH);
    let asked = repeated(job.queries(), period);
    // SAFETY: as the caller vouches; the array has space for eight of the largest registers.
    let (query, none) = unsafe {
        let of_register = |register| R::load(asked.as_ptr().add(register * R::WIDTH));
        (
            std::array::from_fn::<R, REGISTERS, _>(of_register),
            R::splat(u64::from(NONE)),
        )
    };
    job.each_block(|codes, slots, next, of_heads| {
        let len = slots * token;
        let mut least = [none; REGISTERS];
        let (whole, rest) = (len / period, len % period);
        for at in 0..whole {
            let ahead = at * period + AHEAD;
            let ahead = match ahead.checked_sub(len) {
                None => codes.wrapping_add(ahead),
                Some(beyond) => next.wrapping_add(beyond),
            };
            for line in (0..period).step_by(LINE) {
                // SAFETY: nothing is read; the caller vouches for the processor.
                unsafe { R::prefetch(ahead.wrapping_add(line)) };
            }
            // SAFETY: a whole period is readable.
            unsafe { lower::<R, WORDS, REGISTERS>(&mut least, &query, codes.add(at * period)) };
        }
        if rest > 0 {
            // The remaining tokens, repeated: repetitions do not change the least distance. SAFETY:
            // the block has that many bytes behind its whole periods.
            let left = unsafe { std::slice::from_raw_parts(codes.add(whole * period), rest) };
            let filled = repeated(left, period);
            // SAFETY: a whole period is readable.
            unsafe { lower::<R, WORDS, REGISTERS>(&mut least, &query, filled.as_ptr()) };
        }
        for (register, least) in least.into_iter().enumerate() {
            let mut words = [0_u64; MOST_WORDS];
            // SAFETY: the array has space for the largest register.
            unsafe { least.store(words.as_mut_ptr().cast()) };
            for (word, found) in words
                .into_iter()
                .enumerate()
                .take(R::WIDTH / 8)
                .step_by(WORDS)
            {
                let head = (register * R::WIDTH + word * 8) % token / job.spec.code_len;
                of_heads[head] = of_heads[head].min(found as u32);
            }
        }
    });
}
