//! The kind `ds3fs`: what `posix` is, on a mount of 3FS, with records past FUSE through its rings
//! ([`UsrbioOptions`]).
//!
//! Layout, space, trust and everything else are those of `posix`; only the engine of I/O is
//! another.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use ucm_core::Result;
use ucm_io::{PsyncEngine, UsrbioOptions};

use super::posix::{PosixOptions, make_over};
use crate::kind::{BuildContext, BuiltLevel, Size, StoreName, TierKind};

/// The options: those of `posix`, and how rings are made.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("required" = ["storage_backends"]))]
struct Ds3fsOptions {
    #[serde(flatten)]
    posix: PosixOptions,
    /// entries of a ring
    #[schemars(range(min = 1, max = 65536), extend("unit" = "entries"))]
    ior_entries: u32,
    /// operations of a ring that 3FS begins together at most, whatever the sign (it would wait for
    /// full batches of a positive depth, and is never given one); 0: all that there are
    #[schemars(range(min = -65536, max = 65536), extend("unit" = "operations"))]
    ior_depth: i32,
    /// node that the memory of rings is taken from; -1: any
    #[schemars(range(min = -1, max = 1023))]
    numa_id: i32,
    /// memory of the rings of one process, beside `staging_capacity`: 4 MiB for each, half of them
    /// for reads; several roots share it. A thread that finds no ring free goes through the mount
    #[schemars(range(min = 8_388_608, max = 1_073_741_824))]
    ior_memory: Size,
    /// 3FS's client library, by name or path. Without it, or elsewhere than on 3FS, blocks go
    /// through the mount, with a warning
    #[schemars(extend("env" = ["UCM_HF3FS_LIB"]))]
    hf3fs_library: String,
}

impl Default for Ds3fsOptions {
    fn default() -> Self {
        Self {
            posix: PosixOptions::default(),
            ior_entries: 1024,
            ior_depth: 32,
            numa_id: 0,
            ior_memory: Size(256 << 20),
            hf3fs_library: "libhf3fs_api_shared.so".to_owned(),
        }
    }
}

pub(super) fn kind() -> TierKind {
    let name = StoreName::new(
        "ds3fs",
        "UcmDs3fsStore",
        "built: posix, with the rings of 3FS; untested on a real 3FS",
    );
    TierKind::medium(name, make).tested_with(|scratch| {
        let root = scratch.join("root");
        json!({"storage_backends": [root], "storage_capacity": 1 << 26, "free_space_floor": 0})
    })
}

fn make(context: &BuildContext, options: Ds3fsOptions) -> Result<Vec<BuiltLevel>> {
    let roots = options.posix.storage_backends.0.len();
    let rings = UsrbioOptions {
        library: options.hf3fs_library.into(),
        entries: options.ior_entries,
        depth: options.ior_depth,
        numa: options.numa_id,
        memory: usize::try_from(options.ior_memory.0).unwrap_or(usize::MAX) / roots.max(1),
    };
    make_over(context, &options.posix, |direct| {
        PsyncEngine::over_3fs(direct, rings.clone())
    })
}
