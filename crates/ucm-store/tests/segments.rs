//! The segment layout as a reader sees it: other writers, segments that vanish or are damaged, what
//! is refused and what is found again.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::BlockId;
use ucm_infra::{Clock, ManualClock};
use ucm_media::backend::Flush;
use ucm_media::segment::Merging;
use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::segments::{begin, change, finds, is_over, loads, patient, places, quick};
use crate::common::shared::{LONG, in_time, keep, on};
use crate::common::{Device, Fixture, Layout, Store, directory, eventually, id, ids};

#[test]
fn dumped_blocks_are_found_by_stores_that_open_the_root_or_had_it_open() {
    let dir = directory();
    let watcher = Store::open(dir.path(), quick());
    let store = Store::open(dir.path(), quick());
    let blocks = ids(8);
    store
        .dump(&Device::filled(&quick(), &blocks), &blocks)
        .unwrap();
    assert!(loads(&store, &blocks));
    let later = Store::open(dir.path(), quick());
    assert_eq!(finds(&later, &blocks), [true; 8]);
    assert!(loads(&later, &blocks));
    eventually("the other store finds them", || {
        finds(&watcher, &blocks) == [true; 8]
    });
    assert!(loads(&watcher, &blocks));
    assert!(store.privates().is_empty());
    let known: Vec<_> = store.places().into_iter().map(|place| place.id).collect();
    assert_eq!(known.len(), 8, "each once");
}

#[test]
fn the_index_is_refreshed_before_an_unknown_record_is_a_miss() {
    let (dir, clock) = (directory(), ManualClock::new());
    let store = Store::open(dir.path(), quick());
    let reader = on(&clock, dir.path(), &quick());
    store
        .dump(&Device::filled(&quick(), &ids(1)), &ids(1))
        .unwrap();
    assert!(loads(&reader, &ids(1)));
    assert_eq!(finds(&reader, &ids(1)), [true]);
}

/// Harms the footers of a living writer's segments and expects it to store their blocks again.
fn harms_the_footers_beside_their_writer(harm: fn(&mut Vec<u8>)) {
    let (dir, clock) = (directory(), ManualClock::new());
    let store = on(&clock, dir.path(), &quick());
    let device = Device::filled(&quick(), &ids(2));
    store.dump(&device, &ids(2)).unwrap();
    for file in store.segments() {
        change(&file, harm); // its footer is none now, its records are right
    }
    assert_eq!(
        finds(&on(&clock, dir.path(), &quick()), &ids(2)),
        [false; 2]
    );
    in_time(&clock, LONG, "its writer knows", || {
        finds(&store, &ids(2)) == [false; 2]
    });
    for block in ids(2) {
        keep(&store, &clock, &device, block);
    }
    assert!(loads(&on(&clock, dir.path(), &quick()), &ids(2)));
}

#[test]
fn a_segment_of_another_length_is_stored_again_by_its_writer() {
    harms_the_footers_beside_their_writer(|bytes| bytes.truncate(bytes.len() - 1));
}

#[test]
fn a_segment_with_a_damaged_footer_is_stored_again_by_its_writer() {
    harms_the_footers_beside_their_writer(|bytes| {
        let trailer = bytes.len() - 128;
        bytes[trailer + 9] ^= 1;
    });
}

#[test]
fn footers_that_are_read_again_and_are_right_change_nothing() {
    let (dir, clock) = (directory(), ManualClock::new());
    let fixture = Fixture {
        layout: Layout::merging(Merging {
            look: LONG, // merging reads them too
            ..Merging::default()
        }),
        ..quick()
    };
    let store = on(&clock, dir.path(), &fixture);
    let device = Device::filled(&fixture, &ids(20));
    for block in ids(20) {
        store.dump(&device, &[block]).unwrap();
    }
    let segments = store.segments().len();
    assert!(segments > 16, "more than are read at a time: {segments}");
    store.faults.forget();
    in_time(&clock, LONG, "all footers were read", || {
        let files = store.segments();
        let log = store.faults.log();
        let read = |file: &PathBuf| {
            log.iter()
                .any(|seen| seen.kind == OpKind::Read && seen.paths.contains(file))
        };
        files.iter().all(read)
    });
    assert_eq!(finds(&store, &ids(20)), [true; 20]);
    assert!(loads(&store, &ids(20)[..16]));
}

