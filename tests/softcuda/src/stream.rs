//! Streams: queues of operations, each with a thread that executes them in order, later than the
//! calls that submit them.
#![allow(
    unsafe_code,
    reason = "moves bytes between regions and the memory that callers name, and calls their \
              callbacks"
)]

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::Arc;

use parking_lot::{Condvar, MutexGuard};

use crate::call::{abort, in_callback, say};
use crate::capture::Capture;
use crate::clock::Cost;
use crate::context;
use crate::copy;
use crate::error::{
    CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_READY, CUDA_ERROR_OUT_OF_MEMORY, Outcome,
};
use crate::event::Mark;
use crate::memory::{KernelMemory, Place};
use crate::module::Launch;
use crate::state::{ENDED, Handle, Locked, State, lock};
use crate::watch::Watched;

pub(crate) const NON_BLOCKING: u32 = 1;

/// The handles that mean the legacy stream and the streams of threads.
const LEGACY: std::ops::RangeInclusive<Handle> = 0..=2;

/// The one of them that is the default stream in waits and queries.
const DEFAULT: Handle = 0;

/// A callback of `cuLaunchHostFunc`.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// A stream.
pub(crate) struct Stream {
    pub(crate) context: Handle,
    /// Whether copies without a stream wait for it.
    is_blocking: bool,
    /// Its priority is the highest.
    is_preferred: bool,
    /// True for the stream of copies without a stream.
    pub(crate) is_default: bool,
    pub(crate) capture: Option<Capture>,
    queue: VecDeque<Submitted>,
    submitted: u64,
    ended: u64,
    pub(crate) is_held: bool,
    /// Destroyed: queued operations are executed, then it is removed.
    pub(crate) is_closed: bool,
    /// Virtual time at which its last operation ended.
    time: u64,
    wake: Arc<Condvar>,
}

struct Submitted {
    work: Work,
    /// The host's virtual time.
    at: u64,
    /// Host memory that must not change until it runs.
    host: Option<Watched>,
}

/// An operation.
pub(crate) enum Work {
    /// Copies bytes; the cost has the direction.
    Copy {
        from: Place,
        to: Place,
        len: usize,
        cost: Cost,
    },
    /// Fills bytes.
    Fill { to: Place, len: usize, value: u8 },
    /// Sets a mark.
    Record(Mark),
    /// Waits for a mark.
    Wait(Mark),
    /// Calls the host.
    Call { function: HostFunction, data: usize },
    /// Runs a kernel.
    Launch(Launch),
}

impl Work {
    /// The host's bytes of a copy.
    fn host(&self) -> Option<Range<usize>> {
        match self {
            Self::Copy { from, to, len, .. } => from.host(*len).or_else(|| to.host(*len)),
            _ => None,
        }
    }

    /// The host's bytes that it writes; of a kernel, from the first to the last of each region.
    fn written(&self, memory: Option<&KernelMemory>) -> Vec<Range<usize>> {
        match self {
            Self::Copy { to, len, .. } => to.host(*len).into_iter().collect(),
            Self::Launch(_) => memory.map(KernelMemory::written).unwrap_or_default(),
            _ => Vec::new(),
        }
    }
}

impl Stream {
    /// True if all submitted work has ended.
    pub(crate) fn is_idle(&self) -> bool {
        self.ended == self.submitted
    }

    /// Whether its work waits neither for the default stream nor behind that of a stream of a
    /// higher priority.
    pub(crate) fn is_first(&self) -> bool {
        self.is_preferred && !self.is_blocking
    }

    /// No more work comes.
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
        self.wake();
    }

    /// Lets its thread look anew.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    /// True if its next operation may begin.
    fn is_ready(&self) -> bool {
        !self.is_held
            && self.queue.front().is_some_and(|next| match &next.work {
                Work::Wait(mark) => mark.get().is_some(),
                _ => true,
            })
    }
}

