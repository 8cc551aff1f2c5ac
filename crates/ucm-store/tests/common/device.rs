//! Memory that plays the device, and a device whose copies hang and are counted.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Once, OnceLock};

use parking_lot::{Condvar, Mutex};
use ucm_core::{BlockId, Error, Result};
use ucm_device::{
    Copied, CopyDone, DEFAULT_DEVICE, DeviceSpan, Direction, Event, HostDevice, HostSpan, KvLayout,
    KvPiece, Piece, Stream, Transfer,
};
use ucm_infra::{Clock, MonotonicTime};
use ucm_store::engine::{Pieces, Row, RowSides};

use super::{Fixture, id};

/// The device of this run: the host, unless `UCM_TEST_DEVICE` names another.
pub(crate) fn of_this_run(
    transfer: Transfer,
    clock: &Arc<dyn Clock>,
) -> Result<Arc<dyn ucm_device::Device>> {
    let name = std::env::var("UCM_TEST_DEVICE");
    ucm_device::open_device(
        name.as_deref().unwrap_or(DEFAULT_DEVICE),
        transfer,
        Arc::clone(clock),
    )
}

/// The software driver that stands for CUDA's in this run; it registers memory of the tests as
/// the device's.
pub(crate) struct SoftCuda(libloading::Library);

