//! Which records are known to be on the server, for a while: lookups of them ask no one, however
//! busy the server is.
//!
//! A record is known from when this process wrote, read, found or touched it until a while after;
//! one that went meanwhile costs a read that misses, and is forgotten then.

use std::time::Duration;

use hashlink::LruCache;
use parking_lot::Mutex;
use ucm_core::BlockId;
use ucm_infra::MonotonicTime;

/// How long it is believed.
const BELIEVED: Duration = Duration::from_secs(30);
/// Most records; some 60 bytes each.
const MOST: usize = 1 << 17;

/// See the module.
pub(super) struct Known(Mutex<LruCache<BlockId, MonotonicTime>>);

impl Default for Known {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(MOST)))
    }
}

impl Known {
    /// These are there now.
    pub(super) fn learn(&self, ids: impl IntoIterator<Item = BlockId>, now: MonotonicTime) {
        let (mut known, until) = (self.0.lock(), now.after(BELIEVED));
        for id in ids {
            known.insert(id, until);
        }
    }

    /// This one is not.
    pub(super) fn forget(&self, id: BlockId) {
        self.0.lock().remove(&id);
    }

    /// Which of these are known.
    pub(super) fn are(&self, ids: &[BlockId], now: MonotonicTime) -> Vec<bool> {
        let known = self.0.lock();
        let is = |id| known.peek(id).is_some_and(|until| now < *until);
        ids.iter().map(is).collect()
    }

    /// Whether this one is.
    pub(super) fn is(&self, id: BlockId, now: MonotonicTime) -> bool {
        self.are(&[id], now) == [true]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_believed_for_a_while_and_no_longer_than_it_is_true() {
        let (known, id) = (Known::default(), BlockId([1; 16]));
        let at = |seconds: u64| MonotonicTime(seconds * 1_000_000_000);
        assert!(!known.is(id, at(0)));
        known.learn([id], at(0));
        assert!(known.is(id, at(29)) && !known.is(id, at(30)));
        known.learn([id], at(40));
        known.forget(id);
        assert!(!known.is(id, at(41)));
    }
}
