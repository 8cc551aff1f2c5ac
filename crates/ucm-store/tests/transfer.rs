//! What moves between the device and the store: in one transfer for each block, after the events
//! that it must wait for, and before those that it must record.

#![allow(
    unsafe_code,
    clippy::unwrap_used,
    reason = "device spans over the tests' own buffers; a test may fail"
)]

use std::sync::{Arc, mpsc};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{ErrorKind, Result};
use ucm_device::{DeviceSpan, Event};
use ucm_infra::{Clock, ManualClock, MonotonicTime};
use ucm_store::engine::{Deadlines, Pieces, Row, Task, Until};

use crate::common::{
    Device, Fixture, SlowDevice, SoftCuda, Store, directory, eventually, id, ids, media, on,
};

/// An event that reports when a thread begins to wait for it.
struct Watched {
    inner: Arc<dyn Event>,
    waiting: Mutex<mpsc::Sender<()>>,
}

impl Watched {
    fn of(store: &Store) -> (Arc<dyn Event>, mpsc::Receiver<()>) {
        let (waiting, told) = mpsc::channel();
        let inner = store.engine.device().make_event().unwrap();
        let waiting = Mutex::new(waiting);
        (Arc::new(Self { inner, waiting }), told)
    }
}

/// Waits until the store waits for the event. It must do so before the task is over.
#[track_caller]
fn waited_for(waiting: &mpsc::Receiver<()>, store: &Store, task: &Task) {
    eventually("the event is waited for", || {
        let is_over = task.check(store.engine.clock(), Until::Staged);
        waiting.try_recv().is_ok() || {
            assert!(
                !is_over,
                "the task is over, and its event was not waited for"
            );
            false
        }
    });
}

impl Event for Watched {
    fn done(&self) -> bool {
        self.inner.done()
    }

    fn wait(&self, deadline: Option<MonotonicTime>) -> Result<()> {
        let _ = self.waiting.lock().send(());
        self.inner.wait(deadline)
    }

    fn record(&self) {
        self.inner.record();
    }
}

/// These rows, once the event is done.
fn after(event: &Arc<dyn Event>, mut rows: Vec<Row>) -> Vec<Row> {
    rows.iter_mut()
        .for_each(|row| row.ready = Some(Arc::clone(event)));
    rows
}

/// An event that the task records.
fn recorded_by(store: &Store, task: &Task) -> Arc<dyn Event> {
    let event = store.engine.device().make_event().unwrap();
    assert!(!event.done());
    task.record(Arc::clone(&event));
    event
}

#[test]
fn a_dump_reads_nothing_before_its_event_is_recorded() {
    for medium in media() {
        let (dir, fixture) = (directory(), on(medium));
        let store = Store::open(dir.path(), fixture.clone());
        let (event, waiting) = Watched::of(&store);
        let (mut source, right) = (
            Device::blank(&fixture, &ids(1)),
            crate::common::content(&fixture, id(0)),
        );
        let task = store
            .engine
            .dump(after(&event, source.rows(&ids(1))))
            .unwrap();
        let staged = recorded_by(&store, &task);
        waited_for(&waiting, &store, &task);
        assert!(!task.check(store.engine.clock(), Until::Staged) && !staged.done());
        source.change(id(0), |bytes| bytes.copy_from_slice(&right));
        event.record();
        staged.wait(None).unwrap();
        assert!(task.check(store.engine.clock(), Until::Staged));
        store.outcome(&task).unwrap();
        let target = Device::blank(&fixture, &ids(1));
        store.load(&target, &ids(1)).unwrap();
        assert!(target.is_right(id(0)));
        // One that is done holds nothing up.
        let source = Device::filled(&fixture, &[id(1)]);
        let task = store
            .engine
            .dump(after(&event, source.rows(&[id(1)])))
            .unwrap();
        store.outcome(&task).unwrap();
        let target = Device::blank(&fixture, &[id(1)]);
        store.load(&target, &[id(1)]).unwrap();
        assert!(target.is_right(id(1)));
    }
}

