//! Evidence of damage: what is moved aside, what is left alone, and that healing never depends on
//! it.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;
use std::time::Duration;

use ucm_core::crc32c;
use ucm_quota::evidence::QuarantineConfig;
use ucm_testkit::{Fault, Gate, OpKind, Rule};

use crate::common::bench::Bench;
use crate::common::only_over;
use crate::common::{Device, Layout, eventually, id, ids, of_records};

const RECORD: u64 = 8192;
const DAY: Duration = Duration::from_secs(24 * 3600);

#[test]
fn damage_of_every_kind_is_kept_as_it_was_found() {
    type Change = fn(&mut Vec<u8>);
    let damages: [(&str, Change); 6] = [
        ("bad_checksum", |bytes| bytes[5000] ^= 1),
        ("bad_header", |bytes| bytes[100] ^= 1),
        ("not_a_record", |bytes| bytes.fill(0)),
        ("truncated", |bytes| bytes.truncate(4500)),
        ("truncated", |bytes| bytes.truncate(0)),
        ("wrong_length", |bytes| bytes.push(0)),
    ];
    // A record in a segment keeps its length.
    let fitting = if Layout::of_this_run() == Layout::File {
        6
    } else {
        3
    };
    for (reason, change) in damages.into_iter().take(fitting) {
        let bench = Bench::new(QuarantineConfig::default());
        bench.dump(&ids(1));
        bench.clock.advance(Duration::from_secs(180));
        let bytes = bench.damage(id(0), change);
        bench.refuse(id(0));
        bench.kept(1);
        assert_eq!(bench.evidence(), [(id(0).to_string(), reason.to_owned())]);
        let kept = std::fs::read_dir(bench.quarantine())
            .unwrap()
            .next()
            .unwrap();
        assert_eq!(std::fs::read(kept.unwrap().path()).unwrap(), bytes);
        bench.assert_gone(id(0), true);
        bench.heals(id(0));
        assert_eq!(bench.store.stat("records_replaced"), 1);
        assert_eq!(bench.store.stat("healthy"), 1);
    }
}

#[test]
fn what_is_whole_is_left_where_it_is() {
    let bench = Bench::new(QuarantineConfig::default());
    bench.dump(&ids(3));
    bench.clock.advance(Duration::from_secs(180));
    let newer = bench.damage(id(0), |bytes| {
        bytes[4..8].copy_from_slice(&2u32.to_le_bytes());
        let crc = crc32c(&bytes[..60]);
        bytes[60..64].copy_from_slice(&crc.to_le_bytes());
    });
    let other = bench.store.record(id(2));
    bench.damage(id(1), |bytes| bytes.clone_from(&other));
    bench.refuse(id(0));
    bench.refuse(id(1));
    assert_eq!(
        (
            bench.store.missed("newer_version"),
            bench.store.missed("foreign_id")
        ),
        (1, 1)
    );
    bench.looked_at();
    assert_eq!(
        bench.evidence(),
        [(id(39).to_string(), "bad_checksum".to_owned())]
    );
    assert_eq!(bench.store.record(id(0)), newer);
    bench.assert_gone(id(1), false);
}

#[test]
fn a_young_record_of_another_writer_is_a_miss_and_no_more() {
    let theirs = Bench::new(QuarantineConfig::default());
    let (dir, clock) = (Arc::clone(&theirs.dir), Arc::clone(&theirs.clock));
    let ours = || {
        Bench::on(
            Arc::clone(&dir),
            Arc::clone(&clock),
            QuarantineConfig::default(),
        )
    };
    theirs.dump(&ids(2));
    theirs.damage(id(0), |bytes| bytes[5000] ^= 1);
    theirs.damage(id(1), |bytes| bytes[..4096].fill(0));
    drop(theirs); // so that the other one grants itself what it writes
    let bench = ours();
    bench.refuse(id(0));
    bench.refuse(id(1));
    assert_eq!(bench.store.engine.lookup(&ids(2)).unwrap(), [false; 2]);
    bench.looked_at();
    assert_eq!(bench.evidence().len(), 1, "only what was for sure");
    ids(2)
        .into_iter()
        .for_each(|block| bench.assert_gone(block, false));
    bench.heals(id(1));
    // When no one can be writing it any more, damage is damage.
    bench.clock.advance(Duration::from_secs(60));
    drop(bench); // a copy takes room, which the next one grants itself
    let later = ours();
    later.refuse(id(0));
    later.kept(1);
    later.assert_gone(id(0), true);
}

