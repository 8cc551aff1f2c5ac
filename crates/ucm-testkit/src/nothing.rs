//! An empty medium, for tests of the layers above it.

use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::Slot;
use ucm_infra::MonotonicTime;
use ucm_io::IoJob;
use ucm_media::backend::{
    Backend, BlockRead, Features, Listed, MediumStats, Outcome, Presence, WriteOptions, Written,
};

/// Contains nothing and stores nothing.
pub struct Nothing;

impl Backend for Nothing {
    fn features(&self) -> Features<'_> {
        Features {
            name: "nothing",
            ..Features::default()
        }
    }

    fn open(&self, _deadline: MonotonicTime) -> Result<String> {
        Ok("nothing".to_owned())
    }

    fn lookup(&self, _io: &IoJob, ids: &[BlockId], _stop: bool) -> Result<Vec<Presence>> {
        Ok(vec![Err(MissReason::Absent); ids.len()])
    }

    fn read(&self, _io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        let nothing = |_| Outcome::Read(Err(Error::new(ErrorKind::NotFound, "nothing is here")));
        run.into_iter().map(nothing).collect()
    }

    fn write(&self, _io: &IoJob, _id: BlockId, _: Slot, _: WriteOptions) -> Result<Written> {
        let text = "this medium stores nothing";
        Err(Error::new(ErrorKind::NoSpace, text))
    }

    fn touch(&self, _ids: &[(BlockId, u32)], _deadline: MonotonicTime) {}

    fn delete(&self, _io: &IoJob, _ids: &[BlockId]) -> Result<usize> {
        Ok(0)
    }

    fn list(&self, _io: &IoJob) -> Result<Vec<Listed>> {
        Ok(Vec::new())
    }

    fn stats(&self) -> MediumStats {
        MediumStats::default()
    }

    fn close(&self, _drain: Duration) {}
}
