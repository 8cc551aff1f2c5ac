//! The functions of the table, in the order of the header. Each reads C's arguments, calls the
//! engine and writes the result; a failed call writes nothing.

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use ucm_core::{BlockId, Error, Result, limits};
use ucm_store::engine::{Row, Until};

use super::{LAST_ERROR, OK, OWN_DEADLINE, Open, PENDING, run};

/// `count` items at `data`, which may be null if `count` is 0.
///
/// # Safety
/// `data` is null, or `count` items can be read there until the call returns.
unsafe fn items<'a, T>(data: *const T, count: usize, name: &'static str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if data.is_null() || !data.is_aligned() {
        return Err(Error::invalid("a pointer is null or not aligned").with("argument", name));
    }
    if count > isize::MAX as usize / size_of::<T>() {
        return Err(Error::invalid("a count is too large").with("argument", name));
    }
    // SAFETY: not null, aligned, of a possible size; the caller vouches for the rest.
    Ok(unsafe { std::slice::from_raw_parts(data, count) })
}

/// Contiguous ids.
///
/// # Safety
/// As for [`items`], with 16 bytes each.
unsafe fn ids(data: *const u8, count: usize) -> Result<Vec<BlockId>> {
    if count > limits::MAX_IDS_PER_CALL {
        let error = Error::invalid("too many ids for one call").with("count", count);
        return Err(error.with("limit", limits::MAX_IDS_PER_CALL));
    }
    // SAFETY: as the caller of this function vouches; 16 times the limit fits.
    let bytes = unsafe { items(data, count * BlockId::LEN, "ids") }?;
    bytes
        .chunks_exact(BlockId::LEN)
        .map(BlockId::from_slice)
        .collect()
}

/// Where one value goes.
///
/// # Safety
/// `target` is null, or one value can be written there until the call returns.
unsafe fn out<'a, T>(target: *mut T, name: &'static str) -> Result<&'a mut T> {
    if target.is_null() || !target.is_aligned() {
        return Err(Error::invalid("a pointer is null or not aligned").with("argument", name));
    }
    // SAFETY: not null, aligned; the caller vouches for the rest. Only numbers are written, and
    // nothing is read.
    Ok(unsafe { &mut *target })
}

fn level(until: u32) -> Result<Until> {
    match until {
        0 => Ok(Until::Published),
        1 => Ok(Until::Staged),
        _ => Err(Error::invalid("until is UCM_PUBLISHED or UCM_STAGED").with("until", until)),
    }
}

pub(super) unsafe extern "C" fn lookup(
    store: *mut c_void,
    block_ids: *const u8,
    count: usize,
    found: *mut u8,
) -> i32 {
    run(store, |open| {
        // SAFETY: the header requires `count` ids of 16 bytes.
        let ids = unsafe { ids(block_ids, count) }?;
        if count > 0 && found.is_null() {
            return Err(
                Error::invalid("a pointer is null or not aligned").with("argument", "found")
            );
        }
        for (at, present) in open.engine.lookup(&ids)?.into_iter().enumerate() {
            // SAFETY: the header requires space for `count` bytes; there is one result for each id.
            unsafe { found.add(at).write(u8::from(present)) };
        }
        Ok(OK)
    })
}

pub(super) unsafe extern "C" fn lookup_on_prefix(
    store: *mut c_void,
    block_ids: *const u8,
    count: usize,
    present: *mut usize,
) -> i32 {
    run(store, |open| {
        // SAFETY: the header requires `count` ids of 16 bytes, and space for one number.
        let (ids, present) = unsafe { (ids(block_ids, count)?, out(present, "present")?) };
        *present = open.engine.lookup_on_prefix(&ids)?;
        Ok(OK)
    })
}

/// The rows of a load or dump.
///
/// # Safety
/// `rows` ids and shard indices and `rows` × `pieces` addresses can be read until the call
/// returns; at every address, memory of its piece's size stays valid until the task has ended.
unsafe fn rows_of(
    open: &Open,
    block_ids: *const u8,
    shards: *const u32,
    addrs: *const u64,
    rows: usize,
    pieces: usize,
) -> Result<Vec<Row>> {
    let geometry = open.engine.geometry();
    if rows > 0 && pieces != geometry.tensors_per_shard() {
        let error =
            Error::invalid("a row has one address per piece of a shard").with("given", pieces);
        return Err(error.with("expected", geometry.tensors_per_shard()));
    }
    let count = rows
        .checked_mul(pieces)
        .ok_or_else(|| Error::invalid("a count is too large").with("argument", "rows"))?;
    // SAFETY: as the caller of this function vouches.
    let (ids, shards) = unsafe { (ids(block_ids, rows)?, items(shards, rows, "shards")?) };
    // SAFETY: as above.
    let addrs = unsafe { items(addrs, count, "addrs") }?;
    let row = |(number, ((id, &shard), addrs)): (usize, ((BlockId, &u32), &[u64]))| {
        // SAFETY: as the caller of this function vouches for its addresses.
        unsafe { super::row(geometry, number, (id, shard), addrs.iter().copied()) }
    };
    let addrs = addrs.chunks_exact(pieces.max(1));
    ids.into_iter()
        .zip(shards)
        .zip(addrs)
        .enumerate()
        .map(row)
        .collect()
}

