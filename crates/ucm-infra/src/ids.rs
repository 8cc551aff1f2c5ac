//! A concurrent set.
//!
//! It wraps papaya's set (MIT, two small dependencies), whose readers never wait. A removed key is
//! freed when no thread reads it any more.

use std::hash::Hash;

use papaya::HashSet;

/// A set that many threads use at once. Each call is atomic by itself; [`len`](Self::len) and
/// [`clear`](Self::clear) read one part of the set after the other.
pub struct IdSet<K: Eq + Hash>(HashSet<K>);

impl<K: Eq + Hash> IdSet<K> {
    /// An empty set.
    pub fn new() -> Self {
        Self(HashSet::new())
    }

    /// Adds `key`; `false` if the set had it already.
    pub fn insert(&self, key: K) -> bool {
        self.0.pin().insert(key)
    }

    /// Removes `key`; `false` if the set did not have it. If several threads remove the same key at
    /// once, one of them gets `true`.
    pub fn remove(&self, key: &K) -> bool {
        self.0.pin().remove(key)
    }

    /// Whether `key` is there.
    pub fn contains(&self, key: &K) -> bool {
        self.0.pin().contains(key)
    }

    /// Number of keys; exact only while no thread changes the set.
    pub fn len(&self) -> usize {
        self.0.pin().len()
    }

    /// True if the set has no keys; exact only while no thread changes the set.
    pub fn is_empty(&self) -> bool {
        self.0.pin().is_empty()
    }

    /// Removes every key. A key added during the call may stay.
    pub fn clear(&self) {
        self.0.pin().clear();
    }
}

impl<K: Eq + Hash> Default for IdSet<K> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use ucm_core::BlockId;

    use super::*;

    #[test]
    fn a_set_is_a_set() {
        let set = IdSet::new();
        let id = BlockId([7; 16]);
        assert!(set.is_empty());
        assert!(set.insert(id));
        assert!(!set.insert(id));
        assert!(set.contains(&id));
        assert!(set.remove(&id));
        assert!(!set.remove(&id));
        (0..100).for_each(|n| _ = set.insert(BlockId([n; 16])));
        assert_eq!(set.len(), 100);
        set.clear();
        assert!(set.is_empty());
    }

    #[test]
    fn one_thread_wins_each_key() {
        let set = IdSet::new();
        (0..1000).for_each(|key| _ = set.insert(key));
        let won: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| (0..1000).filter(|key| set.remove(key)).count()))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .sum()
        });
        assert_eq!(won, 1000);
    }
}
