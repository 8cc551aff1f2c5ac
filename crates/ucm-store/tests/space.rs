//! Several writers on one root: the limit holds in sum, and one of them is always collector.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use ucm_core::{BlockId, ErrorKind};
use ucm_infra::{Clock, ManualClock};
use ucm_io::Process;
use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::only_over;
use crate::common::shared::{
    LONG, RECORD, attempt, documents, elsewhere, in_time, on, small, stored,
};
use crate::common::{Device, Fixture, Store, directory, eventually, id, ids};

/// A process that has ended.
fn dead() -> Process {
    Process {
        pid: i32::MAX as u32 - 1,
        ..Process::this()
    }
}

fn collectors(stores: &[&Store]) -> usize {
    stores
        .iter()
        .filter(|store| store.stat("storage_collector") == 1)
        .count()
}

#[test]
fn of_many_writers_one_is_collector_and_all_write() {
    let (dir, fixture) = (directory(), small(512));
    let stores: Vec<Store> = std::thread::scope(|scope| {
        let open = || Store::open(dir.path(), fixture.clone());
        let opening: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
        opening
            .into_iter()
            .map(|store| store.join().unwrap())
            .collect()
    });
    let all: Vec<&Store> = stores.iter().collect();
    eventually("one is collector", || collectors(&all) == 1);
    for (n, store) in (0..).zip(&stores) {
        let device = Device::filled(&fixture, &[id(n)]);
        eventually("it was granted something", || {
            store.dump(&device, &[id(n)]).is_ok()
        });
        assert_eq!(store.engine.lookup(&[id(n)]).unwrap(), [true]);
    }
    assert_eq!(collectors(&all), 1);
}

#[test]
fn a_collector_that_leaves_is_followed_at_once_and_its_grants_are_known() {
    only_over!(Files, "it counts records by the length of their files");
    let (dir, fixture) = (directory(), small(64));
    let first = Store::open(dir.path(), fixture.clone());
    let second = Store::open(dir.path(), fixture.clone());
    assert_eq!(
        (
            first.stat("storage_collector"),
            second.stat("storage_collector")
        ),
        (1, 0)
    );
    let device = Device::filled(&fixture, &ids(4));
    first.dump(&device, &ids(3)).unwrap();
    drop(first);
    eventually("the other one follows", || {
        second.stat("storage_collector") == 1
    });
    eventually("it writes", || second.dump(&device, &[id(3)]).is_ok());
    // What is written during a count may count twice until the next, but never not at all.
    eventually("all is counted", || {
        (4..=5).contains(&(second.stat("storage_used_bytes") / RECORD))
    });
    drop(second);
    let third = Store::open(dir.path(), fixture);
    assert_eq!(third.stat("storage_collector"), 1);
    let beats = documents(dir.path(), "collector");
    assert_eq!(beats.len(), 1, "earlier terms are removed: {beats:?}");
}

#[test]
fn a_collector_whose_process_died_on_this_host_is_followed_at_once() {
    let (dir, fixture) = (directory(), small(64));
    let clock = ManualClock::new();
    let gone = on(
        &clock,
        dir.path(),
        &Fixture {
            process: dead(),
            ..fixture.clone()
        },
    );
    // Its last report fails: it dies.
    gone.fault(Rule::on(OpKind::Publish, Fault::Errno(5)).path("/space/"));
    drop(gone);
    assert_eq!(documents(dir.path(), "collector")[0]["resigned"], false);
    let next = on(&clock, dir.path(), &fixture);
    assert_eq!(next.stat("storage_collector"), 1, "no time has passed");
    let device = Device::filled(&fixture, &ids(1));
    next.dump(&device, &ids(1)).unwrap();
}

#[test]
fn a_collector_of_another_host_is_followed_when_it_does_not_move_and_the_limit_holds() {
    only_over!(Files, "it adds up the files of blocks");
    let (dir, fixture) = (directory(), small(64));
    let clock = ManualClock::new();
    let stalled = on(&clock, dir.path(), &elsewhere(&fixture));
    let device = Device::filled(&fixture, &ids(60));
    stalled.dump(&device, &[id(0)]).unwrap();
    let next = on(&clock, dir.path(), &fixture);
    assert_eq!(next.stat("storage_collector"), 0);
    stalled.fault(Rule::on(OpKind::Publish, Fault::Errno(5)).path("/space/"));
    in_time(&clock, LONG, "it takes over", || {
        next.stat("storage_collector") == 1
    });
    // Both believe to be collector for a while: what the first granted itself is in the book of the
    // second.
    in_time(&clock, LONG, "it took over what was granted", || {
        let grants = documents(dir.path(), "grants").pop();
        grants.is_some_and(|grants| grants["writers"].as_object().unwrap().len() == 2)
    });
    for &block in &ids(60) {
        let _ = attempt(&stalled, &clock, &device, block);
        let _ = attempt(&next, &clock, &device, block);
        assert!(stored(dir.path()) <= 64 * RECORD);
        clock.advance(Duration::from_millis(600));
    }
    stalled.faults.clear();
    in_time(
        &clock,
        LONG,
        "the first one sees that it was followed",
        || stalled.stat("storage_collector") == 0,
    );
    assert_eq!(next.stat("storage_collector"), 1);
}

