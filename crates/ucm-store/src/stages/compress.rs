//! The kind `compress`: records take less room on the medium below it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use ucm_core::{Error, ErrorKind, Result};

use crate::kind::{BuildContext, BuiltTier, StoreName, TierKind};

/// The options: none.
#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct CompressOptions {}

pub(super) fn kind() -> TierKind {
    let summary = "built: no store, but a stage before one in segments ([stores.md](stores.md#compression))";
    TierKind::layer(StoreName::new("compress", "UcmCompressStage", summary), make)
}

#[cfg(feature = "compress")]
fn make(context: &BuildContext<'_>, _: CompressOptions, below: BuiltTier) -> Result<BuiltTier> {
    use std::sync::Arc;

    use crate::compress::{CompressBackend, CompressConfig};

    if context.lookup_only {
        return Ok(below); // nothing is moved
    }
    let none = || {
        Error::new(
            ErrorKind::Config,
            "memory is faster than any codec; write the stage that compresses below Cache",
        )
    };
    let io = below.io.ok_or_else(none)?;
    let config = CompressConfig {
        record: context.record.clone(),
        identity: context.identity.clone(),
        part: context.part,
        io,
    };
    let backend = CompressBackend::new(config, below.backend, Arc::clone(&context.clock))?;
    Ok(BuiltTier::plain(Arc::new(backend), below.max_stuck))
}

#[cfg(not(feature = "compress"))]
fn make(_: &BuildContext<'_>, _: CompressOptions, _: BuiltTier) -> Result<BuiltTier> {
    let text = "this build has no codec; build with the feature \"compress\", or leave the stage out";
    Err(Error::new(ErrorKind::Unsupported, text))
}
