//! The kind `mooncake`: one value per record in the pool of a Mooncake Store, through its Python client.
//!
//! Mooncake's C API comes in no wheel, so the client is the Python object that users have installed, and the kind
//! lives here, where Python may be called. [`client`] has the one thread that calls it, [`library`] the calls,
//! [`backend`] what the engine sees.

mod backend;
mod client;
mod library;

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use ucm_core::{Error, ErrorKind, Result};
use ucm_tier::registry::{self, BuildContext, BuiltTier, Size, StoreName, TierKind};

use backend::{Mooncake, Whose};
use client::Client;
use library::Pool;

/// Threads of the tier: as many batches wait for the client at once, and it takes what waits together.
const THREADS: usize = 32;
/// Where Mooncake's master listens unless it is told otherwise.
const MASTER_PORT: u16 = 50051;
/// The least memory that Mooncake takes, bytes.
const LEAST: u64 = 16 << 20;
/// Bytes that a client takes for itself where it only looks up.
const LOOKUP_BUFFER: u64 = LEAST;

/// The options.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct MooncakeOptions {
    /// address of the master, `host:port`
    #[schemars(extend("unset" = "port 50051 on the host of `metadata_server`; one of both must be given"))]
    master_server_address: Option<String>,
    /// address of the metadata server, where the clients use one
    #[schemars(extend("unset" = "none: clients ask each other (`P2PHANDSHAKE`)"))]
    metadata_server: Option<String>,
    /// name or address under which others reach this host
    #[schemars(extend("unset" = "the address from which this host reaches the master"))]
    local_hostname: Option<String>,
    /// name of the network device, for RDMA
    device_name: String,
    /// how bytes travel; `rdma` is untested
    protocol: String,
    /// memory that each process that stores lends to the pool; 0: none, where others lend theirs. The pool is the sum
    /// of it, and Mooncake evicts by itself when it is full
    global_segment_size: Size,
    /// memory that Mooncake's client takes for transfers of its own
    #[schemars(range(min = 1))]
    local_buffer_size: Size,
}

impl Default for MooncakeOptions {
    fn default() -> Self {
        Self {
            master_server_address: None,
            metadata_server: None,
            local_hostname: None,
            device_name: String::new(),
            protocol: "tcp".to_owned(),
            global_segment_size: Size(25 << 27),
            local_buffer_size: Size(1 << 30),
        }
    }
}

/// Adds the kind to the registry; once is enough, also where the module is initialised again.
pub(crate) fn register() {
    let summary =
        "built: the memory of a Mooncake pool, over TCP; needs the package `mooncake-transfer-engine`";
    let name = StoreName::new("mooncake", "UcmMooncakeStore", summary);
    let _registered_before = registry::register(TierKind::medium(name, make));
}

fn make(context: &BuildContext<'_>, options: MooncakeOptions) -> Result<BuiltTier> {
    let given = options
        .master_server_address
        .filter(|address| !address.is_empty());
    let beside = || options.metadata_server.as_deref().and_then(master_beside);
    let master = given.or_else(beside).ok_or_else(|| {
        let text =
            "UcmMooncakeStore needs the address of Mooncake's master; write master_server_address: host:port";
        Error::new(ErrorKind::Config, text)
    })?;
    let pool = Pool {
        master,
        metadata: options
            .metadata_server
            .unwrap_or_else(|| "P2PHANDSHAKE".to_owned()),
        host: options.local_hostname,
        protocol: options.protocol,
        device: options.device_name,
        lent: if context.lookup_only {
            0
        } else {
            options.global_segment_size.0
        },
        buffer: if context.lookup_only {
            LOOKUP_BUFFER
        } else {
            options.local_buffer_size.0
        },
    };
    for (key, bytes) in [
        ("global_segment_size", pool.lent),
        ("local_buffer_size", pool.buffer),
    ] {
        if bytes < LEAST && !(bytes == 0 && key == "global_segment_size") {
            let text =
                format!("{key} is less than Mooncake takes; give it at least 16 MiB, or lend nothing (0)");
            return Err(Error::new(ErrorKind::Config, text).with(key, bytes));
        }
    }
    library::check_installed()?;
    let whose = Whose {
        prefix: format!("ucm:{}:", context.identity.namespace()),
        namespace: *context.identity.digest(),
        part: context.part,
        layout: context.record.clone(),
        writer: context.writer,
    };
    let threads = context.pool("ucm-mooncake", THREADS, false)?;
    let client = Client::begin(pool, Arc::clone(&context.clock))?;
    Ok(BuiltTier {
        backend: Arc::new(Mooncake::new(whose, client, Arc::clone(&threads))),
        pool: threads,
        codec: None,
        max_stuck: THREADS,
    })
}

/// The master on the host of a metadata server, at Mooncake's own port; nothing where that is no URL of HTTP.
fn master_beside(metadata: &str) -> Option<String> {
    let (scheme, rest) = metadata.split_once("://")?;
    let authority = rest.split('/').next().filter(|authority| !authority.is_empty())?;
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    };
    scheme
        .starts_with("http")
        .then(|| format!("{host}:{MASTER_PORT}"))
}
