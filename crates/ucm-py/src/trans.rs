//! Copies by address for Python: devices, streams, buffers. The public API is `ucm.trans`.
#![allow(unsafe_code, reason = "addresses come from Python as numbers")]

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::ptr::with_exposed_provenance_mut;
use std::sync::Arc;
use std::time::Duration;

use numpy::{PyReadonlyArray1, PyUntypedArray};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyList, PyTuple};
use ucm_core::sync::{Condvar, Mutex};
use ucm_core::{Error, ErrorKind};
use ucm_device::trans::{Buffer, Copies, MemoryKind, Pools, Sides, addresses_at, pairs};
use ucm_device::{Device, DeviceSpan, Direction, HostSpan, Transfer, open_device};
use ucm_infra::log::NO_STORE;
use ucm_infra::{Clock, MonotonicTime, SystemClock};

use crate::convert::CallResult;
use crate::store::{Line, lines_of};
use crate::task::{OfProcess, limit};

/// An open device.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct TransDevice(OfProcess<Arc<dyn Device>>);

#[pymethods]
impl TransDevice {
    /// `name`: "host", "cuda:0".
    #[new]
    fn new(py: Python<'_>, name: &str) -> CallResult<Self> {
        let device = py.detach(|| open_device(name, Transfer::Auto, SystemClock::shared()))?;
        Ok(Self(OfProcess::new(device)))
    }

    /// Its name, with its number.
    #[getter]
    fn name(&self) -> &str {
        self.0.value.name()
    }

    /// The core's log records of devices since the last call: (level of `logging`, message,
    /// fields).
    fn take_log(&self) -> Vec<Line> {
        lines_of(NO_STORE)
    }

    /// A stream with this copy method: auto, dma, sm or staging.
    fn make_stream(&self, py: Python<'_>, transfer: &str) -> CallResult<TransStream> {
        let device = self.0.get()?;
        let transfer = Transfer::from_word(transfer)?;
        let stream = py.detach(|| device.make_stream_by(transfer))?;
        let copies = Mutex::new(Some(Copies::new(stream)));
        Ok(TransStream(OfProcess::new(copies)))
    }

    /// The source of buffers, without pools yet.
    fn make_buffer(&self) -> CallResult<TransBuffer> {
        let pools = Pools::new(Arc::clone(self.0.get()?), SystemClock::shared());
        Ok(TransBuffer(OfProcess::new(pools)))
    }
}

/// Buffers of a device and of the host.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct TransBuffer(OfProcess<Pools>);

#[pymethods]
impl TransBuffer {
    /// A buffer outside of pools; `place` is "device" or "host", as below.
    fn make(
        &self,
        py: Python<'_>,
        place: &str,
        size: &Bound<'_, PyAny>,
    ) -> CallResult<TransMemory> {
        let (pools, place, size) = (self.0.get()?, kind(place)?, count(size, "size")?);
        let buffer = py.detach(|| pools.make(place, size))?;
        Ok(TransMemory::new(buffer))
    }

    /// Adds to the pool of this size.
    fn fill(
        &self,
        py: Python<'_>,
        place: &str,
        size: &Bound<'_, PyAny>,
        number: &Bound<'_, PyAny>,
    ) -> CallResult<()> {
        let (pools, place) = (self.0.get()?, kind(place)?);
        let (size, number) = (count(size, "size")?, count(number, "number")?);
        Ok(py.detach(|| pools.fill(place, size, number))?)
    }

    /// A buffer from a pool; waits at most `timeout` seconds.
    fn get(
        &self,
        py: Python<'_>,
        place: &str,
        size: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> CallResult<TransMemory> {
        let (pools, place, size) = (self.0.get()?, kind(place)?, count(size, "size")?);
        let limit = limit(timeout)?;
        may_wait()?;
        let buffer = py.detach(|| pools.get(place, size, until(limit)))?;
        Ok(TransMemory::new(buffer))
    }

    /// Pins memory of the caller.
    fn register(
        &self,
        py: Python<'_>,
        address: &Bound<'_, PyAny>,
        size: &Bound<'_, PyAny>,
    ) -> CallResult<()> {
        let (pools, address, size) = (self.0.get()?, number(address)?, count(size, "size")?);
        // SAFETY: the caller of `register_host_buffer` vouches that the memory stays mapped until
        // it is unregistered.
        let host = unsafe { HostSpan::new(address, size as u64) };
        Ok(py.detach(|| pools.register(host))?)
    }

    /// Ends that.
    fn unregister(&self, py: Python<'_>, address: &Bound<'_, PyAny>) -> CallResult<()> {
        let (pools, address) = (self.0.get()?, number(address)?);
        Ok(py.detach(|| pools.unregister(address))?)
    }
}

fn kind(place: &str) -> CallResult<MemoryKind> {
    MemoryKind::of_name(place).ok_or_else(|| {
        let unknown = Error::invalid("a place is \"device\" or \"host\"");
        unknown.with("place", place).into()
    })
}

/// Some bytes on the device or the host. Copies under way keep them alive.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct TransMemory(OfProcess<Mutex<Option<Arc<Buffer>>>>);

#[pymethods]
impl TransMemory {
    /// The address of its first byte; an error after it was returned.
    #[getter]
    fn address(&self) -> CallResult<u64> {
        self.held().map(|buffer| buffer.address())
    }

