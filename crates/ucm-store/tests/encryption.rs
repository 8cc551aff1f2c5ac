//! Encryption at rest: what lies on a medium is ciphertext, what comes back is the same, a wrong
//! key is a miss that destroys nothing, and what was changed is no hit. Over every medium, with and
//! without a codec, memory above or not.

#![allow(clippy::unwrap_used, reason = "tests may fail")]

use std::path::Path;

use ucm_core::{BlockId, ErrorKind};
use ucm_record::RecordHeader;
use ucm_store::tiers::WritePolicy;
use ucm_testkit::OpKind;

use crate::common::device::content;
use crate::common::segments::finds;
use crate::common::sides::{columns, dump, dump_alone, has_all, loads, sided};
use crate::common::{
    Above, Device, Fixture, Layout, Medium, Store, directory, eventually, id, ids, media, on,
};

/// Files and segments of blocks that are long enough to be found by their content.
fn on_disk() -> [Fixture; 2] {
    [Layout::File, Layout::segments()].map(|layout| Fixture {
        layout,
        above: Above::Nothing,
        unnamed: false,
        compressed: false,
        ..Fixture::default().encrypted(1)
    })
}

/// Whether the content of any of these blocks lies in any file below a directory.
fn lies_open(dir: &Path, fixture: &Fixture, blocks: &[BlockId]) -> bool {
    let mut directories = vec![dir.to_owned()];
    while let Some(dir) = directories.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
                continue;
            }
            let bytes = std::fs::read(&path).unwrap_or_default();
            let has = |&block: &BlockId| {
                let content = content(fixture, block);
                bytes.windows(32).any(|window| window == &content[..32])
            };
            if blocks.iter().any(has) {
                return true;
            }
        }
    }
    false
}

#[test]
fn blocks_and_side_shards_come_back_on_every_medium() {
    for medium in media() {
        let (dir, fixture) = (directory(), sided(on(medium)).encrypted(1));
        let store = Store::open(dir.path(), fixture);
        dump(&store, &ids(4));
        dump_alone(&store, &[id(9)], &["codes"]);
        assert!(loads(&store, &ids(4)), "{medium:?}");
        assert!(has_all(&store, &ids(4)), "{medium:?}");
        let refused = (store.stat("records_refused"), store.stat("sides_refused"));
        assert_eq!(refused, (0, 0), "{medium:?}");
    }
}

#[test]
fn they_come_back_in_every_layout_under_every_codec_and_tier() {
    for fixture in columns() {
        let (dir, fixture) = (directory(), fixture.encrypted(1));
        let what = format!(
            "{:?} {:?} {:?}",
            fixture.layout, fixture.compressed, fixture.above
        );
        let store = Store::open(dir.path(), fixture.clone());
        dump(&store, &ids(4));
        drop(store);
        let store = Store::open(dir.path(), fixture); // the memory is empty now
        assert!(has_all(&store, &ids(4)) && loads(&store, &ids(4)), "{what}");
        assert!(
            loads(&store, &ids(4)),
            "from where they were brought up to, {what}"
        );
        assert_eq!(store.stat("records_refused"), 0, "{what}");
    }
}

#[test]
fn nothing_of_a_block_lies_open_below_memory() {
    for fixture in on_disk() {
        for above in [
            Above::Nothing,
            Above::Memory(8, WritePolicy::Through),
            Above::Memory(8, WritePolicy::Back),
        ] {
            let (dir, fixture) = (
                directory(),
                Fixture {
                    above,
                    ..fixture.clone()
                },
            );
            let store = Store::open(dir.path(), fixture.clone());
            store
                .dump(&Device::filled(&fixture, &ids(4)), &ids(4))
                .unwrap();
            drop(store); // what is written back is written then
            assert!(
                !lies_open(dir.path(), &fixture, &ids(4)),
                "{:?} {above:?}",
                fixture.layout
            );
        }
        let (dir, plain) = (
            directory(),
            Fixture {
                keys: None,
                ..fixture
            },
        );
        let store = Store::open(dir.path(), plain.clone());
        store
            .dump(&Device::filled(&plain, &ids(4)), &ids(4))
            .unwrap();
        drop(store);
        assert!(lies_open(dir.path(), &plain, &ids(4)), "this test can tell");
    }
}

/// Loads one block, which fails: how often for this reason.
fn misses(store: &Store, block: BlockId, reason: &str) -> u64 {
    let device = Device::blank(&store.fixture, &[block]);
    assert!(store.load(&device, &[block]).is_err() && device.is_blank(block));
    store.missed(reason)
}

