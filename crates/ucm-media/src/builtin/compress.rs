//! The word `compress`: `Compress|Pc` is `Pc` with a codec.

use crate::kind::{StoreName, TierKind};

pub(super) fn kind() -> TierKind {
    let summary = "built: no store, but the `codec` of the stage below it \
                   ([stores.md](stores.md#compression))";
    TierKind::layer(StoreName::new("compress", "UcmCompressStage", summary).fixing("codec", "zstd"))
}
