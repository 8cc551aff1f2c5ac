//! Block keys and record ids for Python: one call per prompt. Long inputs are hashed without the
//! GIL.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use ucm_core::{BlockId, Error, ExtraKey, HashMethod, IdMask, Part};

use crate::convert::{CallResult, Id, Ids, Tokens, id_list};

/// Most tokens hashed with the GIL held: half a millisecond.
const AT_ONCE: usize = 1 << 15;

/// Computes the chained keys of the full blocks of a token list.
#[pyclass(frozen, module = "ucm._core")]
pub(crate) struct BlockHasher(ucm_core::BlockHasher);

#[pymethods]
impl BlockHasher {
    #[new]
    #[pyo3(signature = (identity, block_size, hash_method = "sha256"))]
    fn new(identity: &[u8], block_size: usize, hash_method: &str) -> CallResult<Self> {
        let Some(method) = HashMethod::of_name(hash_method) else {
            let wrong = Error::invalid("hash_method is sha256, blake3 or md5");
            return Err(wrong.with("hash_method", hash_method).into());
        };
        Ok(Self(ucm_core::BlockHasher::new(
            identity, block_size, method,
        )?))
    }

    /// Keys of the full blocks from block `start` on; `parent` is the key of block `start - 1`.
    #[pyo3(signature = (tokens, *, parent = None, start = 0, extra = None))]
    fn hash_blocks<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        parent: Option<Id>,
        start: usize,
        extra: Option<Vec<(usize, u8, Vec<u8>)>>,
    ) -> CallResult<Bound<'py, PyList>> {
        let parent = parent.map(|id| id.0);
        let skip = start.saturating_mul(self.0.block_size());
        if tokens.len().is_ok_and(|len| skip > len) {
            let error = Error::invalid("start lies behind the last full block of the tokens");
            return Err(error.with("start", start).into());
        }
        let tokens = Tokens::read(tokens, skip)?;
        let extra = extra.unwrap_or_default();
        let extra: Vec<_> = extra
            .iter()
            .map(|&(block, tag, ref bytes)| ExtraKey { block, tag, bytes })
            .collect();
        let tail = tokens.as_slice()?;
        let hash = || self.0.hash_tail(tail, parent, start, &extra);
        let short = tail.len() <= AT_ONCE;
        let keys = if short { hash() } else { py.detach(hash) }?;
        Ok(id_list(py, &keys)?)
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
    let part = Part {
        group,
        pipeline_rank,
        tensor_rank,
    };
    PyBytes::new(py, &part.mask().0)
}

/// Record ids of block keys (or the other way round) under a part's mask. The keys may be
/// concatenated in one `bytes`.
#[pyfunction]
pub(crate) fn record_ids<'py>(
    py: Python<'py>,
    keys: &Bound<'py, PyAny>,
    mask: Id,
) -> CallResult<Bound<'py, PyList>> {
    let mask = IdMask(mask.0.0);
    let keys = match keys.cast::<PyBytes>() {
        Ok(joined) => {
            let keys = joined.as_bytes().chunks(16).map(BlockId::from_slice);
            keys.collect::<ucm_core::Result<_>>()?
        }
        Err(_) => keys.extract::<Ids>()?.0,
    };
    let ids: Vec<_> = keys.into_iter().map(|key| key.xor(mask)).collect();
    Ok(id_list(py, &ids)?)
}
