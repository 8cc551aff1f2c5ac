//! Background threads that repeat one piece of work, a turn. Between two turns they only wait, so
//! an unused medium costs no more than reading its clock.

use std::sync::Arc;
use std::time::Duration;

use ucm_infra::{Clock, MonotonicTime, Notify, WorkerPool};

/// When the next turn is due; none: after a notification.
pub(crate) type NextTurn = Option<MonotonicTime>;

/// Whether something that is done once in this time is due; then it counts as done now.
pub(crate) fn is_due(last: &mut Option<MonotonicTime>, now: MonotonicTime, each: Duration) -> bool {
    let due = last.is_none_or(|at| now.since(at) >= each);
    *last = if due { Some(now) } else { *last };
    due
}

/// Makes turns on a thread of this lane as long as `parts` are in use and a turn names the next,
/// which is made sooner after a notification.
pub(crate) fn run<T: Send + Sync + 'static>(
    pool: &WorkerPool,
    lane: usize,
    clock: &Arc<dyn Clock>,
    notify: &Notify,
    parts: &Arc<T>,
    turn: fn(&Arc<T>) -> Option<NextTurn>,
) {
    let (weak, clock, notify) = (Arc::downgrade(parts), Arc::clone(clock), notify.clone());
    let work = move || loop {
        let seen = notify.seen();
        // A thread that sleeps keeps nothing alive.
        let Some(next) = weak.upgrade().and_then(|parts| turn(&parts)) else {
            return;
        };
        clock.sleep(&notify, seen, next);
    };
    let _ = pool.submit(lane, MonotonicTime::NEVER, work, |_| {}); // a pool that ends wants no more
}
