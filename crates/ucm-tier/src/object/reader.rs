//! Reading records: a range of an object, each record of it straight into its slot as the bytes
//! arrive.

use std::ops::Range;

use futures_util::stream::TryStreamExt;
use object_store::path::Path;
use ucm_core::{Error, ErrorKind};
use ucm_device::Slot;
use ucm_io::IoJob;

use super::Objects;
use super::bucket::Bucket;
use super::names::SegmentObject;
use crate::backend::{BlockRead, Outcome, ReadDone};
use crate::segment::index::Hit;
use crate::segment::runs::{follows, want};

/// A record that was found, and where it goes.
struct Placed {
    hit: Hit,
    read: BlockRead,
}

impl Objects {
    /// Reads the records of a run: neighbours with one request, others each by itself.
    pub(super) fn read(&self, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        let found: Option<Vec<_>> = run.iter().map(|read| self.index.find(read.id)).collect();
        let Some(found) = found.filter(|found| found.len() > 1) else {
            return run
                .into_iter()
                .map(|read| self.read_alone(io, read))
                .collect();
        };
        let placed: Vec<_> = found
            .into_iter()
            .zip(run)
            .map(|(hit, read)| Placed { hit, read })
            .collect();
        let both =
            |pair: &[Placed]| follows((&pair[0].hit, &pair[0].read), (&pair[1].hit, &pair[1].read));
        if placed.windows(2).all(both) && placed.iter().all(|one| !one.hit.private) {
            return self.read_range(io, placed);
        }
        placed
            .into_iter()
            .map(|one| self.read_alone(io, one.read))
            .collect()
    }

    /// One record, from wherever the index knows it to be.
    fn read_alone(&self, io: &IoJob, mut read: BlockRead) -> Outcome {
        while let Some(hit) = self.index.find(read.id) {
            if !hit.private {
                let mut outcomes = self.read_range(io, vec![Placed { hit, read }]);
                return match outcomes.pop() {
                    Some(Outcome::Moved(moved)) if self.index.find(moved.id).is_some() => {
                        read = moved; // another copy
                        continue;
                    }
                    Some(outcome) => outcome,
                    None => Outcome::Came(Err(Error::internal("a read has no outcome"))),
                };
            }
            if let Some(len) = self.copy_private(&hit, read.slot.as_mut_slice()) {
                return Outcome::Came(Ok(done(read.slot, len, hit.len)));
            }
            if self.index.find(read.id) == Some(hit) {
                self.index.drop_copy(read.id, &hit); // the segment was given up a moment ago
            }
        }
        if !read.looked {
            return Outcome::Moved(read);
        }
        // for the scheduler, which was told that it can be read here
        self.locally_visible.lost(read.id);
        let text = "this record is in no segment";
        Outcome::Came(Err(
            Error::new(ErrorKind::NotFound, text).with("block", read.id)
        ))
    }

    /// Records that lie next to one another in one object, with one request. What goes wrong with
    /// several is asked again for each by itself, so that each has an outcome of its own.
    fn read_range(&self, io: &IoJob, mut placed: Vec<Placed>) -> Vec<Outcome> {
        let (Some(first), Some(last)) = (placed.first(), placed.last()) else {
            return Vec::new();
        };
        let segment = SegmentObject {
            sealed_ns: first.hit.sealed_ns,
            name: first.hit.name,
        };
        let (number, count) = (first.hit.segment, placed.len());
        let range = first.hit.offset..last.hit.offset + last.want() as u64;
        let path = self.names.segment(segment);
        let asked = io.wait(&self.upkeep.runtime, async {
            Ok(fill(&self.bucket, &path, range, &mut placed).await)
        });
        let (mut filled, failed) = match asked {
            Ok(answered) => answered,
            Err(error) => {
                return (0..count)
                    .map(|_| Outcome::Came(Err(error.clone())))
                    .collect();
            }
        };
        let mut outcome = |one: Placed| {
            let (want, len) = (one.want(), one.hit.len);
            let got = filled.min(want);
            filled -= got;
            match &failed {
                _ if got == want => Outcome::Came(Ok(done(one.read.slot, got, len))),
                Some(error) if error.kind() == ErrorKind::NotFound => {
                    self.index.vanished(number);
                    Outcome::Moved(one.read)
                }
                Some(error) if count == 1 => Outcome::Came(Err(error.clone())),
                // the object ends there
                None if count == 1 => Outcome::Came(Ok(done(one.read.slot, got, got as u64))),
                _ => self.read_alone(io, one.read),
            }
        };
        placed.into_iter().map(&mut outcome).collect()
    }
}

impl Placed {
    /// Bytes that are read of it.
    fn want(&self) -> usize {
        want(&self.hit, self.read.slot.len())
    }
}

fn done(slot: Slot, read: usize, stored_len: u64) -> ReadDone {
    ReadDone {
        slot,
        read,
        stored_len,
        lent: None,
    }
}

/// Fills the slots of neighbours, one behind the other, with a stretch of an object: how many bytes
/// came, and why no more.
async fn fill(
    bucket: &Bucket,
    path: &Path,
    range: Range<u64>,
    placed: &mut [Placed],
) -> (usize, Option<Error>) {
    let mut stream = match bucket.stream(path, range).await {
        Ok(stream) => stream,
        Err(error) => return (0, Some(error)),
    };
    let (mut filled, mut number, mut within) = (0, 0, 0);
    // What comes behind the last of them was not asked for.
    while number < placed.len() {
        let mut piece = match stream.try_next().await {
            Ok(Some(piece)) => piece,
            Ok(None) => return (filled, None),
            Err(error) => return (filled, Some(bucket.failed(path, &error))),
        };
        while !piece.is_empty()
            && let Some(one) = placed.get_mut(number)
        {
            let len = piece.len().min(one.want() - within);
            one.read.slot.as_mut_slice()[within..within + len]
                .copy_from_slice(&piece.split_to(len));
            (filled, within) = (filled + len, within + len);
            if within == one.want() {
                (number, within) = (number + 1, 0);
            }
        }
    }
    (filled, None)
}
