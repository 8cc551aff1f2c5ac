//! Where the threads of the core may run, for Python.

use pyo3::prelude::*;

use crate::convert::to_py;

/// Lets the threads that the core begins from now on run on these processors, whatever the thread
/// that begins them is bound to.
#[pyfunction]
pub(crate) fn run_threads_on(py: Python<'_>, processors: Vec<usize>) -> PyResult<()> {
    to_py(py, ucm_infra::run_threads_on(&processors))
}
