//! Accelerators: one copy path for all of them, over the few calls of a vendor's library that it
//! needs.
//!
//! Small pieces of a block are gathered on the device into one buffer that crosses the bus in one
//! copy, and scattered from one; large ones are copied directly. The cheaper method is computed
//! from measurements at the opening of the device; a method that copied wrongly then is not used
//! ([`check`]).
//!
//! **No copy outlives its call.** A copy that failed, or was begun only in part, has ended when the
//! call returns, because the call waits until the driver confirms it
//! ([`runtime::wait_until_over`]).
#![allow(
    unsafe_code,
    reason = "begins copies of ranges that their makers vouched for"
)]

mod ascend;
mod calibrate;
mod check;
mod cuda;
mod lane;
mod library;
mod pinned;
mod plan;
mod runtime;
mod vendor;

use std::any::Any;
use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use tracing::info;
use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, Completion, MonotonicTime, begin_thread};

use crate::arena::{ArenaOptions, HostArena, LetGo};
use crate::copy::{check_host_pairs, check_pieces, check_registered};
use crate::device::{Copied, Device, Event, Stream};
use crate::memory::DeviceMemory;
use crate::queued::{Copier, HostEvent, QueueOptions, QueuedStream};
use crate::region::SharedRegion;
use crate::span::{DeviceSpan, HostSpan, Piece};
use crate::transfer::{Direction, Transfer};
use check::Bench;
use lane::{Allocation, Host, Lane, Lanes, STAGED};
use pinned::{Owner, Pinned};
use plan::{Costs, Method, Run};
use runtime::{RawEvent, Runtime};

pub(crate) use library::Places;
pub(crate) use vendor::Vendor;

impl Transfer {
    fn method(self) -> Option<Method> {
        match self {
            Self::Auto => None,
            Self::Dma => Some(Method::Dma),
            Self::Sm => Some(Method::Kernel),
            Self::Staging => Some(Method::Staging),
        }
    }
}

/// The library of a platform's devices.
pub(crate) enum VendorLibrary {
    Cuda,
    /// The calls of CUDA's runtime under another prefix.
    CudaLike(Vendor),
    Ascend,
}

/// A device of an accelerator.
pub(crate) struct Accelerator {
    name: String,
    shared: Arc<Shared>,
    /// The default method of its streams.
    transfer: Transfer,
    options: QueueOptions,
}

/// Shared by all streams of a device.
struct Shared {
    runtime: Arc<dyn Runtime>,
    lanes: Lanes,
    /// Methods that copy correctly, by direction.
    methods: [Vec<Method>; 2],
    costs: Costs,
}

/// How long the opening of a device may take. A driver's first call takes some seconds on a machine
/// with many devices.
const OPEN_WITHIN: Duration = Duration::from_secs(30);

impl Accelerator {
    /// Opens device number `ordinal` of a platform on a thread of its own. If the driver hangs,
    /// that thread keeps everything it holds and this returns `Timeout`.
    pub(crate) fn open(
        platform: &'static str,
        library: &'static VendorLibrary,
        ordinal: u32,
        transfer: Transfer,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<dyn Device>> {
        let name = format!("{platform}:{ordinal}");
        let open = move || -> Result<Arc<dyn Runtime>> {
            Ok(match library {
                VendorLibrary::Cuda => Arc::new(cuda::Cuda::open(ordinal)?),
                VendorLibrary::CudaLike(vendor) => {
                    Arc::new(vendor::Device::open(platform, vendor, ordinal)?)
                }
                VendorLibrary::Ascend => Arc::new(ascend::Ascend::open(ordinal)?),
            })
        };
        let (opened, ended) = (Arc::new(Mutex::new(None)), Completion::new());
        let (tell, end) = (Arc::clone(&opened), Arc::clone(&ended));
        let opening = move || {
            let result = open().and_then(Shared::over);
            *tell.lock() = Some(result);
            end.complete(());
        };
        let deadline = clock.now().after(OPEN_WITHIN);
        begin_thread("ucm-open", opening).map_err(|error| {
            Error::from_io(error, "cannot start the thread that opens a device")
        })?;
        ended.wait(&*clock, Some(deadline));
        let result = opened.lock().take();
        let shared = result.unwrap_or_else(|| {
            let late =
                "the device did not respond in time when it was opened: its driver hangs, or it is \
                 busy";
            let late = Error::new(ErrorKind::Timeout, late).with("device", &name);
            Err(late.with("seconds", OPEN_WITHIN.as_secs()))
        })?;
        let words = |way: &[Method]| {
            way.iter()
                .map(|method| method.name())
                .collect::<Vec<_>>()
                .join(", ")
        };
        let (costs, methods) = (&shared.costs, &shared.methods);
        info!(
            device = name,
            call_ns = costs.call,
            launch_ns = costs.launch,
            gb_s_to_device = costs.dma[Direction::ToDevice as usize],
            gb_s_to_host = costs.dma[Direction::ToHost as usize],
            gap_ns_to_device = costs.gap[Direction::ToDevice as usize],
            gap_ns_to_host = costs.gap[Direction::ToHost as usize],
            "{name} opened: {}; copies to it by {}, from it by {}",
            shared.runtime.description(),
            words(&methods[Direction::ToDevice as usize]),
            words(&methods[Direction::ToHost as usize]),
        );
        Ok(Arc::new(Self {
            name,
            shared: Arc::new(shared),
            transfer,
            options: QueueOptions::on(clock),
        }))
    }
}

impl Shared {
    /// Checks and measures a device.
    fn over(runtime: Arc<dyn Runtime>) -> Result<Self> {
        let lanes = Lanes::new(Arc::clone(&runtime))?;
        let mut bench = Bench::new(&lanes)?;
        let methods = check::methods(&mut bench)?;
        let costs = calibrate::costs(&mut bench, &methods)?;
        bench.end();
        Ok(Self {
            runtime,
            lanes,
            methods,
            costs,
        })
    }
}

impl Device for Accelerator {
    fn name(&self) -> &str {
        &self.name
    }

