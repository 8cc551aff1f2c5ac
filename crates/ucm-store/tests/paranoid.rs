//! `verify: paranoid`: what was written is read back before it counts, what was loaded is fetched
//! again.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]
#![allow(unsafe_code, reason = "device addresses of the tests' own buffers")]

use ucm_core::ErrorKind;
use ucm_device::DeviceSpan;
use ucm_infra::LANE_DUMP;
use ucm_store::engine::Pieces;
use ucm_testkit::{Fault, OpKind, Rule, Tail};

use crate::common::{
    Device, Layout, Setup, Store, directory, eventually, id, ids, of_records, only_over,
};

fn opened(paranoid: bool) -> (tempfile::TempDir, Store, Device) {
    let setup = Setup {
        paranoid,
        ..Setup::default()
    };
    let dir = directory();
    let device = Device::filled(&setup, &ids(4));
    let store = Store::open(dir.path(), setup);
    (dir, store, device)
}

#[test]
fn a_medium_that_lies_about_a_write_is_found_out_before_it_counts() {
    only_over!(
        FilesUnkept,
        "its torn writes are those of a block file, and nothing else has the block"
    );
    let lies = [
        ("bad_checksum", Fault::Flip(vec![5000])),
        ("bad_header", Fault::Flip(vec![200])),
        (
            "not_a_record",
            Fault::Torn {
                keep: 0,
                tail: Tail::Zeros,
            },
        ),
        (
            "truncated",
            Fault::Torn {
                keep: 4500,
                tail: Tail::Cut,
            },
        ),
    ];
    for (reason, lie) in lies {
        let (_dir, store, device) = opened(true);
        store.fault(of_records(Layout::of_this_run().writing(), lie).times(1));
        let failures = store.dump(&device, &ids(1)).unwrap_err();
        assert_eq!(failures[0].1.kind(), ErrorKind::Corrupt, "{reason}");
        assert_eq!(
            (store.missed(reason), store.stat("publishes_failed")),
            (1, 1),
            "{reason}"
        );
        assert_eq!(
            (store.stat("blocks_published"), store.stat("healthy")),
            (0, 1)
        );
        assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
        store.dump(&device, &ids(1)).unwrap();
        assert_eq!(
            (
                store.stat("records_replaced"),
                store.stat("blocks_published")
            ),
            (1, 1)
        );
        let target = Device::blank(&store.setup, &ids(1));
        store.load(&target, &ids(1)).unwrap();
        assert!(target.is_right(id(0)));
    }
}

#[test]
fn without_it_the_lie_is_found_by_the_first_reader() {
    only_over!(
        NothingKept,
        "a memory has what was dumped, and it is a hit there"
    );
    let (_dir, store, device) = opened(false);
    store.faults.forget();
    store.fault(of_records(Layout::of_this_run().writing(), Fault::Flip(vec![5000])).times(1));
    store.dump(&device, &ids(1)).unwrap();
    assert_eq!(store.asked(OpKind::Read, id(0)), 0, "a dump reads nothing");
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [true]);
    let target = Device::blank(&store.setup, &ids(1));
    store.load(&target, &ids(1)).unwrap_err();
    assert!(target.is_blank(id(0)));
    eventually("it is kept", || store.stat("records_quarantined") == 1);
}

#[test]
fn what_cannot_be_read_back_is_not_published_and_not_blamed() {
    only_over!(
        FilesUnkept,
        "it lets the read fail that is the first one of a block file"
    );
    let (_dir, store, device) = opened(true);
    store.fault(
        Rule::on(OpKind::Read, Fault::Errno(5))
            .lane(LANE_DUMP)
            .times(1),
    );
    let failures = store.dump(&device, &ids(1)).unwrap_err();
    assert_eq!(failures[0].1.kind(), ErrorKind::Io);
    assert_eq!(
        (store.stat("refused_now"), store.stat("publishes_failed")),
        (0, 1)
    );
    store.dump(&device, &ids(1)).unwrap();
    assert_eq!(store.stat("blocks_present"), 1, "it was sound after all");
    let target = Device::blank(&store.setup, &ids(1));
    store.load(&target, &ids(1)).unwrap();
    assert!(target.is_right(id(0)));
}

#[test]
fn a_device_that_does_not_hold_what_it_was_given_fails_the_load() {
    for paranoid in [false, true] {
        let (_dir, store, device) = opened(paranoid);
        store.dump(&device, &ids(1)).unwrap();
        let target = Device::blank(&store.setup, &ids(1));
        let mut rows = target.rows(&ids(1));
        let Pieces::Listed(spans) = &mut rows[0].pieces else {
            unreachable!("the rows of this device list their pieces");
        };
        let first = spans[0];
        // The last layer's second tensor lies on the first layer's first one, as by a wrong table
        // of addresses.
        // SAFETY: within the target's own buffer, which outlives the task.
        spans[5] = unsafe { DeviceSpan::new(first.addr(), store.setup.tensors[1]) };
        let task = store.engine.load(rows, None).unwrap();
        match store.outcome(&task) {
            Ok(()) => assert!(!paranoid && !target.is_right(id(0))),
            Err(failures) => {
                assert!(paranoid);
                assert_eq!(failures[0].1.kind(), ErrorKind::Io);
                assert!(failures[0].1.to_string().contains("does not hold"));
                assert_eq!(
                    (store.missed("io_error"), store.stat("blocks_failed")),
                    (1, 1)
                );
            }
        }
        assert_eq!(store.stat("refused_now"), 0, "not the record's fault");
    }
}
