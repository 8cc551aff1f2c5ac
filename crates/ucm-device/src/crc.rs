//! CRC-32C of host memory with all suitable units of the processor.
//!
//! The library behind [`ucm_core::crc32c`] has kernels for AVX-512 and for the 128-bit carry-less
//! multiplier, and none for processors between the two (AVX2 with VPCLMULQDQ: Zen 3, Alder Lake).
//! There the checksum is half of the cost of a load from the page cache, so this module has a
//! kernel for them. A stretch is cut in four: the wide multiplier folds the first part 128 bytes a
//! step, while the CRC instruction processes the other three. Then the four results are shifted to
//! their positions and added. The values are the same on every processor.

/// CRC-32C of `bytes`; the same value as [`ucm_core::crc32c`].
pub fn crc32c(bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() >= wide::SHORTEST && wide::pays() {
        return wide::crc32c(bytes);
    }
    ucm_core::crc32c(bytes)
}

#[cfg(target_arch = "x86_64")]
#[allow(
    unsafe_code,
    reason = "instructions that not every processor has, used after detection; one unaligned load"
)]
mod wide {
    use std::arch::x86_64::*;

    /// The polynomial, bits reflected.
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    /// Bytes of the multiplier in one step: four registers.
    const FOLDED: usize = 128;
    /// Bytes of each of the three chains of CRC instructions in one step. The multiplier starts one
    /// product every second cycle, and a step needs eight; the CRC instruction takes 8 bytes a
    /// cycle: 120 in 15 of these 16.
    const CHAINED: usize = 40;
    /// Bytes of a step.
    const STEP: usize = FOLDED + 3 * CHAINED;
    /// Steps of the longest, the middle and the shortest stretch. Longer ones need fewer
    /// combinations.
    const STEPS: [usize; 3] = [128, 32, 4];
    /// Fewest bytes for which this kernel is used.
    pub(super) const SHORTEST: usize = STEPS[2] * STEP;

    /// True if this processor is faster with this kernel than with the library.
    pub(super) fn pays() -> bool {
        is_x86_feature_detected!("vpclmulqdq") && !is_x86_feature_detected!("avx512vl") && works()
    }

    /// True if this processor has the instructions.
    pub(super) fn works() -> bool {
        is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("sse4.2")
    }

    /// The checksum; the caller has checked [`works`].
    pub(super) fn crc32c(bytes: &[u8]) -> u32 {
        debug_assert!(works());
        // SAFETY: every caller has checked that the processor has these instructions.
        unsafe { whole(bytes) }
    }

    #[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
    fn whole(mut bytes: &[u8]) -> u32 {
        let mut crc = !0;
        (crc, bytes) = stretches::<{ STEPS[0] }>(crc, bytes);
        (crc, bytes) = stretches::<{ STEPS[1] }>(crc, bytes);
        (crc, bytes) = stretches::<{ STEPS[2] }>(crc, bytes);
        let (words, rest) = bytes.as_chunks::<8>();
        let crc = chain(u64::from(crc), words) as u32;
        !rest.iter().fold(crc, |crc, &byte| _mm_crc32_u8(crc, byte))
    }

    /// Processes all whole stretches of `N` steps; returns the remaining bytes.
    #[inline]
    #[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
    fn stretches<const N: usize>(mut crc: u32, mut bytes: &[u8]) -> (u32, &[u8]) {
        while let Some((first, others)) = bytes.split_at_checked(N * STEP) {
            crc = stretch::<N>(crc, first);
            bytes = others;
        }
        (crc, bytes)
    }

