//! The answers of `Local::locally_visible`: changes since its last call.

use std::collections::HashMap;

use ucm_core::BlockId;

use crate::backend::LocallyVisible;

/// Changes not reported yet. At most one for each id, so their number is bounded by the records
/// present and those reported.
#[derive(Default)]
pub(super) struct Changes {
    /// Gained, or lost.
    pending: HashMap<BlockId, bool>,
}

impl Changes {
    /// A record became readable.
    pub(super) fn gained(&mut self, id: BlockId) {
        self.change(id, true);
    }

    /// It is no longer readable.
    pub(super) fn lost(&mut self, id: BlockId) {
        self.change(id, false);
    }

    /// Two opposite changes that were not reported cancel out.
    fn change(&mut self, id: BlockId, gained: bool) {
        match self.pending.remove(&id) {
            Some(before) if before != gained => {}
            _ => {
                self.pending.insert(id, gained);
            }
        }
    }

    /// At most `most` of them.
    pub(super) fn take(&mut self, most: usize) -> LocallyVisible {
        let ids: Vec<(BlockId, bool)> = self
            .pending
            .iter()
            .take(most)
            .map(|(&id, &gained)| (id, gained))
            .collect();
        let mut early = LocallyVisible::default();
        for (id, gained) in ids {
            self.pending.remove(&id);
            if gained {
                early.gained.push(id);
            } else {
                early.lost.push(id);
            }
        }
        if self.pending.is_empty() {
            self.pending.shrink_to(1024);
        }
        early
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_changed_since_the_last_time_is_told() {
        let (a, b) = (BlockId([1; 16]), BlockId([2; 16]));
        let mut changes = Changes::default();
        changes.gained(a);
        changes.gained(b);
        changes.lost(b);
        assert_eq!(changes.take(10).gained, [a], "b came and went");
        assert_eq!(changes.take(10), LocallyVisible::default());
        changes.lost(a);
        changes.gained(a);
        assert_eq!(
            changes.take(10),
            LocallyVisible::default(),
            "a went and came"
        );
        changes.lost(a);
        changes.gained(b);
        assert!(
            changes.take(1) != LocallyVisible::default()
                && changes.take(1) != LocallyVisible::default()
        );
        assert_eq!(changes.take(1), LocallyVisible::default());
    }
}
