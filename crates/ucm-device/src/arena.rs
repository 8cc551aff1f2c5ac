//! One mapping of host memory from which all staging slots are cut: page aligned (for direct I/O),
//! on huge pages if available (fewer TLB misses in copies and checksums), excluded from core dumps
//! and forked children.
//!
//! Children must not share it: a fork while direct I/O is in flight into a private mapping may
//! deliver the bytes to the wrong side (open(2), O_DIRECT), so the mapping is marked MADV_DONTFORK.
#![allow(
    unsafe_code,
    reason = "maps, advises and unmaps memory; hands out disjoint ranges of it"
)]

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use ucm_core::sync::Mutex;
use ucm_core::{Error, PAGE, Result, round_up};

use crate::fork::Origin;
use crate::numa;

/// Size and alignment of a huge page.
const HUGE: usize = 2 << 20;

/// Kinds of huge pages to request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HugePages {
    /// Reserved huge pages, then transparent ones, then ordinary pages.
    #[default]
    Try,
    /// Transparent huge pages, then ordinary pages.
    Transparent,
    /// Ordinary pages only.
    Off,
}

ucm_core::named! {
    /// The kind of pages of an arena.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Paging {
        /// Reserved huge pages (MAP_HUGETLB).
        Reserved = "reserved huge pages",
        /// Ordinary pages that the kernel may join (madvise accepted).
        Transparent = "transparent huge pages",
        /// Ordinary pages.
        Ordinary = "ordinary pages",
    }
}

/// Configuration of an arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ArenaOptions {
    /// Huge pages.
    pub huge: HugePages,
    /// Touch every page now, so that the first load does not pay for it and a shortage is an error
    /// here.
    pub prefault: bool,
    /// The preferred NUMA node.
    pub node: Option<u32>,
}

/// An anonymous private mapping, unmapped when dropped by the process that made it.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
    origin: Origin,
}

