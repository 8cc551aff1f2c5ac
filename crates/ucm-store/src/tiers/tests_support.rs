//! A medium that has nothing, for tests of what stands before it.

use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::Slot;
use ucm_infra::Mono;

use crate::backend::{Backend, BlockRead, Done, Listed, Presence, Usage, WriteOptions, Written};

/// Has nothing and keeps nothing.
pub(crate) struct Nothing;

impl Backend for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }

    fn describe(&self) -> String {
        "nothing".to_owned()
    }

    fn probe(&self, _deadline: Mono) -> Result<()> {
        Ok(())
    }

    fn lookup(&self, ids: Vec<BlockId>, _stop: bool, _deadline: Mono, done: Done<Vec<Presence>>) {
        done(Ok(vec![Err(MissReason::Absent); ids.len()]));
    }

    fn read(&self, _stage: usize, reads: Vec<BlockRead>) {
        for BlockRead { slot, done, .. } in reads {
            drop(slot);
            done(Err(Error::new(ErrorKind::NotFound, "nothing is here")));
        }
    }

    fn write(&self, _id: BlockId, slot: Slot, _: WriteOptions, _deadline: Mono, done: Done<Written>) {
        drop(slot);
        done(Err(Error::new(ErrorKind::NoSpace, "nothing is kept here")));
    }

    fn touch(&self, _ids: &[(BlockId, u32)], _deadline: Mono) {}

    fn delete(&self, _ids: Vec<BlockId>, _deadline: Mono, done: Done<usize>) {
        done(Ok(0));
    }

    fn list(&self, _deadline: Mono, done: Done<Vec<Listed>>) {
        done(Ok(Vec::new()));
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }

    fn removed(&self) -> (u64, u64, u64) {
        (0, 0, 0)
    }

    fn stuck(&self) -> usize {
        0
    }

    fn shutdown(&self, _drain: Duration) {}
}
