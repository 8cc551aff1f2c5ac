//! `ucm._core`: conversions between Python and the Rust core, no logic.
//!
//! Every call that can wait releases the GIL. No thread of the core ever takes it, with two
//! exceptions: the thread of a `ucm.trans` stream for a user's callbacks, and that of a Mooncake
//! tier, whose client is a Python library. Short calls keep the GIL: on a busy machine, taking it
//! again can take far longer than the call. Ids are 16 `bytes`, addresses NumPy `uint64` arrays,
//! errors the tree of `ucm.errors`.

mod convert;
mod ffi;
mod hasher;
mod kinds;
mod mooncake;
mod places;
mod quiet;
mod records;
mod retrieval;
mod store;
mod task;
mod tensor;
mod threads;
mod trans;

use pyo3::prelude::*;

/// The compiled core of ucm.
#[pymodule(gil_used = true)]
mod _core {
    #[pymodule_export]
    use super::hasher::{BlockHasher, part_mask, record_ids};
    #[pymodule_export]
    use super::kinds::{platforms, tier_kinds};
    #[cfg(feature = "test-utils")]
    #[pymodule_export]
    use super::mooncake::check_mooncake_values;
    #[pymodule_export]
    use super::places::Place;
    #[pymodule_export]
    use super::quiet::QuietSha256;
    #[pymodule_export]
    use super::records::{RecordKeys, read_footer, read_header, verify_record};
    #[pymodule_export]
    use super::retrieval::{
        dot_scores, hamming_scores, hash_encode, hash_encode_query, hash_scores, hash_select,
        paged_attention, retrieval_isas, retrieval_openmp, select_blocks,
    };
    #[pymodule_export]
    use super::store::{Asked, Store};
    #[pymodule_export]
    use super::task::{Sides, Task, keep_stages};
    #[pymodule_export]
    use super::threads::run_threads_on;
    #[pymodule_export]
    use super::trans::{TransBuffer, TransDevice, TransMemory, TransStream, end_callbacks};

    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        ucm_infra::log::keep();
        super::mooncake::register();
        #[cfg(feature = "test-utils")]
        ucm_testkit::register_toy();
        module.add(
            "__commit_id__",
            option_env!("UCM_COMMIT_ID").unwrap_or("unknown"),
        )?;
        module.add(
            "__build_type__",
            if cfg!(debug_assertions) {
                "debug"
            } else {
                "release"
            },
        )?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