    fn make_stream(&self) -> Result<Box<dyn Stream>> {
        self.make_stream_by(self.transfer)
    }

    fn make_stream_by(&self, transfer: Transfer) -> Result<Box<dyn Stream>> {
        let copier = AcceleratorCopier {
            shared: Arc::clone(&self.shared),
            wanted: transfer.method(),
        };
        Ok(Box::new(QueuedStream::new(copier, self.options.clone())))
    }

    fn make_arena(&self, bytes: usize, options: ArenaOptions) -> Result<Arc<HostArena>> {
        self.shared.lanes.arenas.make(bytes, options)
    }

    fn attach(&self, region: &Arc<SharedRegion>) -> Option<Arc<dyn Any + Send + Sync>> {
        let (start, len) = region.mapped();
        if len == 0 {
            return None;
        }
        // SAFETY: the region is kept beside it until the driver has unregistered it.
        let owner = unsafe { self.shared.lanes.arenas.add(start, len) };
        Some(Arc::new(Attached {
            owner,
            region: ManuallyDrop::new(Arc::clone(region)),
        }))
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        if bytes == 0 {
            return Err(Error::invalid("memory of a device has at least one byte"));
        }
        let memory = Allocation::new(&self.shared.runtime, bytes)?;
        Ok(DeviceMemory::new(memory.address, bytes, memory))
    }

    fn register(&self, host: HostSpan) -> Result<Box<dyn Any + Send + Sync>> {
        check_registered(host)?;
        Ok(Box::new(self.shared.lanes.arenas.register(host)?))
    }

    fn make_event(&self) -> Result<Arc<dyn Event>> {
        Ok(HostEvent::new(Arc::clone(&self.options.clock)))
    }

    fn event_of(&self, handle: u64) -> Result<Arc<dyn Event>> {
        if handle == 0 {
            return Err(Error::invalid("an event's handle is not null"));
        }
        Ok(Arc::new(CallersEvent {
            runtime: Arc::clone(&self.shared.runtime),
            event: RawEvent(handle),
            clock: Arc::clone(&self.options.clock),
        }))
    }
}

/// A region used by copies.
struct Attached {
    owner: Owner,
    region: ManuallyDrop<Arc<SharedRegion>>,
}

impl Drop for Attached {
    fn drop(&mut self) {
        if self.owner.let_go() {
            // SAFETY: dropped here, once, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.region) };
        }
    }
}

/// An event that a caller recorded on its own stream and keeps until the work that waits for it has
/// ended.
struct CallersEvent {
    runtime: Arc<dyn Runtime>,
    event: RawEvent,
    clock: Arc<dyn Clock>,
}

/// Intervals between queries of an event, first and last.
const ASKED: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];

/// The last query is this long before a deadline: at the deadline the task is over, and its caller
/// may drop the event.
const MARGIN: Duration = Duration::from_millis(50);

impl Event for CallersEvent {
    /// If the query fails, the event counts as not done: a wait for it fails at the deadline.
    fn done(&self) -> bool {
        self.runtime.is_done(self.event).unwrap_or(false)
    }

    fn wait(&self, deadline: Option<MonotonicTime>) -> Result<()> {
        let mut pause = ASKED[0];
        loop {
            if deadline.is_some_and(|deadline| self.clock.now().after(MARGIN) >= deadline) {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    "the event was not done in time",
                ));
            }
            if self.runtime.is_done(self.event)? {
                return Ok(());
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(ASKED[1]);
        }
    }

    /// The caller's stream records it.
    fn record(&self) {}
}

