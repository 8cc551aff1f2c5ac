//! Copies, sweeps, bounds, and what a block costs.

use super::*;

fn name(sequence: u64) -> SegmentName {
    SegmentName {
        writer: 1,
        sequence,
    }
}

fn entry(n: u8, page: u64) -> Entry {
    Entry {
        id: BlockId([n; 16]),
        offset: page * PAGE,
        len: 2 * PAGE,
    }
}

fn known(sequence: u64, sealed_ns: u64) -> Known {
    Known {
        name: name(sequence),
        part: Part::default(),
        private: false,
        sealed_ns,
        used_ns: 0,
        len: 0,
    }
}

fn with(index: &Index, sequence: u64, sealed: u64, entries: &[Entry]) -> SegmentNumber {
    let number = index.begin(known(sequence, sealed)).unwrap();
    index.add(number, entries);
    number
}

#[test]
fn a_block_costs_no_more_than_was_said() {
    // Numbers at which tables have just doubled are among these, whatever the spread over the
    // tables.
    for blocks in [20_000u32, 29_000, 40_000, 57_500] {
        let index = Index::new(1 << 20);
        let number = index.begin(known(1, 0)).unwrap();
        let entry = |n: u32| {
            let mut id = BlockId([0; 16]);
            id.0[..4].copy_from_slice(&n.to_be_bytes());
            id.0[15] = n.wrapping_mul(0x9E37_79B9).to_be_bytes()[0];
            Entry {
                id,
                offset: PAGE,
                len: PAGE,
            }
        };
        index.add(number, &(0..blocks).map(entry).collect::<Vec<_>>());
        assert_eq!(index.blocks(), blocks as usize);
        // A table has 8/7 of its capacity in places, a place its entry and one byte.
        let places: usize = index
            .shards
            .iter()
            .map(|shard| shard.read().capacity() * 8 / 7)
            .sum();
        let bytes = places * (size_of::<(BlockId, Location)>() + 1);
        assert!(
            bytes <= blocks as usize * 64,
            "{} bytes a block",
            bytes / blocks as usize
        );
    }
}

#[test]
fn the_newest_copy_counts_and_the_next_takes_its_place() {
    let index = Index::new(100);
    let old = with(&index, 1, 10, &[entry(1, 1)]);
    let newest = with(&index, 2, 30, &[entry(1, 2)]);
    let middle = with(&index, 3, 20, &[entry(1, 3)]);
    let found = |index: &Index| index.find(BlockId([1; 16])).map(|hit| hit.segment);
    assert_eq!((found(&index), index.blocks()), (Some(newest), 1));
    index.vanished(newest);
    assert_eq!(found(&index), Some(middle));
    let hit = index.find(BlockId([1; 16])).unwrap();
    assert_eq!(
        (hit.offset, hit.len, hit.name),
        (3 * PAGE, 2 * PAGE, name(3))
    );
    index.drop_copy(BlockId([1; 16]), &hit);
    assert_eq!(found(&index), Some(old));
    index.vanished(old);
    assert_eq!((found(&index), index.blocks()), (None, 0));
    assert!(index.copies.lock().is_empty());
}

#[test]
fn a_sweep_takes_out_what_no_one_met() {
    let index = Index::new(100);
    let gone = with(&index, 1, 10, &[entry(1, 1), entry(2, 3)]);
    with(&index, 2, 5, &[entry(2, 1), entry(3, 3)]);
    index.vanished(gone);
    assert_eq!(index.blocks(), 3);
    index.sweep();
    assert_eq!((index.blocks(), index.segments()), (2, 1));
    assert!(index.find(BlockId([2; 16])).is_some(), "its other copy");
    assert!(index.begin(known(2, 0)).is_none(), "known already");
}

#[test]
fn what_does_not_fit_is_left_out_and_counted() {
    let index = Index::new(1);
    with(
        &index,
        1,
        10,
        &[entry(1, 1), entry(2, 3), entry(1, 1 << PAGE_BITS)],
    );
    assert_eq!((index.blocks(), index.left_out()), (1, 2));
    assert_eq!(index.no_room(), (1, 1), "the other does not fit a place");
    assert!(index.find(BlockId([2; 16])).is_none());
}