    /// Usable bytes.
    #[getter]
    fn size(&self) -> CallResult<usize> {
        self.held().map(|buffer| buffer.len())
    }

    fn __index__(&self) -> CallResult<u64> {
        self.address()
    }

    /// Returns it to its pool or frees it, when no copy and no view uses it any more; repeatable.
    /// No effect in a forked child.
    fn close(&self, py: Python<'_>) {
        if let Ok(buffer) = self.0.get() {
            let buffer = buffer.lock().take();
            py.detach(|| drop(buffer));
        }
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    /// The bytes of a buffer on the host; it stays until the view ends.
    ///
    /// # Safety
    /// Called by Python with its own arguments.
    unsafe fn __getbuffer__(
        this: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: std::ffi::c_int,
    ) -> CallResult<()> {
        let py = this.py();
        let buffer = this.get().held()?;
        if buffer.place() != MemoryKind::Host {
            let wrong = PyBufferError::new_err("the host cannot reach a buffer on the device");
            return Err(wrong.into());
        }
        let first = with_exposed_provenance_mut(buffer.address() as usize);
        let len = buffer.len() as ffi::Py_ssize_t;
        // SAFETY: Python passes `view` to be filled in; the bytes stay until its release, because
        // it keeps the buffer alive.
        unsafe {
            if ffi::PyBuffer_FillInfo(view, this.as_ptr(), first, len, 0, flags) != 0 {
                return Err(PyErr::fetch(py).into());
            }
            (*view).internal = Arc::into_raw(buffer).cast_mut().cast();
        }
        Ok(())
    }

    /// # Safety
    /// Called by Python once for each filled view.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: filled in above.
        let kept = unsafe { Arc::from_raw((*view).internal.cast::<Buffer>()) };
        end(Some(kept), self.0.is_here());
    }
}

impl TransMemory {
    fn new(buffer: Buffer) -> Self {
        Self(OfProcess::new(Mutex::new(Some(Arc::new(buffer)))))
    }

    fn held(&self) -> CallResult<Arc<Buffer>> {
        let held = self.0.get()?.lock().clone();
        held.ok_or_else(|| Error::new(ErrorKind::Closed, "this buffer was given back").into())
    }
}

/// A stream of copies; its calls run one after the other.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct TransStream(OfProcess<Mutex<Option<Copies>>>);

#[pymethods]
impl TransStream {
    /// Copies pieces of `size` bytes between the device and the host. Each side is one address or
    /// an array of `number` addresses; if only the host's is one address, its pieces are
    /// contiguous. Without `wait` the copy is only begun.
    #[allow(
        clippy::too_many_arguments,
        reason = "one function for twelve of Python's"
    )]
    fn copy(
        &self,
        py: Python<'_>,
        shape: &str,
        to_device: bool,
        device: &Bound<'_, PyAny>,
        host: &Bound<'_, PyAny>,
        size: &Bound<'_, PyAny>,
        number: Option<&Bound<'_, PyAny>>,
        wait: bool,
    ) -> CallResult<()> {
        let direction = match to_device {
            true => Direction::ToDevice,
            false => Direction::ToHost,
        };
        let (pairs, kept) = parsed(shape, [device, host], size, number)?;
        self.with(py, move |copies| match wait {
            true => copies.transfer(direction, &pairs),
            false => copies.transfer_async(direction, pairs, kept),
        })
    }

    /// Calls a function on the stream's thread when all earlier work has ended, with true if all of
    /// it succeeded.
    fn append_callback(&self, py: Python<'_>, call: Py<PyAny>) -> CallResult<()> {
        self.with(py, |copies| {
            copies.callback(move |well| Callbacks::run(&call, well))
        })
    }

    /// Waits for all submitted work, at most `timeout` seconds.
    fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> CallResult<()> {
        let limit = limit(timeout)?;
        self.with(py, |copies| copies.synchronize(until(limit)))
    }

    /// Refuses further work. Submitted work is still done, without a wait. Repeatable. No effect in
    /// a forked child.
    fn close(&self, py: Python<'_>) {
        if let Ok(copies) = self.0.get() {
            py.detach(|| drop(copies.lock().take()));
        }
    }
}