/// `cuStreamCreateWithPriority`; priorities are all the same here.
pub(crate) fn create(
    state: &mut State,
    context: Handle,
    flags: u32,
    is_preferred: bool,
) -> Outcome<Handle> {
    if flags & !NON_BLOCKING != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let handle = state.new_handle();
    let wake = Arc::new(Condvar::new());
    let stream = Stream {
        context,
        is_blocking: flags & NON_BLOCKING == 0,
        is_preferred,
        is_default: false,
        capture: None,
        queue: VecDeque::new(),
        submitted: 0,
        ended: 0,
        is_held: state.control.holds_new_streams,
        is_closed: false,
        time: 0,
        wake: Arc::clone(&wake),
    };
    std::thread::Builder::new()
        .name("softcuda stream".into())
        .spawn(move || work(handle, &wake))
        .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    // The thread takes the lock when the caller releases it.
    state.streams.insert(handle, stream);
    Ok(handle)
}

/// `cuStreamDestroy_v2`: returns at once; queued operations are still executed.
pub(crate) fn destroy(state: &mut State, context: Handle, stream: Handle) -> Outcome {
    check(state, context, stream)?;
    if let Some(stream) = state.streams.get_mut(&stream) {
        stream.close();
    }
    Ok(())
}

/// The stream of a context's copies without a stream.
pub(crate) fn default_of(state: &mut State, context: Handle) -> Outcome<Handle> {
    let mut streams = state.streams.iter();
    let made = streams
        .find(|(_, stream)| stream.context == context && stream.is_default && !stream.is_closed);
    if let Some((&handle, _)) = made {
        return Ok(handle);
    }
    let handle = create(state, context, NON_BLOCKING, false)?;
    if let Some(stream) = state.streams.get_mut(&handle) {
        stream.is_default = true;
    }
    Ok(handle)
}

/// A stream of a wait or query, which may be the default one.
fn asked(state: &mut State, context: Handle, stream: Handle) -> Outcome<Handle> {
    match stream {
        DEFAULT => default_of(state, context),
        other => check(state, context, other).map(|()| other),
    }
}

/// Checks that a stream exists and is of this context. The legacy stream ends the process: it waits
/// for every other stream of the device, which is always an error.
pub(crate) fn check(state: &State, context: Handle, stream: Handle) -> Outcome {
    if LEGACY.contains(&stream) {
        abort("the legacy stream was given to a call that takes a stream");
    }
    match state.streams.get(&stream) {
        Some(stream) if stream.context == context && !stream.is_closed => Ok(()),
        _ => Err(CUDA_ERROR_INVALID_HANDLE),
    }
}

/// Puts an operation at the end of a checked stream; returns its number, for a wait. A capturing
/// stream does not execute it.
pub(crate) fn submit(state: &mut State, stream: Handle, work: Work) -> u64 {
    let at = state.clock.now();
    let Some(stream) = state.streams.get_mut(&stream) else {
        abort("work for a stream that was not checked");
    };
    if stream.capture.is_some() {
        return stream.submitted;
    }
    // SAFETY: while the copy is queued its place is in use, or its caller waits.
    let host = work.host().map(|bytes| unsafe { Watched::new(bytes) });
    stream.queue.push_back(Submitted { work, at, host });
    stream.submitted += 1;
    stream.wake();
    stream.submitted
}

/// Waits until an operation has ended, which also advances the host's time.
pub(crate) fn wait(state: &mut Locked, stream: Handle, number: u64) {
    loop {
        // A removed stream has done all its work.
        let Some(found) = state.streams.get(&stream) else {
            return;
        };
        if found.ended >= number {
            let time = found.time;
            return state.clock.waited(time);
        }
        ENDED.wait(state);
    }
}

