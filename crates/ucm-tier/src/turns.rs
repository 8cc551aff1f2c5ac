//! Background threads that make one turn after the other. None does anything between two turns but
//! wait, so a medium that nobody uses costs no more than a look at its clock.

use std::sync::Arc;

use ucm_infra::{Clock, MonotonicTime, Notify, WorkerPool};

/// What a thread waits for: a notification, how often it had been given, and until when.
pub(crate) type NextTurn = (Notify, u64, Option<MonotonicTime>);

/// Makes turns on a thread of this lane as long as `parts` are in use and a turn names the next.
pub(crate) fn run<T: Send + Sync + 'static>(
    pool: &WorkerPool,
    lane: usize,
    clock: &Arc<dyn Clock>,
    parts: &Arc<T>,
    turn: fn(&Arc<T>) -> Option<NextTurn>,
) {
    let (weak, clock) = (Arc::downgrade(parts), Arc::clone(clock));
    let work = move || {
        while let Some(parts) = weak.upgrade()
            && let Some((notify, seen, until)) = turn(&parts)
        {
            drop(parts); // a thread that sleeps keeps nothing alive
            clock.sleep(&notify, seen, until);
        }
    };
    let _ = pool.submit(lane, MonotonicTime::NEVER, work, |_| {}); // a pool that ends wants no more
}
