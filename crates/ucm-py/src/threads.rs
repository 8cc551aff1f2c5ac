//! The processors of the core's threads, for Python.

use pyo3::prelude::*;

use crate::convert::CallResult;

/// Restricts threads that the core starts from now on to these processors, independent of the
/// starting thread's own.
#[pyfunction]
pub(crate) fn run_threads_on(processors: Vec<usize>) -> CallResult<()> {
    Ok(ucm_infra::run_threads_on(&processors)?)
}