/// `cuStreamSynchronize`.
pub(crate) fn synchronize(state: &mut Locked, context: Handle, stream: Handle) -> Outcome {
    let stream = asked(state, context, stream)?;
    let last = state
        .streams
        .get(&stream)
        .map_or(0, |stream| stream.submitted);
    wait(state, stream, last);
    context::check(state, context)
}

/// `cuStreamQuery`.
pub(crate) fn query(state: &mut State, context: Handle, stream: Handle) -> Outcome {
    let stream = asked(state, context, stream)?;
    let stream = state.streams.get(&stream).filter(|stream| stream.is_idle());
    let time = stream.ok_or(CUDA_ERROR_NOT_READY)?.time;
    state.clock.waited(time);
    Ok(())
}

/// Waits as copies without a stream do: for the streams of the context that are not made
/// `NON_BLOCKING`.
pub(crate) fn wait_for_blocking(state: &mut Locked, context: Handle) -> Outcome {
    let streams = state.streams.iter();
    let before: Vec<(Handle, u64)> = streams
        .filter(|(_, stream)| stream.context == context && stream.is_blocking)
        .map(|(&handle, stream)| (handle, stream.submitted))
        .collect();
    for (stream, last) in before {
        wait(state, stream, last);
    }
    context::check(state, context)
}

/// Moves bytes, which may overlap.
///
/// # Safety
/// Both ranges are mapped. Concurrent access follows the rules of a device's own copies.
pub(crate) unsafe fn move_bytes(from: usize, to: usize, len: usize) {
    let (from, to) = (
        with_exposed_provenance::<u8>(from),
        with_exposed_provenance_mut::<u8>(to),
    );
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy(from, to, len) };
}

/// Makes a byte of a copy wrong.
///
/// # Safety
/// As [`move_bytes`].
pub(crate) unsafe fn spoil(to: usize, len: usize) {
    let byte = with_exposed_provenance_mut::<u8>(to + len / 2);
    // SAFETY: the caller's promise.
    unsafe { *byte ^= 1 };
}

/// A stream's thread.
fn work(handle: Handle, wake: &Condvar) {
    let mut state = lock();
    let mut delayed = false;
    while let Some(stream) = state.streams.get(&handle) {
        if stream.queue.is_empty() && stream.is_closed {
            state.streams.remove(&handle);
            break;
        }
        let context = stream.context;
        if context::check(&state, context).is_err() {
            drop_queue(&mut state, handle);
            if state
                .streams
                .get(&handle)
                .is_some_and(|stream| !stream.is_closed)
            {
                wake.wait(&mut state);
            }
            continue;
        }
        if !stream.is_ready() {
            wake.wait(&mut state);
            continue;
        }
        if let Some(delay) = state.control.delay().filter(|_| !delayed) {
            // Afterwards it may be held, or its context broken: check again.
            delayed = true;
            MutexGuard::unlocked(&mut state, || std::thread::sleep(delay));
            continue;
        }
        delayed = false;
        perform(&mut state, handle, context);
    }
    ENDED.notify_all();
}

