//! Hash codes against fused sums in the order of the elements, bit for bit.

use crate::common::{as_bytes, elements, numbers, ways};
use proptest::prelude::*;
use ucm_retrieval::*;

/// The code of a vector.
fn code(vector: &[f32], weights: &[f32], bits: usize) -> Vec<u8> {
    let mut code = vec![0; bits / 8];
    for bit in 0..bits {
        let sum = vector.iter().enumerate().fold(0.0_f32, |sum, (at, value)| {
            value.mul_add(weights[at * bits + bit], sum)
        });
        code[bit / 8] |= u8::from(sum > 0.0) << (bit % 8);
    }
    code
}

/// Weights whose products with exact numbers are not exact.
fn weights(count: usize, seed: u64) -> Vec<f32> {
    numbers(count, seed)
        .iter()
        .enumerate()
        .map(|(at, x)| (x + at as f32 * 0.618_034).sin())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn codes_are_the_same_bits_everywhere(
        element in elements(),
        (tokens, heads, dim) in (0..9_usize, 1..5_usize, 1..50_usize),
        bytes in prop_oneof![Just(16), Just(8), 1..30_usize],
        own_weights: bool,
        by_slot: bool,
        seed: u64,
    ) {
        let bits = bytes * 8;
        let vectors = numbers(tokens * heads * dim, seed);
        let weights = weights(if own_weights { heads } else { 1 } * dim * bits, seed ^ 1);
        let encoder = Encoder::new(&weights, if own_weights { heads } else { 1 }, dim, bits).unwrap();
        let raw = as_bytes(&vectors, element);
        let given = Vectors::new(&raw, element, [tokens, heads, dim]).unwrap();
        // Blocks of 3 slots with an unused byte behind each; every third token is skipped.
        let (block_size, slot_len) = (3, heads * bytes);
        let block_len = block_size * slot_len + 1;
        let slots: Vec<i64> = (0..tokens as i64).rev().map(|slot| if slot % 3 == 1 { -1 } else { slot }).collect();
        for (isa, team) in ways() {
            let mut found = vec![0xee; tokens.div_ceil(block_size).max(1) * block_len];
            let mut right = found.clone();
            for token in 0..tokens {
                let slot = if by_slot { slots[token] } else { token as i64 };
                let Ok(slot) = usize::try_from(slot) else { continue };
                let at = match by_slot {
                    true => slot / block_size * block_len + slot % block_size * slot_len,
                    false => slot * slot_len,
                };
                for head in 0..heads {
                    let unit = if element == Element::I8 { 16.0 } else { 1.0 };
                    let vector = &vectors[(token * heads + head) * dim..][..dim];
                    let vector: Vec<f32> = vector.iter().map(|value| value * unit).collect();
                    let of_head = if own_weights { &weights[head * dim * bits..][..dim * bits] } else { &weights };
                    right[at + head * bytes..][..bytes].copy_from_slice(&code(&vector, of_head, bits));
                }
            }
            if by_slot {
                let shape = [tokens.div_ceil(block_size).max(1), block_size];
                // SAFETY: all blocks lie in `found`, and no slot is repeated.
                #[allow(unsafe_code, reason = "codes by slot are written by address")]
                let mut codes = unsafe {
                    Codes::from_raw(found.as_mut_ptr(), shape, [block_len, slot_len], Some(Ints::I64(&slots)))
                };
                encode(&encoder, &given, &mut codes, isa, team).unwrap();
            } else {
                let mut codes = Codes::new(&mut found[..tokens.max(1) * slot_len], slot_len).unwrap();
                encode(&encoder, &given, &mut codes, isa, team).unwrap();
            }
            prop_assert_eq!(found, right, "on {}", isa.name());
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let weights = [0.0; 64];
    assert!(Encoder::new(&weights, 1, 8, 7).is_err());
    assert!(Encoder::new(&weights, 1, 4, 8).is_err());
    assert!(Encoder::new(&[], 0, 8, 8).is_err());
    let encoder = Encoder::new(&weights, 1, 8, 8).unwrap();
    let refused = |bytes: &[u8], shape: [usize; 3], codes: &mut [u8], token: usize| {
        let vectors = Vectors::new(bytes, Element::I8, shape).unwrap();
        encode(
            &encoder,
            &vectors,
            &mut Codes::new(codes, token).unwrap(),
            Isa::Scalar,
            Team::ONE,
        )
        .is_err()
    };
    assert!(!refused(&[0; 16], [2, 1, 8], &mut [0; 2], 1));
    assert!(
        refused(&[0; 16], [2, 1, 8], &mut [0; 1], 1),
        "room for one token"
    );
    assert!(
        refused(&[0; 16], [1, 2, 8], &mut [0; 1], 1),
        "room for one head"
    );
    assert!(
        refused(&[0; 18], [2, 1, 9], &mut [0; 2], 1),
        "longer vectors"
    );
    assert!(Vectors::new(&[0; 15], Element::I8, [2, 1, 8]).is_err());
    assert!(Codes::new(&mut [0; 15], 2).is_err());
    let of_three = Encoder::new(&[0.0; 192], 3, 8, 8).unwrap();
    let vectors = Vectors::new(&[0; 16], Element::I8, [1, 2, 8]).unwrap();
    let mut bytes = [0; 2];
    let mut codes = Codes::new(&mut bytes, 2).unwrap();
    assert!(encode(&of_three, &vectors, &mut codes, Isa::Scalar, Team::ONE).is_err());
}