impl SoftCuda {
    /// The one that `UCM_TEST_DRIVER` names.
    pub(crate) fn of_this_run() -> Option<&'static Self> {
        static LOADED: OnceLock<Option<SoftCuda>> = OnceLock::new();
        let load = || {
            let path = std::env::var_os("UCM_TEST_DRIVER")?;
            // SAFETY: a library that is built with the tests.
            Some(Self(unsafe { libloading::Library::new(path) }.unwrap()))
        };
        LOADED.get_or_init(load).as_ref()
    }

    /// The one that cargo builds with the tests, as the device of this process. Called first by the
    /// tests of a file that run over it alone.
    pub(crate) fn beside() -> &'static Self {
        static NAMED: Once = Once::new();
        NAMED.call_once(|| {
            let program = std::env::current_exe().unwrap();
            let beside = program
                .ancestors()
                .skip(1)
                .take(2)
                .map(|dir| dir.join("libsoftcuda.so"));
            let found = beside.into_iter().find(|path| path.exists()).unwrap();
            // SAFETY: the first thing that any test of this process does.
            unsafe {
                std::env::set_var("UCM_TEST_DRIVER", found);
                std::env::set_var("UCM_TEST_DEVICE", "cuda");
            }
        });
        Self::of_this_run().unwrap()
    }

    /// How many ranges of host memory are registered, but for those of streams: two streams have
    /// one, up to four.
    pub(crate) fn registrations(&self) -> u64 {
        let live: unsafe extern "C" fn(c_int) -> u64 = self.function(c"softcuda_live");
        // SAFETY: numbers.
        let (all, streams) = unsafe { (live(1), live(2)) };
        all.saturating_sub((streams / 2).min(4))
    }

    /// No stream begins anything more, or all do again.
    pub(crate) fn hold(&self, held: bool) {
        let name = if held {
            c"softcuda_hold"
        } else {
            c"softcuda_release"
        };
        let hold: unsafe extern "C" fn(*mut c_void) = self.function(name);
        // SAFETY: null is all streams.
        unsafe { hold(null_mut()) }
    }

    /// A function of it.
    fn function<F: Copy>(&self, name: &CStr) -> F {
        // SAFETY: the callers below name functions with the types that the driver gives them.
        *unsafe { self.0.get::<F>(name.to_bytes_with_nul()) }.unwrap()
    }

    fn accept(&self, memory: &[u8]) {
        let accept: unsafe extern "C" fn(usize, usize) -> c_int = self.function(c"softcuda_accept");
        // SAFETY: the memory is there until it is forgotten.
        let answer = unsafe { accept(memory.as_ptr() as usize, memory.len()) };
        assert_eq!(answer, 0);
    }

    fn forget(&self, memory: &[u8]) {
        let forget: unsafe extern "C" fn(usize) -> c_int = self.function(c"softcuda_forget");
        // SAFETY: it was accepted.
        let answer = unsafe { forget(memory.as_ptr() as usize) };
        assert_eq!(answer, 0);
    }

    /// Lets the `nth` call from now on of a function answer an error.
    pub(crate) fn fail(&self, function: &CStr, nth: u64, code: c_int) {
        let fail: unsafe extern "C" fn(*const c_char, u64, c_int) = self.function(c"softcuda_fail");
        // SAFETY: reads the name during the call.
        unsafe { fail(function.as_ptr(), nth, code) }
    }

    /// No call fails any more.
    pub(crate) fn mend(&self) {
        let mend: unsafe extern "C" fn() = self.function(c"softcuda_mend");
        // SAFETY: no arguments.
        unsafe { mend() }
    }

    /// The handle of an event that a stream of the caller's recorded.
    pub(crate) fn recorded_event(&self) -> u64 {
        self.record(self.stream())
    }

    /// A stream of the caller's, in the primary context, which is retained and current to this
    /// thread.
    pub(crate) fn stream(&self) -> usize {
        type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
        let (mut context, mut stream) = (null_mut(), 0);
        let init: unsafe extern "C" fn(u32) -> c_int = self.function(c"cuInit");
        let retain: Retain = self.function(c"cuDevicePrimaryCtxRetain");
        let current: unsafe extern "C" fn(*mut c_void) -> c_int = self.function(c"cuCtxSetCurrent");
        let make: unsafe extern "C" fn(*mut usize, u32) -> c_int = self.function(c"cuStreamCreate");
        // SAFETY: each call writes one handle or none.
        let answers = unsafe {
            [
                init(0),
                retain(&raw mut context, 0),
                current(context),
                make(&raw mut stream, 1),
            ]
        };
        assert_eq!(answers, [0; 4]);
        stream
    }

    /// The handle of an event that such a stream records behind what it was given.
    pub(crate) fn record(&self, stream: usize) -> u64 {
        let make: unsafe extern "C" fn(*mut usize, u32) -> c_int = self.function(c"cuEventCreate");
        let record: unsafe extern "C" fn(usize, usize) -> c_int = self.function(c"cuEventRecord");
        let mut event = 0;
        // SAFETY: writes one handle, and names it and a stream.
        let answers = unsafe { [make(&raw mut event, 0), record(event, stream)] };
        assert_eq!(answers, [0; 2]);
        event as u64
    }

    /// Queues a copy of bytes, which are taken now, to memory of the device.
    pub(crate) fn write_later(&self, to: u64, bytes: &[u8], stream: usize) {
        let copy: unsafe extern "C" fn(u64, *const u8, usize, usize) -> c_int =
            self.function(c"cuMemcpyHtoDAsync_v2");
        // SAFETY: the tests keep the memory until the stream has done so.
        assert_eq!(unsafe { copy(to, bytes.as_ptr(), bytes.len(), stream) }, 0);
    }

    /// Queues a copy within memory of the device.
    pub(crate) fn copy_later(&self, to: u64, from: u64, len: usize, stream: usize) {
        let copy: unsafe extern "C" fn(u64, u64, usize, usize) -> c_int =
            self.function(c"cuMemcpyDtoDAsync_v2");
        // SAFETY: as above.
        assert_eq!(unsafe { copy(to, from, len, stream) }, 0);
    }

    /// Memory of the device.
    pub(crate) fn allocate(&self, len: usize) -> u64 {
        let allocate: unsafe extern "C" fn(*mut u64, usize) -> c_int =
            self.function(c"cuMemAlloc_v2");
        let mut address = 0;
        // SAFETY: writes one address.
        assert_eq!(unsafe { allocate(&raw mut address, len) }, 0);
        address
    }

    pub(crate) fn free(&self, address: u64) {
        let free: unsafe extern "C" fn(u64) -> c_int = self.function(c"cuMemFree_v2");
        // SAFETY: allocated as above; the driver ends the process where something still uses it.
        assert_eq!(unsafe { free(address) }, 0);
    }

    /// What is in memory of the device.
    pub(crate) fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let read: unsafe extern "C" fn(u64, *mut u8, usize) -> c_int =
            self.function(c"softcuda_read");
        // SAFETY: as many bytes as there is room for.
        assert_eq!(unsafe { read(address, bytes.as_mut_ptr(), len) }, 0);
        bytes
    }

    /// Random pauses before operations.
    pub(crate) fn jitter(&self, seed: u64, most_us: u64) {
        let jitter: unsafe extern "C" fn(u64, u64) = self.function(c"softcuda_jitter");
        // SAFETY: two numbers.
        unsafe { jitter(seed, most_us) }
    }
}

/// Memory that plays the device: one buffer per block, all layers in a row.
pub(crate) struct Device {
    fixture: Fixture,
    blocks: BTreeMap<BlockId, Vec<u8>>,
}

impl Device {
    /// Blocks filled with what their id stands for.
    pub(crate) fn filled(fixture: &Fixture, ids: &[BlockId]) -> Self {
        Self::of(
            fixture,
            ids.iter().map(|&id| (id, content(fixture, id))).collect(),
        )
    }

