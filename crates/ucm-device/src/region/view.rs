//! A region of another process, mapped read-only.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use rustix::fs::{Mode, OFlags, open, readlink};
use ucm_core::{BlockId, Error, ErrorKind, Result};

use super::mapping::Mapping;
use super::notice::{Notice, memfd_name};
use super::shape::{HEADER_WORDS, Shape};
use super::table::{MOST_PROBES, Table};
use crate::fork::hold_forks;

/// A region of another process (or of another store of this one), for reading. Its memory stays
/// mapped after its writer died; [`super::Registry::scan`] then no longer returns it.
#[derive(Debug)]
pub struct RegionView {
    mapping: Mapping,
    shape: Shape,
    pid: u32,
}

impl RegionView {
    /// Maps the region of a registry file. `Foreign` if it is not (or no longer) as announced, `Io`
    /// if the system denies access.
    pub(crate) fn attach(notice: &Notice) -> Result<Self> {
        let path = format!("/proc/{}/fd/{}", notice.pid, notice.fd);
        let refused = |errno: rustix::io::Errno, what: &'static str| {
            Error::from_io(errno.into(), what).with("pid", notice.pid)
        };
        let wanted = format!("/memfd:{} (deleted)", memfd_name(notice.nonce));
        let link = readlink(path.as_str(), Vec::new());
        let link = link.map_err(|errno| refused(errno, "a region's descriptor cannot be read"))?;
        if link.to_bytes() != wanted.as_bytes() {
            let text = "the process number of a region is another process's by now, or of another \
                        container";
            return Err(Error::new(ErrorKind::Foreign, text).with("pid", notice.pid));
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let together = hold_forks()?;
        let fd: OwnedFd = open(path.as_str(), flags, Mode::empty())
            .map_err(|errno| refused(errno, "a region's descriptor cannot be opened"))?;
        let mapping = Mapping::attach(&fd, notice.bytes)?;
        drop(fd);
        drop(together);
        let mut header = [0; HEADER_WORDS];
        for (value, word) in header.iter_mut().zip(mapping.words()) {
            *value = word.load(Ordering::Relaxed);
        }
        let shape = Shape::parse(&header).filter(|shape| {
            shape.nonce == notice.nonce
                && shape.len() == notice.bytes
                && shape.namespace == notice.namespace
                && shape.record_len == notice.record_len
        });
        let shape = shape.ok_or_else(|| {
            Error::new(
                ErrorKind::Foreign,
                "a region is not what its registry file says",
            )
            .with("pid", notice.pid)
        })?;
        Ok(Self {
            mapping,
            shape,
            pid: notice.pid,
        })
    }

    /// True if it has the record.
    pub fn contains(&self, id: BlockId) -> bool {
        self.table().find(id).is_some()
    }

    /// Copies parts of a record, up to its end, each to its offset in the record, and returns the
    /// record's length; `None` if it does not exist, was removed during the copy, or a part does
    /// not fit `out`. Parts begin at multiples of 8. The checksums of the bytes must be verified.
    pub fn copy_parts(&self, id: BlockId, parts: &[Range<usize>], out: &mut [u8]) -> Option<usize> {
        self.table().copy_parts(id, parts, out)
    }

    /// Ids of all records, in no order, with their lengths.
    pub fn records(&self) -> Vec<(BlockId, usize)> {
        self.table()
            .iter()
            .map(|found| (found.id, found.len))
            .collect()
    }

    /// The number that identifies this region.
    pub fn nonce(&self) -> u64 {
        self.shape.nonce
    }

    /// The process that writes it.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Bytes of its address space.
    pub fn bytes(&self) -> usize {
        self.shape.len()
    }

    fn table(&self) -> Table<'_> {
        Table {
            words: self.mapping.words(),
            shape: &self.shape,
            probes: MOST_PROBES,
        }
    }
}
