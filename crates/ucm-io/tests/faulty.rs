//! The fault-injecting engine: each fault has its documented effect, and operations still end
//! exactly once.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use ucm_core::{ErrorKind, Result};
use ucm_infra::{Clock, MonotonicTime};
use ucm_io::{FileMeta, IoJob, PsyncEngine, ReadMode};
use ucm_testkit::{Fault, FaultyEngine, Gate, OpKind, Rule, RuleId, Tail, errno};

struct Bench {
    place: tempfile::TempDir,
    engine: Arc<FaultyEngine>,
    io: IoJob,
}

impl Bench {
    fn seeded(seed: u64) -> Self {
        let engine = FaultyEngine::new(PsyncEngine::new(false), seed);
        Self {
            place: tempfile::tempdir().unwrap(),
            io: IoJob::alone(Arc::clone(&engine) as _),
            engine,
        }
    }

    fn new() -> Self {
        Self::seeded(1)
    }

    fn dir(&self) -> &Path {
        self.place.path()
    }

    fn rule(&self, kind: OpKind, fault: Fault) -> RuleId {
        self.engine.add(Rule::on(kind, fault).times(1))
    }

    /// Publishes "block" with a pattern through the faults; returns the bytes.
    fn publish(&self) -> (Vec<u8>, Result<Option<FileMeta>>) {
        let bytes = pattern(100, 5);
        let result = try_publish(&self.io, self.dir(), "block", &bytes);
        (bytes, result)
    }

    fn read(&self) -> Result<(Vec<u8>, u64)> {
        read(&self.io, &self.dir().join("block"), 0, 100)
    }

    fn exists(&self, name: &str) -> bool {
        self.io.look(self.dir().join(name)).unwrap().is_some()
    }
}

#[test]
fn without_rules_it_only_looks_on() {
    let bench = Bench::new();
    let (bytes, result) = bench.publish();
    result.unwrap();
    assert_eq!(bench.read().unwrap(), (bytes, 100));
    assert_eq!(
        (
            bench.engine.count(OpKind::Publish),
            bench.engine.count(OpKind::Stat)
        ),
        (1, 0)
    );
    let log = bench.engine.log();
    assert_eq!((log[1].kind, log[1].fault), (OpKind::Read, None));
    assert_eq!(log[0].paths, [bench.dir().join("block")]);
    bench.engine.forget();
    assert_eq!(
        (bench.engine.log().len(), bench.engine.count(OpKind::Read)),
        (0, 0)
    );
}

#[test]
fn every_kind_is_counted_as_itself() {
    for (i, kind) in OpKind::ALL.into_iter().enumerate() {
        assert_eq!(kind as usize, i);
    }
    let bench = Bench::new();
    bench.io.stat(&[], false).unwrap();
    for kind in OpKind::ALL {
        assert_eq!(
            bench.engine.count(kind),
            u64::from(kind == OpKind::Stat),
            "{}",
            kind.name()
        );
    }
}

#[test]
fn error_numbers_arrive_as_their_kinds_and_nothing_is_done() {
    for (code, expected) in [
        (errno::ENOSPC, ErrorKind::NoSpace),
        (errno::EDQUOT, ErrorKind::NoSpace),
        (errno::EIO, ErrorKind::Io),
        (errno::ETIMEDOUT, ErrorKind::Timeout),
    ] {
        let bench = Bench::new();
        let rule = bench.rule(OpKind::Publish, Fault::Errno(code));
        let error = bench.publish().1.unwrap_err();
        assert_eq!((error.kind(), error.os_code()), (expected, Some(code)));
        assert_eq!(bench.engine.hits(rule), 1);
        assert!(names(bench.dir()).is_empty());
        // Only once, by the rule.
        bench.publish().1.unwrap();
    }
}

