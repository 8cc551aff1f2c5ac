//! What can be read here before others can see it, put together from the tiers: an id counts while
//! any of them says so.

use std::collections::HashMap;

use parking_lot::Mutex;
use ucm_core::{BlockId, limits};
use ucm_tier::backend::LocallyVisible;

use super::MAX_TIERS;

const _: () = assert!(MAX_TIERS <= u32::BITS as usize);

/// Which tiers (a bit each) say that only this process can read an id, and the changes not told
/// yet.
#[derive(Default)]
pub(super) struct Merged(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    by_tier: HashMap<BlockId, u32>,
    /// Gained (true) or lost since the last answer; the latest word on an id.
    untold: HashMap<BlockId, bool>,
}

impl Merged {
    /// Takes what the tiers say and tells what that changes, at most as many ids as fit in one
    /// call.
    pub(super) fn merge(&self, tiers: impl Iterator<Item = LocallyVisible>) -> LocallyVisible {
        let mut guard = self.0.lock();
        let inner = &mut *guard;
        for (number, early) in tiers.enumerate() {
            let bit = 1 << number;
            for id in early.gained {
                let bits = inner.by_tier.entry(id).or_default();
                if std::mem::replace(bits, *bits | bit) == 0 {
                    inner.untold.insert(id, true);
                }
            }
            for id in early.lost {
                if let Some(bits) = inner.by_tier.get_mut(&id) {
                    *bits &= !bit;
                    if *bits == 0 {
                        inner.by_tier.remove(&id);
                        inner.untold.insert(id, false);
                    }
                }
            }
        }
        let mut told = LocallyVisible::default();
        let now: Vec<BlockId> = inner
            .untold
            .keys()
            .copied()
            .take(limits::MAX_IDS_PER_CALL)
            .collect();
        for id in now {
            match inner.untold.remove(&id) {
                Some(true) => told.gained.push(id),
                _ => told.lost.push(id),
            }
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visible(gained: &[u8], lost: &[u8]) -> LocallyVisible {
        let ids = |ns: &[u8]| ns.iter().map(|&n| BlockId([n; 16])).collect();
        LocallyVisible {
            gained: ids(gained),
            lost: ids(lost),
        }
    }

    #[test]
    fn an_id_is_locally_visible_while_any_tier_says_so() {
        let merged = Merged::default();
        let said = |tiers: [LocallyVisible; 2]| merged.merge(tiers.into_iter());
        assert_eq!(
            said([visible(&[1], &[]), visible(&[], &[])]),
            visible(&[1], &[])
        );
        assert_eq!(
            said([visible(&[], &[]), visible(&[1], &[])]),
            visible(&[], &[])
        );
        assert_eq!(
            said([visible(&[], &[1]), visible(&[], &[])]),
            visible(&[], &[])
        );
        assert_eq!(
            said([visible(&[], &[]), visible(&[], &[1])]),
            visible(&[], &[1])
        );
        assert_eq!(
            said([visible(&[], &[7]), visible(&[], &[])]),
            visible(&[], &[]),
            "never was"
        );
    }
}
