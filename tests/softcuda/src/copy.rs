//! Copies and fills.
//!
//! Pinned host memory is copied when the stream comes to it. Other host memory is copied as CUDA documents it: to the device,
//! the bytes are taken before the call returns; from the device, the call returns once they are there.
#![allow(unsafe_code, reason = "takes bytes from the memory that callers name")]

use std::ptr::with_exposed_provenance;

use crate::clock::Cost;
use crate::context;
use crate::error::Outcome;
use crate::memory::Place;
use crate::state::{Handle, Locked, State};
use crate::stream::{self, Work};

/// The function that copies so, and waits or does not.
pub(crate) fn name(cost: Cost, waits: bool) -> &'static str {
    match (cost, waits) {
        (Cost::ToDevice(_), false) => "cuMemcpyHtoDAsync_v2",
        (Cost::ToHost(_), false) => "cuMemcpyDtoHAsync_v2",
        (Cost::ToDevice(_), true) => "cuMemcpyHtoD_v2",
        (Cost::ToHost(_), true) => "cuMemcpyDtoH_v2",
        (Cost::OnDevice(_), _) => "cuMemcpyDtoDAsync_v2",
        _ => "",
    }
}

/// `cuMemcpyHtoDAsync_v2`.
///
/// # Safety
/// `len` bytes can be read at `from`; where they are pinned, until the copy has ended.
pub(crate) unsafe fn to_device(
    state: &mut State,
    context: Handle,
    to: u64,
    from: usize,
    len: usize,
    stream: Handle,
) -> Outcome {
    stream::check(state, context, stream)?;
    if len == 0 {
        return Ok(());
    }
    let to = state.memory.device_place(to, len, context)?;
    let from = match state.memory.pinned_place(from, len, context)? {
        Some(pinned) => pinned,
        None => {
            let from = with_exposed_provenance(from);
            // SAFETY: the caller promises that they can be read.
            Place::Staged(unsafe { std::slice::from_raw_parts(from, len) }.into())
        }
    };
    let cost = Cost::ToDevice(len as u64);
    stream::submit(state, stream, Work::Copy { from, to, len, cost });
    Ok(())
}

/// `cuMemcpyDtoHAsync_v2`.
///
/// # Safety
/// `len` bytes can be written at `to`; where they are pinned, until the copy has ended.
pub(crate) unsafe fn to_host(
    state: &mut Locked,
    context: Handle,
    to: usize,
    from: u64,
    len: usize,
    stream: Handle,
) -> Outcome {
    stream::check(state, context, stream)?;
    if len == 0 {
        return Ok(());
    }
    let from = state.memory.device_place(from, len, context)?;
    let pinned = state.memory.pinned_place(to, len, context)?;
    let waits = pinned.is_none();
    let to = pinned.unwrap_or(Place::Caller(to));
    let cost = Cost::ToHost(len as u64);
    let number = stream::submit(state, stream, Work::Copy { from, to, len, cost });
    if waits {
        stream::wait(state, stream, number);
        context::check(state, context)?;
    }
    Ok(())
}

/// `cuMemcpyDtoDAsync_v2`.
pub(crate) fn on_device(
    state: &mut State,
    context: Handle,
    to: u64,
    from: u64,
    len: usize,
    stream: Handle,
) -> Outcome {
    stream::check(state, context, stream)?;
    if len == 0 {
        return Ok(());
    }
    let to = state.memory.device_place(to, len, context)?;
    let from = state.memory.device_place(from, len, context)?;
    let cost = Cost::OnDevice(len as u64);
    stream::submit(state, stream, Work::Copy { from, to, len, cost });
    Ok(())
}

/// `cuMemsetD8Async`.
pub(crate) fn fill(
    state: &mut State,
    context: Handle,
    to: u64,
    value: u8,
    len: usize,
    stream: Handle,
) -> Outcome {
    stream::check(state, context, stream)?;
    if len == 0 {
        return Ok(());
    }
    let to = state.memory.device_place(to, len, context)?;
    stream::submit(state, stream, Work::Fill { to, len, value });
    Ok(())
}

/// `cuMemcpyHtoD_v2`, which waits for the streams that are not made `NON_BLOCKING`, as the legacy stream does.
///
/// # Safety
/// `len` bytes can be read at `from`.
pub(crate) unsafe fn to_device_now(
    state: &mut Locked,
    context: Handle,
    to: u64,
    from: usize,
    len: usize,
) -> Outcome {
    if len == 0 {
        return Ok(());
    }
    let to = state.memory.device_place(to, len, context)?;
    let from = host_place(state, context, from, len)?;
    // SAFETY: the device's end is checked and in use, the caller promises the host's.
    unsafe { now(state, context, &from, &to, len, Cost::ToDevice(len as u64)) }
}

/// `cuMemcpyDtoH_v2`; waits as [`to_device_now`] does.
///
/// # Safety
/// `len` bytes can be written at `to`.
pub(crate) unsafe fn to_host_now(
    state: &mut Locked,
    context: Handle,
    to: usize,
    from: u64,
    len: usize,
) -> Outcome {
    if len == 0 {
        return Ok(());
    }
    let from = state.memory.device_place(from, len, context)?;
    let to = host_place(state, context, to, len)?;
    // SAFETY: as in `to_device_now`.
    unsafe { now(state, context, &from, &to, len, Cost::ToHost(len as u64)) }
}

/// The host's end of a copy that its caller waits for.
fn host_place(state: &State, context: Handle, address: usize, len: usize) -> Outcome<Place> {
    let pinned = state.memory.pinned_place(address, len, context)?;
    Ok(pinned.unwrap_or(Place::Caller(address)))
}

/// Copies on the caller's thread.
///
/// # Safety
/// Both places hold `len` bytes, until this returns.
unsafe fn now(
    state: &mut Locked,
    context: Handle,
    from: &Place,
    to: &Place,
    len: usize,
    cost: Cost,
) -> Outcome {
    stream::wait_for_blocking(state, context)?;
    // SAFETY: the caller's promise.
    unsafe { stream::move_bytes(from.address(), to.address(), len) };
    if state.control.is_wrong(name(cost, true)) {
        // SAFETY: as above.
        unsafe { stream::spoil(to.address(), len) };
    }
    let now = state.clock.now();
    let end = state.clock.spend(now, cost);
    state.clock.waited(end);
    state.control.moved(cost);
    Ok(())
}
