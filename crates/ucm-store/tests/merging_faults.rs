//! Merging of segments with everything that can go wrong at it: processes that die, sleep, meet
//! damage or find no room.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use ucm_testkit::{Fault, Gate, OpKind, Rule};

use crate::common::merging::{eager, fill, filling, finds, gone, loads, privates, there};
use crate::common::segments::{change, places};
use crate::common::shared::LONG;
use crate::common::{Device, Fixture, Store, directory, eventually, ids};

#[test]
fn a_process_that_dies_at_it_leaves_every_record_and_nothing_else() {
    for (kind, nth) in [
        (OpKind::WriteAt, 1),
        (OpKind::WriteAt, 6),
        (OpKind::Finish, 1),
    ] {
        let dir = directory();
        fill(dir.path(), &filling(), &ids(8));
        let fixture = Fixture {
            process: gone(),
            ..eager(Duration::ZERO)
        };
        let gate = Gate::new();
        let rule = Rule::on(kind, Fault::HangBefore(gate.clone())).nth(nth);
        let dead = Store::open_faulty(dir.path(), fixture, vec![rule]);
        gate.await_waiting(1);
        let heir = Store::open(dir.path(), eager(Duration::ZERO));
        assert_eq!(finds(&heir, &ids(8)), [true; 8]);
        eventually("the next one merges", || heir.segments().len() == 1);
        eventually("nothing private is left", || privates(&heir).is_empty());
        assert!(loads(&heir, &ids(8)), "{kind:?} {nth}");
        // It was only asleep: its actions now do no harm.
        gate.open();
        drop(dead);
        assert!(loads(&heir, &ids(8)), "{kind:?} {nth}");
        drop(heir);
        let later = Store::open(dir.path(), filling());
        assert!(
            loads(&later, &ids(8)) && privates(&later).is_empty(),
            "{kind:?} {nth}"
        );
    }
}

#[test]
fn a_process_that_dies_before_the_removal_leaves_it_to_the_next() {
    let dir = directory();
    fill(dir.path(), &filling(), &ids(8));
    let store = Store::open(dir.path(), eager(LONG));
    eventually("they are merged", || store.segments().len() == 9);
    drop(store);
    let heir = Store::open(dir.path(), eager(Duration::ZERO));
    eventually("they are removed", || heir.segments().len() == 1);
    assert_eq!(
        heir.faults.count(OpKind::Finish),
        0,
        "nothing was copied again"
    );
    assert!(loads(&heir, &ids(8)));
}

#[test]
fn two_that_merge_the_same_at_once_do_no_harm() {
    let dir = directory();
    fill(dir.path(), &filling(), &ids(8));
    let gate = Gate::new();
    let rule = Rule::on(OpKind::Finish, Fault::HangBefore(gate.clone())).nth(1);
    let one = Store::open_faulty(dir.path(), eager(Duration::from_millis(50)), vec![rule]);
    gate.await_waiting(1);
    let claim: Vec<_> = privates(&one)
        .into_iter()
        .filter(|file| file.metadata().is_ok_and(|meta| meta.len() == 4096))
        .collect();
    assert_eq!(claim.len(), 1);
    let other = Store::open(dir.path(), eager(Duration::from_millis(50)));
    // As if neither saw the other's claim.
    std::fs::remove_file(&claim[0]).unwrap();
    eventually("the other one merges them", || {
        other.stat("segments_merged") == 8
    });
    gate.open();
    for store in [&one, &other] {
        eventually("one copy stays", || store.segments().len() == 1);
        eventually("it is found", || {
            finds(store, &ids(8)) == [true; 8] && loads(store, &ids(8))
        });
        assert_eq!(store.stat("records_refused"), 0);
    }
    drop((one, other));
    assert!(loads(&Store::open(dir.path(), filling()), &ids(8)));
}

#[test]
fn the_claim_of_another_is_respected_while_it_may_be_alive() {
    let dir = directory();
    fill(dir.path(), &filling(), &ids(8));
    let gate = Gate::new();
    let rule = Rule::on(OpKind::Finish, Fault::HangBefore(gate.clone())).nth(1);
    let one = Store::open_faulty(dir.path(), eager(Duration::ZERO), vec![rule]);
    gate.await_waiting(1);
    let other = Store::open(dir.path(), eager(Duration::ZERO));
    let claims = |store: &Store| {
        let log = store.faults.log();
        let tried = |path: &PathBuf| path.to_string_lossy().contains("/tmp/6d657267");
        log.iter()
            .filter(|seen| seen.kind == OpKind::Create && seen.paths.iter().any(tried))
            .count()
    };
    eventually("the other one tries a few times", || claims(&other) >= 3);
    assert_eq!(
        (other.stat("segments_merged"), other.segments().len()),
        (0, 8)
    );
    gate.open();
    eventually("they are merged", || one.segments().len() == 1);
    assert_eq!(one.stat("segments_merged"), 8);
    assert_eq!(
        other.faults.count(OpKind::Finish),
        0,
        "the other one copied nothing"
    );
    eventually("it is found", || loads(&other, &ids(8)));
}

