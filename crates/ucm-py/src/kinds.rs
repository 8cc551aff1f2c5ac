//! The registry of kinds of tiers for Python.

use pyo3::prelude::*;
use ucm_tier::registry;

/// Every kind of tier as a JSON text, see [`registry::describe`].
#[pyfunction]
pub(crate) fn tier_kinds() -> String {
    registry::describe()
}
