//! Reading one record from its segment.
//!
//! A record that is not where it should be was removed with its segment, moved by its own writer's seal between the look
//! and the open, or published so lately that nobody here has seen it: another look at the directory tells, once.

use std::sync::Arc;

use ucm_core::{BlockId, Error, ErrorKind, Result};
use ucm_device::{Slot, SlotPool};
use ucm_infra::Mono;
use ucm_io::{IoBuf, IoDone, IoOp, ReadMode};

use super::Segments;
use super::index::Hit;
use crate::backend::{Done, ReadDone};
use crate::engine::LANE_LOAD;

/// A read on its way.
struct Read {
    id: BlockId,
    len: usize,
    again: bool,
    deadline: Mono,
    done: Done<ReadDone>,
    /// The directory was looked at since the record was missed.
    looked: bool,
}

impl Segments {
    /// Reads a record into a slot, from its start.
    pub(super) fn read(
        self: &Arc<Self>,
        id: BlockId,
        slot: Slot,
        again: bool,
        deadline: Mono,
        done: Done<ReadDone>,
    ) {
        let len = slot.len();
        let read = Read {
            id,
            len,
            again,
            deadline,
            done,
            looked: false,
        };
        self.read_where_it_is(slot, read);
    }

    fn read_where_it_is(self: &Arc<Self>, slot: Slot, read: Read) {
        match self.index.find(read.id) {
            Some(hit) => {
                let private = hit.private;
                self.read_from(slot, read, hit, private);
            }
            None if read.looked => {
                drop(slot);
                let text = "this record is in no segment";
                (read.done)(Err(Error::new(ErrorKind::NotFound, text).with("block", read.id)));
            }
            None => {
                let segments = Arc::clone(self);
                let read = Read { looked: true, ..read };
                self.after_look(Box::new(move || segments.read_where_it_is(slot, read)));
            }
        }
    }

    fn read_from(self: &Arc<Self>, slot: Slot, read: Read, hit: Hit, private: bool) {
        let path = if private {
            self.private(hit.name)
        } else {
            self.shared.layout.segment(hit.name)
        };
        let pool = Arc::clone(slot.pool());
        let len = usize::try_from(hit.len).unwrap_or(usize::MAX).min(read.len);
        let op = IoOp::Read {
            path: path.clone(),
            offset: hit.offset,
            len,
            buf: IoBuf::Slot(slot),
            mode: if read.again {
                ReadMode::FreshDirect
            } else {
                ReadMode::Default
            },
        };
        let (segments, deadline) = (Arc::clone(self), read.deadline);
        let answer = move |result: Result<IoDone>| match result {
            Ok(IoDone::Read {
                buf: IoBuf::Slot(slot),
                read: count,
                ..
            }) => (read.done)(Ok(ReadDone {
                slot,
                read: count,
                stored_len: hit.len,
            })),
            Ok(_) => (read.done)(Err(Error::internal("a read answered with something else"))),
            Err(error) if error.kind() == ErrorKind::NotFound => segments.missed(&pool, read, hit, private),
            Err(error) => segments.shared.explain(path, error, deadline, read.done),
        };
        self.shared.io.submit(LANE_LOAD, deadline, op, Box::new(answer));
    }

    /// The segment is not there. The slot went with the read, so another one of its pool takes its place.
    fn missed(self: &Arc<Self>, pool: &Arc<SlotPool>, read: Read, hit: Hit, private: bool) {
        if !hit.private {
            self.index.vanished(hit.segment);
        }
        let Some(slot) = pool.try_acquire() else {
            let text = "this record's segment is gone, and no slot is free to look for another copy";
            return (read.done)(Err(Error::new(ErrorKind::Busy, text).with("block", read.id)));
        };
        if private {
            // Sealed since it was found, or about to be told so.
            return self.read_from(slot, read, hit, false);
        }
        if hit.private {
            self.index.vanished(hit.segment);
        }
        self.read_where_it_is(slot, read);
    }
}
