//! Shared parts of the benches: a measurement and its reference take turns, so that a busy machine
//! affects both.

pub mod store;

use std::time::{Duration, Instant};

/// Default number of rounds; the fastest counts.
const ROUNDS: usize = 60;
/// Options without a value, and cargo's.
const FLAGS: [&str; 2] = ["--quick", "--bench"];

fn time(work: &mut dyn FnMut()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// The fastest of many runs of each, in turns after a warm-up. The fastest run is the least
/// disturbed one.
pub fn in_turns<const N: usize>(work: [&mut dyn FnMut(); N]) -> [Duration; N] {
    in_turns_of(ROUNDS, work)
}

/// The same with `rounds` rounds.
pub fn in_turns_of<const N: usize>(
    rounds: usize,
    mut work: [&mut dyn FnMut(); N],
) -> [Duration; N] {
    let mut best = [Duration::MAX; N];
    for work in &mut work {
        time(work);
    }
    for _ in 0..rounds {
        for (best, work) in best.iter_mut().zip(&mut work) {
            *best = time(work).min(*best);
        }
    }
    best
}

/// The text of an identity of a model that does not exist, with these weights.
pub fn identity(weights: &str) -> String {
    [
        r#"{"format_version":1,"architecture":"bench","world_size":1,"dtype":"f32","weights":""#,
        weights,
        r#"","model_config":{},"position":{},"kv_dtype":"f32","attention_backend":"none","#,
        r#""kv_packing":{},"kv_layout":"none","kv_groups":[],"block_tokens":128,"#,
        r#""tensor_parallel":1,"pipeline_parallel":1,"decode_context_parallel":1}"#,
    ]
    .concat()
}

/// True if the filter of `cargo bench -- <words>` includes this bench: there are no words, or one
/// of them is in the name.
pub fn asked_for(name: &str) -> bool {
    is_named(name, std::env::args().skip(1))
}

fn is_named(name: &str, words: impl IntoIterator<Item = String>) -> bool {
    let (mut words, mut named) = (words.into_iter(), None);
    while let Some(word) = words.next() {
        if !word.starts_with('-') {
            named = Some(named == Some(true) || name.contains(&word));
        } else if !FLAGS.contains(&word.as_str()) {
            words.next(); // its value
        }
    }
    named.unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_of_an_option_is_no_name_of_a_bench() {
        let named = |words: &str| is_named("store", words.split_whitespace().map(str::to_owned));
        assert!(named("") && named("--quick") && named("--mib 8 --bench"));
        assert!(named("fio --quick store"));
        assert!(!named("fio") && !named("--quick fio --json store"));
    }
}
