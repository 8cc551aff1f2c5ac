//! Stores that are classes of Python alone, with their options.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::kind::{NoOptions, StoreName, TierKind};

/// Options of the store of tests that has no bytes.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct FakeOptions {
    /// how many ids are remembered
    #[schemars(range(min = 1, max = 16_777_216), extend("unit" = "ids"))]
    buffer_number: u32,
    /// must be true: an engine that uses this store answers with wrong tokens
    allow_wrong_tokens: bool,
}

impl Default for FakeOptions {
    fn default() -> Self {
        Self {
            buffer_number: 1 << 20,
            allow_wrong_tokens: false,
        }
    }
}

pub(super) fn empty() -> TierKind {
    let summary = "built: takes everything, keeps nothing";
    TierKind::python::<NoOptions>(StoreName::new("empty", "UcmEmptyStore", summary))
}

pub(super) fn fake() -> TierKind {
    let summary = "built, for tests alone: an engine that uses it answers with wrong tokens \
                   ([stores.md](stores.md#stores-for-tests))";
    TierKind::python::<FakeOptions>(StoreName::new("fake", "UcmFakeStore", summary))
}
