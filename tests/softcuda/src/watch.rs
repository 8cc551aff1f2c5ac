//! Checks that the host does not change the pinned memory of a queued copy.
//!
//! A copy takes a checksum of the pinned memory that it reads or writes when it is queued, and
//! compares when it runs. If the two differ, a device might have moved wrong bytes, so the process
//! ends. A write by the driver itself, by an earlier copy or a kernel, is not a change by the host:
//! the checksum is computed again. The memory of a kernel is unknown at its launch and is not
//! checked.
#![allow(unsafe_code, reason = "reads the memory that queued copies name")]

use std::ops::Range;
use std::ptr::with_exposed_provenance;

use crc_fast::CrcAlgorithm::Crc64Nvme;

/// A part of the host's memory, with its checksum.
pub(crate) struct Watched {
    bytes: Range<usize>,
    sum: u64,
}

impl Watched {
    /// # Safety
    /// The bytes are mapped as long as this exists.
    pub(crate) unsafe fn new(bytes: Range<usize>) -> Self {
        let mut watched = Self { bytes, sum: 0 };
        watched.sum = watched.sum_now();
        watched
    }

    /// Its begin and length, if it has changed.
    pub(crate) fn changed(&self) -> Option<(usize, usize)> {
        (self.sum_now() != self.sum).then_some((self.bytes.start, self.bytes.len()))
    }

    /// The driver has written to these bytes.
    pub(crate) fn written(&mut self, bytes: &Range<usize>) {
        if self.bytes.start < bytes.end && bytes.start < self.bytes.end {
            self.sum = self.sum_now();
        }
    }

    fn sum_now(&self) -> u64 {
        let first = with_exposed_provenance::<u8>(self.bytes.start);
        // SAFETY: mapped, as the maker promised. A concurrent write is the error to detect.
        let bytes = unsafe { std::slice::from_raw_parts(first, self.bytes.len()) };
        crc_fast::checksum(Crc64Nvme, bytes)
    }
}
