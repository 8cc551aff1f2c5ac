//! Attention over a block table against softmax in double precision, token by token.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use crate::common::{as_bytes, numbers, ways};
use proptest::prelude::*;
use ucm_retrieval::*;

const POOL: usize = 90;

/// The value of an element of an output.
fn value(bytes: &[u8], element: Element) -> f32 {
    match element {
        Element::F32 => f32::from_ne_bytes(bytes.try_into().unwrap()),
        Element::Bf16 => {
            f32::from_bits(u32::from(u16::from_ne_bytes(bytes.try_into().unwrap())) << 16)
        }
        _ => {
            let bits = u16::from_ne_bytes(bytes.try_into().unwrap());
            assert_ne!(bits & 0x7c00, 0x7c00);
            let magnitude = match bits >> 10 & 0x1f {
                0 => f32::from(bits & 0x3ff) * 2f32.powi(-24),
                power => f32::from(bits & 0x3ff | 0x400) * 2f32.powi(i32::from(power) - 25),
            };
            if bits >> 15 == 1 {
                -magnitude
            } else {
                magnitude
            }
        }
    }
}

/// The values of tokens, weighted by the softmax of their logits: one for each of `dim` channels;
/// zeros without tokens.
fn mean(logits: &[f64], dim: usize, value: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - most).exp()).collect();
    let total: f64 = weights.iter().sum();
    let sum = |i| -> f64 {
        let weighed = weights.iter().enumerate();
        weighed
            .map(|(token, weight)| weight * value(token, i))
            .sum()
    };
    (0..dim)
        .map(|i| {
            if weights.is_empty() {
                0.0
            } else {
                sum(i) / total
            }
        })
        .collect()
}

