//! Files that are published but not visible yet, as behind the attribute cache of another host.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Names that stay invisible for some more accesses.
#[derive(Default)]
pub(super) struct Hidden(HashMap<PathBuf, u64>);

impl Hidden {
    /// Makes a name invisible for `looks` accesses (`u64::MAX`: until cleared).
    pub(super) fn hide(&mut self, path: &Path, looks: u64) {
        if looks > 0 {
            self.0.insert(path.to_owned(), looks);
        }
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// The names in this directory that a listing must not return. Counts as one access to each.
    pub(super) fn unseen_in(&mut self, dir: &Path) -> Vec<PathBuf> {
        let mut inside: Vec<PathBuf> = self.0.keys().cloned().collect();
        inside.retain(|path| path.parent() == Some(dir) && self.misses(path));
        inside
    }

    /// True if this access must not find the name. Counts as one access.
    pub(super) fn misses(&mut self, path: &Path) -> bool {
        let Some(left) = self.0.get_mut(path) else {
            return false;
        };
        if *left != u64::MAX {
            *left -= 1;
        }
        if *left == 0 {
            self.0.remove(path);
        }
        true
    }
}