#[test]
fn a_record_that_reads_well_past_the_caches_is_not_moved() {
    let bench = Bench::new(QuarantineConfig::default());
    bench.dump(&ids(1));
    bench.store.forget(id(0));
    // Both reads of the load lie, those of housekeeping do not.
    let lie = Rule::on(OpKind::Read, Fault::Flip(vec![5000]))
        .lane(0)
        .times(2);
    bench.store.fault(lie);
    bench.refuse(id(0));
    assert_eq!(bench.store.stat("second_reads"), 1);
    bench.looked_at();
    assert_eq!(bench.evidence().len(), 1);
    bench.assert_gone(id(0), false);
    assert_eq!(
        bench.store.engine.lookup(&ids(1)).unwrap(),
        [false],
        "refused all the same"
    );
    bench.heals(id(0));
}

#[test]
fn too_much_damage_opens_the_breaker_and_moves_nothing_more() {
    only_over!(OneMedium, "each tier has a breaker of its own");
    let bench = Bench::new(QuarantineConfig {
        max_per_minute: 3,
        ..QuarantineConfig::default()
    });
    bench.dump(&ids(5));
    for block in ids(5) {
        bench.damage(block, |bytes| bytes[5000] ^= 1);
    }
    for (n, block) in (1..).zip(ids(3)) {
        bench.refuse(block);
        bench.kept(n);
    }
    assert_eq!(bench.store.stat("healthy"), 1);
    bench.refuse(id(3));
    eventually("it was stopped", || {
        bench.store.stat("quarantine_stopped") == 1
    });
    assert_eq!(
        (
            bench.store.stat("healthy"),
            bench.store.stat("breaker_opened")
        ),
        (0, 1)
    );
    bench.assert_gone(id(3), false);
    assert_eq!(bench.store.engine.lookup(&ids(5)).unwrap(), [false; 5]);
    assert_eq!(bench.store.missed("unhealthy"), 5);
    let said = bench.store.said();
    let opened = said
        .iter()
        .filter(|text| text.contains("too many damaged records"));
    assert_eq!(opened.count(), 1, "{said:?}");
    // A minute later all is as before, without help.
    bench.clock.advance(Duration::from_secs(60));
    assert_eq!(
        bench.store.engine.lookup(&ids(5)).unwrap(),
        [false, false, false, false, true]
    );
    eventually("it is well again", || bench.store.stat("healthy") == 1);
    bench.refuse(id(4));
    bench.kept(4);
    for block in ids(5) {
        bench.heals(block);
    }
}

#[test]
fn without_quarantine_damage_is_refused_healed_and_counted_all_the_same() {
    only_over!(OneMedium, "each tier has a breaker of its own");
    let bench = Bench::new(QuarantineConfig {
        enabled: false,
        max_per_minute: 1,
        ..QuarantineConfig::default()
    });
    bench.dump(&ids(2));
    for block in ids(2) {
        bench.damage(block, |bytes| bytes[5000] ^= 1);
    }
    ids(2).into_iter().for_each(|block| bench.refuse(block));
    eventually("the breaker opened", || bench.store.stat("healthy") == 0);
    assert!(bench.evidence().is_empty());
    ids(2)
        .into_iter()
        .for_each(|block| bench.assert_gone(block, false));
    bench.clock.advance(Duration::from_secs(60));
    ids(2).into_iter().for_each(|block| bench.heals(block));
}

#[test]
fn the_oldest_evidence_makes_room_and_what_is_kept_counts_as_used() {
    only_over!(Files, "it counts the bytes of block files");
    let bench = Bench::new(QuarantineConfig {
        max_records: 2,
        keep: 3 * DAY,
        ..QuarantineConfig::default()
    });
    for (n, block) in (1..).zip(ids(4)) {
        bench.refuse_own(block);
        bench.kept(n);
        bench.clock.advance(Duration::from_secs(1));
    }
    let names = |evidence: Vec<(String, String)>| {
        evidence.into_iter().map(|(id, _)| id).collect::<Vec<_>>()
    };
    let mut newest = [id(2).to_string(), id(3).to_string()];
    newest.sort();
    assert_eq!(names(bench.evidence()), newest);
    bench.dump(&ids(1));
    let (dir, clock, bounds) = (
        Arc::clone(&bench.dir),
        Arc::clone(&bench.clock),
        bench.store.setup.quarantine,
    );
    drop(bench); // so that the next one counts
    let again = || Bench::on(Arc::clone(&dir), Arc::clone(&clock), bounds);
    assert_eq!(again().store.stat("storage_used_bytes"), 3 * RECORD);
    clock.advance(3 * DAY);
    let later = again();
    assert!(later.evidence().is_empty(), "too old");
    assert_eq!(later.store.stat("storage_used_bytes"), RECORD);
}

