//! Slots through the rings of 3FS, over its client library in software (`tests/soft3fs`): correct
//! bytes, batches, errors, and plain calls where rings are not available.
#![allow(
    clippy::unwrap_used,
    unsafe_code,
    reason = "tests, and the controls of a C library"
)]

use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use crate::common::*;
use libloading::Library;
use parking_lot::{Mutex, MutexGuard};
use ucm_core::ErrorKind;
use ucm_infra::{LANE_LOAD, MonotonicTime};
use ucm_io::{Finish, IoEngine, IoJob, PsyncEngine, ReadMode, UsrbioOptions};

const MIB: usize = 1 << 20;
/// Bytes of one operation of a ring.
const PIECE: usize = 256 << 10;

/// The library of this process; one test uses it at a time.
struct Soft3fs {
    _alone: MutexGuard<'static, ()>,
}

/// Path of the library, which cargo builds with the tests: beside the test program or one directory
/// above.
fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let dirs = program.ancestors().skip(1).take(2);
    let mut found = dirs.map(|dir| dir.join("libsoft3fs.so"));
    found.find(|path| path.exists()).unwrap()
}

impl Soft3fs {
    fn alone() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        Self {
            _alone: ALONE.lock(),
        }
    }

    fn control<T: Copy>(&self, name: &CStr) -> T {
        static LOADED: OnceLock<Library> = OnceLock::new();
        // SAFETY: our own library.
        let loaded = LOADED.get_or_init(|| unsafe { Library::new(library()) }.unwrap());
        // SAFETY: the callers name the function's type.
        *unsafe { loaded.get::<T>(name.to_bytes_with_nul()) }.unwrap()
    }

    fn calls(&self, name: &CStr) -> u64 {
        let calls: unsafe extern "C" fn(*const c_char) -> u64 = self.control(c"soft3fs_calls");
        // SAFETY: the name ends with a zero.
        unsafe { calls(name.as_ptr()) }
    }

    fn fail(&self, name: &CStr, nth: u64, errno: c_int) {
        let fail: unsafe extern "C" fn(*const c_char, u64, c_int) = self.control(c"soft3fs_fail");
        // SAFETY: the name ends with a zero.
        unsafe { fail(name.as_ptr(), nth, errno) }
    }

    /// Reads four pieces; `together`: none begins before all are submitted.
    fn read(
        &self,
        io: &IoJob,
        path: &Path,
        len: usize,
        together: bool,
    ) -> ucm_core::Result<Vec<u8>> {
        self.hold(together);
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| crate::common::read(io, path, 0, len));
            while together && self.live()[3] < 4 {
                std::thread::yield_now();
            }
            self.hold(false);
            Ok(reading.join().unwrap()?.0)
        })
    }

    fn hold(&self, on: bool) {
        let hold: extern "C" fn(bool) = self.control(c"soft3fs_hold");
        hold(on);
    }

    /// Memory, rings, files, operations.
    fn live(&self) -> [u64; 4] {
        let live: extern "C" fn(c_int) -> u64 = self.control(c"soft3fs_live");
        [0, 1, 2, 3].map(|kind| live(kind))
    }

    fn together(&self) -> u64 {
        let together: extern "C" fn() -> u64 = self.control(c"soft3fs_together");
        together()
    }
}

/// A directory that the library treats as 3FS.
fn mount() -> tempfile::TempDir {
    let mount = tempfile::tempdir().unwrap();
    std::fs::create_dir(mount.path().join("3fs-virt")).unwrap();
    mount
}

fn options() -> UsrbioOptions {
    UsrbioOptions {
        library: library().into(),
        ..UsrbioOptions::default()
    }
}

/// An engine after its probe of a directory, and the probe's result.
fn over(dir: &Path, options: UsrbioOptions) -> (Arc<PsyncEngine>, IoJob, Result<usize, String>) {
    let engine = PsyncEngine::over_3fs(false, options);
    let io = IoJob::alone(Arc::clone(&engine) as Arc<dyn IoEngine>);
    let found = io.probe(dir).unwrap().rings.unwrap();
    (engine, io, found)
}

