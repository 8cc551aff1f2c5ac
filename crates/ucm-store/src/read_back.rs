//! Judging what lies on the medium, on the medium's side: a record just published is read back before it counts
//! (`verify: paranoid`), a refused one is looked at once more before it is moved ([`crate::quarantine`]).

use std::sync::Arc;

use ucm_core::{BlockId, Error, MissReason, Result};
use ucm_infra::Mono;
use ucm_io::{IoBuf, IoDone, IoOp, ReadMode};

use crate::backend::{Done, Written};
use crate::engine::LANE_DUMP;
use crate::posix::Shared;
use crate::record::{Expect, verify};

impl Shared {
    /// Reads a published record into the buffer it was written from and tells whether it is sound.
    pub(crate) fn read_back(
        self: &Arc<Self>,
        id: BlockId,
        mut buf: IoBuf,
        len: usize,
        deadline: Mono,
        done: Done<Written>,
    ) {
        if let IoBuf::Slot(slot) = &mut buf {
            slot.as_mut_slice()[..len].fill(0); // a read that brings nothing must not find the right bytes there
        }
        let op = IoOp::Read {
            path: self.layout.record(id),
            offset: 0,
            len,
            buf,
            mode: ReadMode::FreshDirect,
        };
        let shared = Arc::clone(self);
        let answer = move |result: Result<IoDone>| {
            let judged = result.and_then(|answer| match answer {
                IoDone::Read { buf, read, file_len } => Ok(shared.judge(id, &buf[..read], file_len)),
                _ => Err(Error::internal("a read answered with something else")),
            });
            done(judged.map(|judged| judged.map_or_else(Written::Unsound, |()| Written::Published)));
        };
        self.io.submit(LANE_DUMP, deadline, op, Box::new(answer));
    }

    /// Judges the bytes of a record that was read: what is wrong with them, if anything.
    pub(crate) fn judge(&self, id: BlockId, bytes: &[u8], stored_len: u64) -> Result<(), MissReason> {
        if stored_len > self.config.record.record_len() as u64 {
            return Err(MissReason::WrongLength);
        }
        let expect = Expect {
            id,
            namespace: *self.config.identity.digest(),
            part: self.config.part,
            layout: &self.config.record,
        };
        verify(bytes, &expect).map(|_| ())
    }
}
