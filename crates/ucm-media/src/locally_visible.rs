//! Which records this process can read and others may not have found yet, as changes since the last
//! call of the scheduler.
//!
//! A record in a segment is only locally visible from its write until others must have found the
//! segment, a while after that got its name: the scheduler polls the medium now and then, and
//! between two polls the record must not be a miss. One that is dropped, or whose segment never
//! gets a name, is not locally visible any more, at once.
//!
//! A record that is added and removed between two calls is never returned, and none stays for a
//! while before the first call. So there are never more ids here than records that only this
//! process can read, those returned and removed since, and a bounded number published lately.

use std::collections::{HashMap, HashSet, VecDeque};

use ucm_core::sync::Mutex;
use ucm_core::{BlockId, limits};
use ucm_infra::MonotonicTime;

use crate::backend::LocallyVisible;

/// Most records that stay only locally visible for a while after they were published; where more
/// are, the first of them end sooner.
const MOST_LEAVING: usize = 1 << 15;

/// See the module.
#[derive(Default)]
pub(crate) struct LocalChanges(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    /// It was called once.
    asked: bool,
    fresh: HashSet<BlockId>,
    returned: HashSet<BlockId>,
    removed: HashSet<BlockId>,
    /// Published ones in the order in which they end, and when each of them does. A record that was
    /// written again since, or dropped, is in the first only.
    leaving: VecDeque<(MonotonicTime, BlockId)>,
    ends: HashMap<BlockId, MonotonicTime>,
}

impl LocalChanges {
    /// This record can be read here now.
    pub(crate) fn added(&self, id: BlockId) {
        let mut inner = self.0.lock();
        inner.ends.remove(&id);
        if inner.removed.remove(&id) {
            inner.returned.insert(id); // removed and found again: no change
        } else if !inner.returned.contains(&id) {
            inner.fresh.insert(id);
        }
    }

    /// Others can see it too, and will have found it by `found`.
    pub(crate) fn published(&self, id: BlockId, found: MonotonicTime) {
        let mut inner = self.0.lock();
        if !inner.asked {
            return inner.end(id);
        }
        if inner.fresh.contains(&id) || inner.returned.contains(&id) {
            inner.ends.insert(id, found);
            inner.leaving.push_back((found, id));
            if inner.leaving.len() > MOST_LEAVING {
                inner.end_first();
            }
        }
    }

    /// It cannot be read here any more.
    pub(crate) fn removed(&self, id: BlockId) {
        let mut inner = self.0.lock();
        inner.ends.remove(&id);
        inner.end(id);
    }

    /// The changes since the last time.
    pub(crate) fn take(&self, now: MonotonicTime) -> LocallyVisible {
        let mut inner = self.0.lock();
        inner.asked = true;
        while let Some((found, _)) = inner.leaving.front()
            && *found <= now
        {
            inner.end_first();
        }
        let half = limits::MAX_IDS_PER_CALL / 2;
        let some = |ids: &HashSet<BlockId>| ids.iter().copied().take(half).collect::<Vec<_>>();
        let news = LocallyVisible {
            added: some(&inner.fresh),
            removed: some(&inner.removed),
        };
        for id in &news.added {
            inner.fresh.remove(id);
            inner.returned.insert(*id);
        }
        for id in &news.removed {
            inner.removed.remove(id);
        }
        news
    }
}

impl Inner {
    fn end(&mut self, id: BlockId) {
        if !self.fresh.remove(&id) && self.returned.remove(&id) {
            self.removed.insert(id);
        }
    }

    /// The first of those that are published is no longer only locally visible.
    fn end_first(&mut self) {
        if let Some((found, id)) = self.leaving.pop_front()
            && self.ends.get(&id) == Some(&found)
        {
            self.ends.remove(&id);
            self.end(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: BlockId = BlockId([1; 16]);
    const NOW: MonotonicTime = MonotonicTime(100);
    const LATER: MonotonicTime = MonotonicTime(200);

    fn nothing() -> LocallyVisible {
        LocallyVisible::default()
    }

    #[test]
    fn only_changes_are_told_and_only_once() {
        let news = LocalChanges::default();
        news.added(A);
        assert_eq!(news.take(NOW).added, [A]);
        assert_eq!(news.take(NOW), nothing());
        news.removed(A);
        assert_eq!(news.take(NOW).removed, [A]);
        assert_eq!(news.take(NOW), nothing());
    }

    #[test]
    fn what_comes_and_goes_between_two_questions_is_not_told() {
        let news = LocalChanges::default();
        news.added(A);
        news.removed(A);
        assert_eq!(news.take(NOW), nothing());
        news.added(A);
        news.take(NOW);
        news.removed(A);
        news.added(A);
        assert_eq!(news.take(NOW), nothing());
        news.removed(A);
        assert_eq!(news.take(NOW).removed, [A]);
    }

    #[test]
    fn what_is_published_stays_early_until_others_must_have_found_it() {
        let news = LocalChanges::default();
        news.take(NOW);
        news.added(A);
        news.published(A, LATER);
        assert_eq!(
            news.take(NOW).added,
            [A],
            "though it was not returned before"
        );
        assert_eq!(news.take(MonotonicTime(199)), nothing());
        assert_eq!(news.take(LATER).removed, [A]);
        assert_eq!(news.take(MonotonicTime::NEVER), nothing());
    }

    #[test]
    fn what_is_dropped_meanwhile_is_lost_at_once() {
        let news = LocalChanges::default();
        news.added(A);
        news.take(NOW);
        news.published(A, LATER);
        news.removed(A);
        assert_eq!(news.take(NOW).removed, [A]);
        assert_eq!(news.take(LATER), nothing(), "once");
    }

    #[test]
    fn what_is_written_again_meanwhile_stays_until_that_is_found() {
        let news = LocalChanges::default();
        news.added(A);
        news.take(NOW);
        news.published(A, LATER);
        news.added(A);
        assert_eq!(news.take(LATER), nothing());
        news.published(A, MonotonicTime(300));
        assert_eq!(news.take(MonotonicTime(299)), nothing());
        assert_eq!(news.take(MonotonicTime(300)).removed, [A]);
    }

    #[test]
    fn nothing_stays_while_no_one_asks_and_never_more_than_a_bounded_number() {
        let id = |n: usize| BlockId(std::array::from_fn(|at| n.to_le_bytes()[at % 8]));
        let news = LocalChanges::default();
        news.added(A);
        news.published(A, LATER);
        assert_eq!(news.take(NOW), nothing(), "it was not called before");
        for n in 0..MOST_LEAVING + 3 {
            news.added(id(n));
            news.published(id(n), LATER);
        }
        let inner = news.0.lock();
        assert_eq!(
            (inner.leaving.len(), inner.ends.len(), inner.fresh.len()),
            (MOST_LEAVING, MOST_LEAVING, MOST_LEAVING)
        );
    }
}
