//! Resources of a transfer: streams, the staging buffer on the device for small pieces, and the
//! memory of descriptors. A lane executes one transfer at a time.
#![allow(
    unsafe_code,
    reason = "begins copies of ranges that their makers vouched for, and waits for them"
)]

use std::ops::Range;
use std::sync::Arc;

use tracing::warn;
use ucm_core::sync::Mutex;
use ucm_core::{Error, Result};

use super::pinned::{Arenas, Pinned};
use super::plan::{DESCRIPTOR, DESCRIPTORS, Method, Run};
use super::runtime::{
    Direction, Kernel, Owned, RawCopy, RawEvent, RawStream, Runtime, wait_until_over,
};
use crate::arena::{ArenaOptions, HostArena};

/// Bytes of the staging buffer.
pub(super) const STAGED: usize = 8 << 20;

/// Device memory allocated by us.
pub(super) struct Allocation {
    runtime: Arc<dyn Runtime>,
    pub(super) address: u64,
}

impl Allocation {
    pub(super) fn new(runtime: &Arc<dyn Runtime>, bytes: usize) -> Result<Self> {
        Ok(Self {
            address: runtime.allocate(bytes)?,
            runtime: Arc::clone(runtime),
        })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let _ = self.runtime.end(Owned::Memory(self.address)); // a failure could not be handled
    }
}

/// Most lanes of a device with a staging buffer and memory for descriptors: 8.4 MiB of device
/// memory each. This is the number of the memory tier's loading threads; a concurrent dump may find
/// none free and then copies each run by itself.
const ROOMS: usize = 8;

/// Segments in the buffer begin at multiples of this.
const ALIGNED: usize = 256;

/// Bytes that one block of threads copies at a time.
const TILE: usize = 16 << 10;

/// Most blocks of threads of a kernel between places on the device, and of one that reads or writes
/// the host's memory: a few keep the bus busy.
const BLOCKS: [u32; 2] = [512, 32];

/// The host's side of a transfer.
#[derive(Clone, Copy)]
pub(super) struct Host<'a> {
    pub(super) first: *mut u8,
    /// Where it is pinned.
    pub(super) pinned: Option<&'a Pinned>,
}

impl Host<'_> {
    fn at(self, at: usize) -> *mut u8 {
        self.first.wrapping_add(at)
    }

    /// The part of pinned memory around an offset; the whole address range if nothing is pinned.
    pub(super) fn part(self, at: usize) -> Range<usize> {
        let first = self.first.expose_provenance();
        self.pinned.map_or(0..usize::MAX, |pinned| {
            let part = pinned.part_of(first + at);
            part.start.saturating_sub(first)..part.end - first
        })
    }

    /// Returns the device's addresses of the host's side of runs; `None` if kernels cannot reach
    /// it.
    fn mapping(self) -> impl FnMut(&Run) -> Option<u64> {
        let (mut inside, mut first) = (0..0, 0);
        move |run| {
            let at = self.at(run.at).expose_provenance();
            if !inside.contains(&at) {
                let pinned = self.pinned?;
                first = pinned.mapped(at)?;
                inside = pinned.part_of(at);
            }
            Some(first + (at - inside.start) as u64)
        }
    }

    /// True if kernels can reach the host's side of runs.
    pub(super) fn is_mapped(self, runs: &[Run]) -> bool {
        let mut mapping = self.mapping();
        runs.iter().all(|run| mapping(run).is_some())
    }
}

/// Runs that are staged together: `count` of them from `first` on, with the length of the longest.
#[derive(Default)]
struct Chunk {
    first: usize,
    count: usize,
    longest: usize,
    segments: Vec<Segment>,
}

/// A contiguous part of the host buffer and of the buffer on the device.
struct Segment {
    at: usize,
    offset: usize,
    len: usize,
}

/// The idle lanes of a device.
pub(super) struct Lanes {
    pub(super) arenas: Arenas,
    idle: Mutex<Vec<Lane>>,
    /// Each lane's [`Room`] has a clone.
    rooms: Arc<()>,
}

