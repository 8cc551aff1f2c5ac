//! The engines on small file systems of its own: full ones, and one that hangs in the kernel. Needs root.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use ucm_core::ErrorKind;
use ucm_infra::{Clock, ManualClock};
use ucm_io::{IoDone, IoOp, IoOptions, IoPool};

fn space(engine: &IoPool, dir: &Path) -> ucm_io::SpaceInfo {
    match call(
        engine,
        IoOp::Space {
            path: dir.to_path_buf(),
        },
    )
    .unwrap()
    {
        IoDone::Space(space) => space,
        other => unreachable!("{other:?}"),
    }
}

/// Fills a file system until it refuses; then nothing half-written is left, and after a removal it goes on.
fn fill_up(engine: &IoPool, dir: &Path) {
    let pool = slots(1, 256 << 10);
    let mut published = Vec::new();
    let refusal = loop {
        let name = format!("{:03}", published.len());
        match call(
            engine,
            publish_op(dir, &name, filled(&pool, published.len() as u8)),
        ) {
            Ok(_) => published.push(name),
            Err(error) => break error,
        }
        assert!(published.len() < 1000, "never full");
    };
    assert_eq!(refusal.kind(), ErrorKind::NoSpace, "{refusal}");
    assert!(published.len() > 1);
    assert_eq!(pool.available(), 1);
    let left: Vec<String> = names(dir)
        .into_iter()
        .filter(|name| name != "lost+found")
        .collect();
    assert_eq!(left, published);
    let before = space(engine, dir).free;
    assert!(before < 256 << 10, "{before}");
    call(
        engine,
        IoOp::Remove {
            paths: vec![dir.join("000"), dir.join("001")],
        },
    )
    .unwrap();
    assert!(space(engine, dir).free > before);
    publish(engine, dir, "000", filled(&pool, 0));
    for (i, name) in published.iter().enumerate().filter(|(i, _)| *i != 1) {
        let mut expected = vec![0; 256 << 10];
        pattern(&mut expected, i as u8);
        let (got, file_len) = read(engine, dir.join(name), 0, 256 << 10).unwrap();
        assert!(got == expected && file_len == 256 << 10, "{name}");
    }
}

#[test]
fn a_full_tmpfs() {
    let Some(place) = or_skip("a_full_tmpfs", Mounted::tmpfs(3 << 20)) else {
        return;
    };
    fill_up(&*pool(), &place.dir);
}

#[test]
fn a_full_ext4() {
    for engine in [pool(), direct_pool()] {
        let Some(place) = or_skip("a_full_ext4", Mounted::ext4(16 << 20)) else {
            return;
        };
        let IoDone::Probe(found) = call(
            &*engine,
            IoOp::Probe {
                dir: place.dir.clone(),
            },
        )
        .unwrap() else {
            unreachable!();
        };
        assert_eq!((found.fs.name(), found.fs.maybe_shared()), ("ext4", false));
        fill_up(&*engine, &place.dir);
    }
}

/// Whether a thread of this process sleeps where nothing wakes it: the kernel's threads of a ring are among them.
fn hangs_in_the_kernel() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks.flatten().any(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('D'))
    })
}

#[test]
fn a_publish_that_hangs_in_the_kernel() {
    let Some(place) = or_skip("a_publish_that_hangs_in_the_kernel", Mounted::ext4(16 << 20)) else {
        return;
    };
    let clock = ManualClock::new();
    let engine = IoPool::psync(
        false,
        &IoOptions {
            clock: Arc::clone(&clock) as Arc<dyn Clock>,
            max_replacements: 1,
            ..IoOptions::with_workers(1)
        },
    )
    .unwrap();
    publish(&*engine, &place.dir, "before", vec![1; 100]);
    let pool = slots(1, 8192);
    let Some(()) = or_skip("a_publish_that_hangs_in_the_kernel", place.freeze()) else {
        return;
    };
    let mut tries = 0..100;
    let verdict = loop {
        let deadline = clock.now().after(Duration::from_secs(30));
        let block = publish_op(&place.dir, "block", filled(&pool, 1));
        let hung = start(&*engine, 2, deadline, block);
        eventually(|| engine.stats().lanes[2].running == 1 && hangs_in_the_kernel());
        clock.advance(Duration::from_secs(30));
        let verdict = hung.recv().unwrap();
        // Its time may be over before it has begun: then nothing hangs.
        if (pool.out(), engine.stuck()) == (1, 1) || tries.next().is_none() {
            break verdict;
        }
        eventually(|| pool.out() == 0);
    };
    // Reading does not change the file system, and there is a worker for it again.
    let read_meanwhile = read(&*engine, place.dir.join("before"), 0, 100);
    let (out, stuck) = (pool.out(), engine.stuck());
    // A shutdown does not wait for the kernel.
    engine.shutdown(Duration::ZERO);
    place.thaw().unwrap();
    assert_eq!(verdict.unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(read_meanwhile.unwrap().0, vec![1; 100]);
    assert_eq!((out, stuck), (1, 1));
    // The call returns, the slot comes home, and what nobody waited for is not published.
    eventually(|| pool.out() == 0);
    let left: Vec<String> = names(&place.dir)
        .into_iter()
        .filter(|name| name != "lost+found")
        .collect();
    assert_eq!(left, ["before"]);
}