    fn of(fixture: &Fixture, blocks: BTreeMap<BlockId, Vec<u8>>) -> Self {
        if let Some(driver) = SoftCuda::of_this_run() {
            blocks.values().for_each(|block| driver.accept(block));
        }
        Self {
            fixture: fixture.clone(),
            blocks,
        }
    }

    /// Blocks filled with rubbish, to be loaded into.
    pub(crate) fn blank(fixture: &Fixture, ids: &[BlockId]) -> Self {
        let len = content(fixture, id(0)).len();
        Self::of(
            fixture,
            ids.iter().map(|&id| (id, vec![0xee; len])).collect(),
        )
    }

    /// Where a block lies.
    pub(crate) fn address(&self, id: BlockId) -> u64 {
        self.blocks[&id].as_ptr() as u64
    }

    /// Changes what a block holds.
    pub(crate) fn change(&mut self, id: BlockId, change: impl FnOnce(&mut [u8])) {
        change(self.blocks.get_mut(&id).unwrap());
    }

    /// One row per shard of each block.
    pub(crate) fn rows(&self, ids: &[BlockId]) -> Vec<Row> {
        let shards = self.fixture.layers / self.fixture.layers_per_shard;
        ids.iter()
            .flat_map(|&id| (0..shards).map(move |shard| (id, shard)))
            .map(|(id, shard)| self.row(id, shard))
            .collect()
    }

    /// A row of every other block names its pieces by the number of the block in this device's
    /// memory.
    pub(crate) fn row(&self, id: BlockId, shard: u32) -> Row {
        let mut first = self.blocks[&id].as_ptr() as u64;
        let mut all = Vec::new();
        for _ in 0..self.fixture.layers {
            for &len in &self.fixture.tensors {
                all.push(KvPiece {
                    first,
                    stride: 0,
                    len,
                });
                first += len;
            }
        }
        // SAFETY: within this device's own buffer, which the tests keep until their tasks ended.
        let layout = unsafe { KvLayout::new(all, 1) }.unwrap();
        let pieces = if id.0[0] % 2 == 1 {
            Pieces::Block(Arc::new(layout), 0)
        } else {
            let count = self.fixture.tensors.len() * self.fixture.layers_per_shard as usize;
            let first = count * shard as usize;
            Pieces::Listed(layout.spans(0, first..first + count).collect())
        };
        Row {
            id,
            shard,
            pieces,
            ready: None,
            sides: self.sides(id, shard),
        }
    }

    /// What a row brings beside its KV.
    fn sides(&self, id: BlockId, shard: u32) -> RowSides {
        if self.fixture.sides.is_empty() {
            return RowSides::None;
        }
        let shards = (self.fixture.layers / self.fixture.layers_per_shard) as usize;
        let share = |(number, (_, len)): (usize, &(&str, u64))| {
            let side = side_content(id, number, *len);
            let share = side.len() / shards;
            side[shard as usize * share..][..share].to_vec()
        };
        RowSides::Beside(
            self.fixture
                .sides
                .iter()
                .enumerate()
                .flat_map(share)
                .collect(),
        )
    }

    /// Whether the block holds what its id stands for.
    pub(crate) fn is_right(&self, id: BlockId) -> bool {
        self.blocks[&id] == content(&self.fixture, id)
    }

    /// Whether each shard of it is right, or was not written: what a load of shards that failed may
    /// leave.
    pub(crate) fn is_right_as_far(&self, id: BlockId) -> bool {
        let (block, right) = (&self.blocks[&id], content(&self.fixture, id));
        let shard = block.len() / (self.fixture.layers / self.fixture.layers_per_shard) as usize;
        let mut shards = block.chunks(shard).zip(right.chunks(shard));
        shards.all(|(shard, right)| shard == right || shard.iter().all(|&byte| byte == 0xee))
    }

    /// Whether both hold the same blocks.
    pub(crate) fn equals(&self, other: &Self) -> bool {
        self.blocks == other.blocks
    }

    pub(crate) fn is_blank(&self, id: BlockId) -> bool {
        self.blocks[&id].iter().all(|&byte| byte == 0xee)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Some(driver) = SoftCuda::of_this_run() {
            self.blocks.values().for_each(|block| driver.forget(block));
        }
    }
}

/// The bytes of the side shard of that number of a block.
pub(crate) fn side_content(id: BlockId, number: usize, len: u64) -> Vec<u8> {
    let first = usize::from(id.0[0]) * 31 + number * 101;
    (first..first + len as usize)
        .map(|at| ((at * 7) >> 3) as u8)
        .collect()
}