#[test]
fn stale_handles_and_busy_lanes() {
    let bench = Bench::new();
    bench.publish().1.unwrap();
    bench.rule(OpKind::Read, Fault::stale());
    assert_eq!(bench.read().unwrap_err().kind(), ErrorKind::NotFound);
    bench.read().unwrap();
    bench.rule(OpKind::Read, Fault::Busy);
    assert_eq!(bench.read().unwrap_err().kind(), ErrorKind::Busy);
    bench.read().unwrap();
}

#[test]
fn a_lost_reply_reports_failure_of_what_was_done() {
    let bench = Bench::new();
    bench.rule(OpKind::Publish, Fault::LostReply(errno::EIO));
    let (bytes, result) = bench.publish();
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(bench.read().unwrap().0, bytes);
}

#[test]
fn a_short_read_contradicts_the_length() {
    let bench = Bench::new();
    let (bytes, _) = bench.publish();
    bench.rule(OpKind::Read, Fault::ShortRead(30));
    assert_eq!(bench.read().unwrap(), (bytes[..30].to_vec(), 100));
}

#[test]
fn torn_writes_succeed_and_are_not_whole() {
    for (tail, len) in [(Tail::Zeros, 100), (Tail::Cut, 60)] {
        let bench = Bench::new();
        bench.rule(OpKind::Publish, Fault::Torn { keep: 60, tail });
        let (bytes, result) = bench.publish();
        // The writer's result does not show the damage.
        assert_eq!(result.unwrap().unwrap().len, 100);
        let (got, file_len) = bench.read().unwrap();
        assert_eq!((got.len() as u64, file_len), (len, len));
        assert_eq!(got[..60], bytes[..60]);
        assert!(got[60..].iter().all(|&byte| byte == 0));
    }
}

#[test]
fn a_killed_writer_leaves_its_private_file() {
    let bench = Bench::new();
    bench.rule(OpKind::Publish, Fault::Killed { keep: 10 });
    let (bytes, result) = bench.publish();
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(names(bench.dir()), [".block.private"]);
    assert_eq!(
        std::fs::read(bench.dir().join(".block.private")).unwrap(),
        bytes[..10]
    );
}

#[test]
fn flips_change_exactly_what_they_name() {
    let differences =
        |a: &[u8], b: &[u8]| -> Vec<usize> { (0..a.len()).filter(|&i| a[i] != b[i]).collect() };
    let bench = Bench::new();
    // On the way in.
    let (bytes, _) = bench.publish();
    bench.rule(OpKind::Read, Fault::Flip(vec![0, 99, 100, 5000]));
    assert_eq!(differences(&bench.read().unwrap().0, &bytes), [0, 99]);
    assert_eq!(bench.read().unwrap().0, bytes);
    bench.rule(OpKind::Read, Fault::FlipRandom(7));
    let damaged = differences(&bench.read().unwrap().0, &bytes);
    assert_eq!(damaged.len(), 7);
    // On the medium.
    bench.rule(OpKind::Publish, Fault::Flip(vec![50]));
    bench.publish().1.unwrap();
    assert_eq!(differences(&bench.read().unwrap().0, &bytes), [50]);
    bench.rule(OpKind::Publish, Fault::FlipRandom(1000));
    bench.publish().1.unwrap();
    assert_eq!(differences(&bench.read().unwrap().0, &bytes).len(), 100);
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    let story = |seed| {
        let bench = Bench::seeded(seed);
        bench
            .engine
            .add(Rule::on(OpKind::Publish, Fault::Errno(errno::EIO)).chance(300));
        bench
            .engine
            .add(Rule::on(OpKind::Read, Fault::FlipRandom(3)).chance(500));
        let outcomes: Vec<_> = (0..40)
            .map(|_| {
                let published = bench.publish().1.map(|_| ()).map_err(|e| e.kind());
                (published, bench.read().map_err(|e| e.kind()))
            })
            .collect();
        let faults: Vec<_> = bench
            .engine
            .log()
            .into_iter()
            .map(|seen| seen.fault)
            .collect();
        (outcomes, faults)
    };
    let first = story(11);
    assert_eq!(first, story(11));
    assert_ne!(first, story(12));
    for fault in [None, Some("errno"), Some("flip_random")] {
        assert!(first.1.contains(&fault));
    }
}

