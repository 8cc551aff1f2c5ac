//! The three background threads of a backend: one seals segments when they are old enough, one
//! looks for those of others, one reclaims. None does anything on a quiet root but look at the
//! clock, once a second at the time of one directory, and twice a minute at a few footers.

use std::sync::Arc;
use std::time::Duration;

use ucm_infra::MonotonicTime;

use super::discovery::TURN;
use super::{LANE_DISCOVERY, LANE_MERGER, LANE_TIMER, Segments};
use crate::turns::{NextTurn, run};

/// Time between two looks for the segments of others.
const LOOK: Duration = Duration::from_secs(1);

impl Segments {
    /// Starts the threads, once.
    pub(super) fn start(self: &Arc<Self>) {
        self.started.call_once(|| {
            let (pool, clock, looks) = (&self.pool, &self.shared.clock, &self.cache.looks);
            run(pool, LANE_TIMER, clock, &looks.timer, self, |segments| {
                segments.writer.turn()
            });
            run(pool, LANE_DISCOVERY, clock, &looks.due, self, Self::find);
            run(
                pool,
                LANE_MERGER,
                clock,
                &self.reclaim.notify,
                self,
                Self::merge,
            );
        });
    }

    fn find(self: &Arc<Self>) -> Option<NextTurn> {
        self.cache.looks.unless_closed().ok()?;
        let now = self.shared.clock.now();
        if self.discovery.find(now.after(TURN)) {
            return Some(Some(now)); // there is more
        }
        self.recover(u64::MAX, MonotonicTime::NEVER); // every step of it has a deadline
        Some(Some(now.after(LOOK)))
    }

    fn merge(self: &Arc<Self>) -> Option<NextTurn> {
        self.cache.looks.unless_closed().ok()?;
        let now = self.shared.clock.now();
        Some(Some(self.reclaim.turn(now, self.room())))
    }
}
