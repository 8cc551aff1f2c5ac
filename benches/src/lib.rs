//! Shared pieces of the benches: taking a figure and its yardstick in turns, so that a busy machine
//! hits both.

pub mod cli;
pub mod store;

use std::time::{Duration, Instant};

/// Rounds of which the fastest counts, where a bench has no other number.
const ROUNDS: usize = 60;

fn time(work: &mut dyn FnMut()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// The fastest of many runs of each, taken in turns after a warm-up. The fastest is the one least
/// disturbed.
pub fn in_turns<const N: usize>(work: [&mut dyn FnMut(); N]) -> [Duration; N] {
    in_turns_of(ROUNDS, work)
}

/// The same with so many rounds.
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

/// Whether the argument filter of `cargo bench -- <words>` lets this bench run: no words, or one of
/// them is its name.
pub fn asked_for(name: &str) -> bool {
    cli::is_named(name, std::env::args().skip(1))
}
