//! Memory that copies and kernels reach: allocations, registered host memory, and foreign memory
//! that a test had accepted.
//!
//! Device addresses and the pages behind them are separate. The addresses of allocations and of
//! registered memory are reservations that fault on host access; they are never reused. Allocations
//! begin 512 bytes into a page, so that code cannot rely on more alignment than the driver
//! guarantees.

use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use crate::call::abort;
use crate::context;
use crate::error::{
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY, Outcome,
};
use crate::map::{self, PAGE};
use crate::state::{Handle, State};

/// Alignment of allocations.
const ALIGNMENT: usize = 512;

/// Memory of a device. Unwritten pages use no memory.
const CAPACITY: usize = 80 << 30;

pub(crate) const PORTABLE: u32 = 1;
const DEVICE_MAP: u32 = 2;
const WRITE_COMBINED: u32 = 4;

/// What a region is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Memory of a device.
    Device,
    /// Host memory of the caller's, registered.
    Registered,
    /// Host memory of `cuMemHostAlloc`; its device address is its host address.
    HostAllocated,
    /// Foreign host memory that counts as memory of a device.
    Accepted,
}

/// A range of device addresses with the pages behind it.
pub(crate) struct Region {
    /// The device address.
    pub(crate) start: u64,
    pub(crate) len: usize,
    /// Where the bytes are.
    bytes: usize,
    pub(crate) kind: Kind,
    /// The context it was made in; null for accepted memory.
    pub(crate) context: Handle,
    flags: u32,
    alive: AtomicBool,
    /// Operations, submitted or running, that use it.
    uses: AtomicU64,
}

impl Region {
    fn holds(&self, address: u64, len: usize) -> bool {
        (address.checked_sub(self.start))
            .and_then(|offset| offset.checked_add(len as u64))
            .is_some_and(|end| end <= self.len as u64)
    }

    /// Where the byte at a device address is. The address lies inside.
    fn byte(&self, address: u64) -> usize {
        self.bytes + (address - self.start) as usize
    }

    /// The device address of a host address, where that is inside.
    fn device_address(&self, host: u64) -> Option<u64> {
        let offset = host.checked_sub(self.bytes as u64);
        offset
            .filter(|&offset| offset < self.len as u64)
            .map(|offset| self.start + offset)
    }

    /// Whether its bytes are in pinned host memory.
    pub(crate) fn is_host(&self) -> bool {
        matches!(self.kind, Kind::Registered | Kind::HostAllocated)
    }

    /// True if copies in this context may use it. Host memory that is not portable belongs to one
    /// context.
    fn is_open_to(&self, context: Handle) -> bool {
        !self.is_host() || self.flags & PORTABLE != 0 || self.context == context
    }

    /// True if kernels in this context may use it. They cannot access memory of the other device.
    fn is_in_reach_of(&self, context: Handle) -> bool {
        self.is_open_to(context) && (self.kind != Kind::Device || self.context == context)
    }
}

impl Drop for Region {
    #[allow(unsafe_code, reason = "gives its pages back")]
    fn drop(&mut self) {
        match self.kind {
            // SAFETY: allocation mapped these pages for this region; users hold a reference to it.
            // The device addresses stay reserved.
            Kind::Device => unsafe { map::release(self.bytes, pages_of(self.len)) },
            // SAFETY: as above; the host may still hold the address, which faults from now on.
            Kind::HostAllocated => unsafe { map::retire(self.bytes, pages_of(self.len)) },
            Kind::Registered | Kind::Accepted => {}
        }
    }
}

/// A region in use by an operation: freeing it is an error while this exists.
pub(crate) struct Use(Arc<Region>);

impl Use {
    fn new(region: &Arc<Region>) -> Self {
        region.uses.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(region))
    }
}

impl Deref for Use {
    type Target = Region;

    fn deref(&self) -> &Region {
        &self.0
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.0.uses.fetch_sub(1, Ordering::SeqCst);
    }
}

/// One end of a copy.
pub(crate) enum Place {
    /// In a region, at this byte.
    Region { byte: usize, held: Use },
    /// Bytes taken from the caller before its call returned.
    Staged(Box<[u8]>),
    /// Memory of a caller that waits for the copy.
    Caller(usize),
}