#[test]
fn a_wrong_key_is_a_miss_and_destroys_nothing() {
    let on_others = media()
        .into_iter()
        .filter(|medium| matches!(medium, Medium::Kind(_)));
    let mut setups: Vec<_> = on_others.map(|medium| on(medium).encrypted(1)).collect();
    setups.extend(on_disk());
    for fixture in setups {
        let (dir, what) = (
            directory(),
            format!("{:?} {:?}", fixture.medium, fixture.layout),
        );
        let owner = Store::open(dir.path(), fixture.clone());
        owner
            .dump(&Device::filled(&fixture, &ids(2)), &ids(2))
            .unwrap();
        let others = [
            fixture.clone().encrypted(2),
            Fixture {
                keys: None,
                ..fixture.clone()
            },
        ];
        for (number, other) in (0..).zip(others) {
            let store = Store::open(dir.path(), other);
            eventually("it is found", || finds(&store, &ids(1)) == [true]);
            assert_eq!(misses(&store, id(0), "wrong_key"), 1, "{what}");
            assert_eq!(
                finds(&store, &ids(1)),
                [false],
                "it is no hit any more, {what}"
            );
            // A dump of the same block leaves it alone too, and says so: what cannot be read is not
            // stored.
            for _ in 0..3 {
                let failed = store.dump(&Device::filled(&fixture, &ids(1)), &ids(1));
                let (row, error) = failed.unwrap_err().remove(0);
                assert_eq!((row, error.kind()), (0, ErrorKind::Foreign), "{what}");
                let reason = ("reason", "wrong_key".to_owned());
                assert!(error.context().contains(&reason), "{what}: {error}");
                assert_eq!(finds(&store, &ids(1)), [false], "{what}");
            }
            let said = store.said();
            let said = said.iter().filter(|line| line.contains("not stored"));
            assert_eq!(said.count(), 1, "{what}: it is logged once");
            let counted = (store.stat("blocks_present"), store.stat("blocks_published"));
            assert_eq!(counted, (0, 0), "{what}");
            // What nothing is in the way of is stored as ever.
            let free = [id(8 + number)];
            store.dump(&Device::filled(&fixture, &free), &free).unwrap();
            assert!(loads(&store, &free), "{what}");
        }
        let again = Store::open(dir.path(), fixture.clone());
        eventually("it is found", || finds(&again, &ids(2)) == [true; 2]);
        assert!(loads(&again, &ids(2)), "{what}");
    }
}

#[test]
fn a_first_dump_over_a_record_of_another_key_is_not_stored() {
    let kinds = media()
        .into_iter()
        .filter(|medium| matches!(medium, Medium::Kind(_)));
    // From 128 KiB on Redis reports the length of the value before a value is sent.
    let long = Fixture {
        tensors: vec![128 << 10],
        ..Fixture::default()
    };
    let on_kinds = kinds.flat_map(|medium| {
        let long = Fixture {
            medium,
            ..long.clone()
        };
        [on(medium), long].map(|fixture| fixture.encrypted(1))
    });
    for fixture in on_kinds.chain(on_disk()) {
        let what = format!(
            "{:?} {:?} {:?}",
            fixture.medium, fixture.layout, fixture.tensors
        );
        let (dir, stored, new) = (directory(), ids(1), [id(9)]);
        let owner = Store::open(dir.path(), fixture.clone());
        dump(&owner, &stored);
        for looks in [true, false] {
            let other = Store::open(dir.path(), fixture.clone().encrypted(2));
            if looks || fixture.medium != Medium::Kind("redis") {
                eventually("it is found", || finds(&other, &stored) == [true]);
            }
            let failed = other.dump(&Device::filled(&fixture, &stored), &stored);
            let (_, error) = failed.unwrap_err().remove(0);
            let reason = ("reason", "wrong_key".to_owned());
            assert!(error.context().contains(&reason), "{what}: {error}");
            assert_eq!(error.kind(), ErrorKind::Foreign, "{what}");
            assert_eq!(finds(&other, &stored), [false], "{what}");
            let counted = (other.stat("blocks_present"), other.stat("blocks_published"));
            assert_eq!(counted, (0, 0), "{what}");
        }
        let twin = Store::open(dir.path(), fixture.clone());
        eventually("it is found", || finds(&twin, &stored) == [true]);
        for _ in 0..3 {
            dump(&twin, &stored);
        }
        dump(&twin, &new);
        assert_eq!(twin.stat("blocks_present"), 3, "{what}");
        if fixture.medium == Medium::Posix && fixture.layout == Layout::File {
            assert_eq!(twin.asked(OpKind::Read, stored[0]), 1, "its header, once");
        }
        assert!(loads(&twin, &[stored[0], new[0]]), "{what}");
    }
}

