//! Copies, sweeps, bounds, and what a block costs.

use super::*;

fn name(sequence: u64) -> SegmentName {
    SegmentName { writer: 1, sequence }
}

fn entry(n: u8, page: u64) -> Entry {
    Entry {
        id: BlockId([n; 16]),
        offset: page * PAGE,
        len: 2 * PAGE,
    }
}

fn with(index: &Index, sequence: u64, sealed: u64, entries: &[Entry]) -> SegmentNumber {
    let number = index.begin(name(sequence), false, sealed, 0).unwrap();
    index.add(number, entries);
    number
}

#[test]
fn a_block_costs_no_more_than_was_said() {
    // Numbers at which tables have just doubled are among these, whatever the spread over the tables.
    for blocks in [20_000u32, 29_000, 40_000, 57_500] {
        let index = Index::new(1 << 20);
        let number = index.begin(name(1), false, 0, 0).unwrap();
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
        let bytes = places * (size_of::<(BlockId, Place)>() + 1);
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
    assert_eq!((hit.offset, hit.len, hit.name), (3 * PAGE, 2 * PAGE, name(3)));
    index.drop_copy(BlockId([1; 16]), &hit);
    assert_eq!(found(&index), Some(old));
    index.vanished(old);
    assert_eq!((found(&index), index.blocks()), (None, 0));
    assert!(index.copies.lock().is_empty());
}

#[test]
fn a_sweep_takes_out_what_nobody_met() {
    let index = Index::new(100);
    let gone = with(&index, 1, 10, &[entry(1, 1), entry(2, 3)]);
    with(&index, 2, 5, &[entry(2, 1), entry(3, 3)]);
    index.vanished(gone);
    assert_eq!(index.blocks(), 3);
    index.sweep();
    assert_eq!((index.blocks(), index.segments()), (2, 1));
    assert!(index.find(BlockId([2; 16])).is_some(), "its other copy");
    assert!(index.begin(name(2), false, 0, 0).is_none(), "known already");
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
    assert!(index.find(BlockId([2; 16])).is_none());
}

#[test]
fn a_private_segment_is_told_apart_until_it_is_named() {
    let index = Index::new(10);
    let number = index.begin(name(1), true, u64::MAX, 0).unwrap();
    index.add(number, &[entry(1, 1)]);
    assert!(index.find(BlockId([1; 16])).unwrap().private && index.public().is_empty());
    index.named(number, 7, 70);
    assert!(!index.find(BlockId([1; 16])).unwrap().private);
    assert_eq!(index.public(), [(name(1), number)]);
    assert_eq!(index.list(), [(BlockId([1; 16]), 2 * PAGE, 70)]);
}