/// The bytes an id stands for.
pub(crate) fn content(fixture: &Fixture, id: BlockId) -> Vec<u8> {
    let len = fixture.tensors.iter().sum::<u64>() as usize * fixture.layers as usize;
    (0..len)
        .map(|i| match fixture.compressed && i % 4 > 1 {
            true => id.0[i % 2], // half of it compresses well
            false => id.0[i % 16].wrapping_add((i / 16) as u8),
        })
        .collect()
}

/// A device whose first copies hang until they are let go.
pub(crate) struct SlowDevice {
    inner: HostDevice,
    /// Those that hung fail then.
    failing: bool,
    state: Mutex<(usize, usize)>,
    news: Condvar,
    /// Pieces of each transfer to and from a slot.
    transfers: Arc<Mutex<Vec<usize>>>,
}

impl SlowDevice {
    /// The first `copies` to start hang.
    pub(crate) fn new(copies: usize) -> Arc<Self> {
        Self::made(copies, false)
    }

    /// The same, and then they fail.
    pub(crate) fn failing(copies: usize) -> Arc<Self> {
        Self::made(copies, true)
    }

    fn made(copies: usize, failing: bool) -> Arc<Self> {
        Arc::new(Self {
            inner: HostDevice::default(),
            failing,
            state: Mutex::new((copies, 0)),
            news: Condvar::new(),
            transfers: Arc::default(),
        })
    }

    /// How many pieces each transfer had so far.
    pub(crate) fn transfers(&self) -> Vec<usize> {
        self.transfers.lock().clone()
    }

    /// Waits until this many copies hang.
    pub(crate) fn await_hanging(&self, copies: usize) {
        let mut state = self.state.lock();
        while state.1 < copies {
            self.news.wait(&mut state);
        }
    }

    /// Lets all go on.
    pub(crate) fn go(&self) {
        *self.state.lock() = (0, 0);
        self.news.notify_all();
    }
}

impl ucm_device::Device for SlowDevice {
    fn name(&self) -> &str {
        "slow"
    }

    /// A copy that finds no stream in the engine's pool makes one: here it hangs.
    fn make_stream(&self) -> Result<Box<dyn Stream>> {
        let mut state = self.state.lock();
        if state.0 > 0 {
            state.0 -= 1;
            state.1 += 1;
            self.news.notify_all();
            while state.1 > 0 {
                self.news.wait(&mut state);
            }
            if self.failing {
                return Err(Error::internal("the copy failed"));
            }
        }
        drop(state);
        Ok(Box::new(CountedStream {
            inner: self.inner.make_stream()?,
            transfers: Arc::clone(&self.transfers),
        }))
    }

    fn make_stream_by(&self, _transfer: ucm_device::Transfer) -> Result<Box<dyn Stream>> {
        self.make_stream()
    }

    fn allocate(&self, bytes: usize) -> Result<ucm_device::DeviceMemory> {
        self.inner.allocate(bytes)
    }

    fn register(&self, host: ucm_device::HostSpan) -> Result<Box<dyn std::any::Any + Send + Sync>> {
        self.inner.register(host)
    }

    fn make_arena(
        &self,
        bytes: usize,
        options: ucm_device::ArenaOptions,
    ) -> Result<Arc<ucm_device::HostArena>> {
        self.inner.make_arena(bytes, options)
    }

    fn make_event(&self) -> Result<Arc<dyn Event>> {
        self.inner.make_event()
    }
}

/// A stream of such a device. It has nothing to tell before all of a gather is there.
struct CountedStream {
    inner: Box<dyn Stream>,
    transfers: Arc<Mutex<Vec<usize>>>,
}

impl Stream for CountedStream {
    fn gather(&mut self, src: &[Piece], dst: &mut [u8], _copied: &mut Copied<'_>) -> Result<()> {
        self.transfers.lock().push(src.len());
        self.inner.gather(src, dst, &mut |_, _| {})
    }

    fn scatter(&mut self, src: &[u8], dst: &[Piece]) -> Result<()> {
        self.transfers.lock().push(dst.len());
        self.inner.scatter(src, dst)
    }

    fn transfer(&mut self, direction: Direction, pairs: &[(DeviceSpan, HostSpan)]) -> Result<()> {
        self.inner.transfer(direction, pairs)
    }

    fn transfer_async(
        &mut self,
        direction: Direction,
        pairs: Vec<(DeviceSpan, HostSpan)>,
        done: CopyDone,
    ) -> Result<()> {
        self.inner.transfer_async(direction, pairs, done)
    }

    fn callback(&mut self, call: Box<dyn FnOnce() + Send>) -> Result<()> {
        self.inner.callback(call)
    }

    fn synchronize(&mut self, deadline: Option<MonotonicTime>) -> Result<()> {
        self.inner.synchronize(deadline)
    }
}
