//! The tests of the shape over a real pool; a build of the product has none.

use std::sync::Arc;

use ucm_core::Result;
use ucm_media::values::Values;

use super::values::MooncakeValues;
use super::{LEAST_BUFFER, Pool, calling};

/// Runs the tests of the shape `Values` over the pool of a master, to which this process lends
/// nothing.
#[pyo3::pyfunction]
pub(crate) fn check_mooncake_values(py: pyo3::Python<'_>, master: &str) {
    let clock = ucm_infra::SystemClock::shared();
    let prefix = format!("ucm:{:032x}:", ucm_infra::random_u64());
    let open = || -> Result<Box<dyn Values>> {
        let pool = Pool {
            master: master.to_owned(),
            metadata: "P2PHANDSHAKE".to_owned(),
            host: None,
            protocol: "tcp".to_owned(),
            device: String::new(),
            lent: 0,
            buffer: LEAST_BUFFER,
        };
        let client = calling::begin(pool, Arc::clone(&clock))?;
        Ok(Box::new(MooncakeValues::new(prefix.clone(), 0, client)?))
    };
    py.detach(|| ucm_testkit::check_values(&open));
}
