//! The POSIX store for Python: one engine over one root.
#![allow(unsafe_code, reason = "device addresses come from Python as numbers")]

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use numpy::{PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use ucm_core::{BlockId, DType, Error, ErrorKind, Geometry, Identity, MissReason, Part};
use ucm_device::{DeviceSpan, HostDevice};
use ucm_infra::SystemClock;
use ucm_io::{Process, PsyncEngine, PsyncOptions};
use ucm_store::backend::Backend;
use ucm_store::engine::{Deadlines, Engine, EngineConfig, Hint, Row};
use ucm_store::events::Level;
use ucm_store::evidence::QuarantineConfig;
use ucm_store::health::BreakerConfig;
use ucm_store::posix::{Modes, PosixBackend, PosixConfig};
use ucm_store::record::RecordLayout;
use ucm_store::segment::{SegmentBackend, SegmentConfig};
use ucm_store::space::{Capacity, Rules};

use crate::convert::{ids, raise, to_py};
use crate::task::{Task, limit};

/// An engine over a directory. All sizes in bytes, all times in seconds.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct PosixStore(Engine);

/// Reads the dictionary that `ucm.store.posix` fills; it is validated there, so a missing key is our own fault.
struct Config<'a, 'py>(&'a Bound<'py, PyDict>);

impl<'py> Config<'_, 'py> {
    fn get<T: for<'a> FromPyObject<'a, 'py>>(&self, key: &str) -> PyResult<T> {
        let missing = || {
            raise(
                self.0.py(),
                &Error::internal("a key of the store's setup is missing").with("key", key),
            )
        };
        let value = self.0.get_item(key)?.ok_or_else(missing)?;
        value
            .extract::<T>()
            .map_err(Into::<PyErr>::into)
            .map_err(|error| {
                let wrong = Error::new(ErrorKind::Config, format!("{key}: {error}"));
                raise(self.0.py(), &wrong)
            })
    }

    /// A limit given in bytes or in percent; none when it is neither, or 0 bytes.
    fn capacity(&self, bytes: &str, percent: &str) -> PyResult<Option<Capacity>> {
        Ok(
            match (self.get::<Option<u64>>(bytes)?, self.get::<Option<f64>>(percent)?) {
                (Some(bytes), _) => NonZeroU64::new(bytes).map(Capacity::Bytes),
                (None, percent) => percent.map(Capacity::Percent),
            },
        )
    }

    fn seconds(&self, key: &str) -> PyResult<Duration> {
        let seconds: f64 = self.get(key)?;
        Duration::try_from_secs_f64(seconds).map_err(|error| {
            raise(
                self.0.py(),
                &Error::new(ErrorKind::Config, format!("{key}: {error}")).with("value", seconds),
            )
        })
    }
}