#[test]
fn files_are_written_and_read_in_batches() {
    let (soft, dir) = (Soft3fs::alone(), mount());
    let at_first = soft.live();
    let (engine, io, found) = over(dir.path(), options());
    assert_eq!(found, Ok(256 << 20));
    assert_eq!(soft.live()[1], at_first[1] + 2);
    io.probe(dir.path()).unwrap();
    assert_eq!(
        soft.live()[1],
        at_first[1] + 2,
        "rings of an earlier mount are not used"
    );
    let bytes = pattern(3 * MIB + 4096, 7);
    let before = soft.calls(c"write");
    publish(&io, dir.path(), "block", &bytes);
    assert_eq!(
        soft.calls(c"write") - before,
        13,
        "pieces of a quarter of a MiB"
    );
    let path = dir.path().join("block");
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    let (before, mut back) = (soft.calls(c"read"), vec![0; 4 * MIB]);
    let read = io
        .read(&path, 0, 4 * MIB, &mut back, ReadMode::Default)
        .unwrap();
    assert_eq!(
        (read.bytes, read.file_len),
        (bytes.len(), bytes.len() as u64)
    );
    assert_eq!(back[..bytes.len()], bytes);
    assert!(soft.calls(c"read") - before >= 13);
    assert_eq!(soft.read(&io, &path, bytes.len(), true).unwrap(), bytes);
    assert!((4..=32).contains(&soft.together()), "{}", soft.together());
    // Adjacent pieces into separate slots, and parts, over a kept descriptor.
    let (mut one, mut two) = (vec![0; MIB], vec![0; MIB]);
    for _ in 0..2 {
        let into = vec![(&mut one[..], MIB), (&mut two[..], MIB)];
        assert_eq!(io.read_into(&path, 4096, into, true).unwrap(), 2 * MIB);
        assert_eq!(one, bytes[4096..4096 + MIB]);
        assert_eq!(two, bytes[4096 + MIB..4096 + 2 * MIB]);
    }
    assert_eq!((engine.kept(), soft.live()[2]), (1, 1));
    let mut buf = vec![0; MIB];
    let parts = [0..4096, 8192..PIECE];
    assert_eq!(
        io.read_parts(&path, 0, &parts, &mut buf, true).unwrap(),
        PIECE - 4096
    );
    assert_eq!(
        (&buf[..4096], &buf[8192..PIECE]),
        (&bytes[..4096], &bytes[8192..PIECE])
    );
    // Written in pieces, as segments are.
    let (private, target) = (dir.path().join("private"), dir.path().join("target"));
    io.create(&private, b"head", 0, 0o600).unwrap();
    io.write_at(&private, 4096, &bytes[..MIB], false).unwrap();
    let finish = Finish {
        private: &private,
        target: &target,
        footer: b"foot",
        offset: 4096 + MIB as u64,
        mtime_ns: 5,
    };
    assert_eq!(io.finish(finish).unwrap().len, MIB as u64 + 4100);
    assert_eq!(
        std::fs::read(&target).unwrap()[4096..4096 + MIB],
        bytes[..MIB]
    );
    drop((io, engine));
    assert_eq!(soft.live(), at_first, "nothing is left over");
}

#[test]
fn a_depth_is_never_a_batch_that_is_waited_for() {
    let (soft, dir) = (Soft3fs::alone(), mount());
    for depth in [32, -32, 0, 2] {
        let (_, io, found) = over(dir.path(), UsrbioOptions { depth, ..options() });
        assert_eq!(found, Ok(256 << 20));
        publish(
            &io,
            dir.path(),
            &format!("block{depth}"),
            &pattern(PIECE * 3, 1),
        ); // no multiple of the depth
    }
    assert_eq!(soft.live()[3], 0);
}

