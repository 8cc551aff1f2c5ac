//! A store over the software CUDA driver, each of whose calls fails once: a dump that fails or a
//! miss, never a wrong byte, and afterwards everything works.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::ffi::CStr;

use crate::common::{Device, Fixture, SoftCuda, Store, directory, ids};
use ucm_core::BlockId;
use ucm_device::Transfer;
use ucm_store::engine::{Row, Task, Until};

/// What copies of a store call.
const CALLS: [&CStr; 7] = [
    c"cuMemcpyDtoHAsync_v2",
    c"cuMemcpyHtoDAsync_v2",
    c"cuLaunchKernel",
    c"cuEventQuery",
    c"cuCtxPushCurrent_v2",
    c"cuStreamSynchronize",
    c"cuStreamCreateWithPriority",
];

/// What opening a device calls besides.
const OPENING: [&CStr; 4] = [
    c"cuEventCreate",
    c"cuEventRecord",
    c"cuEventElapsedTime",
    c"cuMemAlloc_v2",
];

/// Rows that wait for an event of the caller's.
fn after(store: &Store, event: u64, mut rows: Vec<Row>) -> Vec<Row> {
    for row in &mut rows {
        row.ready = Some(store.engine.device().event_of(event).unwrap());
    }
    rows
}

/// The blocks that a task did not fail.
fn good(store: &Store, task: ucm_core::Result<Task>, of: &[BlockId]) -> Vec<BlockId> {
    let shards = (store.fixture.layers / store.fixture.layers_per_shard) as usize;
    let Ok(task) = task else { return Vec::new() };
    assert!(
        task.wait(store.engine.clock(), Until::Published, None),
        "it ends"
    );
    let failed: Vec<BlockId> = task
        .failures()
        .iter()
        .map(|(row, _)| of[row / shards])
        .collect();
    of.iter()
        .copied()
        .filter(|id| !failed.contains(id))
        .collect()
}

/// Lets the `nth` call fail; streams are made anew only where others failed.
fn fail(driver: &SoftCuda, call: &CStr, nth: u64) {
    driver.fail(call, nth, 999);
    if call == c"cuStreamCreateWithPriority" {
        driver.fail(c"cuStreamSynchronize", 1, 999);
    }
}

/// Dumps and loads blocks, the `nth` call failing in both. How many of them failed.
fn fail_once(
    driver: &SoftCuda,
    event: u64,
    store: &Store,
    call: &CStr,
    nth: u64,
    ids: &[BlockId],
) -> usize {
    let source = Device::filled(&store.fixture, ids);
    fail(driver, call, nth);
    let dumped = good(
        store,
        store.engine.dump(after(store, event, source.rows(ids))),
        ids,
    );
    driver.mend();
    for &id in ids {
        let target = Device::blank(&store.fixture, &[id]);
        let loaded = store.load(&target, &[id]);
        assert!(
            loaded.is_err() || target.is_right(id),
            "{call:?}, {nth}: a wrong block"
        );
        assert!(
            loaded.is_ok() || !dumped.contains(&id),
            "{call:?}, {nth}: {loaded:?}"
        );
    }
    store.dump(&source, ids).unwrap();
    let target = Device::blank(&store.fixture, ids);
    fail(driver, call, nth);
    let loaded = good(
        store,
        store
            .engine
            .load(after(store, event, target.rows(ids)), None),
        ids,
    );
    driver.mend();
    for &id in &loaded {
        assert!(target.is_right(id), "{call:?}, {nth}: a wrong block");
    }
    let target = Device::blank(&store.fixture, ids);
    store.load(&target, ids).unwrap();
    assert!(ids.iter().all(|&id| target.is_right(id)));
    2 * ids.len() - dumped.len() - loaded.len()
}

#[test]
fn a_call_of_the_driver_that_fails_is_a_miss_or_a_failed_dump() {
    let driver = SoftCuda::beside();
    let event = driver.recorded_event();
    let mut failed = [0; CALLS.len()];
    for transfer in [
        Transfer::Auto,
        Transfer::Dma,
        Transfer::Sm,
        Transfer::Staging,
    ] {
        for (number, call) in CALLS.into_iter().enumerate() {
            let (dir, fixture) = (
                directory(),
                Fixture {
                    transfer,
                    ..Fixture::default()
                },
            );
            let store = Store::open(dir.path(), fixture);
            let all = ids(12);
            for (nth, some) in (1..).zip(all.chunks(3)) {
                failed[number] += fail_once(driver, event, &store, call, nth, some);
            }
        }
    }
    assert!(failed.iter().all(|&count| count > 0), "{failed:?}");
    // What fails while the device is opened is an error, or a method that is not used.
    for call in OPENING {
        for nth in 1..4 {
            let dir = directory();
            driver.fail(call, nth, 999);
            let opened = Store::try_open(dir.path(), Fixture::default());
            driver.mend();
            if let Ok(store) = opened {
                assert_eq!(fail_once(driver, event, &store, call, 1000, &ids(3)), 0);
            }
        }
    }
}
