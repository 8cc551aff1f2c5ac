//! Every interleaving of small models of ucm-infra's hand-written atomics: the notify, the
//! completion, the park protocol of the ring, the state of a load and the generations of shared
//! bytes. The crate's documentation has the command.
#![cfg(loom)]

use std::sync::Arc;
use std::time::Duration;

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;
use ucm_infra::seqlock::{self, AtomicU64};
use ucm_infra::{
    BlockState, Clock, Completion, LoadState, ManualClock, MonotonicTime, Notify, PushError,
    SpscRing,
};

/// A clock on which nothing times out. If a sleeper is never rung, loom reports a deadlock.
#[derive(Debug)]
struct Still;

impl Clock for Still {
    fn now(&self) -> MonotonicTime {
        MonotonicTime(0)
    }

    fn wall_ns(&self) -> u64 {
        0
    }

    fn sleep(&self, notify: &Notify, seen: u64, _until: Option<MonotonicTime>) {
        notify.wait(seen);
    }
}

/// For a model with too many interleavings: only those with at most two involuntary switches
/// between threads.
fn few_preemptions(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

#[test]
fn bell_news_between_looking_and_sleeping_is_not_lost() {
    loom::model(|| {
        let notify = Notify::new();
        let news = Arc::new(AtomicBool::new(false));
        let ringer = thread::spawn({
            let (notify, news) = (notify.clone(), Arc::clone(&news));
            move || {
                news.store(true, Ordering::Release);
                notify.notify();
            }
        });
        loop {
            let seen = notify.seen();
            if news.load(Ordering::Acquire) {
                break;
            }
            notify.wait(seen);
        }
        ringer.join().unwrap();
    });
}

#[test]
fn completion_first_wins_and_every_waiter_sees_it() {
    loom::model(|| {
        let done = Completion::new();
        let rival = thread::spawn({
            let done = Arc::clone(&done);
            move || done.complete(1)
        });
        let waiter = thread::spawn({
            let done = Arc::clone(&done);
            move || done.wait(&Still, None)
        });
        let mine = done.complete(2);
        let theirs = rival.join().unwrap();
        assert!(mine != theirs, "exactly one wins");
        let value = if mine { 2 } else { 1 };
        assert_eq!(waiter.join().unwrap(), Some(value));
        assert_eq!(done.peek(), Some(value));
    });
}

#[test]
fn completion_callbacks_run_exactly_once_whenever_they_come() {
    loom::model(|| {
        let done = Completion::new();
        let calls = Arc::new(AtomicUsize::new(0));
        let completer = thread::spawn({
            let done = Arc::clone(&done);
            move || done.complete(1)
        });
        let counted = Arc::clone(&calls);
        done.on_complete(move |value| {
            counted.fetch_add(*value, Ordering::Relaxed);
        });
        assert!(completer.join().unwrap());
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn completion_wait_ends_at_the_deadline_or_with_the_value() {
    loom::model(|| {
        let clock = ManualClock::new();
        let done = Completion::new();
        let waiter = thread::spawn({
            let (clock, done) = (Arc::clone(&clock), Arc::clone(&done));
            move || done.wait(&*clock, Some(MonotonicTime(1)))
        });
        let completer = thread::spawn({
            let done = Arc::clone(&done);
            move || done.complete(7)
        });
        clock.advance(Duration::from_nanos(1));
        assert!(matches!(waiter.join().unwrap(), None | Some(7)));
        assert!(completer.join().unwrap());
        assert_eq!(done.wait(&*clock, Some(MonotonicTime(0))), Some(7));
    });
}

#[test]
fn clock_time_that_passes_before_sleeping_is_not_missed() {
    loom::model(|| {
        let clock = ManualClock::new();
        let done = Completion::<u32>::new();
        let waiter = thread::spawn({
            let (clock, done) = (Arc::clone(&clock), Arc::clone(&done));
            move || done.wait(&*clock, Some(MonotonicTime(1)))
        });
        clock.advance(Duration::from_nanos(1));
        assert_eq!(waiter.join().unwrap(), None);
    });
}

#[test]
fn ring_a_parked_consumer_is_woken_by_an_item() {
    loom::model(|| {
        let (mut producer, mut consumer) = SpscRing::bounded(1).unwrap();
        let pusher = thread::spawn(move || {
            producer.try_push(1).unwrap();
            producer
        });
        assert_eq!(consumer.recv(&Still), Some(1));
        pusher.join().unwrap();
    });
}

#[test]
fn ring_a_parked_producer_is_woken_by_room() {
    loom::model(|| {
        let (mut producer, mut consumer) = SpscRing::bounded(1).unwrap();
        producer.try_push(1).unwrap();
        let popper = thread::spawn(move || {
            assert_eq!(consumer.recv(&Still), Some(1));
            consumer
        });
        assert_eq!(producer.push(2, &Still, None), Ok(()));
        assert_eq!(popper.join().unwrap().recv(&Still), Some(2));
    });
}

#[test]
fn ring_a_parked_consumer_sees_the_producer_go() {
    loom::model(|| {
        let (producer, mut consumer) = SpscRing::<u32>::bounded(1).unwrap();
        let closer = thread::spawn(move || drop(producer));
        assert_eq!(consumer.recv(&Still), None);
        closer.join().unwrap();
    });
}

#[test]
fn ring_both_ends_park_more_than_once() {
    few_preemptions(|| {
        let (mut producer, mut consumer) = SpscRing::bounded(1).unwrap();
        let pusher = thread::spawn(move || {
            producer.push(1, &Still, None).unwrap();
            producer.push(2, &Still, None).unwrap();
            producer
        });
        assert_eq!(consumer.recv(&Still), Some(1));
        assert_eq!(consumer.recv(&Still), Some(2));
        pusher.join().unwrap();
    });
}

#[test]
fn ring_items_pushed_before_closing_arrive() {
    few_preemptions(|| {
        let (mut producer, mut consumer) = SpscRing::bounded(2).unwrap();
        let pusher = thread::spawn(move || {
            producer.try_push(1).unwrap();
            drop(producer);
        });
        let mut taken = Vec::new();
        consumer.run(&Still, |item| taken.push(item));
        assert_eq!(taken, [1]);
        pusher.join().unwrap();
    });
}

#[test]
fn ring_a_parked_producer_sees_the_consumer_go() {
    loom::model(|| {
        let (mut producer, consumer) = SpscRing::bounded(1).unwrap();
        producer.try_push(1).unwrap();
        let closer = thread::spawn(move || drop(consumer));
        // Item 2 is refused, or its push overlaps with the close and it is dropped with the ring.
        let pushed = producer.push(2, &Still, None);
        assert!(
            matches!(pushed, Ok(()) | Err(PushError::Closed(2))),
            "{pushed:?}"
        );
        closer.join().unwrap();
        assert_eq!(producer.try_push(3), Err(PushError::Closed(3)));
    });
}

#[test]
fn ring_a_deadline_and_room_do_not_lose_each_other() {
    loom::model(|| {
        let clock = ManualClock::new();
        let (mut producer, mut consumer) = SpscRing::bounded(1).unwrap();
        producer.try_push(1).unwrap();
        let popper = thread::spawn({
            let clock = Arc::clone(&clock);
            move || {
                clock.advance(Duration::from_nanos(1));
                assert_eq!(consumer.recv(&*clock), Some(1));
                consumer
            }
        });
        let second = producer.push(2, &*clock, Some(MonotonicTime(1)));
        assert!(
            matches!(second, Ok(()) | Err(PushError::TimedOut(2))),
            "{second:?}"
        );
        let mut consumer = popper.join().unwrap();
        if second.is_err() {
            producer.push(2, &*clock, None).unwrap();
        }
        assert_eq!(consumer.recv(&*clock), Some(2));
    });
}

/// Stands for the device memory of a load's blocks, and for its report.
struct Model {
    state: LoadState,
    device: Vec<AtomicUsize>,
    reports: AtomicUsize,
}

impl Model {
    fn new(blocks: usize) -> Arc<Self> {
        Arc::new(Self {
            state: LoadState::new(blocks),
            device: (0..blocks).map(|_| AtomicUsize::new(0)).collect(),
            reports: AtomicUsize::new(0),
        })
    }

    /// Steps of a reader after its block is verified.
    fn scatter(&self, block: usize) {
        if !self.state.begin_scatter(block) {
            return;
        }
        // Relaxed on purpose: only the load state may order these writes before the report.
        self.device[block].store(1, Ordering::Relaxed);
        assert_eq!(
            self.reports.load(Ordering::Relaxed),
            0,
            "bytes after the report"
        );
        if self.state.finish(block) {
            self.report();
        }
    }

    /// Steps of a caller that aborts.
    fn cancel(&self) {
        if self.state.cancel_from(0) {
            self.report();
        }
    }

    /// Steps of a reader whose block failed: the blocks behind it are cancelled.
    fn fail(&self, block: usize) {
        if !self.state.begin_fail(block) {
            return;
        }
        // Stands for the recorded reason, which the report must contain.
        self.device[block].store(1, Ordering::Relaxed);
        assert!(
            !self.state.cancel_from(block + 1),
            "this block is still open"
        );
        if self.state.finish(block) {
            self.report();
        }
    }

    fn report(&self) {
        assert!(self.state.is_over());
        for (block, bytes) in self.device.iter().enumerate() {
            let state = self.state.state(block);
            let over = matches!(state, Some(BlockState::Done | BlockState::Cancelled));
            assert!(over, "block {block} is {state:?} at the report");
            // A done block has its bytes; a cancelled one never gets any.
            let expected = usize::from(state == Some(BlockState::Done));
            assert_eq!(bytes.load(Ordering::Relaxed), expected);
        }
        assert_eq!(
            self.reports.fetch_add(1, Ordering::Relaxed),
            0,
            "reported twice"
        );
    }

    fn check(&self) {
        assert_eq!(
            self.reports.load(Ordering::Relaxed),
            1,
            "reported exactly once"
        );
    }
}

#[test]
fn gate_reports_once_when_blocks_race_with_a_kill() {
    loom::model(|| {
        let model = Model::new(2);
        let threads = [0, 1].map(|block| {
            let model = Arc::clone(&model);
            thread::spawn(move || model.scatter(block))
        });
        model.cancel();
        for thread in threads {
            thread.join().unwrap();
        }
        model.check();
    });
}

#[test]
fn gate_reports_once_when_kills_race() {
    loom::model(|| {
        let model = Model::new(2);
        let canceller = thread::spawn({
            let model = Arc::clone(&model);
            move || model.cancel()
        });
        let reader = thread::spawn({
            let model = Arc::clone(&model);
            move || model.scatter(1)
        });
        model.cancel();
        canceller.join().unwrap();
        reader.join().unwrap();
        model.check();
    });
}

#[test]
fn gate_reports_once_when_blocks_fail_and_those_before_them_arrive() {
    loom::model(|| {
        let model = Model::new(3);
        let failing = thread::spawn({
            let model = Arc::clone(&model);
            move || model.fail(1)
        });
        let behind = thread::spawn({
            let model = Arc::clone(&model);
            move || model.fail(2)
        });
        model.scatter(0);
        failing.join().unwrap();
        behind.join().unwrap();
        assert_eq!(
            model.state.state(0),
            Some(BlockState::Done),
            "no failure behind it ends it"
        );
        assert_eq!(model.state.state(1), Some(BlockState::Done));
        model.check();
    });
}

#[test]
fn gate_reports_once_without_a_kill() {
    loom::model(|| {
        let model = Model::new(3);
        let threads = [0, 1].map(|block| {
            let model = Arc::clone(&model);
            thread::spawn(move || model.scatter(block))
        });
        model.scatter(2);
        for thread in threads {
            thread.join().unwrap();
        }
        model.check();
    });
}

#[test]
fn gate_gives_a_block_to_one_scatterer() {
    loom::model(|| {
        let state = Arc::new(LoadState::new(1));
        let rival = thread::spawn({
            let state = Arc::clone(&state);
            move || state.begin_scatter(0)
        });
        let mine = state.begin_scatter(0);
        assert!(mine != rival.join().unwrap());
        assert!(state.finish(0));
    });
}

/// Two words that a writer fills again and again, always with the same byte.
struct Shared {
    generation: AtomicU64,
    words: [AtomicU64; 2],
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            generation: AtomicU64::new(0),
            words: [AtomicU64::new(0), AtomicU64::new(0)],
        })
    }

    fn write(&self, byte: u8) {
        seqlock::begin(&self.generation);
        seqlock::fill(&self.words, &[byte; 16]);
        seqlock::publish(&self.generation);
    }

    /// Copies that a reader may accept.
    fn read(&self) -> Option<[u8; 16]> {
        let seen = seqlock::enter(&self.generation)?;
        let mut out = [0; 16];
        seqlock::copy(&self.words, &mut out);
        seqlock::unchanged(&self.generation, seen).then_some(out)
    }
}

#[test]
fn seqlock_a_copy_that_is_believed_is_whole() {
    loom::model(|| {
        let shared = Shared::new();
        shared.write(1);
        let writer = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.write(2)
        });
        if let Some(out) = shared.read() {
            assert!(out == [1; 16] || out == [2; 16], "{out:?}");
        }
        writer.join().unwrap();
        assert_eq!(shared.read(), Some([2; 16]));
    });
}

#[test]
fn seqlock_a_writer_that_dies_leaves_a_miss() {
    loom::model(|| {
        let shared = Shared::new();
        shared.write(1);
        let writer = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                seqlock::begin(&shared.generation);
                seqlock::fill(&shared.words[..1], &[2; 8]); // half of it
            }
        });
        if let Some(out) = shared.read() {
            assert_eq!(out, [1; 16]);
        }
        writer.join().unwrap();
        assert_eq!(shared.read(), None);
        shared.write(3); // as the next writer of the slot would
        assert_eq!(shared.read(), Some([3; 16]));
    });
}

#[test]
fn seqlock_a_reader_that_finds_the_name_sees_the_bytes() {
    loom::model(|| {
        // A name in an index, stored after the bytes: release and acquire.
        let (shared, name) = (Shared::new(), Arc::new(AtomicU64::new(0)));
        let writer = thread::spawn({
            let (shared, name) = (Arc::clone(&shared), Arc::clone(&name));
            move || {
                shared.write(1);
                name.store(1, Ordering::Release);
            }
        });
        if name.load(Ordering::Acquire) == 1 {
            assert_eq!(shared.read(), Some([1; 16]));
        }
        writer.join().unwrap();
    });
}
