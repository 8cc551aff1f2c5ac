//! Records that were refused: by this process, or as copies of one tier. Threads that verify write
//! it, every lookup reads it.

use std::sync::atomic::{AtomicBool, Ordering};

use ucm_core::{BlockId, ErrorKind, MissReason};
use ucm_infra::IdSet;

/// Most ids remembered. Forgetting one is safe: every record is verified when it is read.
const REMEMBERED: usize = 1 << 16;

/// Ids that are no hits until another record replaced them.
#[derive(Default)]
pub(crate) struct RejectedRecords {
    /// Replaced by the next dump.
    bad: IdSet<BlockId>,
    /// Records of a newer version: no hits, and never replaced.
    newer: IdSet<BlockId>,
    /// The same for records that another key has encrypted.
    locked: IdSet<BlockId>,
    /// Records that the medium could not read. They may be hits again; the next dump replaces them.
    unread: IdSet<BlockId>,
    /// False until the first one: mostly there is none, and every id of a lookup is checked.
    any: AtomicBool,
}

impl RejectedRecords {
    pub(crate) fn add(&self, id: BlockId, reason: MissReason) {
        let ids = match reason {
            MissReason::NewerVersion => &self.newer,
            MissReason::WrongKey => &self.locked,
            _ => &self.bad,
        };
        self.insert(ids, id);
    }

    fn insert(&self, ids: &IdSet<BlockId>, id: BlockId) {
        self.any.store(true, Ordering::Release);
        let ids = ids.pin();
        if ids.insert(id) && ids.len() > REMEMBERED {
            ids.clear();
        }
    }

    /// Another process refused this record. One that is never replaced keeps its reason.
    pub(crate) fn mark_bad(&self, id: BlockId) {
        if self.kept_for(id).is_none() {
            self.add(id, MissReason::Refused);
        }
    }

    /// The medium failed to read this record.
    pub(crate) fn add_unread(&self, id: BlockId) {
        self.insert(&self.unread, id);
    }

    pub(crate) fn contains(&self, id: BlockId) -> bool {
        self.any.load(Ordering::Acquire)
            && (self.bad.pin().contains(&id)
                || self.newer.pin().contains(&id)
                || self.locked.pin().contains(&id))
    }

    /// Why no dump replaces this record, if none does.
    pub(crate) fn kept_for(&self, id: BlockId) -> Option<MissReason> {
        if !self.any.load(Ordering::Acquire) {
            None
        } else if self.newer.pin().contains(&id) {
            Some(MissReason::NewerVersion)
        } else if self.locked.pin().contains(&id) {
            Some(MissReason::WrongKey)
        } else {
            None
        }
    }

    /// The error kind and reason for a caller that wants a record refused before.
    pub(crate) fn known_refusal(&self, id: BlockId) -> (ErrorKind, MissReason) {
        match self.kept_for(id) {
            Some(reason) => (ErrorKind::Foreign, reason),
            None => (ErrorKind::Corrupt, MissReason::Refused),
        }
    }

    /// Whether the next record of this id replaces the one that is there.
    pub(crate) fn replaces(&self, id: BlockId) -> bool {
        self.any.load(Ordering::Acquire)
            && (self.bad.pin().contains(&id) || self.unread.pin().contains(&id))
    }

    /// A dump replaced the record; true if it had been refused.
    pub(crate) fn clear_bad(&self, id: BlockId) -> bool {
        self.unread.pin().remove(&id);
        self.bad.pin().remove(&id)
    }

    /// A dump found no record of this id and published one: a record that was kept is not there any
    /// more.
    pub(crate) fn published(&self, id: BlockId) {
        self.newer.pin().remove(&id);
        self.locked.pin().remove(&id);
    }

    /// Another record took the place of one that may have been refused.
    pub(crate) fn forget(&self, id: BlockId) {
        if self.any.load(Ordering::Acquire) {
            self.clear_bad(id);
            self.published(id);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.bad.pin().len() + self.newer.pin().len() + self.locked.pin().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_records_and_those_of_another_key_are_no_hits_and_never_replaced() {
        for reason in [MissReason::NewerVersion, MissReason::WrongKey] {
            never_replaced(reason);
        }
    }

    fn never_replaced(reason: MissReason) {
        let refused = RejectedRecords::default();
        let (bad, newer) = (BlockId([1; 16]), BlockId([2; 16]));
        refused.add(bad, MissReason::BadChecksum);
        refused.add(newer, reason);
        refused.mark_bad(newer);
        assert_eq!(refused.known_refusal(newer), (ErrorKind::Foreign, reason));
        assert_eq!(refused.kept_for(newer), Some(reason));
        assert!(refused.contains(bad) && refused.contains(newer));
        assert!(refused.replaces(bad) && !refused.replaces(newer));
        assert!(refused.clear_bad(bad) && !refused.clear_bad(newer));
        assert!(!refused.contains(bad) && refused.contains(newer));
        refused.published(newer);
        assert!(!refused.contains(newer), "ours has replaced it");
        assert_eq!(
            (refused.kept_for(newer), refused.kept_for(bad)),
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
        assert_eq!(refused.known_refusal(newer).1, MissReason::NewerVersion);
        assert_eq!(refused.known_refusal(theirs).1, MissReason::Refused);
    }

    #[test]
    fn what_could_not_be_read_is_replaced_and_may_be_a_hit() {
        let (refused, id) = (RejectedRecords::default(), BlockId([1; 16]));
        refused.add_unread(id);
        assert!(refused.replaces(id) && !refused.contains(id));
        assert!(!refused.clear_bad(id), "it was not refused");
        assert!(!refused.replaces(id));
    }

    #[test]
    fn bounded() {
        let refused = RejectedRecords::default();
        for n in 0..=REMEMBERED as u128 {
            refused.add(BlockId(n.to_le_bytes()), MissReason::BadChecksum);
            refused.add_unread(BlockId(n.to_le_bytes()));
            assert!(refused.len() <= REMEMBERED && refused.unread.pin().len() <= REMEMBERED);
        }
    }
}