/// Copies of one stream.
struct AcceleratorCopier {
    shared: Arc<Shared>,
    /// The preferred method.
    wanted: Option<Method>,
}

impl AcceleratorCopier {
    /// A transfer between the device and a host buffer.
    ///
    /// # Safety
    /// As [`AcceleratorCopier::begin`], of the `len` bytes at `host`.
    unsafe fn transfer_buffer(
        &self,
        direction: Direction,
        pieces: &[Piece],
        host: *mut u8,
        len: usize,
    ) -> Result<()> {
        let pinned = self.shared.lanes.arenas.pin(host.expose_provenance(), len);
        // SAFETY: as the caller vouches.
        unsafe { self.begin(direction, pieces, host, pinned) }
    }

    /// Executes a transfer of pieces that all lie in the given pinned memory, if any. It is over
    /// when this returns.
    ///
    /// # Safety
    /// Each piece names bytes behind `host` that live through the call. Nothing else
    /// writes them or, if the device writes them, reads them.
    unsafe fn begin(
        &self,
        direction: Direction,
        pieces: &[Piece],
        host: *mut u8,
        pinned: Option<Arc<Pinned>>,
    ) -> Result<()> {
        let runtime = &*self.shared.runtime;
        let host = Host {
            first: host,
            pinned: pinned.as_deref(),
        };
        let runs = plan::runs(
            pieces,
            |address| runtime.allocation(address),
            |at| host.part(at),
        );
        let (shared, wanted) = (&self.shared, self.wanted);
        let mut lane = shared.lanes.take()?;
        // SAFETY: the pieces' makers vouched for them until this call returns, and it returns when
        // the lane's work is over; so for the buffer, as the caller vouches.
        let begun = unsafe { shared.begin(&mut lane, wanted, direction, runs, host) };
        lane.wait(direction).and(begun)?; // a lane that failed is not used again
        shared.lanes.give(lane);
        Ok(())
    }
}

impl Shared {
    /// Begins all copies of a transfer.
    ///
    /// # Safety
    /// As [`Lane::begin`].
    unsafe fn begin(
        &self,
        lane: &mut Lane,
        wanted: Option<Method>,
        direction: Direction,
        runs: Vec<Run>,
        host: Host<'_>,
    ) -> Result<()> {
        let can = |method: Method, runs: &[Run]| {
            lane.can(method) && (method != Method::Kernel || host.is_mapped(runs))
        };
        let methods = &self.methods[direction as usize];
        let large = match wanted {
            Some(Method::Dma) => 0,
            // Kernels need no staging space for the moved bytes.
            Some(Method::Kernel)
                if methods.contains(&Method::Kernel) && can(Method::Kernel, &runs) =>
            {
                usize::MAX
            }
            _ => STAGED / 2,
        };
        let (large, small) = match runs.iter().any(|run| run.len > large) {
            true => runs.into_iter().partition(|run| run.len > large),
            false => (Vec::new(), runs),
        };
        let usable: Vec<Method> = methods
            .iter()
            .copied()
            .filter(|&method| can(method, &small))
            .collect();
        let wanted = wanted.filter(|wanted| usable.contains(wanted));
        let single = check::single(methods);
        let method = wanted.unwrap_or_else(|| self.costs.cheapest(&usable, direction, &small));
        // SAFETY: as the caller vouches.
        unsafe {
            lane.begin(single, direction, &large, host)?;
            lane.begin(method, direction, &small, host)
        }
    }
}

impl Copier for AcceleratorCopier {
    fn gather(&mut self, src: &[Piece], dst: &mut [u8], copied: &mut Copied<'_>) -> Result<()> {
        check_pieces(src, dst.len())?;
        // SAFETY: the buffer is borrowed exclusively for the call.
        unsafe { self.transfer_buffer(Direction::ToHost, src, dst.as_mut_ptr(), dst.len()) }?;
        copied(dst, src.len());
        Ok(())
    }

    fn scatter(&mut self, src: &[u8], dst: &[Piece]) -> Result<()> {
        check_pieces(dst, src.len())?;
        // SAFETY: the buffer is borrowed for the call, and only read.
        unsafe {
            self.transfer_buffer(Direction::ToDevice, dst, src.as_ptr().cast_mut(), src.len())
        }
    }

    /// One transfer for all pieces in one arena, treated as a buffer at address zero.
    fn transfer(&mut self, direction: Direction, pairs: &[(DeviceSpan, HostSpan)]) -> Result<()> {
        check_host_pairs(pairs)?;
        for (pinned, pieces) in self.shared.lanes.arenas.split(pairs) {
            // SAFETY: the pairs' makers vouched for both sides until this call returns.
            unsafe { self.begin(direction, &pieces, null_mut(), pinned) }?;
        }
        Ok(())
    }
}
