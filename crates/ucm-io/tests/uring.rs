//! The ring's own matters: that it sleeps, what it registers, its queues, refusal, its end under load.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use common::engines::ring_or_skip;
use common::fuse::{Fuse, Manners, op};
use common::*;
use parking_lot::Mutex;
use ucm_core::ErrorKind;
use ucm_infra::{Clock, Lane, ManualClock, Mono};
use ucm_io::{ChosenEngine, IoChoice, IoDone, IoEngine, IoOp, PsyncOptions, UringEngine, UringOptions};

fn engine(direct: bool) -> Arc<UringEngine> {
    let psync = PsyncOptions {
        direct,
        ..PsyncOptions::with_workers(2)
    };
    UringEngine::new(&UringOptions::beside(psync)).unwrap()
}

fn probe(engine: &dyn IoEngine, dir: &Path) -> ucm_io::Probe {
    match call(engine, IoOp::Probe { dir: dir.into() }).unwrap() {
        IoDone::Probe(found) => found,
        other => unreachable!("{other:?}"),
    }
}

#[test]
fn an_idle_ring_sleeps() {
    if !ring_or_skip("an_idle_ring_sleeps") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let engine = engine(false);
    publish(&*engine, place.path(), "a", vec![1; 100]);
    for _ in 0..10 {
        read(&*engine, place.path().join("a"), 0, 100).unwrap();
    }
    let after = engine.stats();
    // Each operation wakes it a few times (orders, answers, a place that is free again), not more.
    assert!(after.wakeups <= 8 * 11, "{after:?}");
    // The pool works on, and nobody looks after the ring.
    for _ in 0..1000 {
        stat(&*engine, &[place.path().join("a")], false);
    }
    let later = engine.stats();
    // A last wake-up of the operations before may have been on its way.
    assert!(later.wakeups <= after.wakeups + 2, "{after:?} {later:?}");
    assert_eq!(later.calls, after.calls);
}

#[test]
fn direct_io_uses_registered_memory_and_buffered_io_does_not() {
    if !ring_or_skip("direct_io_uses_registered_memory_and_buffered_io_does_not") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    for direct in [false, true] {
        let engine = engine(direct);
        let works = direct && probe(&*engine, place.path()).direct.is_some();
        // Two pools, the second after the first is gone: its number in the kernel is given anew.
        for round in 0..2 {
            let pool = slots(4, 8192);
            let registered = engine.stats().registered;
            let kept = filled(&pool, round);
            let expected = kept.as_slice().to_vec();
            publish(&*engine, place.path(), "block", kept);
            let held: Vec<_> = (0..3).map(|_| pool.try_acquire().unwrap()).collect();
            for slot in held {
                let op = read_op(place.path().join("block"), 0, 8192, slot);
                let (got, _) = bytes_of(call(&*engine, op).unwrap()).unwrap();
                assert!(got == expected, "{direct} {round}");
            }
            let now = engine.stats().registered - registered;
            // All or nothing: an unprivileged process may be allowed too little.
            assert!(now == 0 || (works && now == 4 * 8192), "{direct} {round} {now}");
        }
    }
}