/// Checks that all instruction sets and teams give these results: float32 up to `near`, and all but
/// the scalar ones the same bytes.
fn everywhere(
    right: &[f64],
    element: Element,
    shape: [usize; 3],
    near: f64,
    attend: impl Fn(&mut Output<'_>, Isa, Team) -> ucm_core::Result<()>,
) -> Result<(), TestCaseError> {
    let near = match element {
        Element::F32 => near,
        Element::F16 => 2e-3,
        _ => 1e-2,
    };
    let mut first: Option<Vec<u8>> = None;
    for (isa, team) in ways() {
        let mut out = vec![0xff; right.len() * element.size()];
        let mut target = Output::new(&mut out, element, shape).unwrap();
        attend(&mut target, isa, team).unwrap();
        for (found, right) in out.chunks(element.size()).zip(right) {
            let found = f64::from(value(found, element));
            let text = format!("{found} instead of {right} on {}", isa.name());
            prop_assert!((found - right).abs() <= near, "{}", text);
        }
        if isa > Isa::Scalar {
            let first = first.get_or_insert_with(|| out.clone());
            prop_assert_eq!(first, &out, "on {}", isa.name());
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn results_are_those_of_softmax(
        element in prop_oneof![Just(Element::Bf16), Just(Element::F16), Just(Element::F32)],
        (heads, group) in (1..3_usize, prop_oneof![Just(4), Just(8), 1..12_usize]),
        sixteens in prop_oneof![Just(8), 1..6_usize],
        block_size in prop_oneof![Just(16), Just(32), Just(128), Just(48)],
        lengths in prop::collection::vec(prop_oneof![0..70_usize, 900..1100_usize, 2040..2060_usize], 0..3),
        heads_apart: bool,
        seed: u64,
    ) {
        let dim = 16 * sixteens;
        let (lengths, queries) = match heads_apart {
            // Every KV head has a table of its own, of another length.
            true => {
                let all = lengths.iter().flat_map(|&len| (0..heads).map(move |head| len.saturating_sub(5 * head)));
                (all.collect::<Vec<_>>(), lengths.len())
            }
            false => (lengths.clone(), lengths.len()),
        };
        let most = lengths.iter().map(|len| len.div_ceil(block_size)).max().unwrap_or(0);
        let pool = POOL.min(most * 2 + 2);
        let (ids, stride) = crate::common::table(&lengths, block_size, pool, false, seed);
        let tokens: Vec<i32> = lengths.iter().map(|&len| len as i32).collect();
        let rows = Rows::new(Ints::I32(&ids), stride, Ints::I32(&tokens), block_size).unwrap();
        let page = 2 * block_size * dim;
        let kv = numbers(pool * heads * page, seed ^ 1);
        let kv_bytes = as_bytes(&kv, element);
        let pages = Pages {
            blocks: Blocks::new(&kv_bytes, heads * page * element.size()).unwrap(),
            element,
            heads,
            dim,
        };
        let asked = numbers(queries * heads * group * dim, seed ^ 2);
        let asked_bytes = as_bytes(&asked, element);
        let shape = [queries, heads * group, dim];
        let vectors = Vectors::new(&asked_bytes, element, shape).unwrap();
        let scale = 1.0 / (dim as f32).sqrt();
        let right: Vec<f64> = (0..queries * heads * group).flat_map(|place| {
            let (query, head) = (place / (heads * group), place / group % heads);
            let row = if heads_apart { query * heads + head } else { query };
            let asked = &asked[place * dim..(place + 1) * dim];
            let at = |token: usize| {
                let block = ids[row * stride + token / block_size] as usize;
                (&kv[(block * heads + head) * page..][..page], token % block_size)
            };
            let logit = |token: usize| {
                let (page, slot) = at(token);
                let product: f64 = (0..dim).map(|i| f64::from(asked[i]) * f64::from(page[i * block_size + slot])).sum();
                product * f64::from(scale)
            };
            let logits: Vec<f64> = (0..lengths[row]).map(logit).collect();
            mean(&logits, dim, |token, i| {
                let (page, slot) = at(token);
                f64::from(page[(block_size + slot) * dim + i])
            })
        }).collect();
        everywhere(&right, element, shape, 2e-6, |out, isa, team| {
            attention(&vectors, &pages, &rows, scale, out, isa, team)
        })?;
    }
}

/// Every token counts once for any number of parts, also if a part is not a whole number of blocks.
#[test]
fn every_token_of_a_long_row_is_seen() {
    let (dim, block_size, element) = (16, 48, Element::F32);
    let tokens = 70_000;
    // Keys are zero, so all weights are equal; the values of the two blocks are 0 and 1.
    let mut kv = vec![0.0; 2 * 2 * block_size * dim];
    kv[3 * block_size * dim..].fill(1.0);
    let bytes = as_bytes(&kv, element);
    let blocks = Blocks::new(&bytes, 2 * block_size * dim * 4).unwrap();
    let pages = Pages {
        blocks,
        element,
        heads: 1,
        dim,
    };
    let stride = usize::div_ceil(tokens, block_size);
    for ones in [0, stride / 2, stride - 1] {
        // All blocks but one hold zeros.
        let table: Vec<i32> = (0..stride).map(|block| i32::from(block == ones)).collect();
        let rows = Rows::new(Ints::I32(&table), stride, Ints::I64(&[70_000]), block_size).unwrap();
        let asked = as_bytes(&vec![1.0; dim], element);
        let vectors = Vectors::new(&asked, element, [1, 1, dim]).unwrap();
        let len = if ones == stride - 1 {
            tokens % block_size
        } else {
            block_size
        };
        for (isa, team) in ways() {
            let mut out = vec![0; dim * 4];
            let mut target = Output::new(&mut out, element, [1, 1, dim]).unwrap();
            attention(&vectors, &pages, &rows, 1.0, &mut target, isa, team).unwrap();
            let right = len as f32 / tokens as f32;
            assert!(
                (value(&out[..4], element) / right - 1.0).abs() < 1e-3,
                "{ones} on {}",
                isa.name()
            );
        }
    }
}

/// Slots behind the last token may have any content, and a request has the same result alone and in
/// a batch.
#[test]
fn what_lies_behind_the_last_token_is_not_seen() {
    let (heads, dim, block_size, element) = (2, 32, 16, Element::F32);
    let page = 2 * block_size * dim;
    let mut kv = numbers(3 * heads * page, 1);
    let tokens = 21; // five slots of the second block
    for head in 0..heads {
        let of_head = &mut kv[(heads + head) * page..][..page];
        for at in 0..dim {
            of_head[at * block_size + 5..(at + 1) * block_size].fill(f32::NAN);
        }
        of_head[(block_size + 5) * dim..].fill(f32::NAN);
    }
    let bytes = as_bytes(&kv, element);
    let asked = as_bytes(&numbers(2 * heads * dim, 2), element);
    let run = |queries: usize, table: &[i32], lengths: &[i32], isa: Isa| {
        let mut out = vec![0; queries * heads * dim * 4];
        let shape = [queries, heads, dim];
        let vectors = Vectors::new(&asked[..out.len()], element, shape).unwrap();
        let blocks = Blocks::new(&bytes, heads * page * 4).unwrap();
        let pages = Pages {
            blocks,
            element,
            heads,
            dim,
        };
        let rows = Rows::new(Ints::I32(table), 2, Ints::I32(lengths), block_size).unwrap();
        let mut target = Output::new(&mut out, element, shape).unwrap();
        attention(&vectors, &pages, &rows, 0.2, &mut target, isa, Team::ONE).unwrap();
        out
    };
    for (isa, _) in ways() {
        let alone = run(1, &[0, 1], &[tokens], isa);
        assert!(
            alone
                .chunks(4)
                .all(|found| value(found, element).is_finite())
        );
        let together = run(2, &[0, 1, 2, 0], &[tokens, 32], isa);
        assert_eq!(together[..alone.len()], alone);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    static BYTES: [u8; 4096] = [0; 4096];
    let element = Element::F32;
    let pages = Pages {
        blocks: Blocks::new(&BYTES, 2048).unwrap(),
        element,
        heads: 1,
        dim: 16,
    };
    let refused =
        |pages: Pages<'_>, shape: [usize; 3], table: &[i32], tokens: &[i32], block_size: usize| {
            let len = shape.iter().product::<usize>() * 4;
            let vectors = Vectors::new(&BYTES[..len], element, shape).unwrap();
            let rows = Rows::new(Ints::I32(table), 2, Ints::I32(tokens), block_size).unwrap();
            let mut out = vec![0; len];
            let mut target = Output::new(&mut out, element, shape).unwrap();
            attention(
                &vectors,
                &pages,
                &rows,
                1.0,
                &mut target,
                Isa::Scalar,
                Team::ONE,
            )
            .is_err()
        };
    assert!(!refused(pages, [1, 2, 16], &[0, 1], &[32], 16));
    assert!(
        refused(pages, [1, 2, 16], &[0, 2], &[32], 16),
        "no such block"
    );
    assert!(
        refused(pages, [1, 2, 16], &[0, -1], &[32], 16),
        "a missing block"
    );
    assert!(
        refused(pages, [1, 2, 16], &[0, 1], &[32], 32),
        "larger blocks"
    );
    assert!(
        refused(pages, [1, 2, 16], &[0, 1], &[10], 8),
        "no whole sixteens"
    );
    assert!(
        refused(pages, [1, 2, 32], &[0, 1], &[32], 16),
        "longer queries"
    );
    assert!(
        refused(pages, [3, 2, 16], &[0, 1, 0, 1], &[16, 16], 16),
        "two tables for three queries"
    );
    assert!(
        refused(Pages { heads: 2, ..pages }, [1, 2, 16], &[0, 1], &[32], 16),
        "pages of one head"
    );
    assert!(refused(
        Pages {
            element: Element::I8,
            ..pages
        },
        [1, 2, 16],
        &[0, 1],
        &[32],
        16
    ));
}

/// Cosines, then sines, of each place.
fn rotation(places: usize, dim: usize, amplitude: f64) -> Vec<f32> {
    let angle = |place: usize, channel: usize| {
        place as f64 * 10_000f64.powf(-2.0 * channel as f64 / dim as f64)
    };
    let cos = |place| (0..dim / 2).map(move |channel| angle(place, channel).cos() * amplitude);
    let sin = |place| (0..dim / 2).map(move |channel| angle(place, channel).sin() * amplitude);
    (0..places)
        .flat_map(|place| cos(place).chain(sin(place)))
        .map(|value| value as f32)
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Of the literal formula: the query rotated by the distance, which the window ends.
    #[test]
    fn distances_are_those_of_the_rule(
        element in prop_oneof![Just(Element::Bf16), Just(Element::F16), Just(Element::F32)],
        (heads, group) in (1..3_usize, prop_oneof![Just(4), Just(8), 1..12_usize]),
        sixteens in prop_oneof![Just(8), 1..6_usize],
        block_size in prop_oneof![Just(16), Just(32), Just(128), Just(48)],
        lengths in prop::collection::vec(prop_oneof![0..70_usize, 1010..1100_usize], 0..3),
        window in prop_oneof![Just(1), Just(7), Just(16), Just(100), 1..1200_usize],
        log_unit in prop_oneof![Just(0.0), Just(0.2_f32)],
        seed: u64,
    ) {
        let (dim, amplitude) = (16 * sixteens, 1.25);
        let most = lengths.iter().map(|len| len.div_ceil(block_size)).max().unwrap_or(0);
        let pool = POOL.min(most * 2 + 2);
        let (ids, stride) = crate::common::table(&lengths, block_size, pool, false, seed);
        let tokens: Vec<i32> = lengths.iter().map(|&len| len as i32).collect();
        let rows = Rows::new(Ints::I32(&ids), stride, Ints::I32(&tokens), block_size).unwrap();
        let page = 2 * block_size * dim;
        let kv = numbers(pool * heads * page, seed ^ 1);
        let kv_bytes = as_bytes(&kv, element);
        let blocks = Blocks::new(&kv_bytes, heads * page * element.size()).unwrap();
        let pages = Pages { blocks, element, heads, dim };
        let asked = numbers(lengths.len() * heads * group * dim, seed ^ 2);
        let asked_bytes = as_bytes(&asked, element);
        let shape = [lengths.len(), heads * group, dim];
        let vectors = Vectors::new(&asked_bytes, element, shape).unwrap();
        let scale = 1.0 / (dim as f32).sqrt();
        let table = rotation(1200, dim, amplitude);
        let rule = Rerope::new(&table, dim, window, log_unit).unwrap();
        let angles = rotation(1200, dim, 1.0);
        let right: Vec<f64> = (0..lengths.len() * heads * group).flat_map(|place| {
            let (row, head) = (place / (heads * group), place / group % heads);
            let asked = &asked[place * dim..(place + 1) * dim];
            let at = |token: usize| {
                let block = ids[row * stride + token / block_size] as usize;
                (&kv[(block * heads + head) * page..][..page], token % block_size)
            };
            let last = lengths[row].wrapping_sub(1);
            let factor = f64::from(scale) * amplitude * amplitude
                * (f64::from(log_unit) * (lengths[row] as f64).ln()).max(1.0);
            let logit = |token: usize| {
                let (page, slot) = at(token);
                let turn = &angles[(last - token).min(window) * dim..][..dim];
                (0..dim / 2).map(|i| {
                    let (low, high) = (f64::from(asked[i]), f64::from(asked[i + dim / 2]));
                    let (cos, sin) = (f64::from(turn[i]), f64::from(turn[i + dim / 2]));
                    (low * cos - high * sin) * f64::from(page[i * block_size + slot])
                        + (high * cos + low * sin) * f64::from(page[(i + dim / 2) * block_size + slot])
                }).sum::<f64>() * factor
            };
            let logits: Vec<f64> = (0..lengths[row]).map(logit).collect();
            mean(&logits, dim, |token, i| {
                let (page, slot) = at(token);
                f64::from(page[(block_size + slot) * dim + i])
            })
        }).collect();
        everywhere(&right, element, shape, 1e-5, |out, isa, team| {
            rerope_attention(&vectors, &pages, &rows, &rule, scale, out, isa, team)
        })?;
    }
}

#[test]
fn a_rotation_that_does_not_fit_is_refused() {
    static BYTES: [u8; 4096] = [0; 4096];
    let pages = Pages {
        blocks: Blocks::new(&BYTES, 2048).unwrap(),
        element: Element::F32,
        heads: 1,
        dim: 16,
    };
    let vectors = Vectors::new(&BYTES[..64], Element::F32, [1, 1, 16]).unwrap();
    let rows = Rows::new(Ints::I32(&[0, 1]), 2, Ints::I32(&[32]), 16).unwrap();
    let refused = |places: usize, dim: usize, window: usize| {
        let table = rotation(places, dim, 1.0);
        let mut out = vec![0; 64];
        let mut target = Output::new(&mut out, Element::F32, [1, 1, 16]).unwrap();
        Rerope::new(&table, dim, window, 0.0)
            .and_then(|rule| {
                let (isa, team) = (Isa::Scalar, Team::ONE);
                rerope_attention(&vectors, &pages, &rows, &rule, 1.0, &mut target, isa, team)
            })
            .is_err()
    };
    assert!(!refused(32, 16, 64), "as many places as tokens");
    assert!(
        !refused(17, 16, 1),
        "as many as the window and a block need"
    );
    assert!(refused(16, 16, 1), "too few places");
    assert!(refused(32, 32, 8), "another head size");
    assert!(refused(0, 16, 8), "no places");
    assert!(refused(32, 16, 0), "no window");
}
