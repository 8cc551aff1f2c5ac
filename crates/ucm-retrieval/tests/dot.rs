//! Scores from products against the formula in double precision.

use crate::common::{as_bytes, elements, numbers, table, ways};
use proptest::prelude::*;
use ucm_retrieval::*;

/// A call, with its inputs in plain form for the oracle.
#[derive(Debug, Clone)]
struct Case {
    element: Element,
    count: usize,
    heads: usize,
    dim: usize,
    gaps: bool,
    own_queries: bool,
    scaled: bool,
    metric: Metric,
    over_reps: Reps,
    over_heads: Heads,
    lengths: Vec<usize>,
    windows: Windows,
    seed: u64,
}

const POOL: usize = 40;

fn cases() -> impl Strategy<Value = Case> {
    let shape = (
        elements(),
        1..4_usize,
        1..5_usize,
        1..80_usize,
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
    );
    let words = (
        prop_oneof![Just(Metric::Dot), Just(Metric::L2)],
        prop_oneof![Just(Reps::Max), Just(Reps::Mean), Just(Reps::Sum)],
        prop_oneof![
            Just(Heads::Sum),
            Just(Heads::Mean),
            Just(Heads::Max),
            Just(Heads::Apart)
        ],
    );
    let batch = (
        prop::collection::vec(0..200_usize, 0..4),
        0..3_usize,
        0..3_usize,
        any::<u64>(),
    );
    (shape, words, batch).prop_map(|(shape, words, (lengths, init, local, seed))| Case {
        element: shape.0,
        count: shape.1,
        heads: shape.2,
        dim: shape.3,
        gaps: shape.4,
        own_queries: shape.5,
        scaled: shape.6 || shape.0 == Element::I8,
        metric: words.0,
        over_reps: words.1,
        over_heads: words.2,
        lengths,
        windows: Windows { init, local },
        seed,
    })
}

