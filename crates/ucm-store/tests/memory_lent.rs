//! Records in this process's own memory go to the device from where they lie: verified there, and
//! kept until the copy is over.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::Arc;

use crate::common::memory::{fixture, keep};
use crate::common::{Device, SoftCuda, Store, directory, eventually, id, ids, pages};
use ucm_media::memory::MemoryBackend;

fn memory(store: &Store) -> &Arc<MemoryBackend> {
    store.memory.as_ref().unwrap()
}

/// One test, for what the driver counts is of the process.
#[test]
fn records_of_the_own_memory_go_to_the_device_from_where_they_lie() {
    let driver = SoftCuda::beside();
    let (dir, before) = (directory(), driver.registrations());
    let fixture = fixture(8);
    let store = Store::open(dir.path(), fixture.clone());
    store
        .dump(&Device::filled(&fixture, &ids(4)), &ids(4))
        .unwrap();
    let staged = driver.registrations();
    assert_eq!(memory(&store).counts().lent, 0);
    let target = Device::blank(&fixture, &ids(4));
    store.load(&target, &ids(4)).unwrap();
    assert!(ids(4).into_iter().all(|id| target.is_right(id)));
    assert_eq!(memory(&store).counts().lent, 4);
    assert_eq!(
        driver.registrations(),
        staged + 1,
        "the region, at its first use"
    );

    // A wrong byte is found where it lies, and once more in a slot.
    assert!(pages::flip(id(0), memory(&store).region().unwrap(), 5000));
    let target = Device::blank(&fixture, &ids(4));
    store.load(&target, &[id(0)]).unwrap_err();
    assert!(target.is_blank(id(0)));
    assert_eq!(
        (memory(&store).counts().lent, store.stat("second_reads")),
        (5, 1)
    );

    // One that goes while it is copied stays where it is until that is over.
    driver.hold(true);
    let task = store.engine.load(target.rows(&[id(1)]), None).unwrap();
    eventually("it is lent", || memory(&store).counts().lent == 6);
    store.forget(id(1));
    keep(memory(&store), (10..30).map(id));
    assert!(target.is_blank(id(1)) && !memory(&store).contains(id(1)));
    driver.hold(false);
    store.outcome(&task).unwrap();
    assert!(target.is_right(id(1)));
    drop(task);
    drop(store);
    eventually("nothing is registered", || driver.registrations() == before);
}