#[test]
fn a_load_writes_nothing_before_its_event_and_records_one_after_its_last_byte() {
    for medium in media() {
        let (dir, fixture) = (directory(), on(medium));
        let store = Store::open(dir.path(), fixture.clone());
        // The one with an event is dumped last: neighbours in a segment are brought by one thread,
        // in their order there.
        for those in [ids(2), vec![id(2)]] {
            store
                .dump(&Device::filled(&fixture, &those), &those)
                .unwrap();
        }
        let (event, waiting) = Watched::of(&store);
        let target = Device::blank(&fixture, &ids(3));
        let mut rows = target.rows(&ids(2));
        rows.extend(after(&event, target.rows(&[id(2)])));
        // a busy machine may need more than a load's own
        let patience = Some(Duration::from_secs(60));
        let task = store.engine.load(rows, patience).unwrap();
        let over = recorded_by(&store, &task);
        waited_for(&waiting, &store, &task);
        eventually("the others arrive", || store.stat("blocks_loaded") == 2);
        assert!(target.is_blank(id(2)) && !over.done());
        event.record();
        over.wait(None).unwrap();
        assert!(ids(3).into_iter().all(|id| target.is_right(id)));
        store.outcome(&task).unwrap();
        let late = store.engine.device().make_event().unwrap();
        task.record(Arc::clone(&late));
        assert!(late.done(), "of a task that is over, at once");
    }
}

/// Each row of a block waits for an event of its own. The order of the events makes no difference.
#[test]
fn a_block_is_copied_after_the_events_of_all_its_rows() {
    let (dir, fixture) = (
        directory(),
        Fixture {
            layers_per_shard: 1,
            ..Fixture::default()
        },
    );
    let store = Store::open(dir.path(), fixture.clone());
    let shards = fixture.layers as usize;
    let share = crate::common::content(&fixture, id(0)).len() / shards;
    for last in 0..shards {
        let block = [id(last as u8)];
        let right = crate::common::content(&fixture, block[0]);
        for loads in [false, true] {
            let mut device = Device::blank(&fixture, &block);
            let mut rows = device.rows(&block);
            let (events, waiting): (Vec<_>, Vec<_>) =
                (0..shards).map(|_| Watched::of(&store)).unzip();
            for (row, event) in rows.iter_mut().zip(&events) {
                row.ready = Some(Arc::clone(event));
            }
            let patience = Some(Duration::from_secs(60));
            let task = match loads {
                false => store.engine.dump(rows).unwrap(),
                true => store.engine.load(rows, patience).unwrap(),
            };
            // All but the last: the store waits for that one now.
            for other in (0..shards).filter(|&other| other != last) {
                let its = other * share..(other + 1) * share;
                if !loads {
                    device.change(block[0], |bytes| {
                        bytes[its.clone()].copy_from_slice(&right[its])
                    });
                }
                events[other].record();
            }
            waited_for(&waiting[last], &store, &task);
            assert!(!task.check(store.engine.clock(), Until::Staged));
            assert!(!device.is_right(block[0]), "loaded before its last event");
            if !loads {
                device.change(block[0], |bytes| bytes.copy_from_slice(&right));
            }
            events[last].record();
            store.outcome(&task).unwrap();
            assert!(device.is_right(block[0]));
        }
        let target = Device::blank(&fixture, &block);
        store.load(&target, &block).unwrap();
        assert!(
            target.is_right(block[0]),
            "dumped before event {last} was done"
        );
    }
}

/// Two streams of the caller's, which lag, write the source of a dump and read the target of a
/// load.
#[test]
fn copies_are_behind_all_that_the_callers_streams_do() {
    let (dir, fixture) = (
        directory(),
        Fixture {
            layers_per_shard: 1,
            ..Fixture::default()
        },
    );
    let store = Store::open(dir.path(), fixture.clone());
    let driver = SoftCuda::of_this_run().filter(|_| store.engine.device().name() != "host");
    let Some(driver) = driver else {
        return; // the host has no such streams: `make test` runs this over each vendor's names
    };
    let streams = [driver.stream(), driver.stream()];
    for round in 0..8 {
        let block = [id(round)];
        let right = crate::common::content(&fixture, block[0]);
        let share = right.len() / fixture.layers as usize;
        let of_shard = |shard: usize| streams[shard % 2];
        driver.jitter(u64::from(round) + 1, 2000);
        let (source, target) = (
            Device::blank(&fixture, &block),
            Device::blank(&fixture, &block),
        );
        let spare = driver.allocate(right.len());
        for (shard, bytes) in right.chunks(share).enumerate() {
            driver.write_later(
                source.address(block[0]) + (shard * share) as u64,
                bytes,
                of_shard(shard),
            );
        }
        let behind = |device: &Device| {
            let events =
                streams.map(|stream| store.engine.event_of(driver.record(stream)).unwrap());
            let mut rows = device.rows(&block);
            for (shard, row) in rows.iter_mut().enumerate() {
                row.ready = Some(Arc::clone(&events[shard % 2]));
            }
            rows
        };
        let task = store.engine.dump(behind(&source)).unwrap();
        store.outcome(&task).unwrap();
        for shard in 0..fixture.layers as usize {
            let at = (shard * share) as u64;
            driver.copy_later(
                spare + at,
                target.address(block[0]) + at,
                share,
                of_shard(shard),
            );
        }
        let task = store
            .engine
            .load(behind(&target), Some(Duration::from_secs(60)))
            .unwrap();
        store.outcome(&task).unwrap();
        assert!(
            target.is_right(block[0]),
            "round {round}: not all was written when it was dumped"
        );
        let before = driver.read(spare, right.len());
        assert!(
            before.iter().all(|&byte| byte == 0xee),
            "round {round}: loaded over what was still read"
        );
        driver.free(spare);
    }
    driver.jitter(1, 0);
}

