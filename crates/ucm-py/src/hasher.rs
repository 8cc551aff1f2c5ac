//! Block keys and record ids for Python: one call per prompt. Long inputs are hashed without the
//! GIL.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use ucm_core::{BlockId, ExtraKey, HashMethod, IdMask, Part};

use crate::convert::{Tokens, id, id_list, ids, raise, to_py};

/// Most tokens hashed with the GIL held: half a millisecond.
const AT_ONCE: usize = 1 << 15;

/// Computes the chained keys of the full blocks of a token list.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct BlockHasher(ucm_core::BlockHasher);

#[pymethods]
impl BlockHasher {
    #[new]
    #[pyo3(signature = (identity, block_size, hash_method = "sha256"))]
    fn new(
        py: Python<'_>,
        identity: &[u8],
        block_size: usize,
        hash_method: &str,
    ) -> PyResult<Self> {
        let method = HashMethod::ALL
            .into_iter()
            .find(|method| method.name() == hash_method)
            .ok_or_else(|| {
                let error = ucm_core::Error::invalid("hash_method is sha256, blake3 or md5");
                raise(py, &error.with("hash_method", hash_method))
            })?;
        to_py(py, ucm_core::BlockHasher::new(identity, block_size, method)).map(Self)
    }

    /// Keys of the full blocks from block `start` on; `parent` is the key of block `start - 1`.
    #[pyo3(signature = (tokens, *, parent = None, start = 0, extra = None))]
    fn hash_blocks<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        parent: Option<&Bound<'py, PyAny>>,
        start: usize,
        extra: Option<Vec<(usize, u8, Vec<u8>)>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let parent = parent.map(id).transpose()?;
        let skip = start.saturating_mul(self.0.block_size());
        if tokens.len().is_ok_and(|len| skip > len) {
            let error =
                ucm_core::Error::invalid("start lies behind the last full block of the tokens");
            return Err(raise(py, &error.with("start", start)));
        }
        let tokens = Tokens::read(tokens, skip)?;
        let extra = extra.unwrap_or_default();
        let extra: Vec<ExtraKey<'_>> = extra
            .iter()
            .map(|(block, tag, bytes)| ExtraKey {
                block: *block,
                tag: *tag,
                bytes,
            })
            .collect();
        let tail = tokens.as_slice()?;
        let hash = || self.0.hash_tail(tail, parent, start, &extra);
        let keys = if tail.len() <= AT_ONCE {
            hash()
        } else {
            py.detach(hash)
        };
        id_list(py, &to_py(py, keys)?)
    }

    /// The key before the first block.
    #[getter]
    fn seed<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.seed().0)
    }

    /// Tokens of a block.
    #[getter]
    fn block_size(&self) -> usize {
        self.0.block_size()
    }

    /// The hash function's name.
    #[getter]
    fn hash_method(&self) -> &'static str {
        self.0.method().name()
    }

    fn __repr__(&self) -> String {
        format!(
            "BlockHasher(block_size={}, hash_method={:?})",
            self.0.block_size(),
            self.0.method().name()
        )
    }
}

/// The mask that turns a block key into the record id of one part, and back.
#[pyfunction]
pub(crate) fn part_mask(
    py: Python<'_>,
    group: u32,
    pipeline_rank: u32,
    tensor_rank: u32,
) -> Bound<'_, PyBytes> {
    PyBytes::new(
        py,
        &Part {
            group,
            pipeline_rank,
            tensor_rank,
        }
        .mask()
        .0,
    )
}

/// Record ids of block keys (or the other way round) under a part's mask. The keys may be
/// concatenated in one `bytes`.
#[pyfunction]
pub(crate) fn record_ids<'py>(
    py: Python<'py>,
    keys: &Bound<'py, PyAny>,
    mask: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyList>> {
    let mask = IdMask(id(mask)?.0);
    let keys = match keys.cast::<PyBytes>() {
        Ok(joined) => to_py(
            py,
            joined
                .as_bytes()
                .chunks(16)
                .map(BlockId::from_slice)
                .collect(),
        )?,
        Err(_) => ids(keys)?,
    };
    let ids: Vec<_> = keys.into_iter().map(|key| key.xor(mask)).collect();
    id_list(py, &ids)
}