    /// Processes one stretch of `N` steps.
    #[inline]
    #[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
    fn stretch<const N: usize>(crc: u32, bytes: &[u8]) -> u32 {
        let (folded, chained) = bytes.split_at(N * FOLDED);
        let (a, chained) = chained.split_at(N * CHAINED);
        let (b, c) = chained.split_at(N * CHAINED);
        let (folded, _) = folded.as_chunks::<FOLDED>();
        let [(a, _), (b, _), (c, _)] = [a, b, c].map(|part| part.as_chunks::<CHAINED>());
        let mut fold = load(&folded[0]);
        fold[0] = _mm256_xor_si256(fold[0], _mm256_set_epi64x(0, 0, 0, i64::from(crc)));
        let mut crcs = [&a[0], &b[0], &c[0]].map(|part| chain(0, part.as_chunks().0));
        let far = const { factors(FOLDED) };
        let far = _mm256_set_epi64x(far.1, far.0, far.1, far.0);
        for (((next, a), b), c) in folded[1..].iter().zip(&a[1..]).zip(&b[1..]).zip(&c[1..]) {
            let next = load(next);
            for (own, next) in fold.iter_mut().zip(next) {
                *own = moved(*own, far, next);
            }
            let [(a, _), (b, _), (c, _)] = [a, b, c].map(|part| part.as_chunks::<8>());
            for ((a, b), c) in a.iter().zip(b).zip(c) {
                crcs[0] = _mm_crc32_u64(crcs[0], u64::from_le_bytes(*a));
                crcs[1] = _mm_crc32_u64(crcs[1], u64::from_le_bytes(*b));
                crcs[2] = _mm_crc32_u64(crcs[2], u64::from_le_bytes(*c));
            }
        }
        // Folds four registers to one, its halves to one, and that to a checksum.
        let near = const { factors(32) };
        let near = _mm256_set_epi64x(near.1, near.0, near.1, near.0);
        let [first, others @ ..] = fold;
        let sum = others
            .into_iter()
            .fold(first, |sum, next| moved(sum, near, next));
        let halves = const { factors(16) };
        let halves = _mm256_set_epi64x(0, 0, halves.1, halves.0);
        let upper = _mm256_castsi128_si256(_mm256_extracti128_si256(sum, 1));
        let sum = _mm256_castsi256_si128(moved(sum, halves, upper));
        let folded = _mm_crc32_u64(0, _mm_cvtsi128_si64(sum) as u64);
        let folded = _mm_crc32_u64(folded, _mm_extract_epi64(sum, 1) as u64);
        let parts = [
            shifted(folded, const { power(8 * 3 * N * CHAINED - 33) }),
            shifted(crcs[0], const { power(8 * 2 * N * CHAINED - 33) }),
            shifted(crcs[1], const { power(8 * N * CHAINED - 33) }),
            crcs[2],
        ];
        parts.into_iter().fold(0, |sum, part| sum ^ part) as u32
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn load(bytes: &[u8; FOLDED]) -> [__m256i; 4] {
        // SAFETY: the four loads read the 128 bytes of the array; they need no alignment.
        unsafe {
            let from = bytes.as_ptr().cast::<__m256i>();
            [0, 1, 2, 3].map(|at| _mm256_loadu_si256(from.add(at)))
        }
    }

    /// Two times 128 bits, shifted to the position of `next`, plus `next`.
    #[inline]
    #[target_feature(enable = "avx2,vpclmulqdq")]
    fn moved(bits: __m256i, factors: __m256i, next: __m256i) -> __m256i {
        let low = _mm256_clmulepi64_epi128(bits, factors, 0x00);
        let high = _mm256_clmulepi64_epi128(bits, factors, 0x11);
        _mm256_xor_si256(_mm256_xor_si256(low, next), high)
    }

    /// A checksum shifted over zero bytes; `by` is x to the power of their bits minus 33.
    #[inline]
    #[target_feature(enable = "pclmulqdq,sse4.2")]
    fn shifted(crc: u64, by: u32) -> u64 {
        let by = _mm_cvtsi64_si128(i64::from(by));
        let product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(crc as i64), by, 0);
        _mm_crc32_u64(0, _mm_cvtsi128_si64(product) as u64)
    }

    #[inline]
    #[target_feature(enable = "sse4.2")]
    fn chain(crc: u64, words: &[[u8; 8]]) -> u64 {
        words.iter().fold(crc, |crc, &word| {
            _mm_crc32_u64(crc, u64::from_le_bytes(word))
        })
    }

    /// Factors that shift the two halves of 128 bits by `bytes` bytes.
    const fn factors(bytes: usize) -> (i64, i64) {
        (power(8 * bytes + 31) as i64, power(8 * bytes - 33) as i64)
    }

    /// x to the power of `n`, modulo the polynomial, bits reflected.
    const fn power(n: usize) -> u32 {
        let (mut power, mut at) = (1 << 31, 0);
        while at < n {
            power = (power >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(power & 1));
            at += 1;
        }
        power
    }

    #[cfg(test)]
    pub(super) const CUTS: [usize; 3] = [STEPS[0] * STEP, STEPS[1] * STEP, STEPS[2] * STEP];
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize) -> Vec<u8> {
        let mut state = 7u32;
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
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn as_the_library_gives_it_wherever_the_bytes_lie() {
        let bytes = noise(200_000);
        for len in (0..5_000).chain([8_192, 32_768, 65_536, 131_072, 199_000]) {
            let start = len % 97;
            let bytes = &bytes[start..start + len];
            assert_eq!(
                crc32c(bytes),
                ucm_core::crc32c(bytes),
                "{len} bytes from {start}"
            );
        }
    }

    /// Also on processors with faster instructions, so that every machine that can run this tests
    /// it.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_wide_kernel_agrees_around_every_cut() {
        if !wide::works() {
            return;
        }
        let bytes = noise(2 * wide::CUTS[0] + 100);
        let near = |cut: usize| [cut - 1, cut, cut + 1, cut + 7, cut + 8, cut + 9];
        for len in wide::CUTS
            .into_iter()
            .flat_map(|cut| near(cut).into_iter().chain(near(2 * cut)))
        {
            for start in [0, 1, 8, 15] {
                let bytes = &bytes[start..start + len];
                assert_eq!(
                    wide::crc32c(bytes),
                    ucm_core::crc32c(bytes),
                    "{len} bytes from {start}"
                );
            }
        }
        assert_eq!(
            wide::crc32c(b"123456789"),
            0xe306_9283,
            "too short for a stretch"
        );
    }

    #[test]
    fn every_flipped_bit_of_a_layer_shows() {
        // Long enough for a stretch of every length but the longest.
        let mut bytes = noise(10_000);
        let right = crc32c(&bytes);
        for at in 0..bytes.len() {
            bytes[at] ^= 1 << (at % 8);
            assert_ne!(crc32c(&bytes), right, "byte {at}");
            bytes[at] ^= 1 << (at % 8);
        }
    }
}