#[test]
fn a_load_that_fails_records_its_event_too() {
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    let target = Device::blank(&fixture, &ids(1));
    let task = store.engine.load(target.rows(&ids(1)), None).unwrap();
    recorded_by(&store, &task).wait(None).unwrap();
    store.outcome(&task).unwrap_err();
    assert!(target.is_blank(id(0)));
}

#[test]
fn an_event_that_does_not_come_ends_its_task_at_the_deadline_and_no_other() {
    let (dir, clock, fixture) = (directory(), ManualClock::new(), Fixture::default());
    let store = Store::with_clock(
        dir.path(),
        fixture.clone(),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    let device = Device::filled(&fixture, &ids(2));
    store.dump(&device, &[id(1)]).unwrap();
    let target = Device::blank(&fixture, &[id(1)]);
    let second = Duration::from_secs(1);
    for loads in [false, true] {
        let (event, waiting) = Watched::of(&store);
        let task = if loads {
            let rows = after(&event, target.rows(&[id(1)]));
            store.engine.load(rows, Some(second)).unwrap()
        } else {
            store
                .engine
                .dump(after(&event, device.rows(&ids(1))))
                .unwrap()
        };
        waited_for(&waiting, &store, &task);
        clock.advance(if loads {
            second
        } else {
            Deadlines::default().dump
        });
        eventually("it is given up", || {
            task.check(store.engine.clock(), Until::Published)
        });
        let failures = task.failures();
        assert_eq!(
            (failures.len(), failures[0].1.kind()),
            (1, ErrorKind::Timeout)
        );
        eventually("the slots come back", || {
            store.stat("slots_free") == store.stat("slots")
        });
        event.record();
        assert!(target.is_blank(id(1)), "nothing late");
        store.dump(&device, &ids(1)).unwrap();
    }
    store.load(&target, &[id(1)]).unwrap();
    assert!(target.is_right(id(1)));
}

#[test]
fn all_pieces_of_a_block_are_one_transfer() {
    for layers_per_shard in [1, Fixture::default().layers] {
        let counted = SlowDevice::new(0);
        let fixture = Fixture {
            layers_per_shard,
            device: Some(Arc::clone(&counted)),
            ..Fixture::default()
        };
        let dir = directory();
        let store = Store::open(dir.path(), fixture.clone());
        store
            .dump(&Device::filled(&fixture, &ids(2)), &ids(2))
            .unwrap();
        let target = Device::blank(&fixture, &ids(2));
        store.load(&target, &ids(2)).unwrap();
        assert!(ids(2).into_iter().all(|id| target.is_right(id)));
        let pieces = fixture.tensors.len() * fixture.layers as usize;
        assert_eq!(counted.transfers(), [pieces; 4]);
    }
}

#[test]
fn a_piece_that_is_not_as_long_as_its_tensor_fails_its_block_untouched() {
    let (dir, fixture) = (directory(), Fixture::default());
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::filled(&fixture, &ids(2));
    store.dump(&device, &ids(2)).unwrap();
    let target = Device::blank(&fixture, &ids(2));
    let mut rows = target.rows(&ids(2));
    let Pieces::Listed(spans) = &mut rows[0].pieces else {
        unreachable!("the rows of this block list their pieces");
    };
    // SAFETY: it lies in the buffer of the target, which outlives the task.
    spans[1] = unsafe { DeviceSpan::new(spans[1].addr(), spans[1].len() - 1) };
    let task = store.engine.load(rows, None).unwrap();
    let failures = store.outcome(&task).unwrap_err();
    assert_eq!(failures[0].1.kind(), ErrorKind::InvalidInput);
    assert!(
        failures[0].1.to_string().contains("expected"),
        "{failures:?}"
    );
    assert!(target.is_blank(id(0)));
}
