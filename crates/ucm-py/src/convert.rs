//! Conversion between Python values and types of the core: errors, ids, tokens.
#![allow(
    unsafe_code,
    reason = "reads the items of a Python list without a reference count each"
)]

use numpy::{PyReadonlyArray1, PyUntypedArrayMethods};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use ucm_core::{BlockId, Error};

/// The exception of `ucm.errors` for an error of the core.
fn raise(py: Python<'_>, error: &Error) -> PyErr {
    match exception(py, error) {
        Ok(value) => PyErr::from_value(value),
        Err(failed) => {
            let plain = PyRuntimeError::new_err(format!("({}) {error}", error.kind().code()));
            plain.set_cause(py, Some(failed));
            plain
        }
    }
}

/// The exception object, for errors that are returned and not raised.
pub(crate) fn exception<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let classes = py.import("ucm.errors")?.getattr("BY_KIND")?;
    let class = classes.get_item(error.kind().name())?;
    let context = PyDict::new(py);
    for (key, value) in error.context() {
        context.set_item(key, value)?;
    }
    let mut message = error.message().to_owned();
    if let Some(source) = std::error::Error::source(error) {
        message = format!("{message}: {source}");
    }
    if let Some(code) = error.os_code() {
        context.set_item("errno", code)?;
    }
    let arguments = PyDict::new(py);
    arguments.set_item("context", context)?;
    class.call((message,), Some(&arguments))
}

/// Why a call from Python fails: an error of the core, or an exception.
pub(crate) enum Failure {
    Core(Error),
    Python(PyErr),
}

/// The result of a call from Python.
pub(crate) type CallResult<T> = Result<T, Failure>;

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Core(error)
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Core(error) => Python::attach(|py| raise(py, &error)),
            Failure::Python(error) => error,
        }
    }
}

/// One id: exactly 16 bytes.
pub(crate) struct Id(pub(crate) BlockId);

impl<'a, 'py> FromPyObject<'a, 'py> for Id {
    type Error = Failure;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> CallResult<Self> {
        let Ok(bytes) = value.cast::<PyBytes>() else {
            let kind = value.get_type().name().map(|name| name.to_string());
            let wrong = Error::invalid("a block id is 16 raw bytes (type bytes)");
            return Err(wrong.with("type", kind.unwrap_or_default()).into());
        };
        Ok(Self(BlockId::from_slice(bytes.as_bytes())?))
    }
}

/// Ids of a list, a tuple or any other sequence.
pub(crate) struct Ids(pub(crate) Vec<BlockId>);

impl<'a, 'py> FromPyObject<'a, 'py> for Ids {
    type Error = Failure;

    fn extract(values: Borrowed<'a, 'py, PyAny>) -> CallResult<Self> {
        let id = |value: Bound<'py, PyAny>| Ok(value.extract::<Id>()?.0);
        let ids: CallResult<_> = if let Ok(list) = values.cast::<PyList>() {
            list.iter().map(id).collect()
        } else if let Ok(tuple) = values.cast::<PyTuple>() {
            tuple.iter().map(id).collect()
        } else if values.is_instance_of::<PyBytes>() {
            let whole = "block ids are a sequence of 16-byte ids, not one bytes object";
            Err(Error::invalid(whole).into())
        } else {
            values.try_iter()?.map(|value| id(value?)).collect()
        };
        ids.map(Self)
    }
}

/// Ids as a Python list of `bytes`.
pub(crate) fn id_list<'py>(py: Python<'py>, ids: &[BlockId]) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, ids.iter().map(|id| PyBytes::new(py, &id.0)))
}

/// Token ids from index `skip` on, of a list, a NumPy array of `uint32`, or any buffer or sequence
/// of integers.
pub(crate) enum Tokens<'py> {
    /// Copied out of Python objects.
    Owned(Vec<u32>),
    /// A view of a borrowed array.
    Array(PyReadonlyArray1<'py, u32>, usize),
}

impl<'py> Tokens<'py> {
    /// Reads the tokens; an item that is no token id is an error with its index.
    pub(crate) fn read(values: &Bound<'py, PyAny>, skip: usize) -> CallResult<Self> {
        if let Ok(list) = values.cast::<PyList>() {
            return from_list(list, skip).map(Self::Owned);
        }
        let array = values.extract::<PyReadonlyArray1<'py, u32>>().ok();
        if let Some(array) = array.filter(|array| array.is_contiguous()) {
            return Ok(Self::Array(array, skip));
        }
        if let Ok(buffer) = PyBuffer::<u32>::get(values) {
            return Ok(Self::Owned(tail(buffer.to_vec(values.py())?, skip)));
        }
        if let Ok(buffer) = PyBuffer::<i32>::get(values) {
            return checked(buffer.to_vec(values.py())?.into_iter().map(i64::from), skip);
        }
        if let Ok(buffer) = PyBuffer::<i64>::get(values) {
            return checked(buffer.to_vec(values.py())?.into_iter(), skip);
        }
        let list = PyList::empty(values.py());
        for value in values.try_iter()? {
            list.append(value?)?;
        }
        from_list(&list, skip).map(Self::Owned)
    }

    /// The tokens from the requested index on.
    pub(crate) fn as_slice(&self) -> PyResult<&[u32]> {
        match self {
            Self::Owned(tokens) => Ok(tokens),
            Self::Array(array, skip) => {
                let all = array.as_slice()?;
                Ok(all.get(*skip..).unwrap_or_default())
            }
        }
    }
}

fn tail(mut tokens: Vec<u32>, skip: usize) -> Vec<u32> {
    tokens.drain(..skip.min(tokens.len()));
    tokens
}

fn not_a_token(index: usize) -> Failure {
    let wrong = Error::invalid("a token id is an integer from 0 to 4294967295");
    wrong.with("index", index).into()
}

fn checked<'py>(values: impl Iterator<Item = i64>, skip: usize) -> CallResult<Tokens<'py>> {
    let token = |(index, value)| u32::try_from(value).map_err(|_| not_a_token(index));
    let tokens = values.enumerate().skip(skip).map(token);
    tokens.collect::<CallResult<_>>().map(Tokens::Owned)
}

fn from_list(list: &Bound<'_, PyList>, skip: usize) -> CallResult<Vec<u32>> {
    let object = list.as_ptr();
    let mut tokens = vec![0; list.len().saturating_sub(skip)];
    for (index, token) in (skip..).zip(&mut tokens) {
        // SAFETY: the GIL is held. PyList_GetItem returns a borrowed live object, or null for an
        // index that is out of range by now; PyLong_AsUnsignedLong runs no Python code and returns
        // all ones for null and for any object that it refuses.
        let value = unsafe {
            let item = ffi::PyList_GetItem(object, index as ffi::Py_ssize_t);
            ffi::PyLong_AsUnsignedLong(item)
        };
        *token = match u32::try_from(value) {
            Ok(token) => token,
            Err(_) => odd_item(list, index)?,
        };
    }
    Ok(tokens)
}

/// An item that was refused as an integer but may convert to one (such as a NumPy scalar).
#[cold]
fn odd_item(list: &Bound<'_, PyList>, index: usize) -> CallResult<u32> {
    drop(PyErr::take(list.py())); // the refused item set an exception
    let token = list.get_item(index)?.extract::<u32>();
    token.map_err(|_| not_a_token(index))
}