#[test]
fn many_threads_submit_and_each_hears_once() {
    if !ring_or_skip("many_threads_submit_and_each_hears_once") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let engine = engine(false);
    let heard = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..8_u8 {
            let (engine, place, heard) = (&engine, &place, &heard);
            scope.spawn(move || {
                for number in 0..20_u8 {
                    let name = format!("{thread}-{number}");
                    let mut bytes = vec![0; 5000];
                    pattern(&mut bytes, thread ^ number);
                    publish(&**engine, place.path(), &name, bytes.clone());
                    let got = read(&**engine, place.path().join(&name), 0, 5000).unwrap();
                    assert_eq!(got, (bytes, 5000));
                    heard.fetch_add(2, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(heard.load(Ordering::Relaxed), 8 * 20 * 2);
    assert_eq!(names(place.path()).len(), 160);
    let stats = engine.stats();
    assert_eq!((stats.stuck, stats.callback_panics), (0, 0));
    eventually(|| engine.stats().lanes.iter().all(|&lane| lane == (0, 0)));
}

/// A ring of one lane in which one operation runs and `capacity` wait, on a clock that stands still.
fn narrow(capacity: usize, spare: usize) -> (Arc<UringEngine>, Arc<ManualClock>) {
    let clock = ManualClock::new();
    let psync = PsyncOptions {
        clock: Arc::clone(&clock) as Arc<dyn Clock>,
        ..PsyncOptions::with_workers(2)
    };
    let lane = |lane: &Lane| Lane {
        capacity,
        max_running: 1,
        ..*lane
    };
    let options = UringOptions {
        lanes: psync.lanes.iter().map(lane).collect(),
        spare,
        ..UringOptions::beside(psync)
    };
    (UringEngine::new(&options).unwrap(), clock)
}

#[test]
fn what_hangs_is_given_up_and_its_place_comes_back_with_the_call() {
    let test = "what_hangs_is_given_up_and_its_place_comes_back_with_the_call";
    let manners = Manners {
        stall: op::CREATE,
        ..Manners::default()
    };
    let Some(mount) = or_skip(test, Fuse::mount(manners)) else {
        return;
    };
    if !ring_or_skip(test) {
        return;
    }
    // Room for one that was given up; four lanes of one make four more.
    let (engine, clock) = narrow(2, 1);
    let pool = slots(8, 4096);
    let deadline = clock.now().after(Duration::from_secs(30));
    let begin = |number: u8| {
        let op = publish_op(mount.dir(), &format!("{number}"), filled(&pool, number));
        start(&*engine, 2, deadline, op)
    };
    let first = begin(0);
    mount.await_stalled();
    let (second, third, refused) = (begin(1), begin(2), begin(3));
    assert_eq!(refused.recv().unwrap().unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(engine.stats().lanes[2], (2, 1));
    clock.advance(Duration::from_secs(30));
    for late in [first, second, third] {
        assert_eq!(late.recv().unwrap().unwrap_err().kind(), ErrorKind::Timeout);
    }
    // The one that the kernel has keeps its slot; those that waited gave theirs back.
    assert_eq!((engine.stuck(), pool.out()), (1, 1));
    assert_eq!(engine.stats().lanes[2], (0, 0));
    // Others go on, on another file system.
    let place = tempfile::tempdir().unwrap();
    publish(&*engine, place.path(), "other", vec![1; 100]);
    // Nothing waits for a stuck call. A worker that has just told an answer may count as stuck for a moment.
    engine.shutdown(Duration::ZERO);
    eventually(|| (engine.stuck(), pool.out()) == (1, 1));
    mount.release();
    eventually(|| engine.stuck() == 0 && pool.out() == 0);
    assert!(
        mount.files().is_empty(),
        "what came too late is removed, after the shutdown too"
    );
}

#[test]
fn a_shutdown_under_load_answers_everything_once_and_leaves_nothing_half_done() {
    if !ring_or_skip("a_shutdown_under_load_answers_everything_once_and_leaves_nothing_half_done") {
        return;
    }
    for drain in [Duration::ZERO, Duration::from_secs(60)] {
        let place = tempfile::tempdir().unwrap();
        let engine = engine(false);
        let pool = slots(64, 8192);
        let (send, answers) = mpsc::channel();
        for number in 0..64_u8 {
            let send = send.clone();
            let op = publish_op(place.path(), &format!("{number:02}"), filled(&pool, number));
            let done = move |result: ucm_core::Result<IoDone>| {
                send.send((number, result.map(|_| ()).map_err(|error| error.kind())))
                    .unwrap();
            };
            engine.submit(2, Mono::NEVER, op, Box::new(done));
        }
        drop(send);
        engine.shutdown(drain);
        let answers: Vec<_> = answers.iter().collect();
        let published: BTreeSet<String> = answers
            .iter()
            .filter(|(_, answer)| answer.is_ok())
            .map(|(number, _)| format!("{number:02}"))
            .collect();
        assert_eq!(answers.len(), 64);
        assert!(
            answers
                .iter()
                .all(|(_, answer)| matches!(answer, Ok(()) | Err(ErrorKind::Closed)))
        );
        if drain > Duration::ZERO {
            assert_eq!(published.len(), 64, "there was time for all");
        }
        eventually(|| engine.stuck() == 0 && pool.out() == 0);
        let left: BTreeSet<String> = names(place.path()).into_iter().collect();
        // One whose rename was under way when its answer was given may be there all the same, and is whole.
        assert!(
            published.is_subset(&left) && left.iter().all(|name| !name.starts_with('.')),
            "{left:?}"
        );
        let op = publish_op(place.path(), "late", vec![1]);
        assert_eq!(fails(&*engine, op), ErrorKind::Closed);
    }
}

#[test]
fn a_panic_in_a_callback_stops_nobody() {
    if !ring_or_skip("a_panic_in_a_callback_stops_nobody") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("a"), b"x").unwrap();
    let engine = engine(false);
    let op = read_op(place.path().join("a"), 0, 1, vec![0; 1]);
    engine.submit(
        0,
        Mono::NEVER,
        op,
        Box::new(|_| std::panic::resume_unwind(Box::new("ours"))),
    );
    eventually(|| engine.stats().callback_panics == 1);
    assert_eq!(read(&*engine, place.path().join("a"), 0, 1).unwrap().0, b"x");
    eventually(|| engine.stats().lanes[0] == (0, 0));
}

#[test]
fn loads_find_a_worker_whatever_dumps_and_space_hold_up() {
    if !ring_or_skip("loads_find_a_worker_whatever_dumps_and_space_hold_up") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("a"), b"x").unwrap();
    // Of four workers dumps may have two and space one.
    let options = UringOptions::beside(PsyncOptions::with_workers(4));
    let engine = UringEngine::new(&options).unwrap();
    let (busy, held) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(())));
    let hold = held.lock();
    for lane in [2, 3] {
        for number in 0..8 {
            // One that the ring runs, whose end is the pool's, and one that the pool runs whole.
            let ours = publish_op(place.path(), &format!("{lane}-{number}"), vec![1]);
            let whole = IoOp::List {
                dir: place.path().to_owned(),
            };
            for op in [ours, whole] {
                let (busy, held) = (Arc::clone(&busy), Arc::clone(&held));
                let done = move |_: ucm_core::Result<IoDone>| {
                    busy.fetch_add(1, Ordering::Relaxed);
                    drop(held.lock());
                };
                engine.submit(lane, Mono::NEVER, op, Box::new(done));
            }
        }
    }
    eventually(|| busy.load(Ordering::Relaxed) == 3);
    for _ in 0..50 {
        assert_eq!(read(&*engine, place.path().join("a"), 0, 1).unwrap().0, b"x");
    }
    assert_eq!(busy.load(Ordering::Relaxed), 3);
    drop(hold);
    eventually(|| busy.load(Ordering::Relaxed) == 32);
}

fn chosen(choice: IoChoice, direct: bool, refused: Option<i32>) -> Arc<ChosenEngine> {
    let psync = PsyncOptions {
        direct,
        ..PsyncOptions::with_workers(2)
    };
    let options = UringOptions {
        refused,
        ..UringOptions::beside(psync)
    };
    ChosenEngine::with(choice, options).unwrap()
}

#[test]
fn a_refused_ring_is_the_thread_pool_with_one_warning() {
    let place = tempfile::tempdir().unwrap();
    for code in [libc::EPERM, libc::ENOSYS] {
        let engine = chosen(IoChoice::Uring, false, Some(code));
        assert_eq!(engine.warning(), None, "nothing is known yet");
        for _ in 0..2 {
            probe(&*engine, place.path());
        }
        assert_eq!(engine.name(), "psync");
        let said = engine.warning().unwrap();
        assert!(said.contains("refuses io_uring"), "{said}");
        assert_eq!(engine.warning(), None, "said once");
        publish(&*engine, place.path(), "a", vec![1; 10]);
        assert_eq!(read(&*engine, place.path().join("a"), 0, 10).unwrap().0, [1; 10]);
        // Nobody asked for it by name: no warning.
        let auto = chosen(IoChoice::Auto, true, Some(code));
        probe(&*auto, place.path());
        assert_eq!((auto.name(), auto.warning()), ("psync", None));
        assert_eq!(
            UringEngine::new(&UringOptions {
                refused: Some(code),
                ..UringOptions::beside(PsyncOptions::with_workers(1))
            })
            .err()
            .and_then(|error| error.os_code()),
            Some(code)
        );
    }
}

#[test]
fn the_engine_is_chosen_by_what_was_asked_and_found() {
    if !ring_or_skip("the_engine_is_chosen_by_what_was_asked_and_found") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let found = probe(&*chosen(IoChoice::Psync, false, None), place.path());
    let local = !found.fs.maybe_shared();
    for (choice, direct, ring) in [
        (IoChoice::Psync, true, false),
        (IoChoice::Auto, false, false),
        (IoChoice::Auto, true, local && found.direct.is_some()),
        (IoChoice::Uring, false, local),
        (IoChoice::Uring, true, local),
    ] {
        let engine = chosen(choice, direct, None);
        assert_eq!(engine.name(), "psync", "before the probe");
        publish(&*engine, place.path(), "a", vec![1; 10]);
        probe(&*engine, place.path());
        let name = if ring { "io_uring" } else { "psync" };
        assert_eq!(engine.name(), name, "{choice:?} {direct}");
        assert!(
            engine.describe().starts_with(&format!("{name} engine (")),
            "{}",
            engine.describe()
        );
        assert_eq!(read(&*engine, place.path().join("a"), 0, 10).unwrap().0, [1; 10]);
        let calls = engine.ring().map_or(0, |ring| ring.stats().calls);
        assert_eq!(calls > 0, ring, "who did it");
        engine.shutdown(Duration::from_secs(60));
        assert_eq!(fails(&*engine, stat_op(&[], false)), ErrorKind::Closed);
    }
    assert!(IoChoice::from_name("mmap").is_err());
}

#[test]
fn a_mount_that_is_not_local_gets_the_thread_pool() {
    let test = "a_mount_that_is_not_local_gets_the_thread_pool";
    let Some(mount) = or_skip(test, Fuse::mount(Manners::default())) else {
        return;
    };
    let engine = chosen(IoChoice::Uring, true, None);
    probe(&*engine, mount.dir());
    assert_eq!(engine.name(), "psync");
    let said = engine.warning().unwrap();
    assert!(said.contains("fuse"), "{said}");
}
