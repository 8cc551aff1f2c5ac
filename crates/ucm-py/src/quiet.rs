//! Digests of files for Python, computed without disturbing an engine.
#![allow(unsafe_code, reason = "an open file comes from Python as a number")]

use std::os::fd::BorrowedFd;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ucm_core::Error;
use ucm_core::sync::Mutex;

use crate::convert::CallResult;

/// SHA-256 of pieces of files, read and hashed by threads of the lowest priority. They never take
/// the GIL: a thread that holds it and gets no processor would block the engine.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct QuietSha256(Mutex<Option<ucm_io::QuietSha256>>);

#[pymethods]
impl QuietSha256 {
    #[new]
    fn new() -> Self {
        Self(Mutex::new(Some(ucm_io::QuietSha256::default())))
    }

    /// Adds up to `length` bytes of the open file `fd` from `offset` on; returns their number.
    fn update(&self, py: Python<'_>, fd: i32, offset: u64, length: u64) -> CallResult<u64> {
        if fd < 0 {
            return Err(Error::invalid("no open file").with("fd", fd).into());
        }
        // SAFETY: it is not -1, and the caller keeps it open until this returns.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        let update = |digest: &mut ucm_io::QuietSha256| digest.update(file, offset, length);
        let read = py.detach(|| self.0.lock().as_mut().map(update));
        Ok(read.ok_or_else(taken)?.map_err(PyErr::from)?)
    }

    /// The digest; nothing can be added after that.
    fn digest<'py>(&self, py: Python<'py>) -> CallResult<Bound<'py, PyBytes>> {
        let digest = self.0.lock().take().ok_or_else(taken)?;
        Ok(PyBytes::new(py, &digest.finish()))
    }
}

fn taken() -> Error {
    Error::invalid("the digest was taken")
}