#[test]
fn healing_does_not_depend_on_it() {
    let bench = Bench::new(QuarantineConfig::default());
    let keeping = match Layout::of_this_run() {
        Layout::File => Rule::on(OpKind::Rename, Fault::Errno(5)),
        Layout::Segment(_) => Rule::on(OpKind::Publish, Fault::Errno(5)).path("/quarantine/"),
    };
    bench.store.fault(keeping);
    bench.refuse_own(id(0));
    let mut said = Vec::new();
    eventually("the log says so", || {
        said.extend(bench.store.said());
        said.iter().any(|line| line.contains("could not be moved"))
    });
    assert_eq!(
        (
            bench.store.stat("records_quarantined"),
            bench.store.stat("healthy")
        ),
        (0, 1)
    );
    bench.heals(id(0));
}

/// The lane on which refused records are looked at.
const SPACE: usize = 3;

#[test]
fn a_record_replaced_in_time_is_not_moved() {
    only_over!(
        Files,
        "in a segment the damaged copy stays beside the new one, and is copied as evidence all the \
         same"
    );
    let (bench, gate) = (Bench::new(QuarantineConfig::default()), Gate::new());
    let hang = Rule::on(OpKind::Read, Fault::HangAfter(gate.clone()));
    bench.store.fault(hang.lane(SPACE).times(1));
    bench.refuse_own(id(0));
    gate.await_waiting(1);
    bench.heals(id(0));
    gate.open();
    bench.looked_at();
    assert_eq!(
        bench.evidence(),
        [(id(39).to_string(), "bad_checksum".to_owned())]
    );
    let target = Device::blank(&bench.store.setup, &ids(1));
    bench.store.load(&target, &ids(1)).unwrap();
}

#[test]
fn a_dump_waits_while_what_it_replaces_is_moved() {
    only_over!(
        Files,
        "in a segment nothing is moved, so that no dump waits for that"
    );
    let (bench, gate) = (Bench::new(QuarantineConfig::default()), Gate::new());
    let hang = Rule::on(OpKind::Rename, Fault::HangBefore(gate.clone()));
    bench.store.fault(hang.times(1));
    bench.refuse_own(id(0));
    gate.await_waiting(1);
    let task = bench.store.engine.dump(bench.device.rows(&ids(1))).unwrap();
    // Another block's dump goes on, and comes behind this one in the queue.
    bench.dump(&[id(1)]);
    gate.open();
    bench.store.outcome(&task).unwrap();
    bench.kept(1);
    let target = Device::blank(&bench.store.setup, &ids(2));
    bench.store.load(&target, &ids(2)).unwrap();
    assert!(target.is_right(id(0)));
}

#[test]
fn what_is_being_written_is_not_moved() {
    only_over!(Files, "in a segment nothing is moved");
    let bench = Bench::new(QuarantineConfig::default());
    let (look, write) = (Gate::new(), Gate::new());
    bench.dump(&ids(1));
    bench.damage(id(0), |bytes| bytes[5000] ^= 1);
    let hang = Rule::on(OpKind::Read, Fault::HangBefore(look.clone()));
    bench.store.fault(hang.lane(SPACE).times(1));
    bench.refuse(id(0));
    look.await_waiting(1);
    let hang = of_records(OpKind::Publish, Fault::HangBefore(write.clone()));
    bench.store.fault(hang.times(1));
    let task = bench.store.engine.dump(bench.device.rows(&ids(1))).unwrap();
    write.await_waiting(1);
    look.open();
    bench.looked_at();
    assert_eq!(
        bench.evidence(),
        [(id(39).to_string(), "bad_checksum".to_owned())]
    );
    write.open();
    bench.store.outcome(&task).unwrap();
    bench.heals(id(0));
}

#[test]
fn nothing_is_moved_below_a_root_that_lost_its_marker() {
    let bench = Bench::new(QuarantineConfig::default());
    bench.dump(&ids(1));
    bench.damage(id(0), |bytes| bytes[5000] ^= 1);
    std::fs::remove_file(bench.dir.path().join("ucm-root.json")).unwrap();
    bench.refuse(id(0));
    let mut said = Vec::new();
    eventually("the log says so", || {
        said.extend(bench.store.said());
        said.iter().any(|line| line.contains("lost its marker"))
    });
    assert!(bench.evidence().is_empty());
    bench.assert_gone(id(0), false);
}