impl Lanes {
    pub(super) fn new(runtime: Arc<dyn Runtime>) -> Result<Self> {
        Ok(Self {
            arenas: Arenas::new(runtime)?,
            idle: Mutex::default(),
            rooms: Arc::default(),
        })
    }

    /// An idle lane, preferably with a staging buffer, or a new one: one for each concurrent
    /// transfer.
    pub(super) fn take(&self) -> Result<Lane> {
        let mut idle = self.idle.lock();
        let last = idle.len().checked_sub(1);
        if let Some(at) = idle.iter().rposition(|lane| lane.room.is_some()).or(last) {
            return Ok(idle.swap_remove(at));
        }
        drop(idle);
        self.make()
    }

    /// Returns a lane after a successful transfer.
    pub(super) fn give(&self, lane: Lane) {
        self.idle.lock().push(lane);
    }

    fn make(&self) -> Result<Lane> {
        let runtime = Arc::clone(&self.arenas.runtime);
        let to_device = runtime.make_stream()?;
        let to_host = runtime
            .make_stream()
            .inspect_err(|_| _ = runtime.end(Owned::Stream(to_device)))?;
        let mut lane = Lane {
            runtime,
            streams: [to_device, to_host],
            room: None,
        };
        if lane.runtime.has_kernels() {
            lane.room = self.make_room();
        }
        Ok(lane)
    }

    /// `None` if there are enough already, or no memory: a model may have taken all of the
    /// device's.
    fn make_room(&self) -> Option<Room> {
        let counted = Arc::clone(&self.rooms);
        if Arc::strong_count(&counted) > ROOMS + 1 {
            return None;
        }
        let refused =
            |error: &Error| warn!(%error, "no memory for staged copies: small copies are slow");
        Room::new(&self.arenas, counted).inspect_err(refused).ok()
    }
}

/// Staging memory for small pieces. Its two parts on the device are two allocations, so that a
/// transfer beyond the end of one does not write into the other.
struct Room {
    /// On the device: the staged bytes.
    staged: Allocation,
    /// On the device: descriptors.
    table: Allocation,
    /// On the host, pinned: descriptors.
    descriptors: Arc<HostArena>,
    _counted: Arc<()>,
}

impl Room {
    fn new(arenas: &Arenas, counted: Arc<()>) -> Result<Self> {
        const TABLE: usize = DESCRIPTORS * DESCRIPTOR;
        let descriptors = arenas.make(TABLE, ArenaOptions::default())?;
        arenas.pin(descriptors.at(0).expose_provenance(), descriptors.len());
        Ok(Self {
            staged: Allocation::new(&arenas.runtime, STAGED)?,
            table: Allocation::new(&arenas.runtime, TABLE)?,
            descriptors,
            _counted: counted,
        })
    }
}

/// Streams of one user of a device, with staging memory if available.
pub(super) struct Lane {
    runtime: Arc<dyn Runtime>,
    streams: [RawStream; 2],
    room: Option<Room>,
}

impl Lane {
    /// True if the lane supports a method at all.
    pub(super) fn can(&self, method: Method) -> bool {
        matches!(method, Method::Dma | Method::Plain) || self.room.is_some()
    }

    fn stream(&self, direction: Direction) -> RawStream {
        self.streams[direction as usize]
    }

    /// Records an event behind the work begun in a direction.
    pub(super) fn record(&self, event: RawEvent, direction: Direction) -> Result<()> {
        Ok(self.runtime.record(event, self.stream(direction))?)
    }

    /// Waits until a direction's work is over, failed or not.
    pub(super) fn wait(&self, direction: Direction) -> Result<()> {
        wait_until_over(&*self.runtime, self.stream(direction))
    }