impl Place {
    /// At a device address inside of a region.
    fn new(region: &Arc<Region>, address: u64) -> Self {
        Self::Region {
            byte: region.byte(address),
            held: Use::new(region),
        }
    }

    /// Where its bytes are.
    pub(crate) fn address(&self) -> usize {
        match self {
            Self::Region { byte, .. } => *byte,
            Self::Staged(bytes) => bytes.as_ptr().expose_provenance(),
            Self::Caller(address) => *address,
        }
    }

    /// Its bytes from there on, if they are the host's and were not copied.
    pub(crate) fn host(&self, len: usize) -> Option<Range<usize>> {
        let is_host = match self {
            Self::Region { held, .. } => held.is_host(),
            Self::Staged(_) => false,
            Self::Caller(_) => true,
        };
        is_host.then(|| self.address()..self.address() + len)
    }
}

/// All regions.
pub(crate) struct Memory {
    /// By device address.
    regions: BTreeMap<u64, Arc<Region>>,
    /// Addresses for adjacent allocations, if a test requested them.
    pub(crate) side_by_side: Option<Range<usize>>,
    /// Registered and allocated host memory, by host address.
    pinned: BTreeMap<u64, Arc<Region>>,
}

impl Memory {
    pub(crate) const fn new() -> Self {
        Self {
            regions: BTreeMap::new(),
            side_by_side: None,
            pinned: BTreeMap::new(),
        }
    }

    /// The end of a copy at a device address: it lies inside of one region.
    pub(crate) fn device_place(&self, address: u64, len: usize, context: Handle) -> Outcome<Place> {
        let region = before(&self.regions, address)
            .filter(|region| region.holds(address, len) && region.is_open_to(context));
        Ok(Place::new(region.ok_or(CUDA_ERROR_INVALID_VALUE)?, address))
    }

    /// As [`Memory::device_place`], whatever the context.
    pub(crate) fn any_place(&self, address: u64, len: usize) -> Outcome<Place> {
        let region = before(&self.regions, address).filter(|region| region.holds(address, len));
        Ok(Place::new(region.ok_or(CUDA_ERROR_INVALID_VALUE)?, address))
    }

    /// The end of a copy at a host address, where that is pinned memory. A range that is pinned in
    /// part, or that is memory of a device, is refused.
    pub(crate) fn pinned_place(
        &self,
        address: usize,
        len: usize,
        context: Handle,
    ) -> Outcome<Option<Place>> {
        let at = address as u64;
        let device = overlapping(&self.regions, at, len);
        if device.is_some_and(|region| region.kind != Kind::HostAllocated) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let Some(region) = overlapping(&self.pinned, at, len) else {
            return Ok(None);
        };
        let inside = region
            .device_address(at)
            .filter(|&device| region.holds(device, len));
        let device = inside.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        Ok(region
            .is_open_to(context)
            .then(|| Place::new(region, device)))
    }

    /// The region that a kernel's parameter points into, if it is a pointer.
    pub(crate) fn pointed_at(&self, value: u64) -> Option<Use> {
        before(&self.regions, value)
            .filter(|region| region.holds(value, 1))
            .map(Use::new)
    }

    /// The regions that a kernel of this context can access now, by address.
    pub(crate) fn in_reach_of(&self, context: Handle) -> Vec<Arc<Region>> {
        let regions = self.regions.values();
        let reached = regions.filter(|region| region.is_in_reach_of(context));
        reached.map(Arc::clone).collect()
    }

    /// The region that an address lies in, of the device or of pinned host memory.
    pub(crate) fn region_of(&self, address: u64) -> Option<&Region> {
        let device = before(&self.regions, address).filter(|region| region.holds(address, 1));
        let host = || {
            before(&self.pinned, address).filter(|region| region.device_address(address).is_some())
        };
        device.or_else(host).map(|region| &**region)
    }

