//! The self-audit: offered blocks are compared with the stored ones, counted and told, and nothing else happens.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

mod common;

use common::{Device, Setup, Store, directory, id, ids};
use ucm_core::{ErrorKind, MissReason};
use ucm_io::{Fault, Gate, OpKind, Rule};

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

fn opened(values: &[f32]) -> (tempfile::TempDir, Store) {
    let (dir, setup) = (directory(), Setup::default());
    let store = Store::open(dir.path(), setup.clone());
    store
        .dump(&floats(&setup, values), &ids(values.len() as u8))
        .unwrap();
    (dir, store)
}

#[test]
fn small_differences_are_usual_and_large_ones_are_told() {
    let (_dir, store) = opened(&[1.0, 1.0, 1.0]);
    let mut again = floats(&store.setup, &[1.0, 1.0005, 1.0]);
    // One element of the last tensor of the last layer.
    again.change(id(2), |bytes| {
        let at = bytes.len() - 4;
        bytes[at..].copy_from_slice(&1.5f32.to_le_bytes());
    });
    let audits = store.engine.audit(again.rows(&ids(3)), None).unwrap();
    assert_eq!(audits.iter().map(|audit| audit.id).collect::<Vec<_>>(), ids(3));
    assert_eq!(audits[0].outcome, Ok(0.0));
    let small = audits[1].outcome.unwrap();
    assert!(small > 0.0 && small <= store.engine.audit_tolerance(), "{small}");
    assert!((audits[2].outcome.unwrap() - 1.0 / 3.0).abs() < 1e-9);
    assert_eq!((store.stat("audits"), store.stat("audit_deviations")), (3, 1));
    let told = store.engine.events();
    let told: Vec<_> = told
        .iter()
        .filter(|event| event.text.contains("differs"))
        .collect();
    assert_eq!(told.len(), 1);
    assert!(told[0].text.contains(&id(2).to_string()));
    // The record is not to blame for that alone.
    assert_eq!(
        (store.stat("refused_now"), store.stat("records_quarantined")),
        (0, 0)
    );
    assert_eq!(store.engine.lookup(&ids(3)).unwrap(), [true; 3]);
}

#[test]
fn what_cannot_be_compared_says_why_and_is_not_counted() {
    let (_dir, store) = opened(&[1.0; 3]);
    let device = floats(&store.setup, &[1.0; 5]);
    let damaged = store.file(id(0));
    let mut bytes = std::fs::read(&damaged).unwrap();
    bytes[5000] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    store.fault(Rule::on(OpKind::Read, Fault::Errno(5)).path(id(1).to_string()));
    let outcomes = |blocks: &[ucm_core::BlockId]| -> Vec<_> {
        let audits = store.engine.audit(device.rows(blocks), None).unwrap();
        audits.iter().map(|audit| audit.outcome).collect()
    };
    assert_eq!(
        outcomes(&[id(0), id(1), id(2), id(4)]),
        [
            Err(MissReason::BadChecksum),
            Err(MissReason::IoError),
            Ok(0.0),
            Err(MissReason::Absent)
        ]
    );
    assert_eq!(store.stat("refused_now"), 0, "that is for a load to say");
    store
        .load(&Device::blank(&store.setup, &ids(1)), &ids(1))
        .unwrap_err();
    assert_eq!(outcomes(&ids(1)), [Err(MissReason::Refused)]);
    assert_eq!((store.stat("audits"), store.stat("audit_deviations")), (1, 0));
    assert!(store.engine.audit(Vec::new(), None).unwrap().is_empty());
    let mut wrong = device.rows(&ids(1));
    wrong[0].shard = 1;
    let error = store.engine.audit(wrong, None).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

#[test]
fn an_audit_ends_by_its_deadline() {
    let (_dir, store) = opened(&[1.0]);
    let gate = Gate::new();
    store.fault(Rule::on(OpKind::Read, Fault::HangBefore(gate.clone())));
    let device = floats(&store.setup, &[1.0]);
    let limit = std::time::Duration::from_millis(20);
    let audits = store.engine.audit(device.rows(&ids(1)), Some(limit)).unwrap();
    assert_eq!(audits[0].outcome, Err(MissReason::Timeout));
    gate.open();
}