    /// Begins to move runs. With more than one round of descriptors it waits for all rounds but the
    /// last.
    ///
    /// # Safety
    /// The conditions of [`DeviceSpan::new`](crate::DeviceSpan::new) hold for every run,
    /// and the host's side is readable (for [`Direction::ToHost`] writable, by this copy only)
    /// until [`Lane::wait`] has returned.
    pub(super) unsafe fn begin(
        &mut self,
        method: Method,
        direction: Direction,
        runs: &[Run],
        host: Host<'_>,
    ) -> Result<()> {
        if runs.is_empty() {
            return Ok(());
        }
        if method == Method::Dma {
            for run in runs {
                // SAFETY: as the caller vouches.
                unsafe { self.copy(direction, run.address, host.at(run.at), run.len) }?;
            }
            return Ok(());
        }
        if method == Method::Plain {
            let copied = runs.iter().try_for_each(|run| {
                let copy = RawCopy::between(direction, run.address, host.at(run.at), run.len);
                // SAFETY: as the caller vouches, and waited for here.
                unsafe { self.runtime.copy(copy, None) }.map_err(Error::from)
            });
            return wait_until_over(&*self.runtime, RawStream::DEFAULT).and(copied);
        }
        for (number, round) in runs.chunks(DESCRIPTORS).enumerate() {
            if number > 0 {
                self.wait(direction)?; // the previous descriptors are in use until then
            }
            // SAFETY: as the caller vouches.
            unsafe {
                match method {
                    Method::Kernel => self.round_mapped(direction, round, host)?,
                    _ => self.round_staged(direction, round, host)?,
                }
            }
        }
        Ok(())
    }

    /// One copy between a device address and a host address.
    ///
    /// # Safety
    /// As [`Lane::begin`].
    unsafe fn copy(&self, way: Direction, device: u64, host: *mut u8, len: usize) -> Result<()> {
        let copy = RawCopy::between(way, device, host, len);
        // SAFETY: as the caller vouches.
        Ok(unsafe { self.runtime.copy(copy, Some(self.stream(way))) }?)
    }

    /// The kernel reads or writes the host's memory itself.
    ///
    /// # Safety
    /// As [`Lane::begin`].
    unsafe fn round_mapped(
        &mut self,
        direction: Direction,
        runs: &[Run],
        host: Host<'_>,
    ) -> Result<()> {
        let (mut mapping, mut longest) = (host.mapping(), 0);
        for (descriptor, run) in self.descriptors()?.iter_mut().zip(runs) {
            let Some(mapped) = mapping(run) else {
                return Err(Error::internal(
                    "a kernel was to reach host memory that the device cannot",
                ));
            };
            let (from, to) = match direction {
                Direction::ToDevice => (mapped, run.address),
                Direction::ToHost => (run.address, mapped),
            };
            *descriptor = [from, to, run.len as u64];
            longest = longest.max(run.len);
        }
        let stream = self.stream(direction);
        let table = self.upload(runs.len(), stream)?;
        let (grid, count) = (tiles(runs.len(), longest, BLOCKS[1]), runs.len() as u64);
        // SAFETY: as the caller vouches; the descriptors are in the lane's own memory until the
        // stream's work is over.
        Ok(unsafe {
            self.runtime
                .launch(Kernel::Batch, table, count, 0, grid, stream)
        }?)
    }

    /// Through the staging buffer on the device.
    ///
    /// # Safety
    /// As [`Lane::begin`].
    unsafe fn round_staged(
        &mut self,
        direction: Direction,
        runs: &[Run],
        host: Host<'_>,
    ) -> Result<()> {
        let chunks = staged(runs, |at| host.part(at), self.descriptors()?);
        let stream = self.stream(direction);
        let descriptors = self.upload(runs.len(), stream)?;
        let buffer = self.room()?.staged.address;
        for chunk in &chunks {
            let first = descriptors + (chunk.first * DESCRIPTOR) as u64;
            let grid = tiles(chunk.count, chunk.longest, BLOCKS[0]);
            // SAFETY: as the caller vouches; the buffer is the lane's own, and one stream orders
            // all work on it.
            let launch = |kernel| unsafe {
                let count = chunk.count as u64;
                self.runtime
                    .launch(kernel, first, count, buffer, grid, stream)
            };
            if direction == Direction::ToHost {
                launch(Kernel::Gather)?;
            }
            for segment in &chunk.segments {
                let (device, host) = (buffer + segment.offset as u64, host.at(segment.at));
                // SAFETY: as above.
                unsafe { self.copy(direction, device, host, segment.len) }?;
            }
            if direction == Direction::ToDevice {
                launch(Kernel::Scatter)?;
            }
        }
        Ok(())
    }

