//! Records this process refused: written by the threads that verify, asked by every lookup.

use std::sync::atomic::{AtomicBool, Ordering};

use ucm_core::{BlockId, ErrorKind, MissReason};
use ucm_infra::IdSet;

/// Most ids remembered. To forget is safe: a record is verified on every read anyway.
const REMEMBERED: usize = 1 << 16;

/// Ids that are no hits here until a dump replaced them.
#[derive(Default)]
pub(super) struct RejectedRecords {
    /// What the next dump replaces.
    bad: IdSet<BlockId>,
    /// Records of a newer version: no hits, and left alone.
    newer: IdSet<BlockId>,
    /// The same of those that another key has encrypted.
    locked: IdSet<BlockId>,
    /// Records that the medium could not read. They may be hits again, and the next dump replaces
    /// them all the same: that they are there says little.
    unread: IdSet<BlockId>,
    /// Whether there was ever one: mostly there was none, and every id of a lookup asks.
    any: AtomicBool,
}

impl RejectedRecords {
    pub(super) fn add(&self, id: BlockId, reason: MissReason) {
        let ids = match reason {
            MissReason::NewerVersion => &self.newer,
            MissReason::WrongKey => &self.locked,
            _ => &self.bad,
        };
        self.any.store(true, Ordering::Release);
        if ids.insert(id) && ids.len() > REMEMBERED {
            ids.clear();
        }
    }

    /// Another process refused this record; one that is left alone stays what it is.
    pub(super) fn mark_bad(&self, id: BlockId) {
        if !self.newer.contains(&id) && !self.locked.contains(&id) {
            self.add(id, MissReason::Refused);
        }
    }

    /// The medium failed to read this record.
    pub(super) fn unread(&self, id: BlockId) {
        if self.unread.insert(id) && self.unread.len() > REMEMBERED {
            self.unread.clear();
        }
    }

    pub(super) fn contains(&self, id: BlockId) -> bool {
        self.any.load(Ordering::Acquire)
            && [&self.bad, &self.newer, &self.locked]
                .into_iter()
                .any(|ids| ids.contains(&id))
    }

    /// Why this record is left alone, if it is: no dump replaces it.
    pub(super) fn left_alone(&self, id: BlockId) -> Option<MissReason> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        if self.newer.contains(&id) {
            return Some(MissReason::NewerVersion);
        }
        self.locked.contains(&id).then_some(MissReason::WrongKey)
    }

    /// What a caller that asks for a refused record is told: one that is left alone no dump
    /// replaces.
    pub(super) fn again(&self, id: BlockId) -> (ErrorKind, MissReason) {
        match self.left_alone(id) {
            Some(reason) => (ErrorKind::Foreign, reason),
            None => (ErrorKind::Corrupt, MissReason::Refused),
        }
    }

    /// Whether a dump of this id replaces what is there.
    pub(super) fn replaces(&self, id: BlockId) -> bool {
        self.bad.contains(&id) || self.unread.contains(&id)
    }

    /// A dump replaced the record; whether it had been refused.
    pub(super) fn clear_bad(&self, id: BlockId) -> bool {
        self.unread.remove(&id);
        self.bad.remove(&id)
    }

    /// A dump found nothing under this id and published: a record that was left alone there is
    /// gone.
    pub(super) fn published(&self, id: BlockId) {
        self.newer.remove(&id);
        self.locked.remove(&id);
    }

    pub(super) fn len(&self) -> usize {
        self.bad.len() + self.newer.len() + self.locked.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_records_and_those_of_another_key_are_no_hits_and_never_replaced() {
        for left_alone in [MissReason::NewerVersion, MissReason::WrongKey] {
            never_replaced(left_alone);
        }
    }

    fn never_replaced(reason: MissReason) {
        let refused = RejectedRecords::default();
        let (bad, newer) = (BlockId([1; 16]), BlockId([2; 16]));
        refused.add(bad, MissReason::BadChecksum);
        refused.add(newer, reason);
        refused.mark_bad(newer);
        assert_eq!(refused.again(newer), (ErrorKind::Foreign, reason));
        assert_eq!(refused.left_alone(newer), Some(reason));
        assert!(refused.contains(bad) && refused.contains(newer));
        assert!(refused.replaces(bad) && !refused.replaces(newer));
        assert!(refused.clear_bad(bad) && !refused.clear_bad(newer));
        assert!(!refused.contains(bad) && refused.contains(newer));
        refused.published(newer);
        assert!(!refused.contains(newer), "it is gone, and ours is there");
        assert_eq!(
            (refused.left_alone(newer), refused.left_alone(bad)),
            (None, None)
        );
    }

    #[test]
    fn what_others_refused_is_replaced_unless_it_is_newer() {
        let refused = RejectedRecords::default();
        let (theirs, newer) = (BlockId([1; 16]), BlockId([2; 16]));
        refused.add(newer, MissReason::NewerVersion);
        refused.mark_bad(theirs);
        refused.mark_bad(newer);
        assert!(refused.contains(theirs) && refused.replaces(theirs));
        assert!(!refused.replaces(newer));
        assert_eq!(refused.again(newer).1, MissReason::NewerVersion);
        assert_eq!(refused.again(theirs).1, MissReason::Refused);
    }

    #[test]
    fn what_could_not_be_read_is_replaced_and_may_be_a_hit() {
        let (refused, id) = (RejectedRecords::default(), BlockId([1; 16]));
        refused.unread(id);
        assert!(refused.replaces(id) && !refused.contains(id));
        assert!(!refused.clear_bad(id), "it was not refused");
        assert!(!refused.replaces(id));
    }

    #[test]
    fn bounded() {
        let refused = RejectedRecords::default();
        for n in 0..=REMEMBERED as u128 {
            refused.add(BlockId(n.to_le_bytes()), MissReason::BadChecksum);
            refused.unread(BlockId(n.to_le_bytes()));
            assert!(refused.len() <= REMEMBERED && refused.unread.len() <= REMEMBERED);
        }
    }
}
