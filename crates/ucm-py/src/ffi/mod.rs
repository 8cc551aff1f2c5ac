//! The C table of a store, which `cc_store()` returns to native callers; declared in
//! `python/ucm/include/ucm_store.h`.
//!
//! The memory of a table is never freed, because callers may keep its address: a call through the
//! table of a closed store returns an error code. So the number of tables of a process is bounded.
//! No panic leaves a function, and no function uses Python.
#![allow(
    unsafe_code,
    reason = "functions that C calls take raw pointers, and device addresses are numbers"
)]

mod calls;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use ucm_core::sync::{Mutex, RwLock};
use ucm_core::{BlockId, Error, ErrorKind, Geometry, Result};
use ucm_device::DeviceSpan;
use ucm_store::engine::{Engine, Pieces, Row, RowSides, Task};

/// `UCM_STORE_VERSION`: changes when a field changes its meaning or offset, not when fields are
/// added.
const VERSION: u32 = 1;
/// `UCM_OK` and `UCM_PENDING`: results of successful calls.
const OK: i32 = 0;
const PENDING: i32 = 1;
/// `UCM_OWN_DEADLINE`: the store's configured deadline.
const OWN_DEADLINE: u64 = u64::MAX;
/// Most tables in the life of a process.
const MAX_TABLES: usize = 65_536;
/// Most unreleased tasks of one store.
const MAX_TASKS: usize = 65_536;
/// Mark of a slot, which distinguishes it from other addresses.
const MAGIC: u64 = u64::from_le_bytes(*b"UCMSTORE");

/// A function of `calls`, which has the signature of the header.
type Function = *const c_void;

/// `struct ucm_store` of the header, field by field.
#[repr(C)]
struct Table {
    version: u32,
    size: u32,
    store: *mut c_void,
    block_size: u64,
    shard_size: u64,
    shards_per_block: u32,
    pieces_per_shard: u32,
    piece_sizes: *const u64,
    lookup: Function,
    lookup_on_prefix: Function,
    load: Function,
    dump: Function,
    check: Function,
    wait: Function,
    failures: Function,
    release: Function,
    stats: Function,
    last_error: Function,
}

/// The target of the field `store`.
struct Slot {
    magic: u64,
    pid: u32,
    open: RwLock<Option<Arc<Open>>>,
}

/// An open store.
struct Open {
    engine: Arc<Engine>,
    tasks: Mutex<HashMap<u64, Task>>,
    next: AtomicU64,
}

impl Open {
    /// Starts a task and numbers it. Refused, without effect, if too many tasks are kept.
    fn begin(&self, start: impl FnOnce() -> Result<Task>) -> Result<u64> {
        if self.tasks.lock().len() >= MAX_TASKS {
            let error = Error::new(ErrorKind::Busy, "too many tasks were not released");
            return Err(error.with("limit", MAX_TASKS));
        }
        let task = start()?; // without the lock, because it may take long
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.tasks.lock().insert(number, task);
        Ok(number)
    }

    fn task(&self, number: u64) -> Result<Task> {
        let unknown =
            || Error::invalid("no such task: it was released, or belongs to another store");
        let found = self.tasks.lock().get(&number).cloned();
        found.ok_or_else(|| unknown().with("task", number))
    }
}

/// The table of one store: its address for C, and its end.
pub(crate) struct Published {
    address: usize,
    slot: &'static Slot,
}