#[test]
fn what_is_no_file_under_the_name_of_a_segment_is_no_hit_and_blames_no_medium() {
    let dir = directory();
    let store = Store::open(dir.path(), quick());
    let device = Device::filled(&quick(), &ids(2));
    store.dump(&device, &ids(2)).unwrap();
    for file in store.segments() {
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir(&file).unwrap();
    }
    for block in ids(2) {
        assert!(!loads(&store, &[block]));
        assert_eq!(
            finds(&store, &[block]),
            [false],
            "not promised a second time"
        );
    }
    assert_eq!(store.stat("healthy"), 1);
    store.dump(&device, &ids(2)).unwrap();
    assert!(loads(&store, &ids(2)) && loads(&Store::open(dir.path(), quick()), &ids(2)));
}

#[test]
fn two_writers_of_one_block_keep_two_copies_and_either_will_do() {
    let dir = directory();
    let stores = [
        Store::open(dir.path(), quick()),
        Store::open(dir.path(), quick()),
    ];
    let device = Device::filled(&quick(), &ids(1));
    for store in &stores {
        store.dump(&device, &ids(1)).unwrap();
    }
    if stores[0].places().len() == 1 {
        return; // the second writer had seen it already
    }
    let reader = Store::open(dir.path(), quick());
    for file in stores[0].segments() {
        assert!(loads(&reader, &ids(1)));
        std::fs::remove_file(file).unwrap();
    }
    assert!(!loads(&reader, &ids(1)));
    assert_eq!(finds(&reader, &ids(1)), [false]);
}

#[test]
fn a_segment_that_vanished_under_a_reader_is_a_miss_and_nothing_is_refused() {
    let (dir, clock) = (directory(), ManualClock::new());
    let store = on(&clock, dir.path(), &quick());
    let device = Device::filled(&quick(), &ids(2));
    store.dump(&device, &ids(2)).unwrap();
    let reader = on(&clock, dir.path(), &quick());
    assert!(loads(&reader, &ids(2)));
    for file in store.segments() {
        std::fs::remove_file(file).unwrap();
    }
    assert!(!loads(&reader, &ids(2)));
    assert_eq!(
        (finds(&reader, &ids(2)), reader.stat("records_refused")),
        (vec![false; 2], 0)
    );
    eventually("its slots come back", || {
        reader.stat("slots_free") == reader.stat("slots")
    });
    for block in ids(2) {
        keep(&reader, &clock, &device, block);
    }
    assert!(loads(&reader, &ids(2)));
}

#[test]
fn a_damaged_segment_gives_exact_hits_or_misses() {
    let dir = directory();
    let blocks = ids(3);
    let device = Device::filled(&patient(), &blocks);
    let store = Store::open(dir.path(), patient());
    let task = begin(&store, &device, &blocks);
    store.backend.flush(Flush::Now);
    store.outcome(&task).unwrap();
    drop(store);
    let reader = Store::open(dir.path(), quick());
    let (file, len) = (reader.segments().remove(0), 4096 * 8);
    assert_eq!(std::fs::metadata(&file).unwrap().len(), len);
    drop(reader);
    // Every field of the trailer and of the entries, and somewhere in head, records and padding.
    let ends = (len - 128..len).chain((len - 4096..len - 4096 + 96).step_by(3));
    let places: Vec<usize> = (0..len)
        .step_by(1499)
        .chain(ends.step_by(5))
        .map(|at| at as usize)
        .collect();
    for at in places {
        change(&file, |bytes| bytes[at] ^= 0x10);
        let fixture = Fixture {
            lookup_only: false,
            ..quick()
        };
        let reader = Store::open(dir.path(), fixture);
        for &block in &blocks {
            let found = finds(&reader, &[block])[0];
            let loaded = loads(&reader, &[block]);
            assert!(found || !loaded, "byte {at}");
        }
        drop(reader);
        change(&file, |bytes| bytes[at] ^= 0x10);
    }
    assert!(loads(&Store::open(dir.path(), quick()), &blocks));
}