/// Executes the next operation of a ready stream, without the lock.
fn perform(state: &mut Locked, handle: Handle, context: Handle) {
    let Some(stream) = state.streams.get_mut(&handle) else {
        return;
    };
    let (next, waits) = (stream.queue.pop_front(), stream.is_default);
    let Some(next) = next else { return };
    let mut memory = None;
    let (outcome, work) = match next.work {
        Work::Record(_) | Work::Wait(_) => (Ok(Cost::None), next.work),
        Work::Launch(launch) => {
            let wrong = state.control.is_wrong(launch.name());
            let memory = memory.insert(KernelMemory::new(state.memory.in_reach_of(context), wrong));
            let outcome = MutexGuard::unlocked(state, || launch.run(memory));
            let (host, device) = memory.moved();
            let cost = outcome.map(|()| Cost::Kernel { host, device });
            (cost, Work::Launch(launch))
        }
        other => {
            let name = match other {
                Work::Copy { cost, .. } => copy::name(cost, waits),
                _ => "",
            };
            let wrong = state.control.is_wrong(name);
            let cost = MutexGuard::unlocked(state, || {
                if let Some((at, len)) = next.host.as_ref().and_then(Watched::changed) {
                    abort(&format!(
                        "{name}: the host changed its memory at {at:#x} ({len} bytes), \
                         which a queued copy needed"
                    ));
                }
                move_or_call(&other, wrong)
            });
            (Ok(cost), other)
        }
    };
    for bytes in work.written(memory.as_ref()) {
        written(state, &bytes);
    }
    drop(memory);
    match outcome {
        Ok(cost) => end(state, handle, next.at, &work, cost),
        Err(fault) => {
            let (address, len) = (fault.address, fault.len);
            say(&format!(
                "a kernel used {len} bytes at {address:#x}, where it has no memory"
            ));
            context::poison(state, context, CUDA_ERROR_ILLEGAL_ADDRESS);
            end(state, handle, next.at, &work, Cost::None);
        }
    }
}

/// The driver has written these bytes of the host's memory.
pub(crate) fn written(state: &mut State, bytes: &Range<usize>) {
    let queues = state.streams.values_mut().map(|stream| &mut stream.queue);
    let watched = queues.flatten().filter_map(|queued| queued.host.as_mut());
    watched.for_each(|watched| watched.written(bytes));
}

/// Executes copies, fills and callbacks; returns their cost.
fn move_or_call(work: &Work, wrong: bool) -> Cost {
    match work {
        Work::Copy {
            from,
            to,
            len,
            cost,
        } => {
            // SAFETY: places of regions are checked and in use until this ends, staged bytes are
            // owned, and a caller whose memory this is waits.
            unsafe {
                move_bytes(from.address(), to.address(), *len);
                if wrong {
                    spoil(to.address(), *len);
                }
            }
            *cost
        }
        Work::Fill { to, len, value } => {
            let to = with_exposed_provenance_mut::<u8>(to.address());
            // SAFETY: as for copies.
            unsafe { to.write_bytes(*value, *len) };
            Cost::Fill(*len as u64)
        }
        Work::Call { function, data } => {
            // SAFETY: the caller promised that the callback can be called with this.
            in_callback(|| unsafe { function(with_exposed_provenance_mut(*data)) });
            Cost::None
        }
        Work::Record(_) | Work::Wait(_) | Work::Launch(_) => Cost::None,
    }
}

/// Records the end of an operation and notifies waiters.
fn end(state: &mut State, handle: Handle, submitted: u64, work: &Work, cost: Cost) {
    let State {
        streams,
        clock,
        control,
        ..
    } = state;
    let Some(stream) = streams.get_mut(&handle) else {
        return;
    };
    let mut begin = stream.time.max(submitted);
    if let Work::Wait(mark) = work {
        begin = begin.max(mark.get().copied().unwrap_or(0));
    }
    stream.time = clock.spend(begin, cost);
    stream.ended += 1;
    control.moved(cost);
    if let Work::Record(mark) = work {
        reach(mark, stream.time);
        streams.values().for_each(Stream::wake);
    }
    ENDED.notify_all();
}

/// Drops the pending work of a stream in a broken context. Its marks are set, because another
/// context may wait for them.
fn drop_queue(state: &mut State, handle: Handle) {
    let Some(stream) = state
        .streams
        .get_mut(&handle)
        .filter(|stream| !stream.queue.is_empty())
    else {
        return;
    };
    stream.ended += stream.queue.len() as u64;
    for dropped in std::mem::take(&mut stream.queue) {
        if let Work::Record(mark) = dropped.work {
            reach(&mark, stream.time);
        }
    }
    state.streams.values().for_each(Stream::wake);
    ENDED.notify_all();
}

/// Sets a mark; only its one operation does this.
fn reach(mark: &Mark, time: u64) {
    let _ = mark.set(time);
}