#[test]
fn a_writer_whose_grant_is_spent_refuses_and_does_not_hang() {
    let (dir, fixture) = (directory(), small(512));
    let clock = ManualClock::new();
    let collector = on(&clock, dir.path(), &fixture);
    let writer = on(&clock, dir.path(), &fixture);
    let all: Vec<_> = (0..=255).map(id).collect();
    let device = Device::filled(&fixture, &all);
    eventually("it was granted something", || {
        attempt(&writer, &clock, &device, all[0]).is_ok()
    });
    // The collector stands still: nothing is granted, and no other follows it yet.
    collector.fault(Rule::on(OpKind::List, Fault::Errno(5)).path("/space"));
    let refused = |&(_, &block): &(usize, &BlockId)| match attempt(&writer, &clock, &device, block)
    {
        Ok(()) => false,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
            true
        }
    };
    let written = all.iter().enumerate().find(refused).unwrap().0;
    assert!(
        (1..=32).contains(&written),
        "a sixteenth of the limit at most: {written}"
    );
    assert_eq!(writer.stat("storage_collector"), 0);
}

#[test]
fn what_a_silent_writer_was_granted_is_free_again_and_it_comes_back_as_another() {
    only_over!(
        Files,
        "it removes the file of a block to have it stored again"
    );
    let (dir, fixture) = (directory(), small(64));
    let clock = ManualClock::new();
    let collector = on(&clock, dir.path(), &fixture);
    let silent = on(&clock, dir.path(), &elsewhere(&fixture));
    let device = Device::filled(&fixture, &ids(3));
    eventually("it was granted something", || {
        clock.advance(Duration::from_millis(100));
        attempt(&silent, &clock, &device, id(0)).is_ok()
    });
    let writers = || {
        let grants = documents(dir.path(), "grants");
        let last = grants.last().cloned().unwrap_or_default();
        last["writers"]
            .as_object()
            .map_or(0, |writers| writers.len())
    };
    assert_eq!(writers(), 2);
    silent.fault(Rule::on(OpKind::List, Fault::Errno(5)).path("/space"));
    // The collector goes on, and forgets it after ten minutes and a count.
    eventually("it is forgotten", || {
        clock.advance(Duration::from_secs(10));
        let _ = attempt(&collector, &clock, &device, id(1));
        std::fs::remove_file(collector.file(id(1))).is_ok() && writers() == 1
    });
    let refused = attempt(&silent, &clock, &device, id(2));
    assert!(
        refused.is_err(),
        "its own clock says that the grant is void"
    );
    silent.faults.clear();
    eventually("it is another one now", || {
        clock.advance(Duration::from_millis(200));
        attempt(&silent, &clock, &device, id(2)).is_ok()
    });
    assert!(writers() >= 2);
}

#[test]
fn an_emptied_directory_is_made_again() {
    let (dir, fixture) = (directory(), small(64));
    let first = Store::open(dir.path(), fixture.clone());
    let second = Store::open(dir.path(), fixture.clone());
    eventually("it is emptied, though they write into it", || {
        std::fs::remove_dir_all(dir.path().join("space")).is_ok()
    });
    let all = [&first, &second];
    eventually("one is collector", || {
        collectors(&all) == 1 && documents(dir.path(), "grants").len() == 1
    });
    let device = Device::filled(&fixture, &ids(2));
    eventually("both write", || {
        first.dump(&device, &[id(0)]).is_ok() && second.dump(&device, &[id(1)]).is_ok()
    });
}

/// One thing that happens to a root with several writers.
#[derive(Debug, Clone)]
enum Act {
    Dump(u8, Vec<u8>),
    Close(u8),
    Stall(u8),
    Wake(u8),
    Pass(u16),
}

fn act() -> impl Strategy<Value = Act> {
    let who = 0..3u8;
    prop_oneof![
        8 => (who.clone(), prop::collection::vec(any::<u8>(), 1..8)).prop_map(|(w, ns)| Act::Dump(w, ns)),
        1 => who.clone().prop_map(Act::Close),
        1 => who.clone().prop_map(Act::Stall),
        1 => who.prop_map(Act::Wake),
        2 => (100..30_000u16).prop_map(Act::Pass),
    ]
}

/// Cases of a property: few, as every one opens stores; `PROPTEST_CASES` sets more.
fn cases() -> u32 {
    let asked = std::env::var("PROPTEST_CASES");
    asked
        .ok()
        .and_then(|cases| cases.parse().ok())
        .unwrap_or(12)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_the_limit_holds(acts in prop::collection::vec(act(), 1..40)) {
        let (dir, fixture) = (directory(), small(24));
        let clock = ManualClock::new();
        let process = |n: u8| Process { host: format!("host {n}"), ..Process::this() };
        let open = |n: u8| Store::with_clock_now(
            dir.path(),
            Fixture { process: process(n), ..fixture.clone() },
            Arc::clone(&clock) as Arc<dyn Clock>,
        );
        let mut stores: Vec<Store> = (0..3).map(open).collect();
        for act in &acts {
            match act {
                Act::Dump(who, ns) => {
                    let store = &stores[usize::from(*who)];
                    for &n in ns {
                        let device = Device::filled(&fixture, &[id(n)]);
                        let _ = attempt(store, &clock, &device, id(n));
                        let bytes = stored(dir.path());
                        prop_assert!(bytes <= 24 * RECORD, "{bytes}");
                    }
                }
                Act::Close(who) => {
                    let last = stores.remove(usize::from(*who));
                    drop(last);
                    stores.insert(usize::from(*who), open(*who));
                }
                Act::Stall(who) => {
                    stores[usize::from(*who)].fault(Rule::on(OpKind::Publish, Fault::Errno(5)).path("/space/"));
                }
                Act::Wake(who) => stores[usize::from(*who)].faults.clear(),
                Act::Pass(ms) => clock.advance(Duration::from_millis(u64::from(*ms))),
            }
            prop_assert!(stored(dir.path()) <= 24 * RECORD);
        }
    }
}