    fn room(&self) -> Result<&Room> {
        let none = || Error::internal("a kernel was begun on a lane without room");
        self.room.as_ref().ok_or_else(none)
    }

    /// The memory for descriptors. The previous ones must not be in use any more.
    fn descriptors(&mut self) -> Result<&mut [[u64; 3]]> {
        let first = self.room()?.descriptors.at(0);
        // SAFETY: the arena is the lane's own, page aligned, large enough and initialised; nothing
        // on the device reads it now, and the lane is borrowed for as long as the slice is.
        Ok(unsafe { std::slice::from_raw_parts_mut(first.cast(), DESCRIPTORS) })
    }

    /// Begins to copy `count` descriptors to the device; returns their address there.
    fn upload(&mut self, count: usize, stream: RawStream) -> Result<u64> {
        let room = self.room()?;
        let (to, from) = (room.table.address, room.descriptors.at(0));
        debug_assert!(count <= DESCRIPTORS);
        let copy = RawCopy::between(Direction::ToDevice, to, from, count * DESCRIPTOR);
        // SAFETY: both ranges are the lane's own and large enough; nothing writes to the one on the
        // host until the stream's work is over.
        unsafe { self.runtime.copy(copy, Some(stream)) }?;
        Ok(to)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        for stream in self.streams {
            // its error is returned to the starter of the work
            let _ = wait_until_over(&*self.runtime, stream);
            let _ = self.runtime.end(Owned::Stream(stream));
        }
    }
}

/// Chunks of runs in the order of the host buffer, and their descriptors: as many as fit into the
/// staging buffer at a time. Adjacent runs stay adjacent in it; no segment crosses a border between
/// two parts of pinned memory. No run is longer than the buffer.
fn staged(
    runs: &[Run],
    part: impl Fn(usize) -> Range<usize>,
    descriptors: &mut [[u64; 3]],
) -> Vec<Chunk> {
    let (mut chunks, mut chunk) = (Vec::new(), Chunk::default());
    let mut end = 0_usize; // within the chunk, and within the host buffer
    let (mut host_end, mut inside) = (usize::MAX, 0..0);
    for (run, descriptor) in runs.iter().zip(descriptors) {
        let is_next = run.at == host_end;
        let is_same_part = inside.contains(&run.at);
        if !is_same_part {
            inside = part(run.at);
        }
        let mut offset = if is_next {
            end
        } else {
            end.next_multiple_of(ALIGNED)
        };
        if offset + run.len > STAGED {
            let first = chunk.first + chunk.count;
            chunks.push(std::mem::replace(
                &mut chunk,
                Chunk {
                    first,
                    ..Chunk::default()
                },
            ));
            offset = 0;
        }
        *descriptor = [run.address, offset as u64, run.len as u64];
        match chunk.segments.last_mut() {
            Some(last) if is_next && is_same_part => last.len += run.len,
            _ => chunk.segments.push(Segment {
                at: run.at,
                offset,
                len: run.len,
            }),
        }
        chunk.count += 1;
        chunk.longest = chunk.longest.max(run.len);
        end = offset + run.len;
        host_end = run.at + run.len;
    }
    chunks.push(chunk);
    chunks
}

