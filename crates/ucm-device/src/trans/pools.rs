//! Buffers on a device and on the host, single or from pools of fixed size.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, MonotonicTime, Notify};

use crate::arena::ArenaOptions;
use crate::device::Device;
use crate::fork::Origin;
use crate::memory::DeviceMemory;
use crate::span::HostSpan;

/// Buffers of a pool begin at multiples of this.
const ALIGNED: usize = 256;

ucm_core::named! {
    /// Where a buffer is.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum MemoryKind {
        /// In the device's memory.
        Device = "device",
        /// In the host's, pinned.
        Host = "host",
    }
}

/// The source of one device's buffers.
pub struct Pools {
    device: Arc<dyn Device>,
    clock: Arc<dyn Clock>,
    /// By place, then by the size of the buffers.
    pools: Mutex<[BTreeMap<usize, Arc<Pool>>; 2]>,
    /// By the first address.
    registered: Mutex<HashMap<u64, Box<dyn Any + Send + Sync>>>,
}

/// Buffers of one size.
#[derive(Default)]
struct Pool {
    free: Mutex<Vec<Part>>,
    came_back: Notify,
}

/// A part of some memory, which lives as long as one of its parts.
#[derive(Clone)]
struct Part {
    memory: Arc<DeviceMemory>,
    at: usize,
}

/// Some bytes on the device or the host, owned by the caller. On drop they return to their pool, if
/// they have one, or are freed.
pub struct Buffer {
    part: Part,
    len: usize,
    place: MemoryKind,
    pool: Option<Arc<Pool>>,
    origin: Origin,
}

impl Buffer {
    /// Where it is.
    pub fn place(&self) -> MemoryKind {
        self.place
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.part.memory.address() + self.part.at as u64
    }

    /// Usable bytes.
    #[allow(clippy::len_without_is_empty, reason = "there is always at least one")]
    pub fn len(&self) -> usize {
        self.len
    }
}

/// In a forked child nothing returns: a thread that the child does not have may hold the pool's
/// lock.
impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.as_ref().filter(|_| self.origin.here()) {
            pool.free.lock().push(self.part.clone());
            pool.came_back.notify();
        }
    }
}

impl Pools {
    /// No pools yet, for this device; waits use `clock`.
    pub fn new(device: Arc<dyn Device>, clock: Arc<dyn Clock>) -> Self {
        Self {
            device,
            clock,
            pools: Mutex::default(),
            registered: Mutex::default(),
        }
    }

    /// A buffer of `size` bytes outside of pools. `InvalidInput` for zero, `NoSpace` or `Io`
    /// without enough memory.
    pub fn make(&self, place: MemoryKind, size: usize) -> Result<Buffer> {
        let memory = self.memory(place, size)?;
        Ok(Buffer {
            part: Part {
                memory: Arc::new(memory),
                at: 0,
            },
            len: size,
            place,
            pool: None,
            origin: Origin::this()?,
        })
    }

    /// Adds `number` buffers of `size` bytes to the pool of that size. Errors as of
    /// [`Pools::make`]; then nothing was added.
    pub fn fill(&self, place: MemoryKind, size: usize, number: usize) -> Result<()> {
        let stride = size
            .checked_next_multiple_of(ALIGNED)
            .filter(|_| size > 0 && number > 0);
        let bytes = stride.and_then(|stride| stride.checked_mul(number));
        let (Some(stride), Some(bytes)) = (stride, bytes) else {
            return Err(Error::invalid(
                "a pool has at least one buffer of at least one byte, and fits into memory",
            )
            .with("size", size)
            .with("number", number));
        };
        let memory = Arc::new(self.memory(place, bytes)?);
        let parts = (0..number).map(|i| Part {
            memory: Arc::clone(&memory),
            at: i * stride,
        });
        let pool = Arc::clone(self.pools.lock()[place as usize].entry(size).or_default());
        pool.free.lock().extend(parts);
        pool.came_back.notify();
        Ok(())
    }

    /// A buffer of at least `size` bytes from the pool with the smallest sufficient size. Waits if
    /// the pool is empty: `Timeout` at `deadline` (`None`: for ever). `InvalidInput` if no pool has
    /// large enough buffers.
    pub fn get(
        &self,
        place: MemoryKind,
        size: usize,
        deadline: Option<MonotonicTime>,
    ) -> Result<Buffer> {
        let found = self.pools.lock()[place as usize]
            .range(size.max(1)..)
            .next()
            .map(|(&len, pool)| (len, Arc::clone(pool)));
        let Some((len, pool)) = found.filter(|_| size > 0) else {
            let none = Error::invalid("no pool has buffers of this size: make some first");
            return Err(none
                .with("size", size)
                .with("place", format_args!("{place:?}")));
        };
        let origin = Origin::this()?;
        loop {
            let seen = pool.came_back.seen();
            if let Some(part) = pool.free.lock().pop() {
                return Ok(Buffer {
                    part,
                    len,
                    place,
                    pool: Some(Arc::clone(&pool)),
                    origin,
                });
            }
            if deadline.is_some_and(|deadline| self.clock.now() >= deadline) {
                let late = "no buffer was returned to the pool in time; return some or make more";
                return Err(Error::new(ErrorKind::Timeout, late).with("size", len));
            }
            self.clock.sleep(&pool.came_back, seen, deadline);
        }
    }

    /// Pins a range of this process's memory until [`Pools::unregister`] is called with its first
    /// address, or these pools are dropped. `InvalidInput` if a registered range begins at the same
    /// address; other errors as of [`Device::register`].
    pub fn register(&self, host: HostSpan) -> Result<()> {
        let mut registered = self.registered.lock();
        if registered.contains_key(&host.addr()) {
            let twice = Error::invalid("a range that begins here is registered already");
            return Err(twice.with("address", format_args!("{:#x}", host.addr())));
        }
        registered.insert(host.addr(), self.device.register(host)?);
        Ok(())
    }

