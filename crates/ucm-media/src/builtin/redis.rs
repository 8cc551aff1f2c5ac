//! The kind `redis`: one value per record on a Redis server or cluster. A build without the feature
//! `redis` knows its options and refuses it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::kind::{Addresses, Age, CodecName, StoreName, TierKind};

/// The options.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("required" = ["storage_backends"]))]
struct RedisOptions {
    /// the server, `redis://host:port/number`, or `rediss://` for TLS; several addresses are nodes
    /// of one cluster, of which one is enough
    #[schemars(extend("schemes" = ["redis", "rediss"], "unset" = "none given", "unit" = "address"))]
    storage_backends: Addresses,
    /// the user name, where the address has none
    #[schemars(extend("env" = ["UCM_REDIS_USERNAME"], "unset" = "the server's `default`"))]
    redis_username: Option<String>,
    /// the password, where the address has none; never shown. Better in the environment than in a
    /// file
    #[schemars(extend("env" = ["UCM_REDIS_PASSWORD"], "unset" = "none", "format" = "secret"))]
    redis_password: Option<String>,
    /// file with the authorities that are trusted for `rediss://`
    #[schemars(extend("unset" = "those of the system", "unit" = "path, PEM"))]
    redis_tls_ca: Option<String>,
    /// file with our own certificate, where the server wants one; with `redis_tls_key`
    #[schemars(extend("unset" = "none", "unit" = "path, PEM"))]
    redis_tls_cert: Option<String>,
    /// file with its key
    #[schemars(extend("unset" = "none", "unit" = "path, PEM"))]
    redis_tls_key: Option<String>,
    /// the beginning of every key: letters, digits, `_`, `-`, `.`
    redis_key_prefix: String,
    /// blocks not used for so long are removed, by the server
    #[schemars(extend("unset" = "1d"))]
    expire_after: Option<Age>,
    /// how blocks are stored: as they are, or in a shorter form that comes back to the byte
    codec: CodecName,
    /// connections for blocks, of one process; one more is for short requests
    #[schemars(range(min = 1, max = 64), extend("unit" = "connections"))]
    redis_connections: u32,
    /// threads that wait for the server: as many blocks are on their way at once
    #[schemars(range(min = 2, max = 256), extend("unit" = "threads"))]
    redis_concurrency: u32,
}

impl Default for RedisOptions {
    fn default() -> Self {
        Self {
            storage_backends: Addresses::default(),
            redis_username: None,
            redis_password: None,
            redis_tls_ca: None,
            redis_tls_cert: None,
            redis_tls_key: None,
            redis_key_prefix: "ucm".to_owned(),
            expire_after: None,
            codec: CodecName::Off,
            redis_connections: 4,
            redis_concurrency: 16,
        }
    }
}

fn name() -> StoreName {
    let summary = "built: one value per block on a Redis server or cluster; Valkey untested";
    StoreName::new("redis", "UcmRedisStore", summary)
}

#[cfg(not(feature = "redis"))]
pub(super) fn kind() -> TierKind {
    let instead = "this build is without the feature `redis`; use UcmPosixStore (storage_backend: \
                   posix) on a directory";
    TierKind::declared::<RedisOptions>(name(), instead)
}

#[cfg(feature = "redis")]
pub(super) use built::kind;

#[cfg(feature = "redis")]
mod built {
    use std::path::{Path, PathBuf};
    use std::sync::Arc;
    use std::time::Duration;

    use serde_json::json;
    use ucm_core::{Error, ErrorKind, Result};

    use super::{Age, RedisOptions, TierKind, name};
    use crate::kind::{BuildContext, BuiltTier};
    use crate::place::Place;
    use crate::redis::{Login, RedisConfig, RedisPlace, RedisValues, TlsFiles};

    /// How long a record lives after its last use where nothing else is configured.
    const DAY: Duration = Duration::from_secs(24 * 3600);

    pub(in crate::builtin) fn kind() -> TierKind {
        TierKind::medium(name(), make)
            .seen_by_tools(place)
            .tested_with(|scratch| {
                let address = "redis://127.0.0.1:6379"; // a test puts that of its own server here
                json!({"storage_backends": [address], "redis_key_prefix": prefix_of(scratch)})
            })
    }

    /// A prefix for the keys of a test.
    fn prefix_of(scratch: &Path) -> String {
        let path = scratch.display().to_string();
        let plain = path.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        plain[plain.len().saturating_sub(60)..].to_owned()
    }

    /// Where blocks are and how they are kept. `writer`: of a store that writes.
    fn config(
        options: RedisOptions,
        namespace: String,
        writer: Option<u64>,
    ) -> Result<RedisConfig> {
        let path = |file: Option<String>| file.map(PathBuf::from);
        let certificate = match (path(options.redis_tls_cert), path(options.redis_tls_key)) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some((certificate, key)),
            _ => {
                let text = "redis_tls_cert and redis_tls_key belong together; give both";
                return Err(Error::new(ErrorKind::Config, text));
            }
        };
        Ok(RedisConfig {
            addresses: options.storage_backends.0,
            login: Login {
                username: options.redis_username,
                password: options.redis_password,
            },
            tls: TlsFiles {
                ca: path(options.redis_tls_ca),
                certificate,
            },
            prefix: options.redis_key_prefix,
            namespace,
            expire_after: options.expire_after.map_or(DAY, Age::duration),
            connections: options.redis_connections as usize,
            writer,
        })
    }

    fn place(options: RedisOptions) -> Result<Box<dyn Place>> {
        let config = config(options, String::new(), None)?;
        Ok(Box::new(RedisPlace::open(config)?))
    }

    fn make(context: &BuildContext, options: RedisOptions) -> Result<BuiltTier> {
        let (compressed, scope) = (options.codec.is_on(), &context.scope);
        let threads = options.redis_concurrency as usize;
        let writer = (!scope.lookup_only).then_some(scope.writer);
        let config = config(options, scope.identity.namespace(), writer)?;
        let pool = context.pool("ucm-redis", threads, false)?;
        let values = RedisValues::new(config, Arc::clone(&context.clock))?;
        Ok(BuiltTier {
            backend: context.records(Box::new(values), &pool, compressed),
            pool,
            compressed,
            max_stuck: threads,
        })
    }
}