#[pymethods]
impl PosixStore {
    #[new]
    fn new(py: Python<'_>, setup: &Bound<'_, PyDict>) -> PyResult<Self> {
        let config = Config(setup);
        let identity = to_py(py, Identity::parse(&config.get::<String>("identity")?))?;
        let (group, pipeline_rank, tensor_rank): (u32, u32, u32) = config.get("part")?;
        let part = Part {
            group,
            pipeline_rank,
            tensor_rank,
        };
        let geometry = to_py(
            py,
            Geometry::from_sizes(
                config.get("tensor_sizes")?,
                config.get("shard_size")?,
                config.get("block_size")?,
            ),
        )?;
        let lookup_only: bool = config.get("lookup_only")?;
        let block_tokens: u32 = config.get("block_tokens")?;
        let dtype = DType::from_name(&config.get::<String>("dtype")?);
        let staging_bytes = if lookup_only {
            0
        } else {
            config.get("staging_bytes")?
        };
        let capacity = config.capacity("capacity_bytes", "capacity_percent")?;
        let expire_after: Option<u64> = config.get("expire_after_s")?;
        let rules = Rules {
            // No bytes: no floor, while nothing at all is the default.
            free_floor: config
                .capacity("floor_bytes", "floor_percent")?
                .or(Some(Capacity::Percent(0.0))),
            namespace_quota: config.capacity("quota_bytes", "quota_percent")?,
            expire_after: expire_after.map(Duration::from_secs),
        };
        let deadlines = Deadlines {
            lookup: config.seconds("lookup_s")?,
            load: config.seconds("load_s")?,
            dump: config.seconds("dump_s")?,
            probe: config.seconds("probe_s")?,
            shutdown: config.seconds("shutdown_s")?,
        };
        let threads: usize = config.get("io_threads")?;
        let writer = ucm_store::random_u64();
        let record = RecordLayout::new(&geometry).describing(block_tokens, dtype);
        let slots = usize::try_from(staging_bytes / record.record_len() as u64).unwrap_or(usize::MAX);
        let direct: bool = config.get("io_direct")?;
        let posix = PosixConfig {
            root: config.get::<PathBuf>("root")?,
            identity: identity.clone(),
            labels: config.get::<BTreeMap<String, String>>("labels")?,
            part,
            record,
            direct,
            geometry: geometry.clone(),
            lookup_only,
            capacity,
            rules,
            process: Process::this(),
            writer,
            modes: Modes {
                file: config.get("file_mode")?,
                dir: config.get("dir_mode")?,
            },
            quarantine: QuarantineConfig {
                enabled: config.get("quarantine_enabled")?,
                max_per_minute: config.get("quarantine_max_per_minute")?,
                max_records: config.get("quarantine_max_records")?,
                max_bytes: config.get("quarantine_max_bytes")?,
                keep: config.seconds("quarantine_keep_s")?,
            },
        };
        let segments = match config.get::<String>("layout")?.as_str() {
            "segment" => Some(SegmentConfig {
                size: config.get("segment_size")?,
                age: config.seconds("segment_age_s")?,
                ..SegmentConfig::default()
            }),
            _ => None,
        };
        let engine = EngineConfig {
            geometry,
            identity,
            part,
            block_tokens,
            dtype,
            staging_bytes,
            copy_threads: config.get("copy_threads")?,
            deadlines,
            breaker: BreakerConfig {
                threshold: config.get("breaker_threshold")?,
                window: config.seconds("breaker_window_s")?,
                cool_down: config.seconds("breaker_cool_down_s")?,
                max_stuck: threads.max(2), // as many as are replaced: from there on workers are missing
            },
            writer,
            paranoid: config.get("paranoid")?,
        };
        let opened = py.detach(|| {
            let clock = SystemClock::shared();
            let mut options = PsyncOptions {
                direct,
                clock: Arc::clone(&clock),
                ..PsyncOptions::with_workers(threads)
            };
            // A block that has a slot has a place in the queue too, so that an accepted dump is never refused later.
            for lane in &mut options.lanes {
                lane.capacity = lane.capacity.max(slots.min(ucm_infra::MAX_QUEUE));
            }
            let io = PsyncEngine::new(options)?;
            let backend: Arc<dyn Backend> = match segments {
                Some(segments) => Arc::new(SegmentBackend::new(posix, segments, io, Arc::clone(&clock))?),
                None => Arc::new(PosixBackend::new(posix, io, Arc::clone(&clock))?),
            };
            Engine::open(engine, backend, Arc::new(HostDevice::new()), clock)
        });
        to_py(py, opened).map(Self)
    }

    /// Which ids are stored whole.
    fn lookup(&self, py: Python<'_>, block_ids: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let ids = ids(block_ids)?;
        let found = py.detach(|| self.0.lookup(&ids));
        to_py(py, found)
    }

    /// How many ids from the first on are stored without a gap.
    fn lookup_on_prefix(&self, py: Python<'_>, block_ids: &Bound<'_, PyAny>) -> PyResult<usize> {
        let ids = ids(block_ids)?;
        let run = py.detach(|| self.0.lookup_on_prefix(&ids));
        to_py(py, run)
    }

    /// The same, and the reason why the next id is no hit; `None` if every id is one.
    fn explain_on_prefix(
        &self,
        py: Python<'_>,
        block_ids: &Bound<'_, PyAny>,
    ) -> PyResult<(usize, Option<&'static str>)> {
        let ids = ids(block_ids)?;
        let explained = py.detach(|| self.0.explain_on_prefix(&ids));
        to_py(py, explained).map(|(run, reason)| (run, reason.map(MissReason::name)))
    }

    /// Starts a load; `timeout` in seconds, the configured deadline if `None`.
    #[pyo3(signature = (block_ids, shard_index, addrs, timeout = None))]
    fn load(
        &self,
        py: Python<'_>,
        block_ids: &Bound<'_, PyAny>,
        shard_index: Vec<i64>,
        addrs: PyReadonlyArray2<'_, u64>,
        timeout: Option<f64>,
    ) -> PyResult<Task> {
        let deadline = limit(py, timeout)?;
        let rows = self.rows(py, block_ids, &shard_index, &addrs)?;
        let task = py.detach(|| self.0.load(rows, deadline));
        to_py(py, task).map(|task| self.task(task))
    }

    /// Starts a dump, or refuses it at once.
    fn dump(
        &self,
        py: Python<'_>,
        block_ids: &Bound<'_, PyAny>,
        shard_index: Vec<i64>,
        addrs: PyReadonlyArray2<'_, u64>,
    ) -> PyResult<Task> {
        let rows = self.rows(py, block_ids, &shard_index, &addrs)?;
        let task = py.detach(|| self.0.dump(rows));
        to_py(py, task).map(|task| self.task(task))
    }