    /// Takes foreign host memory as memory of a device.
    pub(crate) fn accept(&mut self, start: usize, len: usize) -> Outcome {
        let at = start as u64;
        if len == 0
            || at.checked_add(len as u64).is_none()
            || overlapping(&self.regions, at, len).is_some()
            || overlapping(&self.pinned, at, len).is_some()
        {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.enter(at, len, start, Kind::Accepted, 0, 0);
        Ok(())
    }

    /// Foreign memory is the host's again.
    pub(crate) fn forget(&mut self, start: usize) -> Outcome {
        let start = start as u64;
        if self
            .regions
            .get(&start)
            .is_none_or(|it| it.kind != Kind::Accepted)
        {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.remove(start, "softcuda_forget");
        Ok(())
    }

    /// How many regions there are of these kinds.
    pub(crate) fn count(&self, kinds: &[Kind]) -> u64 {
        self.regions
            .values()
            .filter(|region| kinds.contains(&region.kind))
            .count() as u64
    }

    /// A context's regions are removed with it.
    pub(crate) fn drop_context(&mut self, context: Handle) {
        let regions = self.regions.values();
        let made: Vec<u64> = regions
            .filter(|region| region.context == context)
            .map(|region| region.start)
            .collect();
        for start in made {
            self.remove(start, "releasing a context");
        }
    }

    fn enter(
        &mut self,
        start: u64,
        len: usize,
        bytes: usize,
        kind: Kind,
        context: Handle,
        flags: u32,
    ) {
        let region = Arc::new(Region {
            start,
            len,
            bytes,
            kind,
            context,
            flags,
            alive: AtomicBool::new(true),
            uses: AtomicU64::new(0),
        });
        if region.is_host() {
            self.pinned.insert(bytes as u64, Arc::clone(&region));
        }
        self.regions.insert(start, region);
    }

    fn remove(&mut self, start: u64, by: &str) {
        let Some(region) = self.regions.remove(&start) else {
            return;
        };
        // A kernel counts its use first and then checks that the region exists, so either this
        // check or the kernel's finds the other.
        region.alive.store(false, Ordering::SeqCst);
        let uses = region.uses.load(Ordering::SeqCst);
        if uses > 0 {
            abort(&format!(
                "{by}: queued work still uses the memory at {start:#x} ({} bytes, {uses} \
                 operations)",
                region.len
            ));
        }
        if region.is_host() {
            self.pinned.remove(&(region.bytes as u64));
        }
    }
}

/// `cuMemAlloc_v2`.
pub(crate) fn alloc(state: &mut State, context: Handle, len: usize) -> Outcome<u64> {
    if len == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let regions = state.memory.regions.values();
    let used: usize = regions
        .filter(|region| region.kind == Kind::Device && region.context == context)
        .map(|region| region.len)
        .sum();
    if len > CAPACITY - used {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    let bytes = map::pages(pages_of(len)).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let start = match &mut state.memory.side_by_side {
        Some(left) => {
            let start = left.start;
            left.start = (start + len).next_multiple_of(ALIGNMENT);
            (left.start <= left.end).then_some(start)
        }
        // The page behind it stays unused: an access behind the end is in no other allocation.
        None => map::reserve(pages_of(len + ALIGNMENT) + PAGE).map(|reserved| reserved + ALIGNMENT),
    };
    let start = start.ok_or(CUDA_ERROR_OUT_OF_MEMORY)? as u64;
    state
        .memory
        .enter(start, len, bytes, Kind::Device, context, 0);
    Ok(start)
}

/// `cuMemGetAddressRange_v2`: where an allocation begins, and its length.
pub(crate) fn range(state: &State, address: u64) -> Outcome<(u64, usize)> {
    let region = before(&state.memory.regions, address).filter(|region| region.holds(address, 1));
    region
        .map(|region| (region.start, region.len))
        .ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// Makes allocations adjacent from now on, like those of a driver that cuts them from larger ones,
/// or separate again.
pub(crate) fn set_side_by_side(state: &mut State, wanted: bool) {
    /// Enough for the adjacent allocations of tests.
    const ROOM: usize = 64 << 20;
    state.memory.side_by_side = wanted
        .then(|| map::reserve(ROOM))
        .flatten()
        .map(|first| first + ALIGNMENT..first + ROOM);
}

/// `cuMemFree_v2`; a null pointer is nothing to free.
pub(crate) fn free(state: &mut State, start: u64) -> Outcome {
    if start == 0 {
        return Ok(());
    }
    let region = state.memory.regions.get(&start);
    if region.is_none_or(|it| it.kind != Kind::Device) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    state.memory.remove(start, "cuMemFree");
    Ok(())
}

/// `cuMemHostAlloc`.
pub(crate) fn host_alloc(
    state: &mut State,
    context: Handle,
    len: usize,
    flags: u32,
) -> Outcome<usize> {
    if len == 0 || flags & !(PORTABLE | DEVICE_MAP | WRITE_COMBINED) != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let bytes = map::pages(pages_of(len)).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let kind = Kind::HostAllocated;
    state
        .memory
        .enter(bytes as u64, len, bytes, kind, context, flags);
    Ok(bytes)
}

/// `cuMemFreeHost`.
pub(crate) fn host_free(state: &mut State, start: usize) -> Outcome {
    let region = state.memory.regions.get(&(start as u64));
    if region.is_none_or(|it| it.kind != Kind::HostAllocated) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    state.memory.remove(start as u64, "cuMemFreeHost");
    Ok(())
}

/// `cuMemHostRegister_v2`: the device address keeps the host address's place within a page.
pub(crate) fn register(
    state: &mut State,
    context: Handle,
    start: usize,
    len: usize,
    flags: u32,
) -> Outcome {
    if start == 0 || len == 0 || start.checked_add(len).is_none() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if flags & !(PORTABLE | DEVICE_MAP) != 0 {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    let memory = &mut state.memory;
    if overlapping(&memory.pinned, start as u64, len).is_some() {
        return Err(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    }
    let device = overlapping(&memory.regions, start as u64, len);
    if device.is_some() || !map::is_mapped(start, len) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let offset = start % PAGE;
    let reserved = map::reserve(pages_of(offset + len) + PAGE).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let device = (reserved + offset) as u64;
    memory.enter(device, len, start, Kind::Registered, context, flags);
    Ok(())
}

/// `cuMemHostUnregister`.
pub(crate) fn unregister(state: &mut State, start: usize) -> Outcome {
    let region = state.memory.pinned.get(&(start as u64));
    let region = region.filter(|region| region.kind == Kind::Registered);
    let device = region.ok_or(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)?.start;
    state.memory.remove(device, "cuMemHostUnregister");
    Ok(())
}

/// `cuMemHostGetDevicePointer_v2`: only for memory registered as mapped for devices.
pub(crate) fn device_pointer(
    state: &State,
    context: Handle,
    address: usize,
    flags: u32,
) -> Outcome<u64> {
    before(&state.memory.pinned, address as u64)
        .filter(|region| region.is_open_to(context) && region.flags & DEVICE_MAP != 0 && flags == 0)
        .and_then(|region| region.device_address(address as u64))
        .ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// Ordinal of the device that a region belongs to; accepted memory counts as memory of the first
/// one.
pub(crate) fn ordinal(state: &State, region: &Region) -> i32 {
    context::device_of(state, region.context).unwrap_or(0)
}

/// The memory of a running kernel: the regions that it could access at its start, as long as they
/// exist.
pub(crate) struct KernelMemory {
    regions: Vec<Arc<Region>>,
    /// For each region, whether the kernel has used it.
    used: Vec<AtomicBool>,
    /// For each, the range from the kernel's first to its last written byte.
    wrote: Vec<[AtomicUsize; 2]>,
    host: AtomicU64,
    device: AtomicU64,
    /// Whether it writes wrong bytes.
    pub(crate) wrong: bool,
}

impl KernelMemory {
    pub(crate) fn new(regions: Vec<Arc<Region>>, wrong: bool) -> Self {
        Self {
            wrong,
            used: regions.iter().map(|_| AtomicBool::new(false)).collect(),
            wrote: regions
                .iter()
                .map(|_| [AtomicUsize::new(usize::MAX), AtomicUsize::new(0)])
                .collect(),
            regions,
            host: AtomicU64::new(0),
            device: AtomicU64::new(0),
        }
    }

    /// Bytes read and written so far, of host memory and of device memory.
    pub(crate) fn moved(&self) -> (u64, u64) {
        (
            self.host.load(Ordering::Relaxed),
            self.device.load(Ordering::Relaxed),
        )
    }

    /// The host's bytes that it has written so far: for each region, from the first to the last.
    pub(crate) fn written(&self) -> Vec<Range<usize>> {
        let host = self
            .regions
            .iter()
            .zip(&self.wrote)
            .filter(|(region, _)| region.is_host());
        let bytes = host
            .map(|(_, [first, end])| first.load(Ordering::Relaxed)..end.load(Ordering::Relaxed));
        bytes.filter(|bytes| !bytes.is_empty()).collect()
    }

    /// The target of a read, which is counted; `None` without memory.
    pub(crate) fn read(&self, address: u64, len: usize) -> Option<usize> {
        self.access(address, len).map(|(_, byte)| byte)
    }

    /// The target of a write, which is counted; `None` without memory.
    pub(crate) fn write(&self, address: u64, len: usize) -> Option<usize> {
        let (index, byte) = self.access(address, len)?;
        let [first, end] = &self.wrote[index];
        first.fetch_min(byte, Ordering::Relaxed);
        end.fetch_max(byte + len, Ordering::Relaxed);
        Some(byte)
    }

    /// The region of an access by its number, and the byte.
    fn access(&self, address: u64, len: usize) -> Option<(usize, usize)> {
        let index = self
            .regions
            .partition_point(|region| region.start <= address);
        let index = index.checked_sub(1)?;
        let region = &self.regions[index];
        if !region.holds(address, len) {
            return None;
        }
        if !self.used[index].swap(true, Ordering::Relaxed) {
            region.uses.fetch_add(1, Ordering::SeqCst);
        }
        if !region.alive.load(Ordering::SeqCst) {
            return None;
        }
        let moved = if region.is_host() {
            &self.host
        } else {
            &self.device
        };
        moved.fetch_add(len as u64, Ordering::Relaxed);
        Some((index, region.byte(address)))
    }
}

impl Drop for KernelMemory {
    fn drop(&mut self) {
        for (region, used) in self.regions.iter().zip(&self.used) {
            if used.load(Ordering::Relaxed) {
                region.uses.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }
}

/// The last region that begins at or before an address.
fn before(regions: &BTreeMap<u64, Arc<Region>>, address: u64) -> Option<&Arc<Region>> {
    regions
        .range(..=address)
        .next_back()
        .map(|(_, region)| region)
}

/// A region that shares a byte with a range.
fn overlapping(
    regions: &BTreeMap<u64, Arc<Region>>,
    address: u64,
    len: usize,
) -> Option<&Arc<Region>> {
    // Regions of one table do not overlap: the last one that begins before the range's end is the
    // one that can.
    let end = address.saturating_add(len as u64);
    let (start, region) = regions.range(..end).next_back()?;
    (start + region.len as u64 > address).then_some(region)
}

fn pages_of(len: usize) -> usize {
    len.next_multiple_of(PAGE)
}

#[cfg(test)]
mod tests {
    use super::{DEVICE_MAP, KernelMemory, Kind, Memory};

    #[test]
    fn a_running_kernel_loses_what_is_freed_and_its_use_is_known() {
        let (mut memory, context, other) = (Memory::new(), 16, 32);
        for start in [1000, 2000] {
            memory.enter(
                start,
                100,
                start as usize + 5,
                Kind::Registered,
                context,
                DEVICE_MAP,
            );
        }
        assert!(memory.in_reach_of(other).is_empty(), "not portable");
        let kernel = KernelMemory::new(memory.in_reach_of(context), false);
        assert_eq!(kernel.read(1098, 2), Some(1103));
        assert_eq!(kernel.read(1099, 2), None);
        assert_eq!(kernel.read(999, 1), None);
        memory.remove(2000, "the test");
        assert_eq!(kernel.read(2000, 1), None);
        assert_eq!(kernel.moved(), (2, 0));
        let uses = |memory: &Memory| memory.regions[&1000].uses.load(super::Ordering::SeqCst);
        assert_eq!(uses(&memory), 1);
        drop(kernel);
        assert_eq!(uses(&memory), 0);
    }
}
