//! The fault-injecting engine: each fault does what it says, and its operations still end exactly once.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::engines::{Kind, UnderTest};
use common::*;
use ucm_core::ErrorKind;
use ucm_infra::{Clock, ManualClock, Mono};
use ucm_io::{Fault, FaultyEngine, Gate, IoDone, IoEngine, IoOp, OpKind, PsyncOptions, Rule, Tail, errno};

over_each_engine!(
    without_rules_it_only_looks_on,
    every_kind_is_counted_as_itself,
    error_numbers_arrive_as_their_kinds_and_nothing_is_done,
    stale_handles_and_busy_lanes,
    a_lost_reply_reports_failure_of_what_was_done,
    a_short_read_contradicts_the_length,
    torn_writes_succeed_and_are_not_whole,
    a_killed_writer_leaves_its_private_file,
    flips_change_exactly_what_they_name,
    the_same_seed_gives_the_same_faults,
    a_late_file_is_not_seen_until_it_is,
    a_replayed_call_answers_as_the_second_one,
    a_hung_operation_is_written_off_and_its_slot_comes_back_with_the_call,
    a_gate_opened_in_time_only_delays,
    a_call_that_hangs_after_its_work_reports_a_failure_of_what_is_there,
    shutdown_leaves_what_hangs_behind,
    rules_can_be_taken_back,
);

struct Bench {
    place: tempfile::TempDir,
    clock: Arc<ManualClock>,
    inner: Arc<dyn UnderTest>,
    engine: Arc<FaultyEngine>,
}

impl Bench {
    fn seeded(kind: Kind, seed: u64) -> Self {
        let clock = ManualClock::new();
        let inner = kind.build(PsyncOptions {
            clock: Arc::clone(&clock) as Arc<dyn Clock>,
            ..PsyncOptions::with_workers(2)
        });
        let engine = FaultyEngine::new(
            Arc::clone(&inner) as Arc<dyn IoEngine>,
            Arc::clone(&clock) as Arc<dyn Clock>,
            seed,
        );
        Self {
            place: tempfile::tempdir().unwrap(),
            clock,
            inner,
            engine,
        }
    }

    fn new(kind: Kind) -> Self {
        Self::seeded(kind, 1)
    }

    fn dir(&self) -> &Path {
        self.place.path()
    }

    fn rule(&self, kind: OpKind, fault: Fault) -> ucm_io::RuleId {
        self.engine.add(Rule::on(kind, fault).times(1)).unwrap()
    }

    /// Publishes "block" with a pattern through the faults; returns the bytes.
    fn publish(&self) -> (Vec<u8>, ucm_core::Result<IoDone>) {
        let mut bytes = vec![0; 100];
        pattern(&mut bytes, 5);
        let result = call(&*self.engine, publish_op(self.dir(), "block", bytes.clone()));
        (bytes, result)
    }

    fn read(&self) -> ucm_core::Result<(Vec<u8>, u64)> {
        read(&*self.engine, self.dir().join("block"), 0, 100)
    }

    fn exists(&self, name: &str) -> bool {
        stat(&*self.engine, &[self.dir().join(name)], false)[0].is_some()
    }
}

fn without_rules_it_only_looks_on(kind: Kind) {
    let bench = Bench::new(kind);
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
    assert_eq!((bench.engine.name(), bench.engine.stuck()), ("faulty", 0));
}

fn every_kind_is_counted_as_itself(kind: Kind) {
    for (i, kind) in OpKind::ALL.into_iter().enumerate() {
        assert_eq!(kind as usize, i);
    }
    let bench = Bench::new(kind);
    call(&*bench.engine, stat_op(&[], false)).unwrap();
    for kind in OpKind::ALL {
        assert_eq!(
            bench.engine.count(kind),
            u64::from(kind == OpKind::Stat),
            "{}",
            kind.name()
        );
    }
}

