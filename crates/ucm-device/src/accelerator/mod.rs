//! Accelerators: one way of copies for all of them, over the few calls that a vendor's library makes for it.
//!
//! Small pieces of a block are gathered on the device into one buffer that crosses the bus in one copy, and scattered from
//! one; large ones are copied as they are. Which way is cheaper is computed from what was measured of the device when it
//! was opened, and a way that gave wrong bytes then is not used ([`check`]).
//!
//! **No copy outlives its call.** A copy that failed, or whose beginning failed half-way, has ended when the call returns,
//! because the call waits until the driver says so; where the driver never does, the thread waits for ever, is written off by
//! the watch of its pool, and keeps what it holds: the memory that may still be written.
#![allow(unsafe_code, reason = "begins copies of ranges that their makers vouched for")]

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
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use tracing::{error, info};
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, MonotonicTime};

use crate::arena::{ArenaOptions, HostArena};
use crate::copy::{check_host_pairs, check_pairs, check_pieces, check_registered};
use crate::device::{Device, Event, Landed, Stream};
use crate::memory::DeviceMemory;
use crate::queued::{Copier, HostEvent, QueueOptions, QueuedStream};
use crate::region::SharedRegion;
use crate::span::{DeviceSpan, HostSpan, Piece};
use crate::transfer::{Direction, Transfer};
use lane::{Host, Lane, STAGED};
use pinned::{Arenas, Pinned};
use plan::{Costs, Method, Run};
use runtime::{RawEvent, Runtime};
use vendor::Vendor;
pub(crate) use vendor::{HIP, MACA, MUSA};

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

/// A device of an accelerator.
pub(crate) struct Accelerator {
    name: String,
    shared: Arc<Shared>,
    /// How its streams copy where nothing else is said.
    transfer: Transfer,
    options: QueueOptions,
}

/// What all streams of a device use.
struct Shared {
    runtime: Arc<dyn Runtime>,
    arenas: Arenas,
    /// Methods that gave right bytes, by direction.
    methods: [Vec<Method>; 2],
    /// So did the driver's copies on the device.
    copies_on_device: bool,
    costs: Costs,
}

impl Accelerator {
    /// Device number `ordinal` of CUDA.
    pub(crate) fn cuda(ordinal: u32, transfer: Transfer, clock: Arc<dyn Clock>) -> Result<Arc<dyn Device>> {
        Self::over(
            format!("cuda:{ordinal}"),
            Arc::new(cuda::Cuda::open(ordinal)?),
            transfer,
            clock,
        )
    }

