//! News that come at bad moments, on a real ring: none is lost.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use ucm_core::Result;
use ucm_infra::{Clock, SystemClock};

use super::state::Overdue;
use super::{UringEngine, UringOptions};
use crate::engine::IoEngine;
use crate::op::{IoDone, IoOp, ReadMode};
use crate::psync::PsyncOptions;

/// An engine, where the kernel gives a ring; with `UCM_REQUIRE_ROOT_TESTS` in the environment it must.
#[allow(clippy::print_stderr, reason = "a test says why it is skipped")]
fn engine(test: &str) -> Option<Arc<UringEngine>> {
    match UringEngine::new(&UringOptions::beside(PsyncOptions::with_workers(1))) {
        Ok(engine) => Some(engine),
        Err(error) => {
            assert!(std::env::var_os("UCM_REQUIRE_ROOT_TESTS").is_none(), "{error}");
            eprintln!("{test} is skipped: {error}");
            None
        }
    }
}

fn read(path: &std::path::Path) -> IoOp {
    IoOp::Read {
        path: path.to_owned(),
        offset: 0,
        len: 4,
        buf: vec![0; 4].into(),
        mode: ReadMode::Default,
    }
}

#[test]
fn an_operation_that_comes_while_the_kernel_lacks_memory_is_begun() {
    let Some(engine) = engine("an_operation_that_comes_while_the_kernel_lacks_memory_is_begun") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, b"data").unwrap();
    let (send, answers) = mpsc::channel();
    let tell = move || {
        let send = send.clone();
        Box::new(move |result: Result<IoDone>| drop(send.send(result.map(drop))))
    };
    // A deadline, so that what is lost shows as late instead of never.
    let deadline = SystemClock.now().after(Duration::from_secs(20));
    // When nothing is under way: first the kernel has no memory; at the next attempt an operation comes in between.
    let (weak, second, done) = (Arc::downgrade(&engine), read(&path), tell());
    let mut acts = vec![Some((second, done)), None];
    *engine.shared.faults.lock() = Some(Box::new(move |idle| {
        if !idle {
            return None;
        }
        match acts.pop()? {
            None => Some(libc::EAGAIN),
            Some((op, done)) => {
                weak.upgrade()?.submit(0, deadline, op, done);
                None
            }
        }
    }));
    engine.submit(0, deadline, read(&path), tell());
    for _ in 0..2 {
        answers.recv().unwrap().unwrap();
    }
}

#[test]
fn whoever_answers_what_is_late_tells_a_shutdown_that_waits() {
    let Some(engine) = engine("whoever_answers_what_is_late_tells_a_shutdown_that_waits") else {
        return;
    };
    let shared = &engine.shared;
    let (seen, told) = (shared.ends.seen(), Arc::new(AtomicBool::new(false)));
    let tells = Arc::clone(&told);
    // As the ring's thread does with an operation that it finds too late in the queue.
    shared.report_late(vec![Overdue {
        done: Box::new(move |result| tells.store(result.is_err(), Ordering::Release)),
        work: None,
        lane: "load",
    }]);
    assert!(told.load(Ordering::Acquire));
    assert_ne!(shared.ends.seen(), seen);
}
