//! The fault-injecting engine: each fault does what it says, and its operations still end exactly once.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use ucm_core::ErrorKind;
use ucm_infra::{Clock, ManualClock, Mono};
use ucm_io::{
    Fault, FaultyEngine, Gate, IoDone, IoOp, IoOptions, IoPool, OpKind, PsyncEngine, Rule, Tail, errno,
};

struct Bench {
    place: tempfile::TempDir,
    clock: Arc<ManualClock>,
    engine: Arc<FaultyEngine>,
    pool: Arc<IoPool>,
}

impl Bench {
    fn seeded(seed: u64) -> Self {
        let clock = ManualClock::new();
        let engine = FaultyEngine::new(PsyncEngine::new(false), seed);
        let options = IoOptions {
            clock: Arc::clone(&clock) as Arc<dyn Clock>,
            ..IoOptions::with_workers(4)
        };
        Self {
            place: tempfile::tempdir().unwrap(),
            clock,
            pool: IoPool::new(Arc::clone(&engine) as _, &options).unwrap(),
            engine,
        }
    }

    fn new() -> Self {
        Self::seeded(1)
    }

    fn dir(&self) -> &Path {
        self.place.path()
    }

    fn rule(&self, kind: OpKind, fault: Fault) -> ucm_io::RuleId {
        self.engine.add(Rule::on(kind, fault).times(1))
    }

    /// Publishes "block" with a pattern through the faults; returns the bytes.
    fn publish(&self) -> (Vec<u8>, ucm_core::Result<IoDone>) {
        let mut bytes = vec![0; 100];
        pattern(&mut bytes, 5);
        let result = call(&self.pool, publish_op(self.dir(), "block", bytes.clone()));
        (bytes, result)
    }

    fn read(&self) -> ucm_core::Result<(Vec<u8>, u64)> {
        read(&self.pool, self.dir().join("block"), 0, 100)
    }

