//! Contenders that take turns, so that whatever disturbs the machine disturbs all of them.

use std::time::Duration;

use super::Result;

/// One turn: does its work and tells how long the part took that counts.
pub(super) type Turn<'a> = Box<dyn FnMut() -> Result<Duration> + 'a>;

/// The times of one contender, by round.
pub(super) struct Times(Vec<Duration>);

impl Times {
    /// The least disturbed turn.
    pub(super) fn fastest(&self) -> Duration {
        self.0.iter().copied().min().unwrap_or(Duration::MAX)
    }

    /// How much faster than another contender, the fastest turns compared.
    pub(super) fn ratio(&self, yardstick: &Self) -> f64 {
        yardstick.fastest().as_secs_f64() / self.fastest().as_secs_f64()
    }

    /// As [`Times::ratio`], but turn by turn, and of these the one in the middle.
    pub(super) fn median_ratio(&self, yardstick: &Self) -> f64 {
        let mut ratios: Vec<f64> = self
            .0
            .iter()
            .zip(&yardstick.0)
            .map(|(own, other)| other.as_secs_f64() / own.as_secs_f64())
            .collect();
        ratios.sort_unstable_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// Lets everybody take a turn without counting it, then `rounds` turns each; who begins changes with every round.
pub(super) fn hold<const N: usize>(rounds: usize, mut contenders: [Turn<'_>; N]) -> Result<[Times; N]> {
    let mut times: [Times; N] = std::array::from_fn(|_| Times(Vec::with_capacity(rounds)));
    for turn in &mut contenders {
        turn()?;
    }
    for round in 0..rounds {
        for place in 0..N {
            let who = (round + place) % N;
            times[who].0.push(contenders[who]()?);
        }
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(ms: &[u64]) -> Times {
        Times(ms.iter().copied().map(Duration::from_millis).collect())
    }

    #[test]
    fn ratios_say_how_much_faster() {
        let (own, yardstick) = (times(&[10, 40, 20]), times(&[20, 20, 30]));
        assert_eq!(own.ratio(&yardstick), 2.0);
        assert_eq!(own.median_ratio(&yardstick), 1.5);
    }

    #[test]
    fn everybody_has_as_many_turns_and_the_first_one_does_not_count() {
        let mut turns = [0, 0];
        let [first, second] = &mut turns;
        let turn = |count: &mut u64| {
            *count += 1;
            Ok(Duration::from_millis(*count))
        };
        let times = hold(3, [Box::new(|| turn(first)), Box::new(|| turn(second))]).unwrap();
        assert_eq!(times.map(|times| times.fastest().as_millis()), [2, 2]);
        assert_eq!(turns, [4, 4]);
    }
}
