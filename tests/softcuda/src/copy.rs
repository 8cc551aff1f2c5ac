//! Copies and fills.
//!
//! Pinned host memory is copied when the stream reaches the operation. Other host memory is copied
//! as CUDA documents it: to the device, the bytes are read before the call returns; from the
//! device, the call returns after the copy.
#![allow(unsafe_code, reason = "takes bytes from the memory that callers name")]

use std::ptr::with_exposed_provenance;

use crate::clock::Cost;
use crate::context;
use crate::error::Outcome;
use crate::memory::Place;
use crate::state::{Handle, Locked, State};
use crate::stream::{self, Work};

/// The function of such a copy, with or without a wait.
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
    stream::submit(
        state,
        stream,
        Work::Copy {
            from,
            to,
            len,
            cost,
        },
    );
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
    let number = stream::submit(
        state,
        stream,
        Work::Copy {
            from,
            to,
            len,
            cost,
        },
    );
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
    stream::submit(
        state,
        stream,
        Work::Copy {
            from,
            to,
            len,
            cost,
        },
    );
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

/// `cuMemcpyHtoD_v2`, which waits for the streams that are not made `NON_BLOCKING`, as the legacy
/// stream does. From memory that is not pinned it returns when the bytes were read: they are
/// written to the device as work of the default stream.
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
    let pinned = state.memory.pinned_place(from, len, context)?;
    let waits = pinned.is_some();
    let from = pinned.unwrap_or_else(|| {
        let from = with_exposed_provenance(from);
        // SAFETY: the caller promises that they can be read.
        Place::Staged(unsafe { std::slice::from_raw_parts(from, len) }.into())
    });
    now(
        state,
        context,
        from,
        to,
        len,
        Cost::ToDevice(len as u64),
        waits,
    )
}

/// `cuMemcpyDtoH_v2`; waits as [`to_device_now`] does, and for the copy.
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
    let pinned = state.memory.pinned_place(to, len, context)?;
    let to = pinned.unwrap_or(Place::Caller(to));
    now(
        state,
        context,
        from,
        to,
        len,
        Cost::ToHost(len as u64),
        true,
    )
}

/// Copies on the default stream, with or without a wait.
fn now(
    state: &mut Locked,
    context: Handle,
    from: Place,
    to: Place,
    len: usize,
    cost: Cost,
    waits: bool,
) -> Outcome {
    stream::wait_for_blocking(state, context)?;
    let stream = stream::default_of(state, context)?;
    let number = stream::submit(
        state,
        stream,
        Work::Copy {
            from,
            to,
            len,
            cost,
        },
    );
    if waits {
        stream::wait(state, stream, number);
        context::check(state, context)?;
    }
    Ok(())
}
