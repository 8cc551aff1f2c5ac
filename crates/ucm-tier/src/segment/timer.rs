//! The three background threads of a backend: one seals segments when they are old enough, one
//! looks for those of others, one reclaims. None does anything on a quiet root but look at the
//! clock, once a second at the time of one directory, and twice a minute at a few footers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
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
        if self.started.swap(true, Ordering::AcqRel) {
            return;
        }
        let (pool, clock) = (&self.pool, &self.shared.clock);
        run(pool, LANE_TIMER, clock, self, |segments| {
            segments.writer.turn()
        });
        run(pool, LANE_DISCOVERY, clock, self, Self::find);
        run(pool, LANE_MERGER, clock, self, Self::merge);
    }

    fn find(self: &Arc<Self>) -> Option<NextTurn> {
        let (notify, now) = (self.cache.looks.due.clone(), self.shared.clock.now());
        let seen = notify.seen();
        if self.cache.looks.is_closed() {
            return None;
        }
        if self.discovery.find(now.after(TURN)) {
            return Some((notify, seen, Some(now))); // there is more
        }
        self.recover(u64::MAX, MonotonicTime::NEVER); // every step of it has a deadline
        Some((notify, seen, Some(now.after(LOOK))))
    }

    fn merge(self: &Arc<Self>) -> Option<NextTurn> {
        let notify = self.reclaim.notify.clone();
        let seen = notify.seen();
        if self.cache.looks.is_closed() {
            return None;
        }
        let next = self.reclaim.turn(self.shared.clock.now(), self.room());
        Some((notify, seen, Some(next)))
    }
}
