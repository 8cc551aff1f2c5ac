//! Tables of the core for Python: the kinds of tiers, and the platforms.

use pyo3::prelude::*;
use ucm_device::PLATFORMS;
use ucm_media::registry;

/// Every kind of tier as a JSON text, see [`registry::describe`].
#[pyfunction]
pub(crate) fn tier_kinds() -> String {
    registry::describe()
}

/// A row of [`PLATFORMS`]: name, spellings, vLLM's name, torch's name.
type PlatformRow = (
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
    &'static str,
    &'static str,
);

/// Every platform, see [`ucm_device::Platform`].
#[pyfunction]
pub(crate) fn platforms() -> Vec<PlatformRow> {
    PLATFORMS
        .iter()
        .map(|row| {
            (
                row.name,
                row.spellings,
                row.in_vllm,
                row.in_torch,
                row.files,
            )
        })
        .collect()
}
