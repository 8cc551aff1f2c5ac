//! A stage of kind `compress`: records take less room on the medium below it.

use serde::Deserialize;
use serde_json::{Map, Value};
use ucm_core::Result;

use super::{Common, Made, keys};

/// The keys: none.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Keys {}

#[cfg(feature = "compress")]
pub(super) fn make(common: &Common<'_>, given: Map<String, Value>, below: Made) -> Result<Made> {
    use std::sync::Arc;

    use crate::compress::{CompressBackend, CompressConfig};

    keys::<Keys>("compress", given)?;
    if common.lookup_only {
        return Ok(below); // nothing is moved
    }
    let config = CompressConfig {
        record: common.record.clone(),
        identity: common.identity.clone(),
        part: common.part,
        io: Arc::clone(&below.pool),
    };
    let backend = CompressBackend::new(config, below.backend, Arc::clone(&common.clock))?;
    Ok(Made {
        backend: Arc::new(backend),
        ..below
    })
}

#[cfg(not(feature = "compress"))]
pub(super) fn make(_: &Common<'_>, given: Map<String, Value>, _: Made) -> Result<Made> {
    use ucm_core::{Error, ErrorKind};

    keys::<Keys>("compress", given)?;
    let text = "this build has no codec; build with the feature \"compress\", or leave the stage out";
    Err(Error::new(ErrorKind::Unsupported, text))
}
