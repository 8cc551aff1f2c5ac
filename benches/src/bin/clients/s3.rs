//! The crate `object_store` alone. As in the store, many blocks form one object, which is put in
//! parts and read in ranges.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::TryStreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{ClientOptions, GetOptions, GetRange, ObjectStore, ObjectStoreExt};

use crate::{AT_ONCE, Result, each};

/// The bucket of the server that `demo/servers.py` starts.
const BUCKET: &str = "bucket";
/// The store's sizes of an object and its parts: `object_size` and `PART` of `ucm_media::object`.
const SEGMENT: usize = 64 << 20;
const PART: usize = 16 << 20;
/// Bytes of one range for several blocks, as there.
const LEAST: usize = 1 << 20;
const MOST: usize = 8 << 20;

/// A bucket in which an object has many blocks, in the order of the puts.
pub(crate) struct Segments(Arc<AmazonS3>);

impl Segments {
    pub(crate) fn open(at: &str) -> Result<Self> {
        let options = ClientOptions::new()
            .with_allow_http(true)
            .with_pool_max_idle_per_host(AT_ONCE);
        let made = AmazonS3Builder::from_env()
            .with_bucket_name(BUCKET)
            .with_endpoint(format!("http://{at}"))
            .with_region("us-east-1")
            .with_client_options(options)
            .build()?;
        Ok(Self(Arc::new(made)))
    }

    pub(crate) async fn put(&self, keys: &[String], values: &[Bytes]) -> Result<()> {
        let blocks = blocks_in(SEGMENT, values);
        let (mut uploads, mut parts) = (Vec::new(), Vec::new());
        for (keys, values) in keys.chunks(blocks).zip(values.chunks(blocks)) {
            let mut upload = self.0.put_multipart(&Path::from(&keys[0][..])).await?;
            for part in values.chunks(blocks_in(PART, values)) {
                let sending = upload.put_part(part.iter().cloned().collect());
                parts.push(async move { Ok(sending.await?) });
            }
            uploads.push(upload);
        }
        each(parts.into_iter()).await?;
        for mut upload in uploads {
            upload.complete().await?;
        }
        Ok(())
    }

    pub(crate) async fn get(
        &self,
        keys: &[String],
        mut into: Vec<Vec<u8>>,
    ) -> Result<Vec<Vec<u8>>> {
        let len = into.first().map_or(1, Vec::len);
        let (in_segment, run) = (
            SEGMENT / len,
            (keys.len() * len / AT_ONCE).clamp(LEAST, MOST) / len,
        );
        let mut jobs = Vec::new();
        for (number, segment) in keys.chunks(in_segment.max(1)).enumerate() {
            let path = Path::from(&segment[0][..]);
            for start in (0..segment.len()).step_by(run.max(1)) {
                let count = run.max(1).min(segment.len() - start);
                let first = number * in_segment.max(1) + start;
                let run: Vec<Vec<u8>> = into[first..first + count]
                    .iter_mut()
                    .map(std::mem::take)
                    .collect();
                let range = (start * len) as u64..((start + count) * len) as u64;
                let (store, path) = (Arc::clone(&self.0), path.clone());
                jobs.push(async move { fill(&store, &path, range, run).await });
            }
        }
        Ok(each(jobs.into_iter())
            .await?
            .into_iter()
            .flatten()
            .collect())
    }
}

/// How many of these blocks, all of one length, fit into `bytes`.
fn blocks_in(bytes: usize, blocks: &[Bytes]) -> usize {
    (bytes / blocks.first().map_or(1, Bytes::len).max(1)).max(1)
}

/// Fills blocks in order with a range of an object, as its bytes arrive.
async fn fill(
    store: &AmazonS3,
    path: &Path,
    range: Range<u64>,
    mut into: Vec<Vec<u8>>,
) -> Result<Vec<Vec<u8>>> {
    let options = GetOptions {
        range: Some(GetRange::Bounded(range)),
        ..GetOptions::default()
    };
    let mut stream = store.get_opts(path, options).await?.into_stream();
    let (mut block, mut within) = (0, 0);
    while let Some(mut piece) = stream.try_next().await? {
        while !piece.is_empty() {
            let rest = &mut into.get_mut(block).ok_or("an object is too long")?[within..];
            let len = piece.len().min(rest.len());
            rest[..len].copy_from_slice(&piece.split_to(len));
            within += len;
            if len == rest.len() {
                (block, within) = (block + 1, 0);
            }
        }
    }
    Ok(into)
}
