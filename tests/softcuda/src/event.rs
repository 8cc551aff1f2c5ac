//! Events.
//!
//! Each recording of an event makes a [`Mark`], which the stream sets. Those who wait hold the
//! mark, so that recording the event anew or destroying it changes nothing for them.

use std::sync::{Arc, OnceLock};

use crate::context;
use crate::error::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_READY, Outcome,
};
use crate::state::{ENDED, Handle, Locked, State};
use crate::stream::{self, Work};

/// A point in a stream: set once it is reached, to the virtual time.
pub(crate) type Mark = Arc<OnceLock<u64>>;

const BLOCKING_SYNC: u32 = 1;
pub(crate) const DISABLE_TIMING: u32 = 2;

/// An event.
pub(crate) struct Event {
    pub(crate) context: Handle,
    has_time: bool,
    /// Its last recording.
    last: Option<Mark>,
}

/// `cuEventCreate`. Events for other processes are not supported.
pub(crate) fn create(state: &mut State, context: Handle, flags: u32) -> Outcome<Handle> {
    if flags & !(BLOCKING_SYNC | DISABLE_TIMING) != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let handle = state.new_handle();
    let event = Event {
        context,
        has_time: flags & DISABLE_TIMING == 0,
        last: None,
    };
    state.events.insert(handle, event);
    Ok(handle)
}

/// `cuEventDestroy_v2`.
pub(crate) fn destroy(state: &mut State, context: Handle, event: Handle) -> Outcome {
    find(state, context, event)?;
    state.events.remove(&event);
    Ok(())
}

/// `cuEventRecord`.
pub(crate) fn record(state: &mut State, context: Handle, event: Handle, stream: Handle) -> Outcome {
    stream::check(state, context, stream)?;
    let mark = Mark::default();
    find(state, context, event)?.last = Some(Arc::clone(&mark));
    stream::submit(state, stream, Work::Record(mark));
    Ok(())
}

/// `cuStreamWaitEvent`: nothing to wait for where the event was never recorded. The event may be of
/// another context.
pub(crate) fn stream_wait(
    state: &mut State,
    context: Handle,
    stream: Handle,
    event: Handle,
    flags: u32,
) -> Outcome {
    stream::check(state, context, stream)?;
    if flags != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let event = state.events.get(&event).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    if let Some(mark) = &event.last {
        let wait = Work::Wait(Arc::clone(mark));
        stream::submit(state, stream, wait);
    }
    Ok(())
}

/// `cuEventQuery`: done where it was never recorded.
pub(crate) fn query(state: &mut State, context: Handle, event: Handle) -> Outcome {
    let Some(mark) = &find(state, context, event)?.last else {
        return Ok(());
    };
    let time = *mark.get().ok_or(CUDA_ERROR_NOT_READY)?;
    state.clock.waited(time);
    Ok(())
}

/// Whether an event was ever recorded.
pub(crate) fn is_recorded(state: &mut State, context: Handle, event: Handle) -> Outcome<bool> {
    Ok(find(state, context, event)?.last.is_some())
}

/// `cuEventSynchronize`.
pub(crate) fn synchronize(state: &mut Locked, context: Handle, event: Handle) -> Outcome {
    let Some(mark) = find(state, context, event)?.last.clone() else {
        return Ok(());
    };
    let time = loop {
        match mark.get() {
            Some(&time) => break time,
            None => ENDED.wait(state),
        }
    };
    state.clock.waited(time);
    context::check(state, context)
}

/// `cuEventElapsedTime`, in milliseconds.
pub(crate) fn elapsed(
    state: &mut State,
    context: Handle,
    start: Handle,
    end: Handle,
) -> Outcome<f32> {
    let start = time(state, context, start)?;
    let end = time(state, context, end)?;
    Ok((end as f64 - start as f64) as f32 / 1e6)
}

/// When a recorded event that keeps times was reached.
fn time(state: &mut State, context: Handle, event: Handle) -> Outcome<u64> {
    let event = find(state, context, event)?;
    let mark = event.last.as_ref().filter(|_| event.has_time);
    let mark = mark.ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    mark.get().copied().ok_or(CUDA_ERROR_NOT_READY)
}

fn find(state: &mut State, context: Handle, event: Handle) -> Outcome<&mut Event> {
    let event = state.events.get_mut(&event);
    event
        .filter(|event| event.context == context)
        .ok_or(CUDA_ERROR_INVALID_HANDLE)
}