#[test]
fn few_entries_make_small_batches() {
    let (_soft, dir) = (Soft3fs::alone(), mount());
    let (_, io, found) = over(
        dir.path(),
        UsrbioOptions {
            entries: 2,
            ..options()
        },
    );
    assert_eq!(found, Ok(256 << 20));
    let bytes = pattern(5 * PIECE + 1, 3);
    publish(&io, dir.path(), "block", &bytes);
    let mut back = vec![0; bytes.len()];
    io.read(
        &dir.path().join("block"),
        0,
        bytes.len(),
        &mut back,
        ReadMode::FreshDirect,
    )
    .unwrap();
    assert_eq!(back, bytes);
}

#[test]
fn the_memory_of_rings_is_bounded_and_who_finds_none_makes_plain_calls() {
    let (soft, dir) = (Soft3fs::alone(), mount());
    let (at_first, few) = (
        soft.live(),
        UsrbioOptions {
            memory: 20 * MIB,
            ..options()
        },
    );
    let engine = PsyncEngine::over_3fs(false, few);
    let io = IoJob::alone(Arc::clone(&engine) as Arc<dyn IoEngine>);
    assert_eq!(io.probe(dir.path()).unwrap().rings, Some(Ok(16 * MIB)));
    let bytes = pattern(PIECE, 6);
    let path = dir.path().join("block");
    publish(&io, dir.path(), "block", &bytes);
    soft.hold(true);
    std::thread::scope(|scope| {
        let read = || {
            let io = IoJob::alone(Arc::clone(&engine) as Arc<dyn IoEngine>);
            assert_eq!(crate::common::read(&io, &path, 0, PIECE).unwrap().0, bytes);
        };
        for _ in 0..2 {
            scope.spawn(read);
        }
        while soft.live()[3] < 2 {
            std::thread::yield_now();
        }
        read(); // all rings for reads are held: this one does not wait for them
        assert_eq!(
            soft.live()[0] - at_first[0],
            3,
            "two for reads, one for writes"
        );
        soft.hold(false);
    });
}

#[test]
fn errors_are_those_of_the_operation_and_leave_nothing_under_way() {
    let (soft, dir) = (Soft3fs::alone(), mount());
    let (_, io, found) = over(dir.path(), options());
    assert_eq!(found, Ok(256 << 20));
    let bytes = pattern(4 * PIECE, 5);
    publish(&io, dir.path(), "block", &bytes);
    let path = dir.path().join("block");
    // Of operations that wait together the last is executed first: the fourth is that of the first
    // piece.
    for (name, nth, errno, seen) in [
        (c"read", 4, 5, 5),
        (c"hf3fs_prep_io", 1, 11, 11),
        (c"read", 4, 7000, 5),
    ] {
        soft.fail(name, nth, errno);
        let error = soft
            .read(&io, &path, bytes.len(), name == c"read")
            .unwrap_err();
        assert_eq!(error.os_code(), Some(seen), "{name:?}");
        assert_eq!(soft.live()[3], 0);
    }
    // If a piece in the middle fails or is not accepted, the bytes before it count and the rest is
    // read again.
    for (name, nth) in [(c"read", 2), (c"hf3fs_prep_io", 3)] {
        soft.fail(name, nth, 5);
        let back = soft.read(&io, &path, bytes.len(), name == c"read").unwrap();
        assert_eq!(back, bytes, "{name:?}");
    }
    soft.fail(c"write", 1, 28);
    let (private, target) = (dir.path().join("p"), dir.path().join("t"));
    let full = ucm_io::Publish {
        private: &private,
        target: &target,
        replace: true,
        bytes: &bytes[..4096],
        mode: 0o600,
        mtime_ns: None,
        durable: false,
    };
    assert_eq!(io.publish(full).unwrap_err().kind(), ErrorKind::NoSpace);
    assert!(!private.exists() && !target.exists());
}