    /// Hints for the header: parallel lists of ids, parents, ordinals and token counts.
    fn describe(
        &self,
        block_ids: &Bound<'_, PyAny>,
        parents: Option<&Bound<'_, PyAny>>,
        ordinals: Option<Vec<u32>>,
        tokens: Option<Vec<u32>>,
    ) -> PyResult<()> {
        let (blocks, py) = (ids(block_ids)?, block_ids.py());
        let parents = parents.map(ids).transpose()?;
        for (name, len) in [
            ("parents", parents.as_ref().map(Vec::len)),
            ("ordinals", ordinals.as_ref().map(Vec::len)),
            ("tokens", tokens.as_ref().map(Vec::len)),
        ] {
            if len.is_some_and(|len| len != blocks.len()) {
                let error = Error::invalid(format!("{name} must have one entry per block id"));
                return Err(raise(
                    py,
                    &error
                        .with("given", len.unwrap_or(0))
                        .with("expected", blocks.len()),
                ));
            }
        }
        let at = |list: &Option<Vec<u32>>, i: usize| list.as_ref().map_or(0, |list| list[i]);
        let told = self.0.describe(blocks.iter().enumerate().map(|(i, &block)| {
            let parent = parents.as_ref().map_or(BlockId::default(), |parents| parents[i]);
            (
                block,
                Hint {
                    parent,
                    ordinal: at(&ordinals, i),
                    tokens: at(&tokens, i),
                },
            )
        }));
        to_py(py, told)
    }

    /// The next dump of these blocks is compared with what is stored.
    fn audit(&self, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        to_py(block_ids.py(), self.0.audit(&ids(block_ids)?))
    }

    /// These blocks, in chain order from ordinal `first` on, were used.
    #[pyo3(signature = (block_ids, first = 0))]
    fn touch(&self, py: Python<'_>, block_ids: &Bound<'_, PyAny>, first: u32) -> PyResult<()> {
        let ids: Vec<(BlockId, u32)> = ids(block_ids)?.into_iter().zip(first..).collect();
        let told = py.detach(|| self.0.touch(&ids));
        to_py(py, told)
    }

    /// How many more blocks a dump could take now.
    fn free_dump_slots(&self, py: Python<'_>) -> PyResult<usize> {
        to_py(py, self.0.check_process())?;
        Ok(py.detach(|| self.0.free_dump_slots()))
    }

    /// Bytes of one record on the medium.
    #[getter]
    fn record_len(&self) -> usize {
        self.0.record_len()
    }

    /// Counters, gauges and histograms as JSON text.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        to_py(py, self.0.check_process())?;
        Ok(py.detach(|| self.0.stats().to_string()))
    }

    /// Messages for the log since the last call: (is a warning, text); none in a forked child.
    fn events(&self) -> Vec<(bool, String)> {
        self.0
            .events()
            .into_iter()
            .map(|event| (event.level == Level::Warning, event.text))
            .collect()
    }

    /// Ends the store; repeatable, and without effect in a forked child.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

impl Drop for PosixStore {
    /// Closing waits for what is under way: not with the GIL held.
    fn drop(&mut self) {
        let close = || self.0.close();
        if Python::try_attach(|py| py.detach(close)).is_none() {
            close();
        }
    }
}

impl PosixStore {
    fn task(&self, task: ucm_store::engine::Task) -> Task {
        Task {
            task,
            clock: SystemClock::shared(),
            pid: std::process::id(),
        }
    }

    fn rows(
        &self,
        py: Python<'_>,
        block_ids: &Bound<'_, PyAny>,
        shard_index: &[i64],
        addrs: &PyReadonlyArray2<'_, u64>,
    ) -> PyResult<Vec<Row>> {
        let ids = ids(block_ids)?;
        let geometry = self.0.geometry();
        let (rows, pieces) = (addrs.shape()[0], addrs.shape()[1]);
        let invalid = |error: Error| Err(raise(py, &error));
        if ids.len() != rows || shard_index.len() != rows {
            let error = Error::invalid("block_ids, shard_index and the rows of addrs must be equally many");
            let error = error
                .with("block_ids", ids.len())
                .with("shard_index", shard_index.len());
            return invalid(error.with("addrs", rows));
        }
        if rows > 0 && pieces != geometry.tensors_per_shard() {
            let error = Error::invalid("addrs must have one column per tensor of a shard");
            return invalid(
                error
                    .with("columns", pieces)
                    .with("expected", geometry.tensors_per_shard()),
            );
        }
        let addrs = addrs.as_array();
        ids.into_iter()
            .zip(shard_index)
            .zip(addrs.rows())
            .enumerate()
            .map(|(number, ((id, &shard), addrs))| {
                let shard = u32::try_from(shard).map_err(|_| {
                    raise(
                        py,
                        &Error::invalid("shard index out of range")
                            .with("row", number)
                            .with("shard", shard),
                    )
                })?;
                if let Some(column) = addrs.iter().position(|&address| address == 0) {
                    let error = Error::invalid("an address is null").with("row", number);
                    return Err(raise(py, &error.with("column", column)));
                }
                let sizes = geometry.tensors().iter().cycle();
                // SAFETY: the caller of the store vouches that each address names that many bytes of device memory,
                // valid until the task ended; that is the contract of load_data and dump_data.
                let span = |(&address, &size)| unsafe { DeviceSpan::new(address, size) };
                let spans = addrs.iter().zip(sizes).map(span).collect();
                Ok(Row { id, shard, spans })
            })
            .collect()
    }
}
