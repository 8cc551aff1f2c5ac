//! Which records only this process can read yet, told to whoever asks as changes since the last time.
//!
//! What is gained and lost between two questions is never told, so nothing grows while nobody asks: at any time there
//! are no more ids here than records in segments that have no name yet, and those that were told of and lost since.

use std::collections::HashSet;

use parking_lot::Mutex;
use ucm_core::{BlockId, limits};

use crate::backend::Early;

/// See the module.
#[derive(Default)]
pub(crate) struct EarlyNews(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    fresh: HashSet<BlockId>,
    told: HashSet<BlockId>,
    lost: HashSet<BlockId>,
}

impl EarlyNews {
    /// This record can be read here now.
    pub(crate) fn gained(&self, id: BlockId) {
        let mut inner = self.0.lock();
        if inner.lost.remove(&id) {
            inner.told.insert(id); // lost and found again: nothing to tell
        } else if !inner.told.contains(&id) {
            inner.fresh.insert(id);
        }
    }

    /// It is published by now, or gone.
    pub(crate) fn lost(&self, id: BlockId) {
        let mut inner = self.0.lock();
        if !inner.fresh.remove(&id) && inner.told.remove(&id) {
            inner.lost.insert(id);
        }
    }

    /// The changes since the last time.
    pub(crate) fn take(&self) -> Early {
        let mut inner = self.0.lock();
        let some = |ids: &HashSet<BlockId>| -> Vec<BlockId> {
            ids.iter().copied().take(limits::MAX_IDS_PER_CALL / 2).collect()
        };
        let news = Early {
            gained: some(&inner.fresh),
            lost: some(&inner.lost),
        };
        for id in &news.gained {
            inner.fresh.remove(id);
            inner.told.insert(*id);
        }
        for id in &news.lost {
            inner.lost.remove(id);
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: BlockId = BlockId([1; 16]);

    #[test]
    fn only_changes_are_told_and_only_once() {
        let news = EarlyNews::default();
        news.gained(A);
        assert_eq!(news.take().gained, [A]);
        assert_eq!(news.take(), Early::default());
        news.lost(A);
        assert_eq!(news.take().lost, [A]);
        assert_eq!(news.take(), Early::default());
    }

    #[test]
    fn what_comes_and_goes_between_two_questions_is_not_told() {
        let news = EarlyNews::default();
        news.gained(A);
        news.lost(A);
        assert_eq!(news.take(), Early::default());
        news.gained(A);
        news.take();
        news.lost(A);
        news.gained(A);
        assert_eq!(news.take(), Early::default());
        news.lost(A);
        assert_eq!(news.take().lost, [A]);
    }
}
