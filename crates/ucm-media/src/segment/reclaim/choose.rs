//! Which segments are gathered: of about one age, so that removal still takes the oldest use first,
//! and enough small ones that no record is copied often.

use ucm_core::PAGE;

use crate::segment::index::stats::SegmentStats;

/// Part of a full segment below which one is small.
const SMALL: u64 = 4;
/// Least length of the merged segment, in lengths of each of its sources: a record moves to a
/// segment several times as long whenever it is copied.
const TIMES: u64 = 4;
/// Most segments merged at once.
const MOST: usize = 512;
/// The youngest band of ages, ns; each further one is twice as long.
const BAND_NS: i64 = 600_000_000_000;

/// Whether a segment is small beside one of `room` bytes.
pub(super) fn is_small(segment: &SegmentStats, room: u64) -> bool {
    segment.len < room / SMALL
}

/// The segments to merge into one of `room` bytes at the most, of those that are small or sparse;
/// none where that gains nothing. The youngest come first: the oldest will be removed soon.
pub(super) fn choose(candidates: &[SegmentStats], room: u64) -> Vec<SegmentStats> {
    let newest = candidates.iter().map(|segment| segment.used_ns).max();
    let newest = newest.unwrap_or(0);
    let band = |segment: &SegmentStats| {
        let age = newest.saturating_sub(segment.used_ns).max(0);
        (age / BAND_NS + 1).ilog2()
    };
    let mut all = candidates.to_vec();
    all.sort_unstable_by_key(|segment| (band(segment), segment.live(), segment.name));
    let bands = all.chunk_by(|one, other| band(one) == band(other));
    bands
        .map(|band| of_one_age(band, room))
        .find(|some| !some.is_empty())
        .unwrap_or_default()
}

/// The most of these, the smallest first, that are worth it.
fn of_one_age(band: &[SegmentStats], room: u64) -> Vec<SegmentStats> {
    let (mut sum, mut best, mut sparse) = (2 * PAGE, 0, 0);
    for (number, segment) in band.iter().take(MOST).enumerate() {
        sum += segment.live();
        if sum > room && number > 0 {
            break;
        }
        sparse += usize::from(segment.is_sparse());
        let grown = sum >= TIMES * segment.live() && number + 1 >= TIMES as usize;
        let full = sum >= room / 2 && number > 0;
        // A sparse one is worth it alone: fewer bytes are copied than removed.
        if grown || full || sparse == number + 1 {
            best = number + 1;
        }
    }
    if best == 0 {
        // No group is worth it; a sparse segment is gathered alone.
        let sparse = band.iter().find(|segment| segment.is_sparse());
        return sparse.into_iter().copied().collect();
    }
    band[..best].to_vec()
}

#[cfg(test)]
mod tests {
    use ucm_core::Part;

    use super::*;
    use crate::layout::SegmentName;

    const MIB: u64 = 1 << 20;
    const MINUTE: i64 = 60_000_000_000;

    fn segment(number: u32, mib: u64, minutes_ago: i64) -> SegmentStats {
        SegmentStats {
            number,
            name: SegmentName {
                writer: 1,
                sequence: u64::from(number),
            },
            part: Part::default(),
            len: mib * MIB,
            used_ns: 100_000 * MINUTE - minutes_ago * MINUTE,
            blocks: 100,
            passed_over: 0,
        }
    }

    fn chosen(candidates: &[SegmentStats]) -> Vec<u32> {
        let mut numbers: Vec<u32> = choose(candidates, 128 * MIB)
            .iter()
            .map(|segment| segment.number)
            .collect();
        numbers.sort_unstable();
        numbers
    }

    #[test]
    fn few_small_ones_wait_for_more() {
        assert!(chosen(&[]).is_empty());
        let three: Vec<_> = (1..=3).map(|n| segment(n, 1, 0)).collect();
        assert!(chosen(&three).is_empty());
        let four: Vec<_> = (1..=4).map(|n| segment(n, 1, 0)).collect();
        assert_eq!(chosen(&four), [1, 2, 3, 4]);
    }

    #[test]
    fn a_larger_one_is_not_copied_for_a_few_small_ones() {
        let mut some: Vec<_> = (1..=4).map(|n| segment(n, 1, 0)).collect();
        some.push(segment(5, 8, 0));
        assert_eq!(chosen(&some), [1, 2, 3, 4]);
        let more: Vec<_> = (6..=40).map(|n| segment(n, 1, 0)).collect();
        some.extend(more);
        assert_eq!(chosen(&some).len(), 40, "now there are enough");
    }

    #[test]
    fn what_does_not_fit_stays() {
        let some: Vec<_> = (1..=30).map(|n| segment(n, 20, 0)).collect();
        assert_eq!(chosen(&some).len(), 6, "of 128 MiB");
    }

    #[test]
    fn old_and_young_are_not_mixed() {
        let mut some: Vec<_> = (1..=3).map(|n| segment(n, 1, 0)).collect();
        some.extend((4..=6).map(|n| segment(n, 1, 600)));
        assert!(chosen(&some).is_empty());
        some.extend((7..=8).map(|n| segment(n, 1, 610)));
        assert_eq!(chosen(&some), [4, 5, 6, 7, 8]);
        some.push(segment(9, 1, 1));
        assert_eq!(chosen(&some), [1, 2, 3, 9], "the young ones first");
    }

    #[test]
    fn a_sparse_one_needs_no_company() {
        let sparse = |number, passed_over| SegmentStats {
            passed_over,
            ..segment(number, 100, 0)
        };
        assert!(!sparse(1, 50).is_sparse());
        assert_eq!(chosen(&[sparse(1, 51)]), [1]);
        assert_eq!(chosen(&[segment(2, 1, 0), sparse(1, 51)]), [1]);
        assert_eq!(
            chosen(&[sparse(1, 100), sparse(2, 100)]),
            [1, 2],
            "nothing is left of them"
        );
    }
}
