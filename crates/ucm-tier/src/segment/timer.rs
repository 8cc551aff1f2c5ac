//! The three background threads of a backend: one seals segments when they are old enough, one
//! looks for those of others, one reclaims. None does anything on a quiet root but look at the
//! clock, once a second at the time of one directory, and twice a minute at a few footers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ucm_infra::MonotonicTime;

use super::discovery::TURN;
use super::{LANE_DISCOVERY, LANE_MERGER, LANE_TIMER, Segments};

/// Time between two looks for the segments of others.
const LOOK: Duration = Duration::from_secs(1);

impl Segments {
    /// Starts the threads, once.
    pub(super) fn start(self: &Arc<Self>) {
        if self.started.swap(true, Ordering::AcqRel) {
            return;
        }
        let clock = Arc::clone(&self.shared.clock);
        let (weak, notify) = (Arc::downgrade(self), self.writer.changed.clone());
        let seal = move || loop {
            let seen = notify.seen();
            let Some(segments) = weak.upgrade() else {
                return;
            };
            let now = segments.shared.clock.now();
            let sealed = segments.writer.seal_due(now);
            let waits = segments.discovery.looks.end_late(now);
            if segments.files.is_closing() && !segments.writer.is_writing() {
                return;
            }
            let next = sealed.into_iter().chain(waits).min();
            drop(segments);
            clock.sleep(&notify, seen, next);
        };
        let clock = Arc::clone(&self.shared.clock);
        let (weak, notify) = (Arc::downgrade(self), self.discovery.notify.clone());
        let find = move || loop {
            let seen = notify.seen();
            let Some(segments) = weak.upgrade() else {
                return;
            };
            if segments.files.is_closing() {
                return;
            }
            let now = segments.shared.clock.now();
            let more = segments.discovery.find(now.after(TURN));
            if !more {
                segments.recover(u64::MAX, MonotonicTime::NEVER); // every step of it has a deadline
            }
            drop(segments);
            if !more {
                clock.sleep(&notify, seen, Some(now.after(LOOK)));
            }
        };
        let clock = Arc::clone(&self.shared.clock);
        let (weak, notify) = (Arc::downgrade(self), self.reclaim.notify.clone());
        let merge = move || loop {
            let seen = notify.seen();
            let Some(segments) = weak.upgrade() else {
                return;
            };
            if segments.files.is_closing() {
                return;
            }
            let room = segments.room();
            let next = segments.reclaim.turn(segments.shared.clock.now(), room);
            drop(segments);
            clock.sleep(&notify, seen, Some(next));
        };
        // A pool that is shut down seals, finds and merges nothing any more.
        let _ = self
            .pool
            .submit(LANE_TIMER, MonotonicTime::NEVER, seal, |_| {});
        let _ = self
            .pool
            .submit(LANE_DISCOVERY, MonotonicTime::NEVER, find, |_| {});
        let _ = self
            .pool
            .submit(LANE_MERGER, MonotonicTime::NEVER, merge, |_| {});
    }
}
