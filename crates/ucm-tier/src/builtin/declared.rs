//! Kinds that a configuration may name and that are not built yet, with the options that are known of them.
//!
//! One that is built moves to a file of its own and gets something that makes it.

use crate::kind::{NoOptions, StoreName, TierKind};

/// What to use instead of a store that is reached by other means than a file system.
const A_DIRECTORY: &str = "use UcmPosixStore (storage_backend: posix) on a directory";
const SUMMARY: &str = "not built yet";

pub(super) fn object() -> TierKind {
    TierKind::declared::<NoOptions>(StoreName::new("object", "UcmObjectStore", SUMMARY), A_DIRECTORY)
}

pub(super) fn redis() -> TierKind {
    TierKind::declared::<NoOptions>(StoreName::new("redis", "UcmRedisStore", SUMMARY), A_DIRECTORY)
}
