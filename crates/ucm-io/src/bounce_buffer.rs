//! Page-aligned memory for direct I/O when the caller's buffer or offset is not aligned. Rare:
//! probes and repeated reads after a bad checksum.

use ucm_core::{Error, PAGE, Result, round_up};
use ucm_device::{ArenaOptions, HostArena, HugePages, Slot, SlotPool};

use crate::sys::{File, read_full};

/// `N` slots of `len` bytes each, in an arena of their own.
pub(crate) fn page_slots<const N: usize>(len: usize) -> Result<[Slot; N]> {
    let options = ArenaOptions {
        huge: HugePages::Off,
        prefault: false,
        node: None,
    };
    let len = round_up(len as u64, PAGE) as usize;
    let arena = HostArena::with(len.saturating_mul(N), options)?;
    let pool = SlotPool::new(arena, len)?;
    let slots: Vec<Slot> = std::iter::from_fn(|| pool.try_acquire()).take(N).collect();
    slots
        .try_into()
        .map_err(|_| Error::internal("a new slot pool has too few slots"))
}

/// The pages that contain a range of a file.
pub(crate) struct BounceBuffer {
    slot: Slot,
    start: u64,
    lead: usize,
    len: usize,
}

impl BounceBuffer {
    /// Those that contain `len` bytes at `offset`.
    pub(crate) fn new(offset: u64, len: usize) -> Result<Self> {
        let lead = (offset % PAGE) as usize;
        let [slot] = page_slots(lead.saturating_add(len).max(1))?;
        Ok(Self {
            slot,
            start: offset - lead as u64,
            lead,
            len,
        })
    }

    /// Reads the range; fewer bytes only at the end of the file.
    pub(crate) fn read(&mut self, file: &mut File) -> rustix::io::Result<&[u8]> {
        let end = self.lead + self.len;
        let got = read_full(file, self.slot.as_mut_slice(), self.start, end)?.min(end);
        Ok(&self.slot.as_slice()[self.lead.min(got)..got])
    }
}