/// A grid over descriptors and tiles with a limited number of blocks of threads.
fn tiles(count: usize, longest: usize, blocks: u32) -> [u32; 2] {
    let x = u32::try_from(count).unwrap_or(u32::MAX).clamp(1, blocks);
    let y = u32::try_from(longest.div_ceil(TILE))
        .unwrap_or(u32::MAX)
        .clamp(1, (blocks / x).max(1));
    [x, y]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs of these lengths, `gap` bytes apart in the host buffer, their descriptors, and their
    /// chunks. Memory is pinned in parts of `part` bytes.
    fn chunks(
        at: usize,
        lens: &[usize],
        gap: usize,
        part: usize,
    ) -> (Vec<Run>, Vec<[u64; 3]>, Vec<Chunk>) {
        let mut at = at;
        let run = |&len: &usize| {
            let run = Run {
                at,
                address: at as u64 * 3,
                len,
            };
            at += len + gap;
            run
        };
        let runs: Vec<Run> = lens.iter().map(run).collect();
        let mut descriptors = vec![[0; 3]; runs.len()];
        let chunks = staged(
            &runs,
            |at| at / part * part..(at / part + 1) * part,
            &mut descriptors,
        );
        (runs, descriptors, chunks)
    }

    /// Each run lies in one segment, at the position of its descriptor. Each segment lies in the
    /// buffer and in one part.
    fn check(runs: &[Run], descriptors: &[[u64; 3]], chunks: &[Chunk], part: usize) {
        let mut next = 0;
        for chunk in chunks {
            assert_eq!(chunk.first, next);
            next += chunk.count;
            let mine = &runs[chunk.first..next];
            assert_eq!(mine.iter().map(|run| run.len).max(), Some(chunk.longest));
            let (mut end, mut moved) = (0, 0);
            for segment in &chunk.segments {
                assert!(segment.offset >= end, "segments lie apart in the buffer");
                end = segment.offset + segment.len;
                assert!(end <= STAGED, "{end} bytes are staged at once");
                assert_eq!(
                    segment.at / part,
                    (segment.at + segment.len - 1) / part,
                    "of one part"
                );
                moved += segment.len;
            }
            assert_eq!(moved, mine.iter().map(|run| run.len).sum::<usize>());
            for (run, &[address, offset, len]) in mine.iter().zip(&descriptors[chunk.first..]) {
                assert_eq!((address, len), (run.address, run.len as u64));
                let holds = |segment: &Segment| {
                    segment.at <= run.at
                        && run.at + run.len <= segment.at + segment.len
                        && segment.offset + (run.at - segment.at) == offset as usize
                };
                assert_eq!(
                    chunk
                        .segments
                        .iter()
                        .filter(|segment| holds(segment))
                        .count(),
                    1
                );
            }
        }
        assert_eq!(next, runs.len());
    }

    #[test]
    fn a_chunk_fits_the_buffer_to_its_last_byte_and_no_further() {
        let far = usize::MAX / 2;
        for over in [0, 1, 16, 100, 255, 256, 4095, 4096, 5000] {
            for gap in [0, 8] {
                let lens = [STAGED / 2, STAGED / 2 - 4096, 4096 + over, 1];
                let (runs, descriptors, chunks) = chunks(64, &lens, gap, far);
                check(&runs, &descriptors, &chunks, far);
                assert_eq!(
                    chunks[0].count,
                    if over == 0 { 3 } else { 2 },
                    "{over}, {gap}"
                );
            }
        }
    }

    #[test]
    fn no_segment_crosses_the_border_of_two_parts() {
        let (lens, part) = ([100; 50], 1000);
        for (at, segments) in [(0, 5), (900, 6), (2000, 5)] {
            let (runs, descriptors, chunks) = chunks(at, &lens, 0, part);
            check(&runs, &descriptors, &chunks, part);
            assert_eq!(chunks[0].segments.len(), segments);
        }
    }

    #[test]
    fn runs_of_all_lengths_are_staged_where_their_descriptors_say() {
        let mut state = 9_u64;
        let mut below = |bound: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % bound) as usize
        };
        for round in 0..50 {
            let (gap, part) = ([0, 1, 300][below(3)], [4096, 1 << 20, 64 << 20][below(3)]);
            let mut at = 0;
            // As `runs` returns them: none crosses a border between two parts.
            let lens: Vec<usize> = (0..400)
                .map(|_| {
                    let left = part - at % part;
                    let len = (1 + below([100, 9000, 1 << 20][round % 3])).min(left);
                    at += len + gap;
                    len
                })
                .collect();
            let (runs, descriptors, chunks) = chunks(0, &lens, gap, part);
            check(&runs, &descriptors, &chunks, part);
        }
    }
}