impl TransStream {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Copies) -> ucm_core::Result<T> + Send,
    ) -> CallResult<T> {
        let copies = self.0.get()?;
        may_wait()?;
        let result = py.detach(|| match copies.lock().as_mut() {
            Some(copies) => call(copies),
            None => Err(Error::new(ErrorKind::Closed, "this stream was closed")),
        });
        Ok(result?)
    }
}

impl Drop for TransStream {
    fn drop(&mut self) {
        let is_here = self.0.is_here();
        end(self.0.value.get_mut().take(), is_here);
    }
}

impl Drop for TransMemory {
    fn drop(&mut self) {
        let is_here = self.0.is_here();
        end(self.0.value.get_mut().take(), is_here);
    }
}

/// Drops a value whose drop may wait for the device, without the GIL. A forked child leaks the
/// value instead: its resources belong to the parent, and a thread that the child does not have may
/// hold its locks.
fn end<T: Send>(mut value: Option<T>, is_here: bool) {
    if !is_here {
        let _left = ManuallyDrop::new(value);
        return;
    }
    if value.is_some() {
        Python::try_attach(|py| py.detach(|| drop(value.take())));
    }
}

/// The Python callbacks of a process, which streams call on their threads.
struct Callbacks {
    process: u32,
    /// How many run now.
    running: usize,
    /// No more are begun.
    ended: bool,
}

static CALLBACKS: Mutex<Callbacks> = Mutex::new(Callbacks::none(0, false));

/// Signalled when a callback has ended.
static ONE_ENDED: Condvar = Condvar::new();

