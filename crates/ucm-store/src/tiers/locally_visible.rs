//! Records that can be read here before others can see them, put together from the tiers: an id
//! counts while any of them has it.

use std::collections::HashMap;

use ucm_core::sync::Mutex;
use ucm_core::{BlockId, limits};
use ucm_media::backend::LocallyVisible;

use super::level::MAX_TIERS;

const _: () = assert!(MAX_TIERS <= u32::BITS as usize);

/// See the module.
#[derive(Default)]
pub(super) struct LocallyVisibleIds(Mutex<Ids>);

#[derive(Default)]
struct Ids {
    /// Which tiers (a bit each) say that only this process can read an id.
    by_tier: HashMap<BlockId, u32>,
    /// Changes to be returned: added (true) or removed; the latest of each id.
    changes: HashMap<BlockId, bool>,
}

impl LocallyVisibleIds {
    /// Takes the changes of each tier and returns those of all together, at most as many ids as fit
    /// in one call.
    pub(super) fn merge(&self, tiers: impl Iterator<Item = LocallyVisible>) -> LocallyVisible {
        let mut guard = self.0.lock();
        let ids = &mut *guard;
        for (number, changes) in tiers.enumerate() {
            let bit = 1 << number;
            for id in changes.added {
                let bits = ids.by_tier.entry(id).or_default();
                if std::mem::replace(bits, *bits | bit) == 0 {
                    ids.changes.insert(id, true);
                }
            }
            for id in changes.removed {
                let Some(bits) = ids.by_tier.get_mut(&id) else {
                    continue;
                };
                *bits &= !bit;
                if *bits == 0 {
                    ids.by_tier.remove(&id);
                    ids.changes.insert(id, false);
                }
            }
        }
        let mut merged = LocallyVisible::default();
        let some = ids.changes.keys().take(limits::MAX_IDS_PER_CALL);
        for id in some.copied().collect::<Vec<_>>() {
            match ids.changes.remove(&id) {
                Some(true) => merged.added.push(id),
                _ => merged.removed.push(id),
            }
        }
        merged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visible(added: &[u8], removed: &[u8]) -> LocallyVisible {
        let ids = |ns: &[u8]| ns.iter().map(|&n| BlockId([n; 16])).collect();
        LocallyVisible {
            added: ids(added),
            removed: ids(removed),
        }
    }

    #[test]
    fn an_id_is_locally_visible_while_any_tier_says_so() {
        let merged = LocallyVisibleIds::default();
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