#[test]
fn a_first_dump_over_a_record_that_is_not_encrypted_has_the_next_one_replace_it() {
    for fixture in on_disk() {
        let (dir, stored) = (directory(), ids(1));
        let plain = Fixture {
            keys: None,
            ..fixture.clone()
        };
        dump(&Store::open(dir.path(), plain), &stored);
        let store = Store::open(dir.path(), fixture.clone());
        eventually("it is found", || finds(&store, &stored) == [true]);
        let failed = store.dump(&Device::filled(&fixture, &stored), &stored);
        let (_, error) = failed.unwrap_err().remove(0);
        assert!(error.message().contains("not encrypted"), "{error}");
        dump(&store, &stored);
        assert!(loads(&store, &stored), "{:?}", fixture.layout);
    }
}

#[test]
fn what_is_not_encrypted_is_a_miss_where_a_key_is_and_is_replaced() {
    for fixture in on_disk() {
        let (dir, plain) = (
            directory(),
            Fixture {
                keys: None,
                ..fixture.clone()
            },
        );
        let store = Store::open(dir.path(), plain.clone());
        store
            .dump(&Device::filled(&plain, &ids(1)), &ids(1))
            .unwrap();
        drop(store);
        let store = Store::open(dir.path(), fixture.clone());
        eventually("it is found", || finds(&store, &ids(1)) == [true]);
        assert_eq!(
            misses(&store, id(0), "not_encrypted"),
            1,
            "{:?}",
            fixture.layout
        );
        store
            .dump(&Device::filled(&fixture, &ids(1)), &ids(1))
            .unwrap();
        assert_eq!(store.stat("records_replaced"), 1, "{:?}", fixture.layout);
        assert!(loads(&store, &ids(1)), "{:?}", fixture.layout);
        // In segments the one that was replaced lies there still.
        let in_segments = store.places().into_iter().map(|place| {
            let file = std::fs::read(&place.file).unwrap();
            file[place.offset..place.offset + place.len].to_vec()
        });
        let records: Vec<_> = match fixture.layout {
            Layout::File => vec![store.record(id(0))],
            _ => in_segments.collect(),
        };
        let encrypted = |record: &Vec<u8>| RecordHeader::decode(record).unwrap().key.is_some();
        assert!(records.iter().any(encrypted), "{:?}", fixture.layout);
    }
}

#[test]
fn a_flipped_bit_is_a_miss_and_the_next_dump_replaces_it() {
    for fixture in on_disk() {
        let dir = directory();
        let store = Store::open(dir.path(), fixture.clone());
        store
            .dump(&Device::filled(&fixture, &ids(3)), &ids(3))
            .unwrap();
        let len = store.record(id(0)).len();
        for (block, at) in [(id(0), 4096), (id(1), len - 1), (id(2), 700)] {
            store.edit(block, |record| record[at] ^= 0x10);
            let device = Device::blank(&fixture, &[block]);
            assert!(store.load(&device, &[block]).is_err() && device.is_blank(block));
        }
        let reasons = (store.missed("bad_checksum"), store.missed("bad_header"));
        assert_eq!(reasons, (2, 1), "{:?}", fixture.layout);
        store
            .dump(&Device::filled(&fixture, &ids(3)), &ids(3))
            .unwrap();
        assert!(loads(&store, &ids(3)), "{:?}", fixture.layout);
    }
}

#[test]
fn layers_come_one_by_one_from_encrypted_blocks() {
    for fixture in on_disk() {
        let (dir, fixture) = (
            directory(),
            Fixture {
                layers: 4,
                layers_per_shard: 1,
                ..fixture
            },
        );
        let store = Store::open(dir.path(), fixture.clone());
        let rows = |device: &Device| (0..4).map(|shard| device.row(id(0), shard)).collect();
        let filled = Device::filled(&fixture, &ids(1));
        store
            .outcome(&store.engine.dump(rows(&filled)).unwrap())
            .unwrap();
        let blank = Device::blank(&fixture, &ids(1));
        let task = store.engine.load(vec![blank.row(id(0), 2)], None).unwrap();
        store.outcome(&task).unwrap();
        assert!(!blank.is_blank(id(0)));
        store
            .outcome(&store.engine.load(rows(&blank), None).unwrap())
            .unwrap();
        assert!(blank.is_right(id(0)));
    }
}