thread_local! {
    /// True if this thread is in a callback.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

impl Callbacks {
    const fn none(process: u32, ended: bool) -> Self {
        Self {
            process,
            running: 0,
            ended,
        }
    }

    /// Counts a callback about to run; `false` if none may run any more. Inherited callbacks do not
    /// run in a forked child.
    fn begin() -> bool {
        let (mut callbacks, process) = (CALLBACKS.lock(), std::process::id());
        if callbacks.process != process {
            *callbacks = Self::none(process, false);
        }
        callbacks.running += usize::from(!callbacks.ended);
        !callbacks.ended
    }

    fn run(call: &Py<PyAny>, well: bool) {
        if !Self::begin() {
            return;
        }
        INSIDE.set(true);
        Python::try_attach(|py| {
            if let Err(error) = call.call1(py, (well,)) {
                error.write_unraisable(py, Some(call.bind(py)));
            }
        });
        INSIDE.set(false);
        CALLBACKS.lock().running -= 1;
        ONE_ENDED.notify_all();
    }
}

/// From now on no stream calls into Python; returns when the running callbacks have ended.
#[pyfunction]
pub(crate) fn end_callbacks(py: Python<'_>) {
    py.detach(|| {
        let mut callbacks = CALLBACKS.lock();
        while callbacks.process == std::process::id() && callbacks.running > 0 {
            callbacks.ended = true;
            callbacks = ONE_ENDED.wait(callbacks);
        }
        *callbacks = Callbacks::none(std::process::id(), true);
    });
}

/// Refuses calls that wait in a callback, because their work may wait for the callback itself.
fn may_wait() -> CallResult<()> {
    if !INSIDE.get() {
        return Ok(());
    }
    let inside = Error::invalid("a callback of a stream uses no stream and waits for no buffer");
    Err(inside.into())
}

fn until(limit: Option<Duration>) -> Option<MonotonicTime> {
    limit.map(|limit| SystemClock.now().after(limit))
}

/// A count or size: a whole number above zero.
fn count(value: &Bound<'_, PyAny>, what: &'static str) -> CallResult<usize> {
    match value.extract::<usize>() {
        Ok(count) if count > 0 && !value.is_instance_of::<PyBool>() => Ok(count),
        _ => {
            let wrong =
                Error::invalid("a size or number is a whole number above zero").with("what", what);
            Err(wrong.with("value", text(value)).into())
        }
    }
}

/// An address, not null.
fn number(value: &Bound<'_, PyAny>) -> CallResult<u64> {
    if let Ok(memory) = value.cast::<TransMemory>() {
        return memory.get().address();
    }
    let address = value.extract::<u64>().ok().filter(|&address| address > 0);
    address.ok_or_else(|| {
        let wrong =
            Error::invalid("an address is a whole number above zero, or a buffer of ucm.trans");
        wrong.with("value", text(value)).into()
    })
}

/// An object's description for an error.
fn text(value: &Bound<'_, PyAny>) -> String {
    let text = value
        .repr()
        .map(|text| text.to_string())
        .unwrap_or_default();
    text.chars().take(80).collect()
}

/// An address of at least `size` bytes. A buffer of ours is checked and kept alive.
fn one(value: &Bound<'_, PyAny>, size: usize, kept: &mut Vec<Arc<Buffer>>) -> CallResult<u64> {
    let Ok(memory) = value.cast::<TransMemory>() else {
        return number(value);
    };
    let buffer = memory.get().held()?;
    if buffer.len() < size {
        let small = Error::invalid("the buffer is smaller than what is copied");
        let small = small.with("buffer", buffer.len()).with("copied", size);
        return Err(small.into());
    }
    let address = buffer.address();
    kept.push(buffer);
    Ok(address)
}

/// Addresses of `size` bytes each: an array of them, a list or tuple, or the address of an array.
fn many(
    value: &Bound<'_, PyAny>,
    size: usize,
    number: Option<usize>,
    kept: &mut Vec<Arc<Buffer>>,
) -> CallResult<Vec<u64>> {
    let mut addresses = if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let items = value.try_iter()?;
        items
            .map(|item| one(&item?, size, kept))
            .collect::<CallResult<Vec<_>>>()?
    } else if value.is_instance_of::<PyUntypedArray>() {
        let array = value.extract::<PyReadonlyArray1<'_, u64>>().map_err(|_| {
            Error::invalid("an array of addresses has one dimension and the type uint64")
        })?;
        array.as_array().iter().copied().collect()
    } else if value.is_instance_of::<PyInt>() {
        let Some(number) = number else {
            let unknown = "pass the number of addresses (number) with the address of an array";
            return Err(Error::invalid(unknown).into());
        };
        let array = self::number(value)?;
        // SAFETY: the caller vouches that the address is that of an array of `number` pointers; the
        // caller's code cannot write to it while this thread holds the GIL.
        unsafe { addresses_at(array, number) }?
    } else {
        let wrong =
            "addresses are a NumPy array of uint64, a list, or the address of an array of pointers";
        return Err(Error::invalid(wrong).with("value", text(value)).into());
    };
    let number = number.unwrap_or(addresses.len());
    if number > addresses.len() {
        let few = Error::invalid("fewer addresses than the number says");
        let few = few.with("addresses", addresses.len());
        return Err(few.with("number", number).into());
    }
    addresses.truncate(number);
    Ok(addresses)
}

/// What a copy moves between: places of the device and of the host.
type Pairs = Vec<(DeviceSpan, HostSpan)>;

/// Parses the arguments of a copy: `shape` is "one" (an address on both sides), "batch" (many on
/// both) or "together" (many on the device, one buffer on the host).
/// Returns the pairs, and the buffers that must live through the copy.
fn parsed(
    shape: &str,
    [device, host]: [&Bound<'_, PyAny>; 2],
    size: &Bound<'_, PyAny>,
    number: Option<&Bound<'_, PyAny>>,
) -> CallResult<(Pairs, Vec<Arc<Buffer>>)> {
    let size = count(size, "size")?;
    let number = number.map(|number| count(number, "number")).transpose()?;
    let mut kept = Vec::new();
    let devices = match shape {
        "one" => vec![one(device, size, &mut kept)?],
        _ => many(device, size, number, &mut kept)?,
    };
    let hosts = match shape {
        "batch" => many(host, size, number, &mut kept)?,
        _ => vec![one(host, size.saturating_mul(devices.len()), &mut kept)?],
    };
    let sides = match (shape, &*hosts) {
        ("together", &[first]) => Sides::Together(first),
        (_, each) => Sides::Each(each),
    };
    // SAFETY: the caller of a stream vouches for each address and its bytes until the copy has
    // ended; buffers of ours are kept alive until then.
    let pairs = unsafe { pairs(&devices, sides, size) }?;
    Ok((pairs, kept))
}
