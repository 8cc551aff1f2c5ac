//! A stage of kind `compress`: records take less room on the medium below it.

#[cfg(feature = "compress")]
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};
use ucm_core::Result;
#[cfg(feature = "compress")]
use ucm_io::IoEngine;

use super::{Common, Made, keys};
#[cfg(feature = "compress")]
use crate::compress::meter::{Meter, MeteredEngine};

/// The keys.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(
    not(feature = "compress"),
    expect(dead_code, reason = "they are checked all the same")
)]
struct Keys {
    mode: Mode,
    threads: usize,
}

/// When records are compressed.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    Measured,
    Always,
}

#[cfg(feature = "compress")]
pub(super) fn make(common: &Common<'_>, given: Map<String, Value>, below: Made) -> Result<Made> {
    use crate::compress::worth::When;
    use crate::compress::{CompressBackend, CompressConfig};

    let given: Keys = keys("compress", given)?;
    if common.lookup_only {
        return Ok(below); // nothing is moved
    }
    let config = CompressConfig {
        record: common.record.clone(),
        identity: common.identity.clone(),
        part: common.part,
        when: match given.mode {
            Mode::Measured => When::Measured,
            Mode::Always => When::Always,
        },
        threads: given.threads,
        // Whatever has a slot has a place in the queue too, as in the queues of the medium.
        queue: common.slots.max(crate::assemble::SPARE_SLOTS),
        meter: below.meter.unwrap_or_default(),
    };
    let backend = CompressBackend::new(config, below.backend, Arc::clone(&common.clock))?;
    Ok(Made::plain(Arc::new(backend), below.max_stuck))
}

#[cfg(not(feature = "compress"))]
pub(super) fn make(_: &Common<'_>, given: Map<String, Value>, _: Made) -> Result<Made> {
    keys::<Keys>("compress", given)?;
    let text = "this build has no codec; build with the feature \"compress\", or leave the stage out";
    Err(ucm_core::Error::new(ucm_core::ErrorKind::Unsupported, text))
}

/// The I/O engine of a medium, measured if a stage above wants to know how fast it is.
#[cfg(feature = "compress")]
pub(super) fn measured(
    common: &Common<'_>,
    io: Arc<dyn IoEngine>,
) -> (Arc<dyn IoEngine>, Option<Arc<Meter>>) {
    if !common.compressed || common.lookup_only {
        return (io, None);
    }
    let meter = Arc::new(Meter::default());
    let measured = MeteredEngine::new(io, Arc::clone(&meter), Arc::clone(&common.clock));
    (measured, Some(meter))
}