    /// Device number `ordinal` of a vendor whose runtime is shaped as CUDA's.
    pub(crate) fn vendor(
        vendor: &'static Vendor,
        ordinal: u32,
        transfer: Transfer,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<dyn Device>> {
        Self::over(
            format!("{}:{ordinal}", vendor.name),
            Arc::new(vendor::Device::open(vendor, ordinal)?),
            transfer,
            clock,
        )
    }

    /// Device number `ordinal` of Ascend.
    pub(crate) fn ascend(ordinal: u32, transfer: Transfer, clock: Arc<dyn Clock>) -> Result<Arc<dyn Device>> {
        Self::over(
            format!("ascend:{ordinal}"),
            Arc::new(ascend::Ascend::open(ordinal)?),
            transfer,
            clock,
        )
    }

    /// Checks and measures a device.
    fn over(
        name: String,
        runtime: Arc<dyn Runtime>,
        transfer: Transfer,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<dyn Device>> {
        let methods = check::methods(&runtime)?;
        let on_device = check::copies_on_device(&runtime, check::single(&methods[0]));
        if let Err(reason) = &on_device {
            error!(device = runtime.description(), %reason, "copies on this device are wrong and are not used");
        }
        let costs = calibrate::costs(&runtime, &methods)?;
        let words = |way: &[Method]| {
            way.iter()
                .map(|method| method.name())
                .collect::<Vec<_>>()
                .join(", ")
        };
        info!(
            device = name,
            call_ns = costs.call,
            launch_ns = costs.launch,
            gb_s_to_device = costs.dma[Direction::ToDevice as usize],
            gb_s_to_host = costs.dma[Direction::ToHost as usize],
            "{name} opened: {}; copies to it by {}, from it by {}",
            runtime.description(),
            words(&methods[Direction::ToDevice as usize]),
            words(&methods[Direction::ToHost as usize]),
        );
        Ok(Arc::new(Self {
            name,
            shared: Arc::new(Shared {
                runtime,
                arenas: Arenas::default(),
                methods,
                copies_on_device: on_device.is_ok(),
                costs,
            }),
            transfer,
            options: QueueOptions::on(clock),
        }))
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
            lane: None,
        };
        Ok(Box::new(QueuedStream::new(copier, self.options.clone())))
    }

    fn make_arena(&self, bytes: usize, options: ArenaOptions) -> Result<Arc<HostArena>> {
        let node = options.node.or(self.shared.runtime.node());
        let mut arena = HostArena::with(bytes, ArenaOptions { node, ..options })?;
        if let Some(arena) = Arc::get_mut(&mut arena) {
            // SAFETY: the arena keeps it, and lets go of it before it unmaps.
            let pinned = unsafe { Pinned::new(Arc::clone(&self.shared.runtime), arena.at(0), arena.len()) };
            let pinned = Arc::new(pinned);
            self.shared.arenas.add(&pinned);
            arena.keep(pinned);
        }
        Ok(arena)
    }

    fn attach(&self, region: &Arc<SharedRegion>) -> Option<Arc<dyn Any + Send + Sync>> {
        let (start, len) = region.mapped();
        if len == 0 {
            return None;
        }
        // SAFETY: the region is kept beside it, and dropped after it.
        let pinned = unsafe { Pinned::new(Arc::clone(&self.shared.runtime), start, len) };
        let pinned = Arc::new(pinned);
        self.shared.arenas.add(&pinned);
        Some(Arc::new(Attached {
            _pinned: pinned,
            _region: Arc::clone(region),
        }))
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        if bytes == 0 {
            return Err(Error::invalid("memory of a device has at least one byte"));
        }
        let memory = Allocation {
            runtime: Arc::clone(&self.shared.runtime),
            address: self.shared.runtime.allocate(bytes)?,
        };
        Ok(DeviceMemory::new(memory.address, bytes, memory))
    }

    fn register(&self, host: HostSpan) -> Result<Box<dyn Any + Send + Sync>> {
        check_registered(host)?;
        let pinned = Arc::new(Pinned::registered(Arc::clone(&self.shared.runtime), host)?);
        self.shared.arenas.add(&pinned);
        Ok(Box::new(pinned))
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

/// A region that copies go to and from; fields are dropped in their order.
struct Attached {
    _pinned: Arc<Pinned>,
    _region: Arc<SharedRegion>,
}

/// Memory of the device that is ours.
struct Allocation {
    runtime: Arc<dyn Runtime>,
    address: u64,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.runtime.free(self.address);
    }
}

/// An event that a caller recorded on a stream of theirs and keeps until the work that waits for it has ended.
struct CallersEvent {
    runtime: Arc<dyn Runtime>,
    event: RawEvent,
    clock: Arc<dyn Clock>,
}

/// How often the driver is asked about an event, first and last.
const ASKED: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];

impl Event for CallersEvent {
    /// An event that the driver knows nothing good of is not done: who waits for it fails at the deadline.
    fn done(&self) -> bool {
        self.runtime.is_done(self.event).unwrap_or(false)
    }

    fn wait(&self, deadline: Option<MonotonicTime>) -> Result<()> {
        let mut pause = ASKED[0];
        while !self.runtime.is_done(self.event)? {
            if deadline.is_some_and(|deadline| self.clock.now() >= deadline) {
                return Err(Error::new(ErrorKind::Timeout, "the event was not done in time"));
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(ASKED[1]);
        }
        Ok(())
    }

    /// The caller's stream records it.
    fn record(&self) {}
}

/// Copies of one stream.
struct AcceleratorCopier {
    shared: Arc<Shared>,
    /// The method to use where it can be.
    wanted: Option<Method>,
    /// Made when it is first needed, and again after a failure.
    lane: Option<Lane>,
}

impl AcceleratorCopier {
    /// A transfer between the device and a host buffer.
    ///
    /// # Safety
    /// As [`AcceleratorCopier::begin`], of the `len` bytes at `host`.
    unsafe fn transfer_buffer(
        &mut self,
        direction: Direction,
        pieces: &[Piece],
        host: *mut u8,
        len: usize,
    ) -> Result<()> {
        let pinned = self.shared.arenas.pin(host.expose_provenance(), len);
        // SAFETY: as the caller vouches.
        unsafe { self.begin(direction, pieces, host, pinned) }
    }

