//! The self-audit: blocks that were marked are compared when they are dumped; the outcome is
//! counted and told, and nothing else happens.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::{Device, Medium, Setup, Store, directory, id, ids, media, on, only_over};

/// Blocks of 32-bit floats, all the same in a block.
fn floats(setup: &Setup, values: &[f32]) -> Device {
    let mut device = Device::blank(setup, &ids(values.len() as u8));
    for (n, value) in values.iter().enumerate() {
        device.change(id(n as u8), |bytes| {
            for element in bytes.chunks_exact_mut(4) {
                element.copy_from_slice(&value.to_le_bytes());
            }
        });
    }
    device
}

fn opened(medium: Medium, values: &[f32]) -> (tempfile::TempDir, Store) {
    let (dir, setup) = (directory(), on(medium));
    let store = Store::open(dir.path(), setup.clone());
    store
        .dump(&floats(&setup, values), &ids(values.len() as u8))
        .unwrap();
    (dir, store)
}

#[test]
fn small_differences_are_usual_and_large_ones_are_told() {
    for medium in media() {
        let (_dir, store) = opened(medium, &[1.0, 1.0, 1.0]);
        let mut again = floats(&store.setup, &[1.0, 1.0005, 1.0]);
        // One element of the last tensor of the last layer.
        again.change(id(2), |bytes| {
            let at = bytes.len() - 4;
            bytes[at..].copy_from_slice(&1.5f32.to_le_bytes());
        });
        store.engine.audit(&ids(3)).unwrap();
        store.dump(&again, &ids(3)).unwrap();
        assert_eq!(
            (store.stat("audits"), store.stat("audit_deviations")),
            (3, 1)
        );
        assert_eq!(
            (store.stat("blocks_present"), store.stat("blocks_published")),
            (3, 3)
        );
        let mut said = store.said();
        said.retain(|line| line.contains("differs"));
        assert_eq!(said.len(), 1);
        assert!(said[0].contains(&format!("{}, computed again, differs", id(2))));
        assert!(said[0].contains("0.333"), "{}", said[0]);
        // The record is not to blame for that alone: it stays, a hit.
        assert_eq!(
            (store.stat("refused_now"), store.stat("records_quarantined")),
            (0, 0)
        );
        assert_eq!(store.engine.lookup(&ids(3)).unwrap(), [true; 3]);
        let target = Device::blank(&store.setup, &ids(3));
        store.load(&target, &ids(3)).unwrap();
        assert!(target.equals(&floats(&store.setup, &[1.0; 3])));
        // Once per mark.
        store.dump(&again, &ids(3)).unwrap();
        assert_eq!(store.stat("audits"), 3);
    }
}

#[test]
fn what_cannot_be_compared_is_dumped_as_usual() {
    only_over!(
        FilesUnkept,
        "it damages one block file and lets the read of another fail"
    );
    let (_dir, store) = opened(Medium::Posix, &[1.0; 3]);
    let device = floats(&store.setup, &[2.0; 5]);
    let damaged = store.file(id(0));
    let mut bytes = std::fs::read(&damaged).unwrap();
    bytes[5000] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    store.fault(
        Rule::on(OpKind::Read, Fault::Errno(5))
            .path(id(1).to_string())
            .times(1),
    );
    let marked = [id(0), id(1), id(4)];
    store.engine.audit(&marked).unwrap();
    store.dump(&device, &marked).unwrap();
    assert_eq!(
        (store.stat("audits"), store.stat("refused_now")),
        (0, 0),
        "a load verifies it"
    );
    assert_eq!(
        (store.stat("blocks_present"), store.stat("blocks_published")),
        (2, 4)
    );
    store
        .load(&Device::blank(&store.setup, &ids(1)), &ids(1))
        .unwrap_err();
    // A refused one is replaced, not compared.
    store.engine.audit(&ids(1)).unwrap();
    store.dump(&device, &ids(1)).unwrap();
    assert_eq!(
        (store.stat("audits"), store.stat("records_replaced")),
        (0, 1)
    );
    store.engine.close();
    assert!(store.engine.audit(&ids(1)).is_err());
}

#[test]
fn without_a_slot_to_read_into_the_dump_goes_on() {
    for medium in media() {
        let (_dir, store) = opened(medium, &[1.0]);
        let device = floats(&store.setup, &[1.0; 12]);
        assert_eq!(store.engine.free_dump_slots(), 12);
        store.engine.audit(&ids(12)).unwrap();
        store.dump(&device, &ids(12)).unwrap();
        let (audits, present) = (store.stat("audits"), store.stat("blocks_present"));
        assert!(audits <= 1 && present == 1, "{audits} {present}");
        assert_eq!(store.stat("blocks_published"), 12);
        assert_eq!(store.stat("slots_free"), store.stat("slots"));
    }
}
