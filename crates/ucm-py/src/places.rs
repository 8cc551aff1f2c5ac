//! Servers and buckets, for the command line.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ucm_core::Error;
use ucm_media::place::{Item, Place as Seen};
use ucm_media::registry;

use crate::convert::CallResult;
use crate::task::OfProcess;

/// A server or a bucket, for tools.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct Place(OfProcess<Box<dyn Seen>>);

/// Path, name, length, time of the last use (ns since 1970), version: see `ucm_media::place::Item`.
type Listed = (String, String, u64, u64, String);

#[pymethods]
impl Place {
    /// `kind`: the name of a kind of tier; `options`: its options as a JSON text.
    #[new]
    fn new(py: Python<'_>, kind: &str, options: &str) -> CallResult<Self> {
        let seen = py.detach(|| registry::place(kind, options))?;
        Ok(Self(OfProcess::new(seen)))
    }

    /// Its capacity in bytes, its used bytes (0: unknown), and its description.
    fn room(&self, py: Python<'_>) -> CallResult<(u64, u64, String)> {
        let room = self.ask(py, |seen| seen.room())?;
        Ok((room.limit, room.used, room.words))
    }

    /// All its items: path below a root (empty: not ours), name on the server, length, time of last
    /// use in ns since 1970, version.
    fn list(&self, py: Python<'_>) -> CallResult<Vec<Listed>> {
        let items = self.ask(py, |seen| seen.list())?;
        let listed = |item: Item| (item.path, item.name, item.len, item.used_ns, item.version);
        Ok(items.into_iter().map(listed).collect())
    }

    /// Bytes of the item of this name, fewer at its end; `None` if it does not exist.
    fn read<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        start: u64,
        length: u64,
    ) -> CallResult<Option<Bound<'py, PyBytes>>> {
        let bytes = self.ask(py, |seen| seen.read(name, start, length))?;
        Ok(bytes.map(|bytes| PyBytes::new(py, &bytes)))
    }

    /// Removes a listed item of ours; false if it does not exist any more, or was used or replaced
    /// since.
    fn remove(&self, py: Python<'_>, item: Listed) -> CallResult<bool> {
        let (path, name, len, used_ns, version) = item;
        let item = Item {
            path,
            name,
            len,
            used_ns,
            version,
        };
        self.ask(py, |seen| seen.remove(&item))
    }
}

impl Place {
    fn ask<T: Send>(
        &self,
        py: Python<'_>,
        ask: impl FnOnce(&dyn Seen) -> Result<T, Error> + Send,
    ) -> CallResult<T> {
        let seen = self.0.get()?;
        Ok(py.detach(|| ask(&**seen))?)
    }
}