    /// Makes a transfer of pieces that are all in what is pinned, if anything is; over when it returns.
    ///
    /// # Safety
    /// Each piece names bytes behind `host` that live through the call and that nobody else writes, or, where the
    /// device writes them, reads.
    unsafe fn begin(
        &mut self,
        direction: Direction,
        pieces: &[Piece],
        host: *mut u8,
        pinned: Option<Arc<Pinned>>,
    ) -> Result<()> {
        let first = host.expose_provenance();
        let runs = plan::runs(pieces, |at| match &pinned {
            Some(pinned) => pinned.next_border(first + at) - first,
            None => usize::MAX,
        });
        let host = Host {
            first: host,
            pinned: pinned.as_deref(),
        };
        let (shared, wanted) = (Arc::clone(&self.shared), self.wanted);
        self.with_lane(direction, |lane| {
            // SAFETY: the pieces' makers vouched for them until this call returns, and it returns when the lane's work is
            // over; so for the buffer, as the caller says.
            unsafe { shared.begin(lane, wanted, direction, runs, host) }
        })
    }

    /// Begins something on the lane and waits until it is over; a lane that failed is not used again.
    fn with_lane(&mut self, direction: Direction, begin: impl FnOnce(&mut Lane) -> Result<()>) -> Result<()> {
        let lane = match &mut self.lane {
            Some(lane) => lane,
            none => none.insert(Lane::new(Arc::clone(&self.shared.runtime))?),
        };
        let begun = begin(lane);
        let result = lane.wait(direction).and(begun);
        if result.is_err() {
            self.lane = None;
        }
        result
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
            // Kernels need no room for what they move.
            Some(Method::Kernel) if methods.contains(&Method::Kernel) && can(Method::Kernel, &runs) => {
                usize::MAX
            }
            Some(_) => STAGED / 2,
            None => self.costs.large(direction).min(STAGED / 2),
        };
        let (large, small): (Vec<Run>, Vec<Run>) = runs.into_iter().partition(|run| run.len > large);
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
    fn batch(&mut self, pairs: &[(DeviceSpan, DeviceSpan)]) -> Result<()> {
        check_pairs(pairs)?;
        let mut words = Vec::with_capacity(pairs.len());
        for (number, (src, dst)) in pairs.iter().enumerate() {
            if src.addr() < dst.addr() + dst.len() && dst.addr() < src.addr() + src.len() {
                return Err(
                    Error::invalid("source and destination overlap on the device").with("pair", number)
                );
            }
            words.push([src.addr(), dst.addr(), src.len()]);
        }
        words.retain(|pair| pair[2] > 0);
        let kernel = self.shared.methods[Direction::ToDevice as usize].contains(&Method::Kernel);
        let copies = self.shared.copies_on_device;
        self.with_lane(Direction::ToDevice, |lane| {
            // SAFETY: the spans' makers vouched for them until this call returns, and it returns when the work is over.
            unsafe { lane.begin_on_device(&words, kernel, copies) }
        })
    }

    fn gather(&mut self, src: &[Piece], dst: &mut [u8], landed: &mut Landed<'_>) -> Result<()> {
        check_pieces(src, dst.len())?;
        // SAFETY: the buffer is borrowed for the call, by us alone.
        unsafe { self.transfer_buffer(Direction::ToHost, src, dst.as_mut_ptr(), dst.len()) }?;
        landed(dst, src.len());
        Ok(())
    }

    fn scatter(&mut self, src: &[u8], dst: &[Piece]) -> Result<()> {
        check_pieces(dst, src.len())?;
        // SAFETY: the buffer is borrowed for the call, and only read.
        unsafe { self.transfer_buffer(Direction::ToDevice, dst, src.as_ptr().cast_mut(), src.len()) }
    }

    /// One transfer for what lies in one arena: of a buffer that begins at the address zero.
    fn transfer(&mut self, direction: Direction, pairs: &[(DeviceSpan, HostSpan)]) -> Result<()> {
        check_host_pairs(pairs)?;
        for (pinned, pieces) in self.shared.arenas.split(pairs) {
            // SAFETY: the pairs' makers vouched for both sides until this call returns.
            unsafe { self.begin(direction, &pieces, null_mut(), pinned) }?;
        }
        Ok(())
    }
}

/// Says that a method is not used.
fn switched_off(runtime: &dyn Runtime, method: Method, direction: Direction, reason: &Error) {
    error!(
        device = runtime.description(),
        method = method.name(),
        ?direction,
        %reason,
        "a way of copying is wrong on this device and is not used"
    );
}
