//! Reading records, for a load and for a judgement on the medium's side: one just published is read back before it
//! counts (`verify: paranoid`), a refused one is looked at once more before it is moved ([`crate::quarantine`]).

use std::path::PathBuf;
use std::sync::Arc;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::Slot;
use ucm_infra::Mono;
use ucm_io::{IoBuf, IoDone, IoOp, ReadMode};

use crate::backend::{Done, ReadDone, Written};
use crate::engine::{LANE_DUMP, LANE_LOAD};
use crate::posix::Shared;
use crate::record::{Expect, verify_stored};

/// Error numbers of what is there for others but never for us as a record: no permission (of the file, or of a
/// directory above it), a directory, a link.
const FORBIDDEN: [i32; 2] = [1, 13];
const NO_FILE: [i32; 2] = [21, 40];

impl Shared {
    /// Reads a record into a slot, from its start.
    pub(crate) fn read(
        self: &Arc<Self>,
        id: BlockId,
        slot: Slot,
        again: bool,
        deadline: Mono,
        done: Done<ReadDone>,
    ) {
        let mode = if again {
            ReadMode::FreshDirect
        } else {
            ReadMode::Default
        };
        let len = self.config.record.record_len().min(slot.len());
        let op = IoOp::Read {
            path: self.layout.record(id),
            offset: 0,
            len,
            buf: IoBuf::Slot(slot),
            mode,
        };
        let (shared, path) = (Arc::clone(self), self.layout.record(id));
        let answer = move |result: Result<IoDone>| match result {
            Ok(IoDone::Read {
                buf: IoBuf::Slot(slot),
                read,
                file_len,
            }) => done(Ok(ReadDone {
                slot,
                read,
                stored_len: file_len,
            })),
            Ok(_) => done(Err(Error::internal("a read answered with something else"))),
            Err(error) => shared.explain(path, error, deadline, done),
        };
        self.io.submit(LANE_LOAD, deadline, op, Box::new(answer));
    }

    /// Tells why a file could not be read: the record's own fault, or the medium's.
    pub(crate) fn explain(&self, path: PathBuf, error: Error, deadline: Mono, done: Done<ReadDone>) {
        match error.os_code() {
            Some(code) if NO_FILE.contains(&code) => done(Err(own_fault(error))),
            Some(code) if FORBIDDEN.contains(&code) => self.blame(path, error, deadline, done),
            _ => done(Err(error)),
        }
    }

    /// No permission: that is the record's own fault if its directories can be searched, and else the medium's.
    fn blame(&self, path: PathBuf, error: Error, deadline: Mono, done: Done<ReadDone>) {
        let op = IoOp::Stat {
            paths: vec![path],
            stop_at_missing: false,
        };
        let answer = move |looked: Result<IoDone>| {
            let own = looked.is_ok();
            done(Err(if own { own_fault(error) } else { error }));
        };
        self.io.submit(LANE_LOAD, deadline, op, Box::new(answer));
    }

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

    /// Judges the bytes of a record that was read, in whatever form it is stored: what is wrong with them, if anything.
    pub(crate) fn judge(&self, id: BlockId, bytes: &[u8], stored_len: u64) -> Result<(), MissReason> {
        let expect = Expect {
            id,
            namespace: *self.config.identity.digest(),
            part: self.config.part,
            layout: &self.config.record,
        };
        verify_stored(bytes, stored_len, &expect).map(|_| ())
    }
}

/// This record can never be read, whatever the medium's health.
fn own_fault(error: Error) -> Error {
    Error::new(
        ErrorKind::Foreign,
        "what has this record's name cannot be read as one",
    )
    .caused_by(error)
}
