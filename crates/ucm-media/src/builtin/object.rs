//! The kind `object`: segments as objects in a bucket of S3, Azure or Google. A build without the
//! feature `object` knows its options and refuses it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::kind::{Addresses, Age, Amount, CodecName, Size, StoreName, TierKind};

/// The options.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("required" = ["storage_backends"]))]
struct ObjectOptions {
    /// the bucket, and the beginning of all names in it: `s3://bucket/prefix`,
    /// `az://container/prefix` or `gs://bucket/prefix`. Keys come from the environment, the files
    /// of the vendor's tools or the machine's own service
    #[schemars(extend("schemes" = ["s3", "az", "gs"], "unset" = "none given", "unit" = "address"))]
    storage_backends: Addresses,
    /// the server, where it is not the vendor's own: `http://host:port`
    #[schemars(extend("unset" = "`AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL` for S3; the vendor's", "unit" = "address"))]
    object_endpoint: Option<String>,
    /// region of the bucket
    #[schemars(extend("unset" = "that of the environment or the files, `us-east-1`"))]
    object_region: Option<String>,
    /// file with the keys: one like `~/.aws/credentials` for S3, the key file of a service account
    /// for Google
    #[schemars(extend("unset" = "those of the environment, the files of the vendor's tools, the machine", "unit" = "path"))]
    object_credentials: Option<String>,
    /// file with authorities that are trusted beside those of the system
    #[schemars(extend("unset" = "none", "unit" = "path, PEM"))]
    object_ca: Option<String>,
    /// limit below the prefix, at least 8 blocks; the oldest use is removed first. Kept where the
    /// server has conditional writes (S3, Azure, Google and most others have); elsewhere the log
    /// says so and blocks are removed by `expire_after`
    #[schemars(extend("unset" = "100GiB", "unit" = "size"))]
    storage_capacity: Option<Amount>,
    /// blocks not used for so long are removed, segment by segment
    #[schemars(extend("unset" = "never; 7d where the server has no conditional writes"))]
    expire_after: Option<Age>,
    /// how blocks are stored: as they are, or in a shorter form that comes back to the byte
    codec: CodecName,
    /// length at which a segment becomes an object; three of them are kept in memory at most. Never
    /// more than a 64th of `storage_capacity`, and never less than one block
    #[schemars(range(min = 1_048_576, max = 1_073_741_824))]
    object_size: Size,
    /// how long a written block waits for others to be put with it, unless a caller waits for it;
    /// never longer than half of `deadlines.dump_s`
    #[schemars(range(min = 0, max = 60), extend("unit" = "seconds"))]
    object_age: f64,
    /// how often the segments of others are listed while lookups arrive
    #[schemars(range(min = 1, max = 3600), extend("unit" = "seconds"))]
    object_refresh: f64,
    /// how often a request is tried again where that can help; the deadline of the caller that
    /// waits ends it sooner
    #[schemars(range(max = 20), extend("unit" = "times"))]
    object_retries: u32,
    /// threads that wait for the server: as many requests are on their way at once
    #[schemars(range(min = 2, max = 256), extend("unit" = "threads"))]
    object_concurrency: u32,
}

impl Default for ObjectOptions {
    fn default() -> Self {
        Self {
            storage_backends: Addresses::default(),
            object_endpoint: None,
            object_region: None,
            object_credentials: None,
            object_ca: None,
            storage_capacity: None,
            expire_after: None,
            codec: CodecName::Off,
            object_size: Size(64 << 20),
            object_age: 5.0,
            object_refresh: 10.0,
            object_retries: 3,
            object_concurrency: 16,
        }
    }
}

fn name() -> StoreName {
    let summary =
        "built: many blocks per object in a bucket; S3 run here, Azure and Google untested";
    StoreName::new("object", "UcmObjectStore", summary)
}

#[cfg(not(feature = "object"))]
pub(super) fn kind() -> TierKind {
    let instead = "this build is without the feature `object`; use UcmPosixStore (storage_backend: \
                   posix) on a directory";
    TierKind::declared::<ObjectOptions>(name(), instead)
}

#[cfg(feature = "object")]
pub(super) use built::kind;

#[cfg(feature = "object")]
mod built {
    use std::path::PathBuf;
    use std::sync::Arc;

    use serde_json::json;
    use ucm_core::{Error, ErrorKind, Result};

    use super::{ObjectOptions, TierKind, name};
    use crate::kind::{BuildContext, BuiltTier, seconds};
    use crate::object::{BucketConfig, ObjectBackend, ObjectConfig, ObjectPlace};
    use crate::place::Place;
    use crate::quota::Capacity;

    pub(in crate::builtin) fn kind() -> TierKind {
        TierKind::medium(name(), make).seen_by_tools(place).tested_with(|scratch| {
            // A test puts its own server here.
            let endpoint = "http://127.0.0.1:9000";
            let prefix = scratch.display().to_string().replace('/', "-");
            json!({
                "storage_backends": [format!("s3://bucket/{prefix}")], "object_endpoint": endpoint, "object_age": 0,
                "object_region": "us-east-1", "storage_capacity": 1 << 26, "object_refresh": 1,
            })
        })
    }

    /// Where the bucket is.
    fn at(options: &ObjectOptions) -> Result<BucketConfig> {
        let [url] = &options.storage_backends.0[..] else {
            let text = "storage_backends names one bucket: s3://bucket/prefix";
            let wrong = Error::new(ErrorKind::Config, text);
            return Err(wrong.with("given", options.storage_backends.0.len()));
        };
        let environment = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let aws = || environment("AWS_ENDPOINT_URL_S3").or_else(|| environment("AWS_ENDPOINT_URL"));
        let endpoint = options.object_endpoint.clone();
        Ok(BucketConfig {
            endpoint: endpoint.or_else(|| url.starts_with("s3:").then(aws).flatten()),
            region: options.object_region.clone(),
            credentials: options.object_credentials.as_ref().map(PathBuf::from),
            ca: options.object_ca.as_ref().map(PathBuf::from),
            retries: options.object_retries as usize,
            connections: options.object_concurrency as usize,
            url: url.clone(),
        })
    }

    fn place(options: ObjectOptions) -> Result<Box<dyn Place>> {
        Ok(Box::new(ObjectPlace::open(&at(&options)?)?))
    }

    fn make(context: &BuildContext, options: ObjectOptions) -> Result<BuiltTier> {
        let place = at(&options)?;
        let capacity = match options.storage_capacity.and_then(super::Amount::limit) {
            Some(Capacity::Bytes(bytes)) => Some(bytes.get()),
            Some(Capacity::Percent(_)) => {
                let text = "storage_capacity of a bucket is a size, for it has none that could be \
                            shared; write 500GiB";
                return Err(Error::new(ErrorKind::Config, text));
            }
            None => None,
        };
        let compressed = options.codec.is_on();
        let threads = options.object_concurrency as usize;
        let config = ObjectConfig {
            place,
            scope: context.scope(compressed),
            capacity,
            expire_after: options.expire_after.map(super::Age::duration),
            size: options.object_size.0,
            age: seconds("object_age", options.object_age)?,
            refresh: seconds("object_refresh", options.object_refresh)?,
        };
        let pool = context.pool("ucm-object-io", threads, false)?;
        let clock = Arc::clone(&context.clock);
        Ok(BuiltTier {
            backend: Arc::new(ObjectBackend::new(config, Arc::clone(&pool), clock)?),
            pool,
            compressed,
            max_stuck: threads,
        })
    }
}
