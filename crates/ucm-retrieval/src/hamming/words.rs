//! Distances eight bytes at a time, by the bit-count instruction: the kernel for processors without
//! a vector form of it, and for codes that do not divide registers.

use super::HammingJob;

/// See [`super::Kernel`].
#[target_feature(enable = "popcnt")]
pub(super) unsafe fn score(job: HammingJob<'_>) {
    match (job.spec.code_len, job.spec.queries_per_head) {
        (8, 1) => of_size::<1>(job),
        (16, 1) => of_size::<2>(job),
        (32, 1) => of_size::<4>(job),
        (64, 1) => of_size::<8>(job),
        _ => of_any_size(job),
    }
}

/// Codes of `WORDS` words, one query for each head.
#[target_feature(enable = "popcnt")]
fn of_size<const WORDS: usize>(job: HammingJob<'_>) {
    let heads = job.spec.heads;
    let queries: Vec<[u64; WORDS]> = job
        .queries()
        .chunks_exact(8 * WORDS)
        .map(|code| std::array::from_fn(|at| word(&code[8 * at..])))
        .collect();
    job.each_block(|codes, slots, _, least| {
        for slot in 0..slots {
            // SAFETY: the slot is within the block.
            let of_slot = unsafe { codes.add(slot * heads * 8 * WORDS) }.cast::<[u64; WORDS]>();
            for (head, (query, least)) in queries.iter().zip(&mut *least).enumerate() {
                // SAFETY: as above, for each head.
                let code = unsafe { of_slot.add(head).read_unaligned() };
                let distance: u32 = code
                    .iter()
                    .zip(query)
                    .map(|(a, b)| (a ^ b).count_ones())
                    .sum();
                *least = distance.min(*least);
            }
        }
    });
}

/// Codes of any size, any number of queries.
#[target_feature(enable = "popcnt")]
fn of_any_size(job: HammingJob<'_>) {
    let (heads, len) = (job.spec.heads, job.spec.code_len);
    let queries = job.queries();
    job.each_block(|codes, slots, _, least| {
        for slot in 0..slots {
            let of_heads = queries
                .chunks_exact(job.spec.queries_per_head * len)
                .zip(&mut *least);
            for (head, (queries, least)) in of_heads.enumerate() {
                // SAFETY: the slot and the head are within the block.
                let code = unsafe {
                    std::slice::from_raw_parts(codes.add((slot * heads + head) * len), len)
                };
                let distance: u32 = queries
                    .chunks_exact(len)
                    .map(|query| distance(code, query))
                    .sum();
                *least = distance.min(*least);
            }
        }
    });
}

#[target_feature(enable = "popcnt")]
fn distance(a: &[u8], b: &[u8]) -> u32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let words: u32 = a
        .iter()
        .zip(b)
        .map(|(a, b)| (word(a) ^ word(b)).count_ones())
        .sum();
    let rest: u32 = a_rest
        .iter()
        .zip(b_rest)
        .map(|(a, b)| (a ^ b).count_ones())
        .sum();
    words + rest
}

/// The first eight bytes.
#[inline(always)]
fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[..8]);
    u64::from_ne_bytes(word)
}