fn error_numbers_arrive_as_their_kinds_and_nothing_is_done(kind: Kind) {
    for (code, expected) in [
        (errno::ENOSPC, ErrorKind::NoSpace),
        (errno::EDQUOT, ErrorKind::NoSpace),
        (errno::EIO, ErrorKind::Io),
        (errno::ETIMEDOUT, ErrorKind::Timeout),
    ] {
        let bench = Bench::new(kind);
        let rule = bench.rule(OpKind::Publish, Fault::Errno(code));
        let error = bench.publish().1.unwrap_err();
        assert_eq!((error.kind(), error.os_code()), (expected, Some(code)));
        assert_eq!(bench.engine.hits(rule), 1);
        assert!(names(bench.dir()).is_empty());
        // Only once, as the rule says.
        bench.publish().1.unwrap();
    }
}

fn stale_handles_and_busy_lanes(kind: Kind) {
    let bench = Bench::new(kind);
    bench.publish().1.unwrap();
    bench.rule(OpKind::Read, Fault::stale());
    assert_eq!(bench.read().unwrap_err().kind(), ErrorKind::NotFound);
    bench.read().unwrap();
    bench.rule(OpKind::Read, Fault::Busy);
    assert_eq!(bench.read().unwrap_err().kind(), ErrorKind::Busy);
    bench.read().unwrap();
}

fn a_lost_reply_reports_failure_of_what_was_done(kind: Kind) {
    let bench = Bench::new(kind);
    bench.rule(OpKind::Publish, Fault::LostReply(errno::EIO));
    let (bytes, result) = bench.publish();
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(bench.read().unwrap().0, bytes);
}

fn a_short_read_contradicts_the_length(kind: Kind) {
    let bench = Bench::new(kind);
    let (bytes, _) = bench.publish();
    bench.rule(OpKind::Read, Fault::ShortRead(30));
    assert_eq!(bench.read().unwrap(), (bytes[..30].to_vec(), 100));
}