#[test]
fn a_private_segment_is_told_apart_until_it_is_named() {
    let index = Index::new(10);
    let private = Known {
        private: true,
        ..known(1, u64::MAX)
    };
    let number = index.begin(private).unwrap();
    index.add(number, &[entry(1, 1)]);
    assert!(index.find(BlockId([1; 16])).unwrap().private && index.stats().is_empty());
    index.named(number, 7, 70, 5 * PAGE);
    assert!(!index.find(BlockId([1; 16])).unwrap().private);
    let public = index.stats();
    assert_eq!(
        (public.len(), public[0].name, public[0].number),
        (1, name(1), number)
    );
    assert_eq!(index.list(), [(BlockId([1; 16]), 2 * PAGE, 70)]);
}

#[test]
fn what_is_taken_from_elsewhere_is_counted_and_told() {
    use super::stats::CopyStatus;

    let index = Index::new(100);
    let old = with(&index, 1, 10, &[entry(1, 1), entry(2, 3), entry(3, 5)]);
    let new = with(&index, 2, 20, &[entry(1, 1), entry(2, 3)]);
    let passed = |number| {
        let all = index.stats();
        let found = all.into_iter().find(|segment| segment.number == number);
        found.map(|segment| (segment.passed_over, segment.blocks, segment.is_sparse()))
    };
    assert_eq!(passed(old), Some((2, 3, true)));
    assert_eq!(passed(new), Some((0, 2, false)));
    let copy_status =
        |n: u8, number, page: u64| index.copy_status(BlockId([n; 16]), number, page * PAGE);
    assert_eq!(copy_status(1, old, 1), CopyStatus::Superseded(new));
    assert_eq!(copy_status(1, new, 1), CopyStatus::Current);
    assert_eq!(copy_status(3, old, 5), CopyStatus::Current);
    assert_eq!(copy_status(9, old, 1), CopyStatus::Unknown);
    // The newer copy turns out to be none: the older one is taken again.
    let hit = index.find(BlockId([1; 16])).unwrap();
    index.drop_copy(BlockId([1; 16]), &hit);
    assert_eq!(
        (passed(old), passed(new)),
        (Some((1, 3, false)), Some((1, 2, false)))
    );
    assert_eq!(copy_status(1, old, 1), CopyStatus::Current);
    assert_eq!(copy_status(1, new, 1), CopyStatus::Aside);
    index.vanished(new);
    assert_eq!(copy_status(2, old, 3), CopyStatus::Current);
    assert_eq!(passed(old), Some((0, 3, false)));
}

#[test]
fn a_record_that_was_removed_is_found_nowhere_and_kept_by_no_one() {
    use super::stats::CopyStatus;

    let index = Index::new(100);
    let old = with(&index, 1, 10, &[entry(1, 1), entry(2, 3)]);
    let new = with(&index, 2, 20, &[entry(1, 1)]);
    let copy_status =
        |n: u8, number, page: u64| index.copy_status(BlockId([n; 16]), number, page * PAGE);
    assert!(index.remove(BlockId([1; 16])) && !index.remove(BlockId([1; 16])));
    assert_eq!(index.find(BlockId([1; 16])), None);
    assert_eq!(copy_status(1, old, 1), CopyStatus::Removed);
    assert_eq!(copy_status(1, new, 1), CopyStatus::Removed);
    assert_eq!(copy_status(2, old, 3), CopyStatus::Current);
    assert_eq!(
        copy_status(2, new, 9),
        CopyStatus::Aside,
        "the rest is as it was"
    );
    // Stored again it is a record like any other.
    let again = with(&index, 3, 30, &[entry(1, 1)]);
    assert_eq!(copy_status(1, again, 1), CopyStatus::Current);
    assert_eq!(copy_status(1, old, 1), CopyStatus::Superseded(again));
}

#[test]
fn every_index_of_the_same_segments_takes_the_same_copy() {
    let orders: [&[u64]; 3] = [&[1, 2, 3], &[3, 2, 1], &[2, 3, 1]];
    for sequences in orders {
        let index = Index::new(100);
        for &sequence in sequences {
            with(&index, sequence, 10, &[entry(1, sequence)]);
        }
        let hit = index.find(BlockId([1; 16])).unwrap();
        assert_eq!(
            hit.name,
            name(3),
            "of one time, in whatever order they were found"
        );
    }
}
