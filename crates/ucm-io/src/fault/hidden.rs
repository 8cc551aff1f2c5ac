//! Files that are published but not seen yet, as through the attribute cache of another host.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::op::{IoDone, IoOp};

/// Names that are invisible for some more looks.
#[derive(Default)]
pub(super) struct Hidden(HashMap<PathBuf, u64>);

/// What one look did not see.
#[derive(Default)]
pub(super) struct Look {
    read: bool,
    /// Positions of a stat.
    stats: Vec<usize>,
    /// Names in a listed directory.
    names: Vec<OsString>,
}

impl Hidden {
    /// Makes a name invisible for `looks` looks (`u64::MAX`: until cleared).
    pub(super) fn hide(&mut self, path: PathBuf, looks: u64) {
        if looks > 0 {
            self.0.insert(path, looks);
        }
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// What this operation must not see; uses up one look of each.
    pub(super) fn look(&mut self, op: &IoOp<'_>) -> Look {
        let mut look = Look::default();
        if self.0.is_empty() {
            return look;
        }
        match op {
            IoOp::Read { path, .. } | IoOp::ReadInto { path, .. } | IoOp::ReadParts { path, .. } => {
                look.read = self.misses(path);
            }
            IoOp::Stat { paths, .. } => {
                look.stats = (0..paths.len()).filter(|&i| self.misses(&paths[i])).collect();
            }
            IoOp::List { dir } => {
                let inside: Vec<PathBuf> = self
                    .0
                    .keys()
                    .filter(|p| p.parent() == Some(*dir))
                    .cloned()
                    .collect();
                for path in inside {
                    if self.misses(&path)
                        && let Some(name) = path.file_name()
                    {
                        look.names.push(name.to_owned());
                    }
                }
            }
            _ => {}
        }
        look
    }

    fn misses(&mut self, path: &Path) -> bool {
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

impl Look {
    /// Whether a read must not find its file.
    pub(super) fn hides_read(&self) -> bool {
        self.read
    }

    /// The answer without what was not seen.
    pub(super) fn filter(&self, answer: IoDone, stop_at_missing: bool) -> IoDone {
        match answer {
            IoDone::Stat(mut found) if !self.stats.is_empty() => {
                for &i in &self.stats {
                    if let Some(meta) = found.get_mut(i) {
                        *meta = None;
                    }
                }
                if stop_at_missing && let Some(first) = found.iter().position(Option::is_none) {
                    found.truncate(first + 1);
                }
                IoDone::Stat(found)
            }
            IoDone::List(mut found) if !self.names.is_empty() => {
                found.retain(|(name, _)| !self.names.contains(name));
                IoDone::List(found)
            }
            other => other,
        }
    }
}
