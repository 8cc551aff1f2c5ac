//! Primary contexts, and the one current to a thread.

use std::cell::RefCell;

use crate::device;
use crate::error::{
    CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_CONTEXT, CUresult, Outcome,
};
use crate::state::{ENDED, Handle, Locked, State};

/// The primary context of a device.
pub(crate) struct Context {
    pub(crate) handle: Handle,
    references: u64,
    /// The fault that broke it: the result of every later call.
    sticky: Option<CUresult>,
}

thread_local! {
    /// The thread's stack of contexts; the last one is current.
    static CURRENT: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

/// Accesses the thread's stack; a thread that is ending has none.
fn with_stack<T>(act: impl FnOnce(&mut Vec<Handle>) -> T) -> Outcome<T> {
    CURRENT
        .try_with(|stack| act(&mut stack.borrow_mut()))
        .map_err(|_| CUDA_ERROR_INVALID_CONTEXT)
}

/// The context current to the thread, null for none.
pub(crate) fn top() -> Outcome<Handle> {
    with_stack(|stack| stack.last().copied().unwrap_or(0))
}

/// The context current to the thread, if it is not broken.
pub(crate) fn current(state: &State) -> Outcome<Handle> {
    let handle = top()?;
    if handle == 0 {
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    }
    find(state, handle).ok_or(CUDA_ERROR_CONTEXT_IS_DESTROYED)?;
    check(state, handle).map(|()| handle)
}

/// The fault that broke a context, if one did.
pub(crate) fn check(state: &State, handle: Handle) -> Outcome {
    match find(state, handle).and_then(|(_, context)| context.sticky) {
        Some(code) => Err(code),
        None => Ok(()),
    }
}

/// The device of a context; a destroyed context has none.
pub(crate) fn device_of(state: &State, handle: Handle) -> Option<i32> {
    find(state, handle).map(|(index, _)| index as i32)
}

/// Breaks a context: pending work of its streams is dropped.
pub(crate) fn poison(state: &mut State, handle: Handle, code: CUresult) {
    for context in state.contexts.iter_mut().flatten() {
        if context.handle == handle {
            context.sticky.get_or_insert(code);
        }
    }
    for stream in state.streams.values() {
        stream.wake();
    }
}

/// `cuDevicePrimaryCtxRetain`.
pub(crate) fn retain(state: &mut State, device: i32) -> Outcome<Handle> {
    let index = device::index(device)?;
    let handle = state.new_handle();
    let context = state.contexts[index].get_or_insert(Context {
        handle,
        references: 0,
        sticky: None,
    });
    context.references += 1;
    Ok(context.handle)
}

/// `cuDevicePrimaryCtxRelease_v2`: the last release waits for the work in the context, then
/// destroys everything in it.
pub(crate) fn release(state: &mut Locked, device: i32) -> Outcome {
    let index = device::index(device)?;
    let context = state.contexts[index]
        .as_mut()
        .ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    context.references = context
        .references
        .checked_sub(1)
        .ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    if context.references > 0 {
        return Ok(());
    }
    let handle = context.handle;
    while state
        .streams
        .values()
        .any(|stream| stream.context == handle && !stream.is_idle())
    {
        ENDED.wait(state);
    }
    // Another thread may have retained it in the meantime.
    if state.contexts[index]
        .take_if(|it| it.references == 0)
        .is_some()
    {
        for stream in state.streams.values_mut() {
            if stream.context == handle {
                stream.close();
            }
        }
        state.events.retain(|_, event| event.context != handle);
        state.modules.retain(|_, module| module.context != handle);
        state
            .functions
            .retain(|_, function| function.context != handle);
        state.memory.drop_context(handle);
    }
    Ok(())
}

/// `aclrtCreateContext`: a context in addition to the primary one, current to this thread.
pub(crate) fn create(state: &mut State, device: i32) -> Outcome<Handle> {
    let index = device::index(device)?;
    let handle = state.new_handle();
    let context = Context {
        handle,
        references: 1,
        sticky: None,
    };
    state.others.push((index, context));
    set_current(state, handle).map(|()| handle)
}

/// True if the primary context of a device exists.
pub(crate) fn is_active(state: &State, device: i32) -> Outcome<bool> {
    Ok(state.contexts[device::index(device)?].is_some())
}

/// `cuCtxSetCurrent`: replaces the top of the stack; null removes it.
pub(crate) fn set_current(state: &State, handle: Handle) -> Outcome {
    if handle != 0 {
        find(state, handle).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    }
    with_stack(|stack| {
        stack.pop();
        if handle != 0 {
            stack.push(handle);
        }
    })
}

/// `cuCtxPushCurrent_v2`.
pub(crate) fn push(state: &State, handle: Handle) -> Outcome {
    find(state, handle).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    with_stack(|stack| stack.push(handle))
}

/// `cuCtxPopCurrent_v2`.
pub(crate) fn pop() -> Outcome<Handle> {
    with_stack(Vec::pop)?.ok_or(CUDA_ERROR_INVALID_CONTEXT)
}

fn find(state: &State, handle: Handle) -> Option<(usize, &Context)> {
    let primary = state.contexts.iter().enumerate();
    let primary = primary.filter_map(|(index, context)| Some((index, context.as_ref()?)));
    let others = state
        .others
        .iter()
        .map(|(index, context)| (*index, context));
    primary
        .chain(others)
        .find(|(_, context)| context.handle == handle)
}
