//! Which records of segments one thread reads together: neighbours, as one stretch.

use super::index::{Hit, Index};
use crate::backend::BlockRead;

/// Most records of one operation.
const MOST_RECORDS: usize = 256;

/// Bytes of a record that a slot of that length has room for.
pub(crate) fn want(hit: &Hit, room: usize) -> usize {
    usize::try_from(hit.len).unwrap_or(usize::MAX).min(room)
}

/// Whether a record follows another one directly, and one operation is to bring both.
pub(crate) fn follows(
    (before, first): (&Hit, &BlockRead),
    (hit, read): (&Hit, &BlockRead),
) -> bool {
    hit.segment == before.segment
        && hit.private == before.private
        && hit.offset == before.offset + before.len
        && want(before, first.slot.len()) as u64 == before.len
        && read.deadline == first.deadline
        && [first, read]
            .iter()
            .all(|read| !read.again && read.parts.is_none())
}

/// Neighbours together, but in so many runs that each of so many threads has some: of `least` bytes
/// at least, where there are as many, and of `most`. Side shards alone in runs of as many as there
/// are threads for. What the index does not know is left out until somebody has looked.
pub(crate) fn runs(
    index: &Index,
    reads: &[&BlockRead],
    threads: usize,
    (least, most): (usize, usize),
) -> Vec<Vec<usize>> {
    let (mut placed, mut sides, mut runs) =
        (Vec::with_capacity(reads.len()), Vec::new(), Vec::new());
    for (at, read) in reads.iter().enumerate() {
        match index.find(read.id) {
            Some(hit) if read.sides => sides.push((hit, at)),
            Some(_) if read.parts.is_some() => runs.push(vec![at]),
            Some(hit) => placed.push((hit, at)),
            None if read.looked => runs.push(vec![at]),
            None => {}
        }
    }
    for found in [&mut placed, &mut sides] {
        found.sort_by_key(|(hit, _)| (hit.segment, hit.offset));
    }
    // A few pages each, which no operation brings together: as many for each thread.
    let each = sides.len().div_ceil(threads.max(1)).clamp(1, MOST_RECORDS);
    let shared_out = sides
        .chunks(each)
        .map(|some| some.iter().map(|(_, at)| *at).collect());
    runs.extend(shared_out);
    let len = |(hit, at): &(Hit, usize)| want(hit, reads[*at].slot.len());
    let bytes: usize = placed.iter().map(len).sum();
    let share = (bytes / threads.max(1)).clamp(least, most);
    let mut filled = 0;
    for (at, next) in placed.iter().enumerate() {
        let before = at.checked_sub(1).map(|before| &placed[before]);
        let joins = before.is_some_and(|(hit, last)| {
            follows((hit, reads[*last]), (&next.0, reads[next.1]))
                && filled + len(next) <= share
                && runs
                    .last()
                    .is_some_and(|run: &Vec<usize>| run.len() < MOST_RECORDS)
        });
        match runs.last_mut() {
            Some(run) if joins => run.push(next.1),
            _ => {
                filled = 0;
                runs.push(vec![next.1]);
            }
        }
        filled += len(next);
    }
    runs
}