#[test]
fn a_ring_that_does_not_say_what_became_of_its_operations_is_not_used_again() {
    let (soft, dir) = (Soft3fs::alone(), mount());
    let (_, io, found) = over(dir.path(), options());
    assert_eq!(found, Ok(256 << 20));
    let bytes = pattern(PIECE, 2);
    publish(&io, dir.path(), "block", &bytes);
    let (path, mut back) = (dir.path().join("block"), vec![0; PIECE]);
    let destroyed = soft.calls(c"hf3fs_iovdestroy");
    soft.fail(c"hf3fs_wait_for_ios", 1, 5);
    assert!(
        io.read(&path, 0, PIECE, &mut back, ReadMode::Default)
            .is_err()
    );
    io.read(&path, 0, PIECE, &mut back, ReadMode::Default)
        .unwrap();
    assert_eq!(back, bytes);
    assert_eq!(
        soft.calls(c"hf3fs_iovdestroy"),
        destroyed,
        "its memory stays: the daemon may still write there"
    );
}

#[test]
fn a_daemon_that_hangs_costs_the_deadline_and_no_late_byte() {
    let (soft, dir) = (Soft3fs::alone(), mount());
    let engine = PsyncEngine::over_3fs(false, options());
    let (pool, clock) = clocked(engine, 2);
    let at = dir.path().to_owned();
    let probed = start(&pool, LANE_LOAD, MonotonicTime::NEVER, move |io| {
        io.probe(&at)
    });
    assert_eq!(probed.recv().unwrap().unwrap().rings, Some(Ok(256 << 20)));
    let path = dir.path().join("block");
    std::fs::write(&path, pattern(PIECE, 4)).unwrap();
    soft.hold(true);
    let mut slot = vec![0u8; PIECE];
    let asked = path.clone();
    let late = start(&pool, LANE_LOAD, MonotonicTime(1_000), move |io| {
        io.read(&asked, 0, PIECE, &mut slot, ReadMode::Default)
    });
    while soft.live()[3] == 0 {
        std::thread::yield_now();
    }
    clock.advance(std::time::Duration::from_secs(1));
    assert_eq!(late.recv().unwrap().unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(
        pool.stuck(),
        1,
        "the thread keeps its slot and its ring until the daemon answers"
    );
    soft.hold(false);
    while pool.stuck() > 0 {
        std::thread::yield_now();
    }
}

#[test]
fn where_rings_cannot_be_had_calls_are_plain_and_the_probe_says_why() {
    let (soft, dir) = (Soft3fs::alone(), mount());
    let elsewhere = tempfile::tempdir().unwrap();
    let no_library = UsrbioOptions {
        library: "/no/such/library.so".into(),
        ..UsrbioOptions::default()
    };
    soft.fail(c"hf3fs_iorcreate4", 1, 12);
    let cases = [
        (dir.path(), options(), "no ring could be made"),
        (dir.path(), no_library, "/no/such/library.so cannot be"),
        (elsewhere.path(), options(), "no mount of 3FS"),
    ];
    for (place, options, why) in cases {
        let (_, io, found) = over(place, options);
        let said = found.unwrap_err();
        assert!(said.contains(why), "{said}");
        let operations = soft.calls(c"write");
        publish(&io, place, "plain", b"bytes");
        assert_eq!(std::fs::read(place.join("plain")).unwrap(), b"bytes");
        assert_eq!(soft.calls(c"write"), operations);
        std::fs::remove_file(place.join("plain")).unwrap();
    }
    // A library without one of the functions: any other one.
    let other = UsrbioOptions {
        library: "libc.so.6".into(),
        ..UsrbioOptions::default()
    };
    let (.., found) = over(dir.path(), other);
    assert!(found.unwrap_err().contains("hf3fs_"));
    // A page that is read back differently.
    soft.fail(c"read", 1, 5);
    let (_, io, found) = over(dir.path(), options());
    assert!(found.unwrap_err().contains("a page could not be"));
    publish(&io, dir.path(), "plain", b"bytes");
}