#[test]
fn a_late_file_is_not_seen_until_it_is() {
    let bench = Bench::new();
    bench.rule(OpKind::Publish, Fault::LateVisible(4));
    bench.publish().1.unwrap();
    publish(&bench.io, bench.dir(), "other", &[1]);
    let path = |name: &str| bench.dir().join(name);
    assert!(!bench.exists("block") && bench.exists("other"));
    assert_eq!(bench.read().unwrap_err().kind(), ErrorKind::NotFound);
    // A stat that stops at the first missing name stops there.
    let paths = [path("other"), path("block"), path("other")];
    let found = bench.io.stat(&paths, true).unwrap();
    assert_eq!(
        found.iter().map(Option::is_some).collect::<Vec<_>>(),
        [true, false]
    );
    let listed = || bench.io.list(bench.dir()).unwrap().len();
    assert_eq!(listed(), 1);
    // Four looks are over.
    assert_eq!(listed(), 2);
    bench.read().unwrap();
    bench.rule(OpKind::Publish, Fault::LateVisible(u64::MAX));
    bench.publish().1.unwrap();
    for _ in 0..10 {
        assert!(!bench.exists("block"));
    }
    bench.engine.reveal();
    assert!(bench.exists("block"));
}

#[test]
fn a_replayed_call_answers_as_the_second_one() {
    let bench = Bench::new();
    bench.engine.add(Rule::always(Fault::Replay));
    let (bytes, result) = bench.publish();
    assert_eq!(result.unwrap().unwrap().len, 100);
    assert_eq!(bench.read().unwrap().0, bytes);
    assert_eq!(names(bench.dir()), ["block"]);
    // Removed by the first call, missing for the second; likewise an existing directory.
    let removed = bench.io.remove(&[bench.dir().join("block")]).unwrap();
    assert!(!removed[0].as_ref().unwrap());
    assert!(!bench.io.make_dir(&bench.dir().join("d"), 0o700).unwrap());
}

#[test]
fn a_hung_operation_is_written_off_and_its_slot_comes_back_with_the_call() {
    let bench = Bench::new();
    let (pool, clock) = clocked(Arc::clone(&bench.engine) as _, 4);
    let gate = Gate::new();
    bench.rule(OpKind::Publish, Fault::HangBefore(gate.clone()));
    let slots = slots(2, 4096);
    let deadline = clock.now().after(Duration::from_secs(30));
    let hung = start_publish(&pool, 2, deadline, bench.dir(), "block", filled(&slots, 1));
    gate.await_waiting(1);
    clock.advance(Duration::from_secs(29));
    // Other operations pass in the meantime.
    let other = start_publish(
        &pool,
        2,
        MonotonicTime::NEVER,
        bench.dir(),
        "other",
        filled(&slots, 2),
    );
    other.recv().unwrap().unwrap();
    assert!(hung.try_recv().is_err());
    clock.advance(Duration::from_secs(1));
    assert_eq!(fails(hung.recv().unwrap()), ErrorKind::Timeout);
    // Reported, and its slot still belongs to the call that has not returned.
    assert_eq!((slots.out(), pool.stuck()), (1, 1));
    gate.open();
    eventually(|| slots.out() == 0 && pool.stuck() == 0);
    assert_eq!(names(bench.dir()), ["other"]);
    assert!(hung.recv().is_err(), "reported once only");
}