impl Published {
    /// Makes the table of a store.
    pub(crate) fn new(engine: &Arc<Engine>) -> Result<Self> {
        static TABLES: AtomicUsize = AtomicUsize::new(0);
        engine.check_process()?;
        if TABLES.fetch_add(1, Ordering::Relaxed) >= MAX_TABLES {
            let error = Error::new(
                ErrorKind::Unsupported,
                "this process has made too many C tables of stores",
            );
            return Err(error.with("limit", MAX_TABLES));
        }
        let geometry = engine.geometry();
        let slot: &'static Slot = Box::leak(Box::new(Slot {
            magic: MAGIC,
            pid: std::process::id(),
            open: RwLock::new(Some(Arc::new(Open {
                engine: Arc::clone(engine),
                tasks: Mutex::default(),
                next: AtomicU64::new(1),
            }))),
        }));
        let sizes = geometry.tensors().iter().cycle();
        let pieces: Box<[u64]> = sizes.take(geometry.tensors_per_shard()).copied().collect();
        let block_size = geometry.layer_len() * u64::from(geometry.layers());
        let table: &'static Table = Box::leak(Box::new(Table {
            version: VERSION,
            size: u32::try_from(size_of::<Table>()).unwrap_or(0),
            store: std::ptr::from_ref(slot).cast_mut().cast(),
            block_size,
            shard_size: pieces.iter().sum(),
            shards_per_block: geometry.shards(),
            pieces_per_shard: u32::try_from(pieces.len()).unwrap_or(u32::MAX),
            piece_sizes: Box::leak(pieces).as_ptr(),
            lookup: calls::lookup as Function,
            lookup_on_prefix: calls::lookup_on_prefix as Function,
            load: calls::load as Function,
            dump: calls::dump as Function,
            check: calls::check as Function,
            wait: calls::wait as Function,
            failures: calls::failures as Function,
            release: calls::release as Function,
            stats: calls::stats as Function,
            last_error: calls::last_error as Function,
        }));
        Ok(Self {
            address: std::ptr::from_ref(table).expose_provenance(),
            slot,
        })
    }

    /// The result of `cc_store()`.
    pub(crate) fn address(&self) -> usize {
        self.address
    }

    /// Refuses every further call; calls under way finish. Without effect in a forked child.
    pub(crate) fn close(&self) {
        if self.slot.pid == std::process::id() {
            let open = self.slot.open.write().take();
            drop(open); // without the lock, because it may be the last owner of an engine
        }
    }
}

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

fn remember_error(text: String) {
    // A thread that is ending has no thread-local storage any more.
    let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = text);
}

/// The store behind the field `store` of a table.
fn open(store: *mut c_void) -> Result<Arc<Open>> {
    let slot = store.cast::<Slot>();
    if slot.is_null() || !slot.is_aligned() {
        return Err(Error::invalid("`store` is not the one of a table"));
    }
    // SAFETY: the caller passes the `store` of a table, as the header requires. Slots are never
    // freed, so this also holds for a closed store.
    let slot = unsafe { &*slot };
    if slot.magic != MAGIC {
        return Err(Error::invalid("`store` is not the one of a table"));
    }
    if slot.pid != std::process::id() {
        let text = "this store was opened before a fork; open another in the child";
        return Err(Error::new(ErrorKind::Forked, text));
    }
    let open = slot.open.read().clone();
    open.ok_or_else(|| Error::new(ErrorKind::Closed, "the store is closed"))
}

/// Runs one call. Returns a failure as its code, and keeps its text as the thread's last error.
fn run(store: *mut c_void, work: impl FnOnce(&Open) -> Result<i32>) -> i32 {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        open(store).and_then(|open| work(&open))
    }));
    match outcome {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => {
            remember_error(error.to_string());
            error.kind().code()
        }
        Err(_) => {
            remember_error("a bug in ucm; please report it".to_owned());
            ErrorKind::Internal.code()
        }
    }
}

/// A row of a load or dump by the addresses of its pieces.
///
/// # Safety
/// At each address, memory of its piece's size is valid until the task of the row has
/// ended.
pub(crate) unsafe fn row(
    geometry: &Geometry,
    number: usize,
    (id, shard): (BlockId, u32),
    addrs: impl Iterator<Item = u64>,
) -> Result<Row> {
    let sizes = geometry.tensors().iter().cycle();
    let span = |(column, (address, &size))| {
        if address == 0 {
            let error = Error::invalid("an address is null").with("row", number);
            return Err(error.with("column", column));
        }
        // SAFETY: as the caller of this function vouches.
        Ok(unsafe { DeviceSpan::new(address, size) })
    };
    let spans: Result<_> = addrs.zip(sizes).enumerate().map(span).collect();
    Ok(Row {
        id,
        shard,
        pieces: Pieces::Listed(spans?),
        ready: None,
        sides: RowSides::None,
    })
}
