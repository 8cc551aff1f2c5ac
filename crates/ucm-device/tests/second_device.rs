//! A rank that uses the second device allocates nothing on the first one. In a process of its own,
//! because a runtime keeps its allocations.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

mod common;

use common::{CONTEXTS, Driver, copy_on, open_named};
use ucm_device::Transfer;
use ucm_infra::begin_thread;

#[test]
fn threads_of_ours_begin_nothing_on_the_first_device() {
    let driver = Driver::load();
    for name in ["hip:1", "musa:1", "maca:1", "ascend:1", "cuda:1"] {
        let device = open_named(name, Transfer::Auto);
        begin_thread("ours", move || copy_on(&*device))
            .unwrap()
            .join()
            .unwrap();
        assert_eq!(driver.live(CONTEXTS), 1, "{name}");
    }
}
