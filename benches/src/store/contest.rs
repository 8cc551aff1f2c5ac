//! Contenders that take turns, so that whatever disturbs the machine disturbs all of them.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::Result;

/// What a piece of work took.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Spent {
    /// Time on the wall.
    pub(super) wall: Duration,
    /// Processor time of all threads of this process, the kernel's for them too.
    pub(super) cpu: Duration,
}

/// A running watch.
pub(super) struct Watch(Instant, Duration);

impl Watch {
    /// Starts now.
    pub(super) fn start() -> Self {
        Self(Instant::now(), cpu())
    }

    /// What was spent since.
    pub(super) fn stop(&self) -> Spent {
        Spent {
            wall: self.0.elapsed(),
            cpu: cpu().saturating_sub(self.1),
        }
    }
}

/// Processor time of this process so far.
pub(super) fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// One turn: does its work and tells what the part took that counts.
pub(super) type Turn<'a> = Box<dyn FnMut() -> Result<Spent> + 'a>;

/// The turns of one contender, by round.
pub(super) struct Times(Vec<Spent>);

impl Times {
    /// The least disturbed turn.
    pub(super) fn fastest(&self) -> Duration {
        self.0
            .iter()
            .map(|turn| turn.wall)
            .min()
            .unwrap_or(Duration::MAX)
    }

    /// The least processor time of a turn.
    pub(super) fn least_cpu(&self) -> Duration {
        self.0
            .iter()
            .map(|turn| turn.cpu)
            .min()
            .unwrap_or(Duration::MAX)
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
            .map(|(own, other)| other.wall.as_secs_f64() / own.wall.as_secs_f64())
            .collect();
        ratios.sort_unstable_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// Lets everybody take a turn without counting it, then `rounds` turns each; who begins changes
/// with every round.
pub(super) fn hold<const N: usize>(
    rounds: usize,
    mut contenders: [Turn<'_>; N],
) -> Result<[Times; N]> {
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

    fn turn(ms: u64) -> Spent {
        Spent {
            wall: Duration::from_millis(ms),
            cpu: Duration::ZERO,
        }
    }

    fn times(ms: &[u64]) -> Times {
        Times(ms.iter().copied().map(turn).collect())
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
        let next = |count: &mut u64| {
            *count += 1;
            Ok(turn(*count))
        };
        let times = hold(3, [Box::new(|| next(first)), Box::new(|| next(second))]).unwrap();
        assert_eq!(times.map(|times| times.fastest().as_millis()), [2, 2]);
        assert_eq!(turns, [4, 4]);
    }
}
