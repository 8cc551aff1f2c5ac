//! The kind `mooncake`: one value per record in the pool of a Mooncake Store, through its Python
//! client.
//!
//! Mooncake's C API comes in no wheel, so the client is the Python object that users have
//! installed, and the kind lives here, where Python may be called. [`client`] has the queue of work,
//! [`calling`] the one thread that takes it from there, [`library`] the calls, [`values`] what the
//! engine reads and writes, [`place`] what tools do.

mod calling;
mod client;
mod library;
mod place;
#[cfg(feature = "test-utils")]
mod tests_values;
mod values;

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use ucm_core::{Error, ErrorKind, Result};
use ucm_media::place::Place;
use ucm_media::registry::{self, Addresses, BuildContext, BuiltTier, Size, StoreName, TierKind};

use calling::{LEAST, LEAST_BUFFER};
use library::Pool;
use place::MooncakePlace;
#[cfg(feature = "test-utils")]
pub(crate) use tests_values::check_mooncake_values;
use values::{MooncakeValues, THREADS};

/// Where Mooncake's master listens by default.
const MASTER_PORT: u16 = 50051;
/// Where its HTTP service does.
const HTTP_PORT: u16 = 9003;
/// The options.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct MooncakeOptions {
    /// the master as an address, `mooncake://host:port`, in place of `master_server_address`
    #[schemars(extend("schemes" = ["mooncake"], "unset" = "`master_server_address`", "unit" = "address"))]
    storage_backends: Addresses,
    /// address of the master, `host:port`
    #[schemars(extend("unset" = "port 50051 on the host of `metadata_server`; one of both, or `storage_backends`, must be given"))]
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
    /// memory that each process that stores lends to the pool; 0: none, where others lend theirs.
    /// The pool is the sum of it, and Mooncake evicts by itself when it is full
    global_segment_size: Size,
    /// memory that Mooncake's client takes for transfers of its own
    #[schemars(range(min = 1))]
    local_buffer_size: Size,
    /// address of the master's HTTP service (its `--metrics_port`), which lists the keys of a pool:
    /// only tools ask it
    #[schemars(extend("unset" = "port 9003 on the host of the master", "unit" = "`host:port`"))]
    master_http_address: Option<String>,
}

impl Default for MooncakeOptions {
    fn default() -> Self {
        Self {
            storage_backends: Addresses::default(),
            master_server_address: None,
            metadata_server: None,
            local_hostname: None,
            device_name: String::new(),
            protocol: "tcp".to_owned(),
            global_segment_size: Size(25 << 27),
            local_buffer_size: Size(1 << 30),
            master_http_address: None,
        }
    }
}

/// Adds the kind to the registry; once is enough, also where the module is initialised again.
pub(crate) fn register() {
    let summary = "built: the memory of a Mooncake pool, over TCP; needs the package \
                   `mooncake-transfer-engine`";
    let name = StoreName::new("mooncake", "UcmMooncakeStore", summary);
    let _registered_before =
        registry::register(TierKind::medium(name, make).seen_by_tools(open_place));
}

/// The pool that these options name; `lent` and `buffer`: bytes that this process lends, and the
/// client's own.
fn pool_of(options: MooncakeOptions, lent: u64, buffer: u64) -> Result<Pool> {
    for (key, bytes) in [("global_segment_size", lent), ("local_buffer_size", buffer)] {
        if bytes < LEAST && !(bytes == 0 && key == "global_segment_size") {
            let text = format!(
                "{key} is less than Mooncake takes; give it at least 16 MiB, or lend nothing (0)"
            );
            return Err(Error::new(ErrorKind::Config, text).with(key, bytes));
        }
    }
    let master = master_of(&options)?;
    library::check_installed()?;
    Ok(Pool {
        master,
        metadata: options
            .metadata_server
            .unwrap_or_else(|| "P2PHANDSHAKE".to_owned()),
        host: options.local_hostname,
        protocol: options.protocol,
        device: options.device_name,
        lent,
        buffer,
    })
}

