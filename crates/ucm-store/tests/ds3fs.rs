//! The kind `ds3fs` over 3FS's client library in software: its records go through rings. That it is
//! a store like any other is what the suite shows, of which it is a column.

#![allow(
    clippy::unwrap_used,
    unsafe_code,
    reason = "tests, and the controls of a C library"
)]

use std::ffi::{CStr, c_char};

use crate::common::{Device, Medium, Store, directory, id, ids, media, on, soft3fs};

/// How often something was done by the library of this process.
fn calls(name: &CStr) -> u64 {
    // SAFETY: our own library, and the type of its function.
    let loaded = unsafe { libloading::Library::new(soft3fs()) }.unwrap();
    // SAFETY: as above; the name ends with a zero.
    unsafe {
        let calls = loaded.get::<unsafe extern "C" fn(*const c_char) -> u64>(b"soft3fs_calls\0");
        calls.unwrap()(name.as_ptr())
    }
}

#[test]
fn it_is_a_column_of_the_suite_and_its_records_go_through_rings() {
    assert!(media().contains(&Medium::Kind("ds3fs")));
    let (dir, fixture) = (directory(), on(Medium::Kind("ds3fs")));
    let store = Store::open(dir.path(), fixture.clone());
    store
        .dump(&Device::filled(&fixture, &ids(4)), &ids(4))
        .unwrap();
    let (read, written) = (calls(c"read"), calls(c"write"));
    assert!(written >= 2, "{written}");
    drop(store);
    let store = Store::open(dir.path(), fixture.clone());
    let device = Device::blank(&fixture, &ids(4));
    store.load(&device, &ids(4)).unwrap();
    assert!(ids(4).into_iter().all(|block| device.is_right(block)));
    assert!(calls(c"read") > read + 1, "more than what a probe reads");
    assert!(!store.engine.lookup(&[id(9)]).unwrap()[0]);
}