    /// Unpins the range that [`Pools::register`] pinned at this address; no copy may use it any
    /// more. `InvalidInput` if there is none.
    pub fn unregister(&self, address: u64) -> Result<()> {
        let ended = self.registered.lock().remove(&address);
        ended.map(drop).ok_or_else(|| {
            let none = Error::invalid("no range that begins here is registered");
            none.with("address", format_args!("{address:#x}"))
        })
    }

    fn memory(&self, place: MemoryKind, bytes: usize) -> Result<DeviceMemory> {
        match place {
            MemoryKind::Device => self.device.allocate(bytes),
            MemoryKind::Host => {
                let arena = self.device.make_arena(bytes, ArenaOptions::default())?;
                let address = arena.at(0).expose_provenance() as u64;
                Ok(DeviceMemory::new(address, bytes, arena))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ucm_infra::ManualClock;

    use super::*;
    use crate::fork::tests::in_child;
    use crate::host::HostDevice;

    fn pools() -> (Arc<Pools>, Arc<ManualClock>) {
        let clock = ManualClock::new();
        let pools = Pools::new(
            Arc::new(HostDevice::default()),
            Arc::clone(&clock) as Arc<dyn Clock>,
        );
        (Arc::new(pools), clock)
    }

    #[test]
    fn a_pool_waits_to_its_deadline_and_never_grows() {
        let (pools, clock) = pools();
        for place in [MemoryKind::Device, MemoryKind::Host] {
            pools.fill(place, 100, 2).unwrap();
            let (one, two) = (
                pools.get(place, 100, None).unwrap(),
                pools.get(place, 1, None).unwrap(),
            );
            assert_ne!(one.address(), two.address());
            assert_eq!((one.len(), two.len()), (100, 100));
            let now = Some(clock.now());
            assert_eq!(
                pools.get(place, 100, now).err().unwrap().kind(),
                ErrorKind::Timeout
            );
            let address = two.address();
            drop(two);
            assert_eq!(pools.get(place, 100, now).unwrap().address(), address);
        }
    }

    #[test]
    fn who_waits_gets_the_buffer_that_comes_back() {
        let (pools, clock) = pools();
        pools.fill(MemoryKind::Host, 64, 1).unwrap();
        let held = pools.get(MemoryKind::Host, 64, None).unwrap();
        let address = held.address();
        let deadline = clock.now().after(Duration::from_secs(1));
        let waiting = Arc::clone(&pools);
        let got = std::thread::spawn(move || waiting.get(MemoryKind::Host, 64, Some(deadline)));
        drop(held);
        assert_eq!(got.join().unwrap().unwrap().address(), address);
        let held = pools.get(MemoryKind::Host, 64, None).unwrap();
        let waiting = Arc::clone(&pools);
        let got = std::thread::spawn(move || waiting.get(MemoryKind::Host, 64, Some(deadline)));
        clock.advance(Duration::from_secs(2));
        assert_eq!(
            got.join().unwrap().err().unwrap().kind(),
            ErrorKind::Timeout
        );
        drop(held);
    }

    #[test]
    fn the_smallest_that_holds_it() {
        let (pools, _) = pools();
        pools.fill(MemoryKind::Host, 4096, 1).unwrap();
        pools.fill(MemoryKind::Host, 100, 1).unwrap();
        pools.fill(MemoryKind::Host, 100, 1).unwrap();
        let small = [100, 7].map(|size| pools.get(MemoryKind::Host, size, None).unwrap());
        assert_eq!(small.each_ref().map(Buffer::len), [100, 100]);
        assert_eq!(pools.get(MemoryKind::Host, 101, None).unwrap().len(), 4096);
        assert!(pools.get(MemoryKind::Host, 4097, None).is_err());
        assert!(pools.get(MemoryKind::Host, 0, None).is_err());
        assert!(pools.get(MemoryKind::Device, 1, None).is_err());
    }

    #[test]
    fn a_buffer_outlives_its_pools() {
        let (pools, _) = pools();
        pools.fill(MemoryKind::Device, 64, 1).unwrap();
        let held = pools.get(MemoryKind::Device, 64, None).unwrap();
        let alone = pools.make(MemoryKind::Host, 10).unwrap();
        drop(pools);
        assert_eq!((held.len(), alone.len()), (64, 10));
    }

    #[test]
    fn a_forked_child_gives_nothing_back() {
        let (pools, _) = pools();
        pools.fill(MemoryKind::Host, 64, 1).unwrap();
        let mut held = Some(pools.get(MemoryKind::Host, 64, None).unwrap());
        let pool = Arc::clone(
            pools.pools.lock()[MemoryKind::Host as usize]
                .get(&64)
                .unwrap(),
        );
        let locked = pool.free.lock(); // as another thread would hold it
        let status = in_child(|| held.take().is_some());
        drop(locked);
        assert_eq!(status, 0, "how the child ended");
    }

    #[test]
    fn impossible_buffers_are_errors() {
        let (pools, _) = pools();
        for place in [MemoryKind::Device, MemoryKind::Host] {
            assert!(pools.make(place, 0).is_err());
            assert!(pools.make(place, usize::MAX).is_err());
            assert!(pools.fill(place, 0, 1).is_err());
            assert!(pools.fill(place, 1, 0).is_err());
            assert!(pools.fill(place, usize::MAX / 2, 3).is_err());
            assert!(pools.fill(place, usize::MAX, 1).is_err());
        }
    }
}
