//! Records of block files that are written and looked at side by side: what is being written is not moved aside, and what is
//! being moved is written afterwards.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_infra::{Clock, MonotonicTime, Notify};

use crate::backend::{Done, Quarantined};

/// The span in which damaged records are counted.
const MINUTE: Duration = Duration::from_secs(60);

/// Records that wait to be looked at, and how many were damaged of late.
#[derive(Default)]
pub(crate) struct Waiting {
    pub(crate) inner: Mutex<Inner>,
    /// Rung when a record was moved.
    moved: Notify,
}

/// See [`Waiting`].
#[derive(Default)]
pub(crate) struct Inner {
    pub(crate) queue: VecDeque<(BlockId, Done<Quarantined>)>,
    /// A job is taking them from the queue.
    pub(crate) running: bool,
    /// Records this process is writing, and how many threads at once (one may have been written off): they are not moved.
    writing: HashMap<BlockId, usize>,
    /// The record that is being looked at, and whether it was written meanwhile. Inodes are used again, so that one
    /// written since could pass for the one that was read.
    pub(crate) looking: Option<BlockId>,
    pub(crate) overtaken: bool,
    /// The record that is being moved: it is written when that is over.
    moving: Option<BlockId>,
    /// When damaged records were found within the last minute, oldest first.
    recent: VecDeque<MonotonicTime>,
}

/// A record is being written for as long as this is there.
pub(crate) struct Writing<'a> {
    waiting: &'a Waiting,
    id: BlockId,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut inner = self.waiting.inner.lock();
        if let Entry::Occupied(mut writers) = inner.writing.entry(self.id) {
            *writers.get_mut() -= 1;
            if *writers.get() == 0 {
                writers.remove();
            }
        }
    }
}

impl Waiting {
    /// Begins to write this record, once nobody moves what has its name; `Timeout` if that takes until `until`.
    pub(crate) fn begin_write(
        &self,
        id: BlockId,
        clock: &dyn Clock,
        until: MonotonicTime,
    ) -> Result<Writing<'_>> {
        loop {
            let seen = self.moved.seen();
            {
                let mut inner = self.inner.lock();
                if inner.moving != Some(id) {
                    inner.overtaken |= inner.looking == Some(id);
                    *inner.writing.entry(id).or_default() += 1;
                    return Ok(Writing { waiting: self, id });
                }
            }
            if clock.now() >= until {
                let text = "what had this record's name was not moved aside in time";
                return Err(Error::new(ErrorKind::Timeout, text));
            }
            clock.sleep(&self.moved, seen, Some(until));
        }
    }

    /// Moves a record, unless it is being written; `None` then.
    pub(crate) fn moved<T>(&self, id: BlockId, run: impl FnOnce() -> T) -> Option<T> {
        {
            let mut inner = self.inner.lock();
            if inner.overtaken || inner.writing.contains_key(&id) {
                return None;
            }
            inner.moving = Some(id);
        }
        let result = run();
        self.inner.lock().moving = None;
        self.moved.notify();
        Some(result)
    }

    /// Counts one damaged record; false if there are too many of late.
    pub(crate) fn count(&self, now: MonotonicTime, most: u32) -> bool {
        let recent = &mut self.inner.lock().recent;
        while recent.front().is_some_and(|&first| now.since(first) >= MINUTE) {
            recent.pop_front();
        }
        let room = recent.len() < most as usize;
        if room {
            recent.push_back(now);
        }
        room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minute_passes_before_more_is_kept() {
        let waiting = Waiting::default();
        let at = |s: u64| MonotonicTime(s * 1_000_000_000);
        assert!(waiting.count(at(0), 2) && waiting.count(at(30), 2));
        assert!(!waiting.count(at(59), 2), "the third within a minute");
        assert!(waiting.count(at(60), 2), "the first is a minute ago");
        assert!(!waiting.count(at(61), 2));
        assert!(!waiting.count(at(200), 0));
    }
}
