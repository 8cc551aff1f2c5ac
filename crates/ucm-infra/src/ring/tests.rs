//! The ring with its real queue: order, bounds, waiting, closing.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::clock::SystemClock;
use crate::tests_clock::ManualClock;

#[test]
fn items_come_in_order_and_no_more_than_fit() {
    let (mut producer, mut consumer) = SpscRing::bounded(2).unwrap();
    producer.try_push(1).unwrap();
    producer.try_push(2).unwrap();
    assert_eq!(producer.try_push(3), Err(PushError::Full(3)));
    assert_eq!(consumer.recv(&SystemClock), Some(1));
    producer.try_push(3).unwrap();
    drop(producer);
    let mut rest = Vec::new();
    consumer.run(&SystemClock, |item| rest.push(item));
    assert_eq!(rest, [2, 3]);
}

#[test]
fn a_parked_consumer_is_woken_by_an_item() {
    let clock = ManualClock::new();
    let (mut producer, mut consumer) = SpscRing::bounded(2).unwrap();
    std::thread::scope(|scope| {
        let taken = scope.spawn(|| consumer.recv(&*clock));
        clock.await_sleepers(1);
        producer.try_push(5).unwrap();
        assert_eq!(taken.join().unwrap(), Some(5));
    });
}

#[test]
fn a_parked_producer_is_woken_by_room() {
    let clock = ManualClock::new();
    let (mut producer, mut consumer) = SpscRing::bounded(1).unwrap();
    producer.try_push(1).unwrap();
    std::thread::scope(|scope| {
        let pushed = scope.spawn(|| producer.push(2, &*clock, None));
        clock.await_sleepers(1);
        assert_eq!(consumer.recv(&*clock), Some(1));
        assert_eq!(pushed.join().unwrap(), Ok(()));
    });
    assert_eq!(consumer.recv(&*clock), Some(2));
}

#[test]
fn a_push_ends_at_its_deadline() {
    let clock = ManualClock::new();
    let (mut producer, mut consumer) = SpscRing::bounded(1).unwrap();
    producer.try_push(1).unwrap();
    std::thread::scope(|scope| {
        let pushed = scope.spawn(|| producer.push(2, &*clock, Some(MonotonicTime(10))));
        clock.await_sleepers(1);
        clock.advance(Duration::from_nanos(10));
        assert_eq!(pushed.join().unwrap(), Err(PushError::TimedOut(2)));
    });
    assert_eq!(consumer.recv(&*clock), Some(1));
    // An item that finds room is accepted even if the deadline has passed.
    assert_eq!(producer.push(2, &*clock, Some(MonotonicTime(0))), Ok(()));
}

#[test]
fn a_closed_producer_leaves_its_items() {
    let (mut producer, mut consumer) = SpscRing::bounded(4).unwrap();
    producer.try_push(1).unwrap();
    drop(producer);
    assert_eq!(consumer.recv(&SystemClock), Some(1));
    assert_eq!(consumer.recv(&SystemClock), None);
}

#[test]
fn closing_wakes_the_other_end() {
    let clock = ManualClock::new();
    let (producer, mut consumer) = SpscRing::<u32>::bounded(1).unwrap();
    std::thread::scope(|scope| {
        let taken = scope.spawn(|| consumer.recv(&*clock));
        clock.await_sleepers(1);
        drop(producer);
        assert_eq!(taken.join().unwrap(), None);
    });
    let (mut producer, consumer) = SpscRing::bounded(1).unwrap();
    producer.try_push(1).unwrap();
    std::thread::scope(|scope| {
        let pushed = scope.spawn(|| producer.push(2, &*clock, None));
        clock.await_sleepers(1);
        drop(consumer);
        assert_eq!(pushed.join().unwrap(), Err(PushError::Closed(2)));
    });
}

#[test]
fn a_dropped_consumer_drops_what_is_in_the_ring() {
    let item = Arc::new(());
    let (mut producer, consumer) = SpscRing::bounded(4).unwrap();
    producer.try_push(Arc::clone(&item)).unwrap();
    drop(consumer);
    assert_eq!(Arc::strong_count(&item), 1);
    assert!(matches!(producer.try_push(item), Err(PushError::Closed(_))));
}

#[test]
fn nothing_is_lost_between_two_busy_threads() {
    // Small enough that both ends park many times.
    let (mut producer, mut consumer) = SpscRing::bounded(3).unwrap();
    let mut taken = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for item in 0..20_000_u32 {
                producer.push(item, &SystemClock, None).unwrap();
            }
        });
        consumer.run(&SystemClock, |item| taken.push(item));
    });
    assert_eq!(taken.len(), 20_000);
    assert!(taken.iter().copied().eq(0..20_000));
}

#[test]
fn wrong_capacities_are_refused() {
    for capacity in [0, MAX_CAPACITY + 1] {
        let refused = SpscRing::<u8>::bounded(capacity).err();
        assert_eq!(refused.map(|error| error.kind()), Some(ErrorKind::Config));
    }
}

#[test]
fn errors_become_ours() {
    let kind = |error: Error| error.kind();
    assert_eq!(kind(PushError::Full(()).into()), ErrorKind::Busy);
    assert_eq!(kind(PushError::Closed(()).into()), ErrorKind::Closed);
    assert_eq!(kind(PushError::TimedOut(()).into()), ErrorKind::Timeout);
}