#[test]
fn a_newer_segment_is_a_miss_and_stays() {
    let dir = directory();
    let device = Device::filled(&quick(), &ids(1));
    let store = Store::open(dir.path(), quick());
    store.dump(&device, &ids(1)).unwrap();
    drop(store);
    let reader = Store::open(dir.path(), quick());
    let file = reader.segments().remove(0);
    drop(reader);
    change(&file, |bytes| {
        let trailer = bytes.len() - 128;
        bytes[trailer + 4] = 2;
        let crc = ucm_core::crc32c(&bytes[trailer..trailer + 124]);
        bytes[trailer + 124..].copy_from_slice(&crc.to_le_bytes());
    });
    let newer = std::fs::read(&file).unwrap();
    let reader = Store::open(dir.path(), quick());
    assert_eq!(finds(&reader, &ids(1)), [false]);
    reader.dump(&device, &ids(1)).unwrap();
    assert!(loads(&reader, &ids(1)));
    assert_eq!(std::fs::read(&file).unwrap(), newer);
    assert_eq!(places(&file).len(), 1);
}

#[test]
fn a_record_that_was_refused_is_written_again_and_the_new_copy_counts() {
    let dir = directory();
    let store = Store::open(dir.path(), quick());
    let device = Device::filled(&quick(), &ids(1));
    store.dump(&device, &ids(1)).unwrap();
    let place = store.places().remove(0);
    change(&place.file, |bytes| bytes[place.offset + 5000] ^= 1);
    assert!(!loads(&store, &ids(1)));
    assert_eq!(finds(&store, &ids(1)), [false]);
    store.dump(&device, &ids(1)).unwrap();
    assert!(loads(&store, &ids(1)));
    drop(store);
    assert!(
        loads(&Store::open(dir.path(), quick()), &ids(1)),
        "the newest copy counts"
    );
}

#[test]
fn a_store_for_lookups_finds_segments_and_writes_nothing() {
    let dir = directory();
    let store = Store::open(dir.path(), quick());
    store
        .dump(&Device::filled(&quick(), &ids(2)), &ids(2))
        .unwrap();
    let fixture = Fixture {
        lookup_only: true,
        ..quick()
    };
    let reader = Store::open(dir.path(), fixture);
    assert_eq!(finds(&reader, &ids(3)), [true, true, false]);
    assert_eq!(reader.engine.lookup_on_prefix(&ids(3)).unwrap(), 2);
    store
        .dump(&Device::filled(&quick(), &ids(3)), &ids(3))
        .unwrap();
    eventually("it finds new ones", || finds(&reader, &ids(3)) == [true; 3]);
}

#[test]
fn a_lookup_makes_no_system_call() {
    let (dir, clock) = (directory(), ManualClock::new());
    let store = on(&clock, dir.path(), &quick());
    store
        .dump(&Device::filled(&quick(), &ids(4)), &ids(4))
        .unwrap();
    let asked = |store: &Store| {
        store
            .faults
            .log()
            .iter()
            .filter(|seen| seen.lane == 1)
            .count()
    };
    let before = asked(&store);
    for _ in 0..100 {
        finds(&store, &ids(9));
        store.engine.lookup_on_prefix(&ids(9)).unwrap();
    }
    assert_eq!(asked(&store), before);
}

#[test]
fn use_of_a_record_is_use_of_its_segment_once_a_minute() {
    let (dir, clock) = (directory(), ManualClock::new());
    let store = Store::with_clock(dir.path(), quick(), Arc::clone(&clock) as Arc<dyn Clock>);
    store
        .dump(&Device::filled(&quick(), &ids(1)), &ids(1))
        .unwrap();
    let file = store.segments().remove(0);
    let time = || std::fs::metadata(&file).unwrap().modified().unwrap();
    let before = time();
    store.engine.touch(&[(id(0), 0), (id(5), 1)]).unwrap();
    clock.advance(Duration::from_secs(61));
    store.engine.touch(&[(id(0), 3), (id(5), 1)]).unwrap();
    eventually("it counts as used", || store.stat("blocks_touched") == 1);
    assert!(time() > before);
    let touches = store.faults.count(OpKind::Touch);
    store.engine.touch(&[(id(0), 3)]).unwrap();
    assert_eq!(
        store.faults.count(OpKind::Touch),
        touches,
        "noted this minute"
    );
}

