//! Whether a server keeps to conditional writes, which a limit that several share needs.

use std::sync::atomic::Ordering;

use object_store::path::Path;
use tracing::warn;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;

use super::bucket::Bucket;
use super::{DOCUMENT, Objects};

impl Objects {
    /// Looks whether the server has conditional writes, unless it was seen to: then the limit is
    /// kept to from there on.
    pub(super) fn look_for_conditions(&self, deadline: MonotonicTime) -> Result<()> {
        if self.has_conditions() {
            return Ok(());
        }
        let conditions = self.call(deadline, has_conditions(&self.bucket, &self.names.probe()))?;
        self.space.conditions.store(conditions, Ordering::Release);
        if !conditions {
            let after = self.expiry().unwrap_or_default().as_secs();
            warn!(
                store = self.config.scope.writer,
                "{} has no conditional writes, so storage_capacity is not kept to: segments go \
                 when they were not used for \
                 {after} s (expire_after)",
                self.config.place.url
            );
        }
        Ok(())
    }

    /// Whether the server has conditional writes.
    pub(super) fn has_conditions(&self) -> bool {
        self.space.conditions.load(Ordering::Acquire)
    }
}

/// Whether the server keeps to `If-None-Match` and `If-Match`. Only its own answer says that it
/// does not: an error that may pass is an error here.
async fn has_conditions(bucket: &Bucket, path: &Path) -> Result<bool> {
    let conditions = try_conditions(bucket, path).await;
    let removed = bucket.delete(path).await;
    match conditions {
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(false),
        Err(error) => Err(error),
        Ok(conditions) => removed.map(|()| conditions),
    }
}

/// The same; what it puts may be left behind, and `Unsupported` is a refusal.
async fn try_conditions(bucket: &Bucket, path: &Path) -> Result<bool> {
    let word = |text: &'static str| bytes::Bytes::from_static(text.as_bytes());
    // False only where an answer was lost and the client has put it twice: it is read below.
    let _first = bucket.put_new(path, word("first")).await?;
    if bucket.put_new(path, word("again")).await? {
        return Ok(false);
    }
    let Some((found, version)) = bucket.get(path, DOCUMENT).await? else {
        return Err(Error::new(
            ErrorKind::Io,
            "the object store does not have what was put there just now",
        ));
    };
    if found != "first" || (version.e_tag.is_none() && version.version.is_none()) {
        return Ok(false);
    }
    if !bucket
        .replace(path, word("second"), version.clone())
        .await?
    {
        let found = bucket.get(path, DOCUMENT).await?;
        if found.is_none_or(|(found, _)| found != "second") {
            return Ok(false);
        }
    }
    Ok(!bucket.replace(path, word("third"), version).await?)
}
