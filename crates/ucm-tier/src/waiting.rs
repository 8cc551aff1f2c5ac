//! Records of block files that are written and looked at side by side: what is being written is not
//! moved aside, and what is being moved is written afterwards.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use parking_lot::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_infra::{Clock, MonotonicTime, Notify};

use crate::backend::{Done, Quarantined};
use crate::damage_rate::DamageRate;

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
    /// Records this process is writing, and how many threads at once (one may have been written
    /// off): they are not moved.
    writing: HashMap<BlockId, usize>,
    /// The record that is being looked at, and whether it was written meanwhile. Inodes are used
    /// again, so that one written since could pass for the one that was read.
    pub(crate) looking: Option<BlockId>,
    pub(crate) overtaken: bool,
    /// The record that is being moved: it is written when that is over.
    moving: Option<BlockId>,
    /// Damaged records of late.
    recent: DamageRate,
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
    /// Begins to write this record, once no one moves what has its name; `Timeout` if that takes
    /// until `until`.
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
        self.inner.lock().recent.count(now, most)
    }
}
