//! Contenders take turns, so that other load on the machine affects all of them.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::Result;

/// Cost of a piece of work.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Spent {
    /// Time on the wall.
    pub(super) wall: Duration,
    /// Processor time of all threads of this process, including kernel time.
    pub(super) cpu: Duration,
}

impl Spent {
    pub(super) fn add(&mut self, more: Self) {
        self.wall += more.wall;
        self.cpu += more.cpu;
    }
}

/// A running watch.
pub(super) struct Watch(Instant, Duration);

impl Watch {
    pub(super) fn start() -> Self {
        Self(Instant::now(), cpu())
    }

    pub(super) fn stop(&self) -> Spent {
        Spent {
            wall: self.0.elapsed(),
            cpu: cpu().saturating_sub(self.1),
        }
    }
}

fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// One turn: does its work and returns the cost of the measured part.
pub(super) type Turn<'a> = Box<dyn FnMut() -> Result<Spent> + 'a>;

/// The turns of one contender, by round.
#[derive(Default)]
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

    /// Ratio to another contender, by the fastest turns.
    pub(super) fn ratio(&self, yardstick: &Self) -> f64 {
        yardstick.fastest().as_secs_f64() / self.fastest().as_secs_f64()
    }

    /// The median of the ratios turn by turn.
    pub(super) fn median_ratio(&self, yardstick: &Self) -> f64 {
        let pairs = self.0.iter().zip(&yardstick.0);
        let mut ratios: Vec<f64> = pairs
            .map(|(own, other)| other.wall.as_secs_f64() / own.wall.as_secs_f64())
            .collect();
        ratios.sort_unstable_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// One uncounted turn of each, then `rounds` of each; the first contender changes with every round.
pub(super) fn hold(rounds: usize, mut contenders: Vec<Turn<'_>>) -> Result<Vec<Times>> {
    let mut times: Vec<Times> = contenders.iter().map(|_| Times::default()).collect();
    for turn in &mut contenders {
        turn()?;
    }
    for round in 0..rounds {
        for place in 0..contenders.len() {
            let at = (round + place) % contenders.len();
            times[at].0.push(contenders[at]()?);
        }
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(ms: &[u64]) -> Times {
        let turn = |&ms| Spent {
            wall: Duration::from_millis(ms),
            cpu: Duration::ZERO,
        };
        Times(ms.iter().map(turn).collect())
    }

    #[test]
    fn ratios_say_how_much_faster() {
        let (own, yardstick) = (times(&[10, 40, 20]), times(&[20, 20, 30]));
        assert_eq!(own.ratio(&yardstick), 2.0);
        assert_eq!(own.median_ratio(&yardstick), 1.5);
    }
}