#[test]
fn a_gate_opened_in_time_only_delays() {
    let bench = Bench::new();
    let (pool, _) = clocked(Arc::clone(&bench.engine) as _, 4);
    let slots = slots(1, 4096);
    for (fault, salt) in [
        (Fault::HangBefore as fn(Gate) -> Fault, 1),
        (Fault::HangAfter, 2),
    ] {
        let gate = Gate::new();
        bench.rule(OpKind::Publish, fault(gate.clone()));
        let answer = start_publish(
            &pool,
            2,
            MonotonicTime(1),
            bench.dir(),
            "block",
            filled(&slots, salt),
        );
        gate.await_waiting(1);
        assert!(answer.try_recv().is_err());
        gate.open();
        answer.recv().unwrap().unwrap();
        assert_eq!(bench.read().unwrap(), (pattern(100, salt), 4096));
    }
    assert_eq!(pool.stuck(), 0);
}

#[test]
fn a_call_that_hangs_after_its_work_reports_a_failure_of_what_is_there() {
    let bench = Bench::new();
    let (pool, clock) = clocked(Arc::clone(&bench.engine) as _, 4);
    let gate = Gate::new();
    bench.rule(OpKind::Publish, Fault::HangAfter(gate.clone()));
    let slots = slots(1, 4096);
    let hung = start_publish(
        &pool,
        2,
        MonotonicTime(5),
        bench.dir(),
        "block",
        filled(&slots, 1),
    );
    gate.await_waiting(1);
    clock.advance(Duration::from_nanos(5));
    assert_eq!(fails(hung.recv().unwrap()), ErrorKind::Timeout);
    assert!(bench.exists("block"));
    assert_eq!(slots.out(), 1);
    gate.open();
    eventually(|| slots.out() == 0);
}

#[test]
fn shutdown_leaves_what_hangs_behind() {
    let bench = Bench::new();
    let (pool, _) = clocked(Arc::clone(&bench.engine) as _, 4);
    let gate = Gate::new();
    bench.rule(OpKind::Read, Fault::HangBefore(gate.clone()));
    let slots = slots(1, 4096);
    let (path, mut slot) = (bench.dir().join("block"), slots.try_acquire().unwrap());
    let hung = start(&pool, 0, MonotonicTime::NEVER, move |io| {
        io.read(&path, 0, 10, slot.as_mut_slice(), ReadMode::Default)
    });
    gate.await_waiting(1);
    pool.shutdown(Duration::ZERO);
    assert_eq!(fails(hung.recv().unwrap()), ErrorKind::Closed);
    assert_eq!(
        fails(pool.call(0, MonotonicTime::NEVER, |_| Ok(()))),
        ErrorKind::Closed
    );
    assert_eq!(slots.out(), 1);
    gate.open();
    eventually(|| slots.out() == 0);
}

#[test]
fn rules_can_be_taken_back() {
    let bench = Bench::new();
    bench.engine.add(Rule::always(Fault::Busy));
    assert_eq!(bench.read().unwrap_err().kind(), ErrorKind::Busy);
    bench.engine.clear();
    bench.publish().1.unwrap();
}

#[test]
fn a_job_that_no_one_waits_for_any_more_does_nothing_more() {
    let bench = Bench::new();
    let gate = Gate::new();
    bench.rule(OpKind::Space, Fault::HangAfter(gate.clone()));
    let (pool, clock) = clocked(Arc::clone(&bench.engine) as _, 2);
    let (dir, deadline) = (
        bench.dir().to_owned(),
        clock.now().after(Duration::from_secs(5)),
    );
    let (send, late) = std::sync::mpsc::channel();
    let hung = start(&pool, 2, deadline, move |io| {
        let space = io.space(&dir).is_ok();
        send.send((
            space,
            fails(try_publish(io, &dir, "block", &[1])),
            io.is_wanted(),
        ))
        .unwrap();
        Ok(())
    });
    gate.await_waiting(1);
    clock.advance(Duration::from_secs(5));
    assert_eq!(fails(hung.recv().unwrap()), ErrorKind::Timeout);
    gate.open();
    assert_eq!(late.recv().unwrap(), (true, ErrorKind::Timeout, false));
    assert_eq!(bench.engine.count(OpKind::Publish), 0, "not even tried");
    assert!(names(bench.dir()).is_empty());
}
