//! Tasks for Python: waiting with the GIL released, failures by row.

use std::sync::Arc;
use std::time::Duration;

use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use ucm_core::{Error, ErrorKind};
use ucm_infra::Clock;
use ucm_store::engine::{self, Until};

use crate::convert::{CallResult, exception};

/// A load or dump.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct Task {
    pub(crate) task: engine::Task,
    pub(crate) clock: Arc<dyn Clock>,
    /// The process of the task: a forked child must not access it.
    pub(crate) pid: u32,
}

/// The bytes of side shards, a row for each id, and which of them exist.
type SideArrays<'py> = (Bound<'py, PyArray2<u8>>, Bound<'py, PyArray1<bool>>);

/// Side shards being read.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct Sides {
    task: Py<Task>,
    sides: engine::SidesTask,
    /// Ids, and bytes of each.
    shape: [usize; 2],
}

impl Sides {
    pub(crate) fn new(
        py: Python<'_>,
        task: Task,
        sides: engine::SidesTask,
        shape: [usize; 2],
    ) -> PyResult<Self> {
        let task = Py::new(py, task)?;
        Ok(Self { task, sides, shape })
    }
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
        self.task.get().check_process()?;
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
        self.check_process()?;
        Ok(self.task.check(&*self.clock, level))
    }

    /// Waits for the level, at most `timeout` seconds; false at the timeout.
    fn wait(&self, py: Python<'_>, level: &str, timeout: Option<f64>) -> CallResult<bool> {
        let level = until(level)?;
        self.check_process()?;
        let limit = limit(timeout)?;
        Ok(py.detach(|| {
            let limit = limit.map(|limit| self.clock.now().after(limit));
            self.task.wait(&*self.clock, level, limit)
        }))
    }

    /// True if a row of a load was copied, verified, possibly before the rest of its block; never
    /// waits.
    fn shard_done(&self, row: usize) -> CallResult<bool> {
        self.check_process()?;
        Ok(self.task.shard_done(row))
    }

    /// Waits for that, at most `timeout` seconds; false at the timeout or if the row has failed.
    fn wait_shard(&self, py: Python<'_>, row: usize, timeout: Option<f64>) -> CallResult<bool> {
        self.check_process()?;
        let limit = limit(timeout)?;
        Ok(py.detach(|| {
            let limit = limit.map(|limit| self.clock.now().after(limit));
            self.task.wait_shard(&*self.clock, row, limit)
        }))
    }

    /// Loaded blocks by their tier; final when the load has finished.
    fn served(&self) -> CallResult<Vec<u64>> {
        self.check_process()?;
        Ok(self.task.served().to_vec())
    }

    /// The failed rows, each with its exception.
    fn failures<'py>(&self, py: Python<'py>) -> CallResult<Bound<'py, PyDict>> {
        self.check_process()?;
        let failures = PyDict::new(py);
        for (row, error) in self.task.failures() {
            failures.set_item(row, exception(py, &error)?)?;
        }
        Ok(failures)
    }
}

impl Task {
    fn check_process(&self) -> CallResult<()> {
        same_process(self.pid)
    }
}

/// Refuses a task from before a fork, whose locks may be held for ever.
pub(crate) fn same_process(pid: u32) -> CallResult<()> {
    if pid == std::process::id() {
        return Ok(());
    }
    let text = "this was started before a fork; only the parent can wait for it";
    Err(Error::new(ErrorKind::Forked, text).into())
}
