//! Common parts of the kernels' tests: instruction sets of this machine, numbers, and batches of
//! rows.
#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use proptest::prelude::*;
use ucm_retrieval::{Element, Isa, Team};

/// Every set of this processor, with numbers of threads.
pub(crate) fn ways() -> Vec<(Isa, Team)> {
    let sets = Isa::ALL.into_iter().filter(|isa| isa.supported());
    let mut ways: Vec<_> = sets.map(|isa| (isa, Team::ONE)).collect();
    ways.push((Isa::best(), Team::new(3).unwrap()));
    ways
}

/// Numbers from -2 to 2 that are exact in every element type, with exact sums of a limited number
/// of products.
pub(crate) fn number(state: &mut u64) -> f32 {
    *state = state
        .wrapping_mul(0x5851_f42d_4c95_7f2d)
        .wrapping_add(0x1405_7b7e_f767_814f);
    ((*state >> 58) as i32 - 32) as f32 / 16.0
}

pub(crate) fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    (0..count).map(|_| number(&mut state)).collect()
}

/// Bytes of exact numbers in an element type.
pub(crate) fn as_bytes(numbers: &[f32], element: Element) -> Vec<u8> {
    let bytes = |&number: &f32| match element {
        Element::F32 => number.to_ne_bytes().to_vec(),
        Element::Bf16 => ((number.to_bits() >> 16) as u16).to_ne_bytes().to_vec(),
        Element::F16 => half(number).to_ne_bytes().to_vec(),
        Element::I8 => ((number * 16.0) as i8).to_ne_bytes().to_vec(),
    };
    numbers.iter().flat_map(bytes).collect()
}

/// A number as half, if it is representable.
fn half(number: f32) -> u16 {
    let bits = number.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    match number.abs() {
        0.0 => sign,
        _ => sign | ((bits >> 13 & 0x3ff) as u16) | (((bits >> 23 & 0xff) - 112) << 10) as u16,
    }
}

pub(crate) fn elements() -> impl Strategy<Value = Element> {
    prop_oneof![
        Just(Element::Bf16),
        Just(Element::F16),
        Just(Element::F32),
        Just(Element::I8)
    ]
}

/// A block table of `lengths.len()` rows with random ids below `pool`; with `absent` a tenth of the
/// blocks is missing.
pub(crate) fn table(
    lengths: &[usize],
    block_size: usize,
    pool: usize,
    absent: bool,
    seed: u64,
) -> (Vec<i32>, usize) {
    let stride = lengths
        .iter()
        .map(|len| len.div_ceil(block_size))
        .max()
        .unwrap_or(0);
    let mut state = seed;
    let ids = (0..lengths.len() * stride).map(|_| {
        number(&mut state);
        let drawn = (state >> 33) as usize;
        if absent && drawn.is_multiple_of(10) {
            -1
        } else {
            (drawn / 10 % pool) as i32
        }
    });
    (ids.collect(), stride)
}
