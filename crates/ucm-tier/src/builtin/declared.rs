//! Kinds that a configuration may name and that are not built yet, with the options that are known of them.
//!
//! One that is built moves to a file of its own and gets something that makes it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::kind::{Size, StoreName, TierKind};

/// What to use instead of a store that is reached by other means than a file system.
const A_DIRECTORY: &str = "use UcmPosixStore (storage_backend: posix) on a directory";
const SUMMARY: &str = "not built yet";

/// Options of the Mooncake store.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct MooncakeOptions {
    /// name or address of this host
    local_hostname: Option<String>,
    /// address of the metadata server
    metadata_server: Option<String>,
    /// address of the master
    master_server_address: Option<String>,
    /// name of the network device
    device_name: String,
    /// how bytes travel
    protocol: String,
    /// memory lent to the others
    #[schemars(range(min = 1))]
    global_segment_size: Size,
    /// memory for transfers
    #[schemars(range(min = 1))]
    local_buffer_size: Size,
}

impl Default for MooncakeOptions {
    fn default() -> Self {
        Self {
            local_hostname: None,
            metadata_server: None,
            master_server_address: None,
            device_name: String::new(),
            protocol: "tcp".to_owned(),
            global_segment_size: Size(25 << 27),
            local_buffer_size: Size(1 << 30),
        }
    }
}

pub(super) fn mooncake() -> TierKind {
    let name = StoreName::new("mooncake", "UcmMooncakeStore", SUMMARY);
    TierKind::declared::<MooncakeOptions>(name, A_DIRECTORY)
}