/// The score of a block for a head.
fn of_head(
    case: &Case,
    reps: &[f32],
    scales: &[f32],
    queries: &[f32],
    row: usize,
    id: usize,
    head: usize,
) -> f64 {
    let (count, heads, dim) = (case.count, case.heads, case.dim);
    let each = (0..count).map(|rep| {
        let rep_at = (id * count + rep) * heads + head;
        let query_at = if case.own_queries {
            (row * count + rep) * heads + head
        } else {
            row * heads + head
        };
        let scale = f64::from(if case.scaled { scales[rep_at] } else { 1.0 });
        let unit = if case.element == Element::I8 {
            16.0
        } else {
            1.0
        };
        let pairs = (0..dim).map(|at| {
            let rep = f64::from(reps[rep_at * dim + at]) * unit * scale;
            (f64::from(queries[query_at * dim + at]), rep)
        });
        match case.metric {
            Metric::Dot => pairs.map(|(a, b)| a * b).sum::<f64>(),
            Metric::L2 => -pairs.map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt(),
        }
    });
    match case.over_reps {
        Reps::Max => each.fold(f64::NEG_INFINITY, f64::max),
        Reps::Sum => each.sum(),
        Reps::Mean => each.sum::<f64>() / count as f64,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn scores_are_those_of_the_formula(case in cases()) {
        let (count, heads, dim) = (case.count, case.heads, case.dim);
        let per_block = count * heads * dim;
        let reps = numbers(POOL * per_block, case.seed);
        let scales: Vec<f32> = numbers(POOL * count * heads, case.seed ^ 1).iter().map(|x| x.abs() + 0.25).collect();
        let queries = numbers(
            case.lengths.len() * heads * dim * if case.own_queries { count } else { 1 },
            case.seed ^ 2,
        );
        let (ids, stride) = table(&case.lengths, 1, POOL, true, case.seed ^ 3);
        let lengths: Vec<i64> = case.lengths.iter().map(|&len| len as i64).collect();
        // With gaps a head is followed by seven unused elements.
        let gap = if case.gaps { 7 } else { 0 };
        let spread: Vec<f32> = reps.chunks(dim).flat_map(|head| {
            head.iter().copied().chain(std::iter::repeat_n(99.0, gap))
        }).collect();
        let bytes = as_bytes(&spread, case.element);
        let scale_bytes = as_bytes(&scales, Element::F32);
        let spec = DotScores {
            rows: Rows::new(Ints::I32(&ids), stride, Ints::I64(&lengths), 1).unwrap(),
            reps: Representations {
                blocks: Blocks::new(&bytes, count * heads * (dim + gap) * case.element.size()).unwrap(),
                element: case.element,
                count,
                heads,
                dim,
                stride: heads * (dim + gap),
                head_stride: dim + gap,
                scales: case.scaled.then(|| Blocks::new(&scale_bytes, count * heads * 4).unwrap()),
            },
            queries: &queries,
            own_queries: case.own_queries,
            metric: case.metric,
            over_reps: case.over_reps,
            over_heads: case.over_heads,
            windows: case.windows,
        };
        let per_row = if case.over_heads == Heads::Apart { heads } else { 1 };
        let mut first: Option<Vec<f32>> = None;
        for (isa, team) in ways() {
            let mut out = vec![f32::NAN; case.lengths.len() * per_row * stride];
            dot_scores(&spec, &mut out, stride, isa, team).unwrap();
            for (place, &found) in out.iter().enumerate() {
                let (row, head, block) = (place / stride / per_row, place / stride % per_row, place % stride);
                let blocks = case.lengths[row];
                let id = ids[row * stride + block];
                if block >= blocks {
                    prop_assert_eq!(found, f32::NEG_INFINITY);
                } else if block < case.windows.init || block + case.windows.local >= blocks {
                    prop_assert_eq!(found, f32::INFINITY);
                } else if id < 0 {
                    prop_assert_eq!(found, f32::NEG_INFINITY);
                } else {
                    let of = |head| of_head(&case, &reps, &scales, &queries, row, id as usize, head);
                    let right = match case.over_heads {
                        Heads::Apart => of(head),
                        Heads::Max => (0..heads).map(of).fold(f64::NEG_INFINITY, f64::max),
                        Heads::Sum => (0..heads).map(of).sum(),
                        Heads::Mean => (0..heads).map(of).sum::<f64>() / heads as f64,
                    };
                    let near = 1e-4 * (right.abs() + dim as f64);
                    prop_assert!((f64::from(found) - right).abs() < near, "{} instead of {} on \
                    {}", found, right, isa.name());
                }
            }
            // The vector sets agree to the bit for any number of threads.
            if isa > Isa::Scalar {
                prop_assert_eq!(first.get_or_insert_with(|| out.clone()), &out);
            }
        }
    }
}

#[test]
fn quest_is_a_bound_of_every_key() {
    let (heads, dim, tokens) = (2, 24, 16);
    let keys = numbers(tokens * heads * dim, 5);
    let query = numbers(heads * dim, 6);
    let column = |at: usize| keys.iter().skip(at).step_by(heads * dim).copied();
    let least = (0..heads * dim).map(|at| column(at).fold(f32::INFINITY, f32::min));
    let most = (0..heads * dim).map(|at| column(at).fold(f32::NEG_INFINITY, f32::max));
    let bounds: Vec<f32> = least.chain(most).collect();
    let bytes = as_bytes(&bounds, Element::F32);
    let spec = DotScores {
        rows: Rows::new(Ints::I32(&[0]), 1, Ints::I32(&[1]), 1).unwrap(),
        reps: Representations {
            blocks: Blocks::new(&bytes, bytes.len()).unwrap(),
            element: Element::F32,
            count: 2,
            heads,
            dim,
            stride: heads * dim,
            head_stride: dim,
            scales: None,
        },
        queries: &quest_queries(&query, heads * dim),
        own_queries: true,
        metric: Metric::Dot,
        over_reps: Reps::Sum,
        over_heads: Heads::Sum,
        windows: Windows::default(),
    };
    let right: f32 = (0..heads * dim)
        .map(|at| (query[at] * bounds[at]).max(query[at] * bounds[heads * dim + at]))
        .sum();
    for (isa, team) in ways() {
        let mut out = [0.0];
        dot_scores(&spec, &mut out, 1, isa, team).unwrap();
        assert!((out[0] - right).abs() < 1e-3);
        for key in keys.chunks(heads * dim) {
            let product: f32 = key.iter().zip(&query).map(|(a, b)| a * b).sum();
            assert!(out[0] >= product - 1e-3);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    static BYTES: [u8; 64] = [0; 64];
    let reps = Representations {
        blocks: Blocks::new(&BYTES, 16).unwrap(),
        element: Element::F32,
        count: 1,
        heads: 2,
        dim: 2,
        stride: 4,
        head_stride: 2,
        scales: None,
    };
    let fits = DotScores {
        rows: Rows::new(Ints::I32(&[0, 3]), 2, Ints::I32(&[2]), 1).unwrap(),
        reps,
        queries: &[0.0; 4],
        own_queries: false,
        metric: Metric::Dot,
        over_reps: Reps::Max,
        over_heads: Heads::Sum,
        windows: Windows::default(),
    };
    let refused =
        |spec: DotScores<'_>| dot_scores(&spec, &mut [0.0; 2], 2, Isa::Scalar, Team::ONE).is_err();
    assert!(!refused(fits));
    for wrong in [
        Representations { heads: 3, ..reps },
        Representations { dim: 0, ..reps },
        Representations { count: 2, ..reps },
        Representations {
            head_stride: usize::MAX,
            ..reps
        },
        Representations {
            element: Element::I8,
            ..reps
        },
        Representations {
            blocks: Blocks::new(&BYTES[..48], 16).unwrap(),
            ..reps
        },
    ] {
        assert!(
            refused(DotScores {
                reps: wrong,
                ..fits
            }),
            "{wrong:?}"
        );
    }
    assert!(refused(DotScores {
        queries: &[0.0; 5],
        ..fits
    }));
    assert!(refused(DotScores {
        own_queries: true,
        queries: &[],
        ..fits
    }));
    assert!(dot_scores(&fits, &mut [0.0; 1], 1, Isa::Scalar, Team::ONE).is_err());
    assert!(Rows::new(Ints::I32(&[0, 3]), 2, Ints::I32(&[3]), 1).is_err());
    assert!(Rows::new(Ints::I32(&[0, 3]), 2, Ints::I32(&[-1]), 1).is_err());
    assert!(Rows::new(Ints::I32(&[0, 3, 1]), 2, Ints::I32(&[2, 2]), 1).is_err());
    assert!(Rows::new(Ints::I32(&[0, 3, 1]), 2, Ints::I32(&[2, 1]), 1).is_ok());
    assert!(Rows::new(Ints::I32(&[]), usize::MAX, Ints::I64(&[i64::MAX, 1, 2]), 1).is_err());
}