/// The pool as tools see it.
fn open_place(options: MooncakeOptions) -> Result<Box<dyn Place>> {
    let given = options.master_http_address.clone();
    let pool = pool_of(options, 0, LEAST_BUFFER)?;
    let beside = || {
        let host = pool
            .master
            .rsplit_once(':')
            .map_or(&*pool.master, |(host, _)| host);
        format!("{host}:{HTTP_PORT}")
    };
    let http = given
        .filter(|address| !address.is_empty())
        .unwrap_or_else(beside);
    Ok(Box::new(MooncakePlace::open(pool, http)?))
}

fn make(context: &BuildContext, options: MooncakeOptions) -> Result<BuiltTier> {
    let (lent, buffer) = if context.scope.lookup_only {
        (0, LEAST_BUFFER)
    } else {
        (options.global_segment_size.0, options.local_buffer_size.0)
    };
    let pool = pool_of(options, lent, buffer)?;
    let threads = context.pool("ucm-mooncake", THREADS, false)?;
    let client = calling::begin(pool, Arc::clone(&context.clock))?;
    let prefix = format!("ucm:{}:", context.scope.identity.namespace());
    let values = MooncakeValues::new(prefix, context.scope.writer, client)?;
    Ok(BuiltTier {
        backend: context.records(Box::new(values), &threads, false),
        pool: threads,
        compressed: false,
        max_stuck: THREADS,
    })
}

/// The address of the master. `Config` where none is given, or two that differ.
fn master_of(options: &MooncakeOptions) -> Result<String> {
    let named = options.master_server_address.clone();
    let named = named.filter(|address| !address.is_empty());
    let addressed = match &options.storage_backends.0[..] {
        [] => None,
        [address] => Some(master_at(address)?),
        more => {
            let text =
                "storage_backends names one pool of Mooncake, by its master: mooncake://host:port";
            return Err(Error::new(ErrorKind::Config, text).with("given", more.len()));
        }
    };
    match (named, addressed) {
        (Some(named), Some(addressed)) if named != addressed => {
            let text =
                "storage_backends and master_server_address name two masters; keep one of them";
            let error = Error::new(ErrorKind::Config, text).with("storage_backends", addressed);
            Err(error.with("master_server_address", named))
        }
        (Some(master), _) | (None, Some(master)) => Ok(master),
        (None, None) => {
            let beside = options.metadata_server.as_deref().and_then(master_beside);
            beside.ok_or_else(|| {
                let text = "UcmMooncakeStore needs the address of Mooncake's master; write \
                            master_server_address: \
                            host:port, or storage_backends: mooncake://host:port";
                Error::new(ErrorKind::Config, text)
            })
        }
    }
}

/// The master of `mooncake://host:port`; without a port Mooncake's own.
fn master_at(address: &str) -> Result<String> {
    let text = "a pool of Mooncake is written mooncake://host:port, the address of its master and \
                nothing else";
    let wrong = || Error::new(ErrorKind::Config, text);
    let (_, place) = address.split_once("://").ok_or_else(wrong)?;
    let place = place.strip_suffix('/').unwrap_or(place);
    let (host, port) = match place.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| wrong())?),
        _ => (place, MASTER_PORT),
    };
    if host.is_empty() || host.contains(['/', '@', '?', '#', ' ']) {
        return Err(wrong()); // not shown: it may have a password
    }
    Ok(format!("{host}:{port}"))
}

/// The master on the host of a metadata server, at Mooncake's own port; nothing where that is no
/// URL of HTTP.
fn master_beside(metadata: &str) -> Option<String> {
    let (scheme, rest) = metadata.split_once("://")?;
    let authority = rest
        .split('/')
        .next()
        .filter(|authority| !authority.is_empty())?;
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    };
    scheme
        .starts_with("http")
        .then(|| format!("{host}:{MASTER_PORT}"))
}