    fn exists(&self, name: &str) -> bool {
        stat(&self.pool, &[self.dir().join(name)], false)[0].is_some()
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
    assert_eq!(bench.pool.stuck(), 0);
}

#[test]
fn every_kind_is_counted_as_itself() {
    for (i, kind) in OpKind::ALL.into_iter().enumerate() {
        assert_eq!(kind as usize, i);
    }
    let bench = Bench::new();
    call(&bench.pool, stat_op(&[], false)).unwrap();
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
        // Only once, as the rule says.
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
        let IoDone::Published { buf, meta } = result.unwrap() else {
            unreachable!();
        };
        // The writer notices nothing: neither its buffer nor what it is told shows the damage.
        assert_eq!((&buf[..], meta.len), (&bytes[..], 100));
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
    let differences = |a: &[u8], b: &[u8]| -> Vec<usize> { (0..a.len()).filter(|&i| a[i] != b[i]).collect() };
    let bench = Bench::new();
    // On the way in.
    let (bytes, _) = bench.publish();
    bench.rule(OpKind::Read, Fault::Flip(vec![0, 99, 100, 5000]));
    assert_eq!(differences(&bench.read().unwrap().0, &bytes), [0, 99]);
    assert_eq!(bench.read().unwrap().0, bytes);
    bench.rule(OpKind::Read, Fault::FlipRandom(7));
    let damaged = differences(&bench.read().unwrap().0, &bytes);
    assert_eq!(damaged.len(), 7);
    // On the medium; the writer's buffer is whole.
    bench.rule(OpKind::Publish, Fault::Flip(vec![50]));
    let (bytes, result) = bench.publish();
    let IoDone::Published { buf, .. } = result.unwrap() else {
        unreachable!();
    };
    assert_eq!(buf[..], bytes);
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
        let faults: Vec<_> = bench.engine.log().into_iter().map(|seen| seen.fault).collect();
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
    call(&bench.pool, publish_op(bench.dir(), "other", vec![1])).unwrap();
    let path = |name: &str| bench.dir().join(name);
    assert!(!bench.exists("block") && bench.exists("other"));
    assert_eq!(bench.read().unwrap_err().kind(), ErrorKind::NotFound);
    // A stat that stops at the first missing name stops there.
    let paths = [path("other"), path("block"), path("other")];
    let found = stat(&bench.pool, &paths, true);
    assert_eq!(
        found.iter().map(Option::is_some).collect::<Vec<_>>(),
        [true, false]
    );
    let listed = |bench: &Bench| {
        let op = IoOp::List {
            dir: bench.dir().to_path_buf(),
        };
        let IoDone::List(found) = call(&bench.pool, op).unwrap() else {
            unreachable!();
        };
        found.len()
    };
    assert_eq!(listed(&bench), 1);
    // Four looks are over.
    assert_eq!(listed(&bench), 2);
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
    let (path, dir) = (bench.dir().join("block"), bench.dir().join("d"));
    bench.engine.add(Rule::always(Fault::Replay));
    let (bytes, result) = bench.publish();
    let IoDone::Published { buf, .. } = result.unwrap() else {
        unreachable!();
    };
    assert_eq!(buf[..], bytes);
    assert_eq!(bench.read().unwrap().0, bytes);
    assert_eq!(names(bench.dir()), ["block"]);
    // Removed by the first, gone for the second; likewise a directory that is there already.
    let IoDone::Removed(done) = call(&bench.pool, IoOp::Remove { paths: vec![path] }).unwrap() else {
        unreachable!();
    };
    assert!(!done[0].as_ref().unwrap());
    let made = call(
        &bench.pool,
        IoOp::MakeDir {
            path: dir,
            mode: 0o700,
        },
    )
    .unwrap();
    assert!(matches!(made, IoDone::MadeDir(false)));
}

#[test]
fn a_hung_operation_is_written_off_and_its_slot_comes_back_with_the_call() {
    let bench = Bench::new();
    let gate = Gate::new();
    bench.rule(OpKind::Publish, Fault::HangBefore(gate.clone()));
    let pool = slots(2, 4096);
    let deadline = bench.clock.now().after(Duration::from_secs(30));
    let hung = start(
        &bench.pool,
        2,
        deadline,
        publish_op(bench.dir(), "block", filled(&pool, 1)),
    );
    gate.await_waiting(1);
    bench.clock.advance(Duration::from_secs(29));
    // Others pass meanwhile.
    let op = publish_op(bench.dir(), "other", filled(&pool, 2));
    start(&bench.pool, 2, Mono::NEVER, op).recv().unwrap().unwrap();
    assert!(hung.try_recv().is_err());
    bench.clock.advance(Duration::from_secs(1));
    assert_eq!(hung.recv().unwrap().unwrap_err().kind(), ErrorKind::Timeout);
    // Reported, and its slot still belongs to the call that has not returned.
    assert_eq!((pool.out(), bench.pool.stuck()), (1, 1));
    gate.open();
    eventually(|| pool.out() == 0 && bench.pool.stuck() == 0);
    assert_eq!(names(bench.dir()), ["other"]);
    assert!(hung.recv().is_err(), "told once only");
}

#[test]
fn a_gate_opened_in_time_only_delays() {
    let bench = Bench::new();
    for fault in [Fault::HangBefore as fn(Gate) -> Fault, Fault::HangAfter] {
        let gate = Gate::new();
        bench.rule(OpKind::Publish, fault(gate.clone()));
        let answer = start(
            &bench.pool,
            2,
            Mono(1),
            publish_op(bench.dir(), "block", vec![3; 100]),
        );
        gate.await_waiting(1);
        assert!(answer.try_recv().is_err());
        gate.open();
        answer.recv().unwrap().unwrap();
        assert_eq!(bench.read().unwrap().0, vec![3; 100]);
    }
    assert_eq!(bench.pool.stuck(), 0);
}

#[test]
fn a_call_that_hangs_after_its_work_reports_a_failure_of_what_is_there() {
    let bench = Bench::new();
    let gate = Gate::new();
    bench.rule(OpKind::Publish, Fault::HangAfter(gate.clone()));
    let pool = slots(1, 4096);
    let hung = start(
        &bench.pool,
        2,
        Mono(5),
        publish_op(bench.dir(), "block", filled(&pool, 1)),
    );
    gate.await_waiting(1);
    bench.clock.advance(Duration::from_nanos(5));
    assert_eq!(hung.recv().unwrap().unwrap_err().kind(), ErrorKind::Timeout);
    assert!(bench.exists("block"));
    assert_eq!(pool.out(), 1);
    gate.open();
    eventually(|| pool.out() == 0);
}

#[test]
fn shutdown_leaves_what_hangs_behind() {
    let bench = Bench::new();
    let gate = Gate::new();
    bench.rule(OpKind::Read, Fault::HangBefore(gate.clone()));
    let pool = slots(1, 4096);
    let op = read_op(bench.dir().join("block"), 0, 10, pool.try_acquire().unwrap());
    let hung = start(&bench.pool, 0, Mono::NEVER, op);
    gate.await_waiting(1);
    bench.pool.shutdown(Duration::ZERO);
    assert_eq!(hung.recv().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(bench.read().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(pool.out(), 1);
    gate.open();
    eventually(|| pool.out() == 0);
}

#[test]
fn rules_can_be_taken_back() {
    let bench = Bench::new();
    bench.engine.add(Rule::always(Fault::Busy));
    assert_eq!(bench.read().unwrap_err().kind(), ErrorKind::Busy);
    bench.engine.clear();
    bench.publish().1.unwrap();
}