impl Mapping {
    fn new(
        len: usize,
        flags: MapFlags,
        node: Option<u32>,
        origin: Origin,
    ) -> std::io::Result<Self> {
        // SAFETY: an anonymous mapping at an address the kernel chooses touches no memory in use.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | flags,
            )
        }?;
        if let Some(node) = node {
            // SAFETY: the mapping, which is whole pages, and is still untouched.
            unsafe { numa::prefer(start, len, node) };
        }
        let start = NonNull::new(start.cast()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len, origin })
    }

    /// Advises the range from `offset` to the end.
    fn advise(&self, offset: usize, len: usize, advice: Advice) -> std::io::Result<()> {
        debug_assert!(offset + len <= self.len);
        // SAFETY: the range is inside our mapping, and none of the advices used here (populate,
        // huge page, no dump, no fork) changes a byte that was written.
        unsafe { madvise(self.start.as_ptr().add(offset).cast(), len, advice) }?;
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.origin.here() {
            // SAFETY: the mapping is ours, and every view of a range of it holds the arena, so none
            // is left. In a forked child it is not mapped, and another mapping may have the
            // address. Unmapping an existing mapping cannot fail.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

/// A user of an arena's memory, such as a device that pins it.
pub(crate) trait LetGo: Send + Sync {
    /// Ends the use of the memory. False if it may be used for ever: then the memory is never
    /// unmapped.
    fn let_go(&self) -> bool;
}

/// One anonymous private mapping of host memory, cut into slots by slot pools.
pub struct HostArena {
    /// The users of the mapping.
    kept: Option<Box<dyn LetGo>>,
    mapping: ManuallyDrop<Mapping>,
    /// Start of the usable bytes in the mapping; page aligned, on huge pages aligned to those.
    offset: usize,
    /// Usable bytes, a multiple of 4096.
    len: usize,
    paging: Paging,
    /// Bytes claimed by slot pools; it only grows, so no byte ever has two owners.
    claimed: Mutex<usize>,
}

// SAFETY: the arena owns its mapping; its bytes are accessed only through ranges that `claim`
// returns once, whose owners (slots) keep Rust's rules for them.
unsafe impl Send for HostArena {}
// SAFETY: as above; `claimed` is behind a lock and everything else is immutable.
unsafe impl Sync for HostArena {}

impl HostArena {
    /// At least `bytes` of zeroed memory (rounded up to 4096), on huge pages if allowed, not
    /// touched yet. `InvalidInput` for an impossible size, `Io` if the system refuses the memory.
    pub fn new(bytes: usize) -> Result<Arc<Self>> {
        Self::with(bytes, ArenaOptions::default())
    }

    /// As [`HostArena::new`], with options.
    pub fn with(bytes: usize, options: ArenaOptions) -> Result<Arc<Self>> {
        if bytes == 0 || bytes > isize::MAX as usize - 2 * HUGE {
            return Err(
                Error::invalid("a host arena has between 1 byte and the address space")
                    .with("bytes", bytes),
            );
        }
        let len = round_up(bytes as u64, PAGE) as usize;
        let refused = |e: std::io::Error| {
            Error::from_io(
                e,
                "the system refuses memory for the host arena; lower its size",
            )
            .with("bytes", len)
        };
        let origin = Origin::this()?;
        let arena = match Self::reserved(len, options, origin) {
            Some(arena) => arena,
            None => Self::ordinary(len, options, origin).map_err(refused)?,
        };
        // Advice only: the arena also works on an old kernel that knows neither.
        for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
            let _ = arena.mapping.advise(0, arena.mapping.len, advice);
        }
        if options.prefault {
            arena.prefault().map_err(refused)?;
        }
        Ok(Arc::new(arena))
    }

    /// On reserved huge pages; `None` if there are none.
    fn reserved(len: usize, options: ArenaOptions, origin: Origin) -> Option<Self> {
        if options.huge != HugePages::Try {
            return None;
        }
        let mapped = round_up(len as u64, HUGE as u64) as usize;
        let flags = MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        let mapping = Mapping::new(mapped, flags, options.node, origin).ok()?;
        // A cgroup may refuse reserved pages at the first touch, with SIGBUS; a touch here turns
        // that into an error.
        mapping.advise(0, mapped, Advice::LinuxPopulateWrite).ok()?;
        Some(Self::around(mapping, len, Paging::Reserved))
    }

    fn around(mapping: Mapping, len: usize, paging: Paging) -> Self {
        Self {
            kept: None,
            mapping: ManuallyDrop::new(mapping),
            offset: 0,
            len,
            paging,
            claimed: Mutex::new(0),
        }
    }

    /// On ordinary pages, which the kernel may join if it accepts the advice.
    fn ordinary(len: usize, options: ArenaOptions, origin: Origin) -> std::io::Result<Self> {
        let try_huge = options.huge != HugePages::Off && len >= HUGE;
        // One huge page more, so that the usable part can be aligned to one.
        let mapped = if try_huge { len + HUGE } else { len };
        let mapping = Mapping::new(mapped, MapFlags::empty(), options.node, origin)?;
        let mut arena = Self::around(mapping, len, Paging::Ordinary);
        if try_huge {
            arena.offset = arena.mapping.start.as_ptr().align_offset(HUGE);
            let advised = (arena.mapping).advise(arena.offset, len, Advice::LinuxHugepage);
            if advised.is_ok() {
                arena.paging = Paging::Transparent;
            }
        }
        Ok(arena)
    }

    /// Touches every page; on an old kernel without the advice the first use does.
    fn prefault(&self) -> std::io::Result<()> {
        let advice = Advice::LinuxPopulateWrite;
        match self.mapping.advise(self.offset, self.len, advice) {
            Err(e) if e.kind() == std::io::ErrorKind::InvalidInput => Ok(()),
            other => other,
        }
    }

    /// Registers a user of the memory.
    pub(crate) fn keep(&mut self, kept: Box<dyn LetGo>) {
        self.kept = Some(kept);
    }

    /// Usable bytes.
    #[allow(
        clippy::len_without_is_empty,
        reason = "there is always at least one page"
    )]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Address of the first usable byte, for a library that must register the memory before it
    /// moves bytes of slots.
    pub fn address(&self) -> u64 {
        self.at(0) as u64
    }

    /// Which pages it got.
    pub fn paging(&self) -> Paging {
        self.paging
    }

    /// Bytes that no slot pool owns yet.
    pub fn unclaimed(&self) -> usize {
        self.len - *self.claimed.lock()
    }

    /// Claims `bytes` (a multiple of 4096) for the life of the arena; `None` if fewer are left.
    pub(crate) fn claim(&self, bytes: usize) -> Option<Range<usize>> {
        debug_assert!((bytes as u64).is_multiple_of(PAGE));
        let mut claimed = self.claimed.lock();
        let end = claimed.checked_add(bytes).filter(|&end| end <= self.len)?;
        Some(std::mem::replace(&mut *claimed, end)..end)
    }

    /// Address of the byte at `offset` of the usable part. Reading or writing there is allowed only
    /// to the owner of a claimed range around it.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.len);
        // SAFETY: `offset` is inside the usable part (or one past it), which lies inside the
        // mapping.
        unsafe { self.mapping.start.as_ptr().add(self.offset + offset) }
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        if self.kept.as_ref().is_none_or(|kept| kept.let_go()) {
            // SAFETY: dropped here, once, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.mapping) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fork::tests::in_child;

    #[test]
    fn every_kind_of_page_gives_aligned_memory() {
        for huge in [HugePages::Try, HugePages::Transparent, HugePages::Off] {
            for prefault in [false, true] {
                let arena = HostArena::with(
                    (4 << 20) + 1,
                    ArenaOptions {
                        huge,
                        prefault,
                        node: None,
                    },
                )
                .unwrap();
                assert_eq!(arena.len(), (4 << 20) + 4096);
                assert!((arena.at(0) as usize).is_multiple_of(4096));
                if huge == HugePages::Off {
                    assert_eq!(arena.paging(), Paging::Ordinary);
                } else if arena.paging() != Paging::Ordinary {
                    assert!((arena.at(0) as usize).is_multiple_of(HUGE));
                }
            }
        }
    }

    #[test]
    fn no_byte_is_claimed_twice() {
        let arena = HostArena::new(3 * 4096).unwrap();
        assert_eq!(arena.claim(8192), Some(0..8192));
        assert_eq!(arena.claim(8192), None);
        assert_eq!(arena.unclaimed(), 4096);
        assert_eq!(arena.claim(4096), Some(8192..12288));
        assert_eq!(arena.claim(4096), None);
        assert_eq!(arena.claim(0), Some(12288..12288));
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert!(HostArena::new(0).is_err());
        assert!(HostArena::new(usize::MAX).is_err());
        // A size within the address space but beyond any machine's memory.
        let error = HostArena::new(1 << 60).err().unwrap();
        assert!(error.to_string().contains("lower its size"), "{error}");
    }

    /// The child maps memory of its own at the address of its parent's arena.
    #[test]
    fn a_forked_child_that_drops_an_arena_unmaps_nothing() {
        let arena = HostArena::new(1 << 20).unwrap();
        let (start, len) = (arena.mapping.start.as_ptr(), arena.mapping.len);
        let status = in_child(move || {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            // SAFETY: maps memory at a free address; an access to memory that is not mapped any
            // more ends the child.
            unsafe {
                let own = libc::mmap(
                    start.cast(),
                    len,
                    libc::PROT_READ | libc::PROT_WRITE,
                    flags,
                    -1,
                    0,
                );
                own == start.cast() && {
                    start.write_volatile(7);
                    drop(arena);
                    start.read_volatile() == 7
                }
            }
        });
        assert_eq!(status, 0, "how the child ended");
    }

    #[test]
    fn the_mapping_is_kept_from_forked_children_and_core_dumps() {
        let arena = HostArena::new(1 << 20).unwrap();
        let address = arena.at(0) as usize;
        let holds = |line: &str| {
            let (from, to) = line.split_whitespace().next()?.split_once('-')?;
            let parse = |hex| usize::from_str_radix(hex, 16).ok();
            Some((parse(from)?..parse(to)?).contains(&address))
        };
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let flags = smaps
            .lines()
            .skip_while(|line| holds(line) != Some(true))
            .find(|line| line.starts_with("VmFlags:"))
            .unwrap();
        // "don't copy on fork" and "don't dump".
        assert!(flags.contains(" dc") && flags.contains(" dd"), "{flags}");
    }
}
