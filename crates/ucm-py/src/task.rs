//! Tasks for Python: waiting with the GIL released, failures by row.

use std::collections::BTreeMap;
use std::time::Duration;

use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use ucm_core::{Error, ErrorKind};
use ucm_infra::{Clock, SystemClock};
use ucm_store::engine::{self, Until};

use crate::convert::{CallResult, exception};

/// A value of the process that made it.
pub(crate) struct OfProcess<T> {
    pub(crate) value: T,
    pid: u32,
}

impl<T> OfProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        let pid = std::process::id();
        Self { value, pid }
    }

    pub(crate) fn is_here(&self) -> bool {
        self.pid == std::process::id()
    }

    /// The value. Refused in a forked child, where its locks may be held for ever.
    pub(crate) fn get(&self) -> CallResult<&T> {
        if self.is_here() {
            return Ok(&self.value);
        }
        let text = "this was started before a fork; only the parent can wait for it";
        Err(Error::new(ErrorKind::Forked, text).into())
    }
}

/// The tasks of this process keep the times of their stages from now on.
#[pyfunction]
pub(crate) fn keep_stages() {
    ucm_store::stats::keep_stages();
}

/// A load or dump.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct Task(pub(crate) OfProcess<engine::Task>);

/// The bytes of side shards, a row for each id, and which of them exist.
type SideArrays<'py> = (Bound<'py, PyArray2<u8>>, Bound<'py, PyArray1<bool>>);

/// Side shards being read.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct Sides {
    pub(crate) task: Py<Task>,
    pub(crate) sides: engine::SidesTask,
    /// Ids, and bytes of each.
    pub(crate) shape: [usize; 2],
}

#[pymethods]
impl Sides {
    /// The task whose row *i* is the *i*-th id.
    #[getter]
    fn task(&self, py: Python<'_>) -> Py<Task> {
        self.task.clone_ref(py)
    }

    /// The bytes, a row for each id (zeros for a missing one), and for each whether it exists;
    /// final when the task has finished.
    fn result<'py>(&self, py: Python<'py>) -> CallResult<SideArrays<'py>> {
        self.task.get().0.get()?;
        let bytes = py.detach(|| self.sides.bytes());
        let found = (0..self.shape[0])
            .map(|row| self.sides.task.shard_done(row))
            .collect();
        let bytes = PyArray1::from_vec(py, bytes).reshape(self.shape)?;
        Ok((bytes, PyArray1::from_vec(py, found)))
    }
}

/// A caller's limit in seconds. A negative one has passed already; an infinite one becomes the
/// longest duration.
pub(crate) fn limit(seconds: Option<f64>) -> CallResult<Option<Duration>> {
    let Some(seconds) = seconds else {
        return Ok(None);
    };
    if seconds.is_nan() {
        return Err(Error::invalid("timeout is a number of seconds, not NaN").into());
    }
    let limit = Duration::try_from_secs_f64(seconds.max(0.0));
    Ok(Some(limit.unwrap_or(Duration::MAX)))
}

fn until(name: &str) -> CallResult<Until> {
    match name {
        "staged" => Ok(Until::Staged),
        "published" => Ok(Until::Published),
        _ => {
            let wrong = Error::invalid("until is \"staged\" or \"published\"");
            Err(wrong.with("until", name).into())
        }
    }
}

#[pymethods]
impl Task {
    /// True if the level was reached or failed; never waits.
    fn check(&self, level: &str) -> CallResult<bool> {
        let level = until(level)?;
        Ok(self.0.get()?.check(&SystemClock, level))
    }

    /// Waits for the level, at most `timeout` seconds; false at the timeout.
    fn wait(&self, py: Python<'_>, level: &str, timeout: Option<f64>) -> CallResult<bool> {
        let level = until(level)?;
        let (task, limit) = (self.0.get()?, limit(timeout)?);
        Ok(py.detach(|| {
            let limit = limit.map(|limit| SystemClock.now().after(limit));
            task.wait(&SystemClock, level, limit)
        }))
    }

    /// True if a row of a load was copied, verified, possibly before the rest of its block; never
    /// waits.
    fn shard_done(&self, row: usize) -> CallResult<bool> {
        Ok(self.0.get()?.shard_done(row))
    }

    /// Waits for that, at most `timeout` seconds; false at the timeout or if the row has failed.
    fn wait_shard(&self, py: Python<'_>, row: usize, timeout: Option<f64>) -> CallResult<bool> {
        let (task, limit) = (self.0.get()?, limit(timeout)?);
        Ok(py.detach(|| {
            let limit = limit.map(|limit| SystemClock.now().after(limit));
            task.wait_shard(&SystemClock, row, limit)
        }))
    }

    /// Loaded blocks by their tier; final when the load has finished.
    fn served(&self) -> CallResult<Vec<u64>> {
        Ok(self.0.get()?.served().to_vec())
    }

    /// The stages of its blocks: first begin and last end in seconds after its begin, and the sum.
    fn stages(&self) -> CallResult<BTreeMap<&'static str, [f64; 3]>> {
        Ok(self.0.get()?.stages())
    }

    /// The failed rows, each with its exception.
    fn failures<'py>(&self, py: Python<'py>) -> CallResult<Bound<'py, PyDict>> {
        let failures = PyDict::new(py);
        for (row, error) in self.0.get()?.failures() {
            failures.set_item(row, exception(py, &error)?)?;
        }
        Ok(failures)
    }
}
