//! The kind `compress`: records take less room on the medium below it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use ucm_core::Result;

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
    let config = CompressConfig {
        record: context.record.clone(),
        identity: context.identity.clone(),
        part: context.part,
        writer: context.writer,
        io: Arc::clone(&below.pool),
    };
    let backend = CompressBackend::new(config, below.backend, Arc::clone(&context.clock))?;
    Ok(BuiltTier {
        backend: Arc::new(backend),
        ..below
    })
}

#[cfg(not(feature = "compress"))]
fn make(_: &BuildContext<'_>, _: CompressOptions, _: BuiltTier) -> Result<BuiltTier> {
    use ucm_core::{Error, ErrorKind};

    let text = "this build has no codec; build with the feature \"compress\", or leave the stage out";
    Err(Error::new(ErrorKind::Unsupported, text))
}