#[test]
fn a_segment_with_a_record_that_is_not_sound_stays_as_it_is() {
    let newer = |bytes: &mut Vec<u8>, at: usize| {
        bytes[at + 4] = 2;
        let crc = ucm_core::crc32c(&bytes[at..at + 60]);
        bytes[at + 60..at + 64].copy_from_slice(&crc.to_le_bytes());
    };
    let flipped = |bytes: &mut Vec<u8>, at: usize| bytes[at + 5000] ^= 1;
    for (what, harm) in [
        ("damaged", &flipped as &dyn Fn(&mut Vec<u8>, usize)),
        ("newer", &newer),
    ] {
        let dir = directory();
        fill(dir.path(), &filling(), &ids(8));
        let probe = Store::open(dir.path(), filling());
        let bad = probe
            .places()
            .into_iter()
            .find(|place| place.id == ids(4)[3])
            .unwrap();
        drop(probe);
        change(&bad.file, |bytes| harm(bytes, bad.offset));
        let left = std::fs::read(&bad.file).unwrap();
        let store = Store::open(dir.path(), eager(Duration::ZERO));
        eventually("the others are merged", || store.segments().len() == 2);
        assert_eq!(std::fs::read(&bad.file).unwrap(), left, "{what}");
        let merged = store
            .segments()
            .into_iter()
            .find(|file| *file != bad.file)
            .unwrap();
        let there: Vec<_> = places(&merged).into_iter().map(|place| place.id).collect();
        assert!(there.len() == 7 && !there.contains(&bad.id), "{what}");
        let others: Vec<_> = ids(8)
            .into_iter()
            .filter(|block| *block != bad.id)
            .collect();
        assert!(
            loads(&store, &others) && !loads(&store, &[bad.id]),
            "{what}"
        );
        let dumped = store.dump(&Device::filled(&store.fixture, &ids(8)), &[bad.id]);
        match dumped {
            Ok(()) => assert_eq!(what, "damaged", "it is not replaced"),
            Err(failed) => {
                let text = failed[0].1.to_string();
                assert!(
                    what == "newer" && text.contains("reason=newer_version"),
                    "{what}: {text}"
                );
            }
        }
    }
}

#[test]
fn a_merging_that_fails_leaves_everything_as_it_was_and_is_tried_again() {
    let faults: &[(OpKind, u64, Fault)] = &[
        (OpKind::Create, 1, Fault::Errno(5)),
        (OpKind::Create, 2, Fault::Errno(28)),
        (OpKind::WriteAt, 3, Fault::Errno(28)),
        (OpKind::WriteAt, 3, Fault::Errno(5)),
        (OpKind::WriteAt, 3, Fault::Killed { keep: 100 }),
        (OpKind::Finish, 1, Fault::Errno(28)),
        (OpKind::Finish, 1, Fault::Killed { keep: 100 }),
        (OpKind::Finish, 1, Fault::LostReply(5)),
        (OpKind::Finish, 1, Fault::Replay),
        (OpKind::Remove, 1, Fault::Errno(5)),
    ];
    for (kind, nth, fault) in faults {
        let dir = directory();
        fill(dir.path(), &filling(), &ids(8));
        let place = match kind {
            OpKind::Remove => "/segments/",
            OpKind::Finish => "",
            _ => "/tmp/",
        };
        let rule = Rule::on(*kind, fault.clone()).path(place).nth(*nth);
        let store = Store::open_faulty(dir.path(), eager(Duration::ZERO), vec![rule]);
        let all = BTreeSet::from_iter(ids(8));
        eventually("it goes well in the end", || {
            assert_eq!(
                there(&store),
                all,
                "{kind:?} {fault:?}: a record is stored at any time"
            );
            store.segments().len() == 1
        });
        assert!(loads(&store, &ids(8)), "{kind:?} {fault:?}");
        drop(store);
        let later = Store::open(dir.path(), filling());
        assert!(loads(&later, &ids(8)), "{kind:?} {fault:?}");
    }
}