#[allow(
    clippy::too_many_arguments,
    reason = "C has no other way to pass three arrays and a matrix"
)]
pub(super) unsafe extern "C" fn load(
    store: *mut c_void,
    block_ids: *const u8,
    shards: *const u32,
    addrs: *const u64,
    rows: usize,
    pieces: usize,
    timeout_ns: u64,
    task: *mut u64,
) -> i32 {
    run(store, |open| {
        // SAFETY: the header has the requirements of `rows_of`, and requires space for one number.
        let (rows, task) = unsafe {
            let rows = rows_of(open, block_ids, shards, addrs, rows, pieces)?;
            (rows, out(task, "task")?)
        };
        let deadline = (timeout_ns != OWN_DEADLINE).then(|| Duration::from_nanos(timeout_ns));
        *task = open.begin(|| open.engine.load(rows, deadline))?;
        Ok(OK)
    })
}

pub(super) unsafe extern "C" fn dump(
    store: *mut c_void,
    block_ids: *const u8,
    shards: *const u32,
    addrs: *const u64,
    rows: usize,
    pieces: usize,
    task: *mut u64,
) -> i32 {
    run(store, |open| {
        // SAFETY: the header has the requirements of `rows_of`, and requires space for one number.
        let (rows, task) = unsafe {
            let rows = rows_of(open, block_ids, shards, addrs, rows, pieces)?;
            (rows, out(task, "task")?)
        };
        *task = open.begin(|| open.engine.dump(rows))?;
        Ok(OK)
    })
}

pub(super) unsafe extern "C" fn check(
    store: *mut c_void,
    task: u64,
    until: u32,
    finished: *mut u8,
) -> i32 {
    run(store, |open| {
        // SAFETY: the header requires space for one byte.
        let finished = unsafe { out(finished, "finished") }?;
        *finished = u8::from(open.task(task)?.check(open.engine.clock(), level(until)?));
        Ok(OK)
    })
}

pub(super) unsafe extern "C" fn wait(
    store: *mut c_void,
    task: u64,
    until: u32,
    timeout_ns: u64,
) -> i32 {
    run(store, |open| {
        let (task, level, clock) = (open.task(task)?, level(until)?, open.engine.clock());
        let limit = (timeout_ns != OWN_DEADLINE)
            .then(|| clock.now().after(Duration::from_nanos(timeout_ns)));
        if !task.wait(clock, level, limit) {
            return Ok(PENDING);
        }
        match task.failures().into_iter().next() {
            Some((row, error)) => Err(error.with("row", row)),
            None => Ok(OK),
        }
    })
}

pub(super) unsafe extern "C" fn failures(
    store: *mut c_void,
    task: u64,
    rows: *mut usize,
    codes: *mut i32,
    capacity: usize,
    count: *mut usize,
) -> i32 {
    run(store, |open| {
        // SAFETY: the header requires space for one number.
        let count = unsafe { out(count, "count") }?;
        let failed = open.task(task)?.failures();
        if capacity > 0 && (rows.is_null() || codes.is_null()) {
            return Err(
                Error::invalid("a pointer is null or not aligned").with("argument", "rows, codes")
            );
        }
        for (at, (row, error)) in failed.iter().take(capacity).enumerate() {
            // SAFETY: the header requires space for `capacity` numbers in each.
            unsafe {
                rows.add(at).write(*row);
                codes.add(at).write(error.kind().code());
            }
        }
        *count = failed.len();
        Ok(OK)
    })
}

pub(super) unsafe extern "C" fn release(store: *mut c_void, task: u64) -> i32 {
    run(store, |open| {
        open.task(task)?;
        open.tasks.lock().remove(&task);
        Ok(OK)
    })
}

/// Copies the part of a text that fits, with a final zero. Returns its whole length.
///
/// # Safety
/// `target` is null, or `capacity` bytes can be written there until the call returns.
unsafe fn copy_text(text: &str, target: *mut c_char, capacity: usize) -> usize {
    if !target.is_null() && capacity > 0 {
        let fits = text.len().min(capacity - 1);
        // SAFETY: `fits` bytes and a zero are at most `capacity`; a text of our own does not
        // overlap a caller's memory.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), target.cast::<u8>(), fits);
            target.add(fits).write(0);
        }
    }
    text.len()
}

pub(super) unsafe extern "C" fn stats(
    store: *mut c_void,
    text: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> i32 {
    run(store, |open| {
        // SAFETY: the header requires space for one number and for `capacity` bytes.
        let length = unsafe { out(length, "length") }?;
        let json = open.engine.stats().to_string();
        // SAFETY: as above.
        *length = unsafe { copy_text(&json, text, capacity) };
        Ok(OK)
    })
}

pub(super) unsafe extern "C" fn last_error(text: *mut c_char, capacity: usize) -> usize {
    let copied = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the header requires space for `capacity` bytes.
        LAST_ERROR.try_with(|last| unsafe { copy_text(&last.borrow(), text, capacity) })
    }));
    copied.ok().and_then(Result::ok).unwrap_or(0)
}
