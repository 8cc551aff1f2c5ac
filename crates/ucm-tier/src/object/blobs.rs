//! Segments in a bucket as blobs: a read is a range of an object, and the bytes go straight into
//! the slots as they arrive. A segment that is not put yet is read from the writer's memory.

use std::ops::Range;
use std::sync::Arc;

use bytes::Buf;
use futures_util::stream::{StreamExt, TryStreamExt};
use object_store::path::Path;
use ucm_core::Result;
use ucm_infra::MonotonicTime;
use ucm_io::{IoJob, ReadMode};

use super::AT_ONCE;
use super::remote::Remote;
use super::writer::Writer;
use crate::blobs::{BlobName, BlobPiece, Blobs, Filled, ReadAt};

/// See the module.
pub(super) struct BucketBlobs {
    pub(super) remote: Arc<Remote>,
    pub(super) writer: Arc<Writer>,
}

impl BucketBlobs {
    /// Fills buffers, one behind the other, with a stretch of an object.
    async fn fill(&self, path: &Path, start: u64, into: &mut [(&mut [u8], usize)]) -> Filled {
        let bucket = &self.remote.bucket;
        let wanted: usize = into.iter().map(|(_, len)| len).sum();
        let mut filled = Filled {
            bytes: 0,
            failed: None,
        };
        let mut stream = match bucket.stream(path, start..start + wanted as u64).await {
            Ok(stream) => stream,
            Err(error) => {
                filled.failed = Some(error);
                return filled;
            }
        };
        let (mut number, mut within) = (0, 0);
        // Bytes behind the last buffer were not requested.
        while number < into.len() {
            let mut piece = match stream.try_next().await {
                Ok(Some(piece)) => piece,
                Ok(None) => return filled,
                Err(error) => {
                    filled.failed = Some(bucket.failed(path, &error));
                    return filled;
                }
            };
            while !piece.is_empty()
                && let Some((buffer, want)) = into.get_mut(number)
            {
                let len = piece.len().min(*want - within);
                piece.copy_to_slice(&mut buffer[within..within + len]);
                (filled.bytes, within) = (filled.bytes + len, within + len);
                if within == *want {
                    (number, within) = (number + 1, 0);
                }
            }
        }
        filled
    }
}

impl Blobs for BucketBlobs {
    const RUN: (usize, usize) = (1 << 20, 8 << 20);
    const READS_PARTS: bool = false;
    const NAMES_HAVE_TIMES: bool = true;

    fn read(
        &self,
        io: &IoJob,
        at: ReadAt,
        mut into: Vec<(&mut [u8], usize)>,
        _mode: ReadMode,
    ) -> Filled {
        let read = if at.open {
            self.writer.copy_open(&at, &mut into)
        } else {
            let path = self.remote.names.segment(at.blob);
            io.wait(&self.remote.runtime, async {
                Ok(self.fill(&path, at.offset, &mut into).await)
            })
        };
        read.unwrap_or_else(|error| Filled {
            bytes: 0,
            failed: Some(error),
        })
    }

    fn read_pieces(
        &self,
        pieces: Vec<(BlobName, Range<u64>)>,
        _mode: ReadMode,
        deadline: MonotonicTime,
    ) -> Vec<Result<BlobPiece>> {
        let count = pieces.len();
        let reads = pieces.into_iter().map(|(blob, range)| async move {
            let (path, end) = (self.remote.names.segment(blob), range.end);
            let bytes = self.remote.bucket.range(&path, range).await?;
            Ok((bytes, end))
        });
        let reads = futures_util::stream::iter(reads).buffered(AT_ONCE);
        let read = self
            .remote
            .call(deadline, async { Ok(reads.collect::<Vec<_>>().await) });
        match read {
            Ok(read) => read,
            Err(error) => (0..count).map(|_| Err(error.clone())).collect(),
        }
    }
}
