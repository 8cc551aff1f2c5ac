//! How many damaged records were found of late: more than a few a minute speak against the medium,
//! not the records.

use std::collections::VecDeque;
use std::time::Duration;

use ucm_infra::MonotonicTime;

/// The span in which they are counted.
const MINUTE: Duration = Duration::from_secs(60);

/// When damaged records were found within the last minute, oldest first.
#[derive(Default)]
pub(crate) struct DamageRate(VecDeque<MonotonicTime>);

impl DamageRate {
    /// Counts one damaged record; false if there are too many of late.
    pub(crate) fn count(&mut self, now: MonotonicTime, most: u32) -> bool {
        while self
            .0
            .front()
            .is_some_and(|&first| now.since(first) >= MINUTE)
        {
            self.0.pop_front();
        }
        let room = self.0.len() < most as usize;
        if room {
            self.0.push_back(now);
        }
        room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minute_passes_before_more_are_few_again() {
        let mut rate = DamageRate::default();
        let at = |s: u64| MonotonicTime(s * 1_000_000_000);
        assert!(rate.count(at(0), 2) && rate.count(at(30), 2));
        assert!(!rate.count(at(59), 2), "the third within a minute");
        assert!(rate.count(at(60), 2), "the first is a minute ago");
        assert!(!rate.count(at(61), 2));
        assert!(!rate.count(at(200), 0));
    }
}