#[test]
fn what_was_found_is_read_while_its_segment_gets_its_name() {
    let dir = directory();
    let store = Store::open(dir.path(), quick());
    let blocks: Vec<BlockId> = (0..200u8).map(|n| BlockId([n; 16])).collect();
    let device = Device::filled(&store.fixture, &blocks);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for block in &blocks {
                store.dump(&device, &[*block]).unwrap();
            }
        });
        for block in &blocks {
            eventually("it is found", || finds(&store, &[*block]) == [true]);
            // Before, during and after the renaming: the place may change under the read, the bytes
            // never.
            assert!(loads(&store, &[*block]), "{block}");
        }
    });
    assert_eq!(
        (store.stat("records_refused"), store.privates().len()),
        (0, 0)
    );
}

#[test]
fn a_segment_whose_footer_could_not_be_read_for_a_while_is_found_when_it_can() {
    let (dir, clock) = (directory(), ManualClock::new());
    let store = Store::open(dir.path(), quick());
    let reader = on(&clock, dir.path(), &quick());
    reader.fault(Rule::on(OpKind::Read, Fault::Errno(5)).path(".seg"));
    store
        .dump(&Device::filled(&quick(), &ids(2)), &ids(2))
        .unwrap();
    for _ in 0..5 {
        assert!(!loads(&reader, &ids(2)), "each refreshes the index");
    }
    // A read that is under way would be joined, whatever it has seen.
    eventually("no read is under way", || {
        reader.stat("slots_free") == reader.stat("slots")
    });
    reader.faults.clear();
    assert!(loads(&reader, &ids(2)));
}

#[test]
fn closing_ends_reads_that_wait_for_a_look_around() {
    let (dir, clock) = (directory(), ManualClock::new());
    let store = on(&clock, dir.path(), &quick());
    let gate = store.hang(OpKind::List);
    store.faults.forget();
    let device = Device::blank(&store.fixture, &ids(2));
    let first = store.engine.load(device.rows(&ids(1)), None).unwrap();
    eventually("it is looked for", || store.faults.count(OpKind::List) > 0);
    let second = store.engine.load(device.rows(&[id(1)]), None).unwrap();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| store.engine.close());
        eventually("it is closed", || {
            clock.advance(Duration::from_millis(100));
            closing.is_finished()
        });
    });
    assert!(is_over(&store, &first) && is_over(&store, &second));
    gate.open();
    eventually("every slot comes back", || {
        store.stat("slots_free") == store.stat("slots")
    });
}

#[test]
fn stores_that_write_read_and_lose_segments_at_once_never_give_wrong_bytes() {
    let dir = directory();
    let stores: Vec<Store> = (0..2).map(|_| Store::open(dir.path(), quick())).collect();
    let blocks = ids(30);
    let device = Device::filled(&stores[0].fixture, &blocks);
    std::thread::scope(|scope| {
        for (number, store) in stores.iter().enumerate() {
            let (blocks, device) = (&blocks, &device);
            scope.spawn(move || {
                for turn in 0..60usize {
                    let some: Vec<BlockId> = (0..3)
                        .map(|n| blocks[(turn * 7 + number * 11 + n * 5) % 30])
                        .collect();
                    // an error is no harm: its segment may be taken away below
                    let _ = store.dump(device, &some);
                    loads(store, &some);
                    if turn % 9 == 8 {
                        let files = store.segments();
                        let _ = files
                            .get(turn % files.len().max(1))
                            .map(std::fs::remove_file);
                    }
                }
            });
        }
    });
    for store in &stores {
        eventually("all is well again", || {
            let stored = blocks
                .iter()
                .all(|block| store.dump(&device, &[*block]).is_ok());
            stored && loads(store, &blocks)
        });
        eventually("every slot comes back", || {
            store.stat("slots_free") == store.stat("slots")
        });
    }
}

#[test]
fn a_damaged_record_of_a_segment_is_refused_and_its_neighbours_stay() {
    let dir = directory();
    let store = Store::open(dir.path(), patient());
    let device = Device::filled(&patient(), &ids(3));
    let task = begin(&store, &device, &ids(3));
    store.backend.flush(Flush::Now);
    store.outcome(&task).unwrap();
    let places = store.places();
    let bad = places.iter().find(|place| place.id == id(1)).unwrap();
    change(&bad.file, |bytes| bytes[bad.offset + 4096 + 5] ^= 1);
    assert!(!loads(&store, &[id(1)]));
    assert!(bad.file.exists() && loads(&store, &[id(0)]) && loads(&store, &[id(2)]));
    assert_eq!(finds(&store, &ids(3)), [true, false, true]);
}