fn torn_writes_succeed_and_are_not_whole(kind: Kind) {
    for (tail, len) in [(Tail::Zeros, 100), (Tail::Cut, 60)] {
        let bench = Bench::new(kind);
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

fn a_killed_writer_leaves_its_private_file(kind: Kind) {
    let bench = Bench::new(kind);
    bench.rule(OpKind::Publish, Fault::Killed { keep: 10 });
    let (bytes, result) = bench.publish();
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(names(bench.dir()), [".block.private"]);
    assert_eq!(
        std::fs::read(bench.dir().join(".block.private")).unwrap(),
        bytes[..10]
    );
}

fn flips_change_exactly_what_they_name(kind: Kind) {
    let differences = |a: &[u8], b: &[u8]| -> Vec<usize> { (0..a.len()).filter(|&i| a[i] != b[i]).collect() };
    let bench = Bench::new(kind);
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

fn the_same_seed_gives_the_same_faults(kind: Kind) {
    let story = |seed| {
        let bench = Bench::seeded(kind, seed);
        bench
            .engine
            .add(Rule::on(OpKind::Publish, Fault::Errno(errno::EIO)).chance(300))
            .unwrap();
        bench
            .engine
            .add(Rule::on(OpKind::Read, Fault::FlipRandom(3)).chance(500))
            .unwrap();
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

fn a_late_file_is_not_seen_until_it_is(kind: Kind) {
    let bench = Bench::new(kind);
    bench.rule(OpKind::Publish, Fault::LateVisible(4));
    bench.publish().1.unwrap();
    call(&*bench.engine, publish_op(bench.dir(), "other", vec![1])).unwrap();
    let path = |name: &str| bench.dir().join(name);
    assert!(!bench.exists("block") && bench.exists("other"));
    assert_eq!(bench.read().unwrap_err().kind(), ErrorKind::NotFound);
    // A stat that stops at the first missing name stops there.
    let paths = [path("other"), path("block"), path("other")];
    let found = stat(&*bench.engine, &paths, true);
    assert_eq!(
        found.iter().map(Option::is_some).collect::<Vec<_>>(),
        [true, false]
    );
    let listed = |bench: &Bench| {
        let op = IoOp::List {
            dir: bench.dir().to_path_buf(),
        };
        let IoDone::List(found) = call(&*bench.engine, op).unwrap() else {
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

fn a_replayed_call_answers_as_the_second_one(kind: Kind) {
    let bench = Bench::new(kind);
    let (path, dir) = (bench.dir().join("block"), bench.dir().join("d"));
    bench.engine.add(Rule::always(Fault::Replay)).unwrap();
    let (bytes, result) = bench.publish();
    let IoDone::Published { buf, .. } = result.unwrap() else {
        unreachable!();
    };
    assert_eq!(buf[..], bytes);
    assert_eq!(bench.read().unwrap().0, bytes);
    assert_eq!(names(bench.dir()), ["block"]);
    // Removed by the first, gone for the second; likewise a directory that is there already.
    let IoDone::Removed(done) = call(&*bench.engine, IoOp::Remove { paths: vec![path] }).unwrap() else {
        unreachable!();
    };
    assert!(!done[0].as_ref().unwrap());
    let made = call(
        &*bench.engine,
        IoOp::MakeDir {
            path: dir,
            mode: 0o700,
        },
    )
    .unwrap();
    assert!(matches!(made, IoDone::MadeDir(false)));
}

fn a_hung_operation_is_written_off_and_its_slot_comes_back_with_the_call(kind: Kind) {
    let bench = Bench::new(kind);
    let gate = Gate::new();
    bench.rule(OpKind::Publish, Fault::HangBefore(gate.clone()));
    let pool = slots(2, 4096);
    let deadline = bench.clock.now().after(Duration::from_secs(30));
    let hung = start(
        &*bench.engine,
        2,
        deadline,
        publish_op(bench.dir(), "block", filled(&pool, 1)),
    );
    gate.await_waiting(1);
    bench.clock.advance(Duration::from_secs(29));
    // Others pass meanwhile.
    let op = publish_op(bench.dir(), "other", filled(&pool, 2));
    start(&*bench.engine, 2, Mono::NEVER, op).recv().unwrap().unwrap();
    assert!(hung.try_recv().is_err());
    bench.clock.advance(Duration::from_secs(1));
    assert_eq!(hung.recv().unwrap().unwrap_err().kind(), ErrorKind::Timeout);
    // Reported, and its slot still belongs to the call that has not returned.
    assert_eq!((pool.out(), bench.engine.stuck()), (1, 1));
    gate.open();
    eventually(|| pool.out() == 0 && bench.engine.stuck() == 0);
    assert_eq!(names(bench.dir()), ["other"]);
    assert!(hung.recv().is_err(), "told once only");
}

fn a_gate_opened_in_time_only_delays(kind: Kind) {
    let bench = Bench::new(kind);
    for fault in [Fault::HangBefore as fn(Gate) -> Fault, Fault::HangAfter] {
        let gate = Gate::new();
        bench.rule(OpKind::Publish, fault(gate.clone()));
        let answer = start(
            &*bench.engine,
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
    assert_eq!(bench.engine.stuck(), 0);
}

fn a_call_that_hangs_after_its_work_reports_a_failure_of_what_is_there(kind: Kind) {
    let bench = Bench::new(kind);
    let gate = Gate::new();
    bench.rule(OpKind::Publish, Fault::HangAfter(gate.clone()));
    let pool = slots(1, 4096);
    let hung = start(
        &*bench.engine,
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

fn shutdown_leaves_what_hangs_behind(kind: Kind) {
    let bench = Bench::new(kind);
    let gate = Gate::new();
    bench.rule(OpKind::Read, Fault::HangBefore(gate.clone()));
    let pool = slots(1, 4096);
    let op = read_op(bench.dir().join("block"), 0, 10, pool.try_acquire().unwrap());
    let hung = start(&*bench.engine, 0, Mono::NEVER, op);
    gate.await_waiting(1);
    bench.engine.shutdown(Duration::ZERO);
    assert_eq!(hung.recv().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(bench.read().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(fails(&*bench.inner, stat_op(&[], false)), ErrorKind::Closed);
    assert_eq!(pool.out(), 1);
    gate.open();
    eventually(|| pool.out() == 0);
}

fn rules_can_be_taken_back(kind: Kind) {
    let bench = Bench::new(kind);
    bench.engine.add(Rule::always(Fault::Busy)).unwrap();
    assert_eq!(bench.read().unwrap_err().kind(), ErrorKind::Busy);
    bench.engine.clear();
    bench.publish().1.unwrap();
}
