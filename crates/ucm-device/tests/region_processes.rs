//! Regions between processes: writers killed at critical moments, children that outlive them.
//!
//! The other process is this test binary, running `other_process` with its role in the environment;
//! both exchange lines of text.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use ucm_core::BlockId;
use ucm_device::{RegionOptions, RegionView, Registry, Scan, SharedRegion, Wanted};

const ROLE: &str = "UCM_TEST_REGION_ROLE";
const DIR: &str = "UCM_TEST_REGION_DIR";
const LEN: usize = 300_000;
const NAMESPACE: [u8; 32] = [7; 32];

fn id(n: u8) -> BlockId {
    BlockId([n; 16])
}

fn put(region: &Arc<SharedRegion>, n: u8, version: u8) {
    let mut blank = region.reserve().unwrap();
    blank.fill(&vec![n ^ version; LEN]).unwrap();
    blank.publish(id(n), 0);
}

/// The other side of the tests below.
#[test]
#[ignore = "run by the tests of this file, as another process"]
fn other_process() {
    let registry = Registry::new(std::env::var_os(DIR).unwrap());
    let options = RegionOptions {
        capacity: 8 * (LEN as u64 + 8192),
        record_len: LEN,
        namespace: NAMESPACE,
        huge_pages: false,
    };
    let region = SharedRegion::create(options).unwrap();
    (1..=3).for_each(|n| put(&region, n, 0));
    region.announce(&registry).unwrap();
    match std::env::var(ROLE).unwrap().as_str() {
        "half" => {
            drop(region.remove(id(1), None).unwrap());
            // the slot of that record, its generation odd
            let mut blank = region.reserve().unwrap();
            blank.fill(&vec![0xff; LEN]).unwrap();
            say("half written");
            listen();
        }
        "busy" => {
            say("busy");
            for round in (0..u8::MAX).cycle() {
                put(&region, 1 + round % 3, round);
            }
        }
        "forks" => {
            let child = fork(&region);
            say(&format!("child {child}"));
            listen();
        }
        role => unreachable!("{role}"),
    }
}

/// Makes a child that lives until it is killed; true if it could not access the region.
#[allow(unsafe_code, reason = "fork")]
fn fork(region: &Arc<SharedRegion>) -> i32 {
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    // SAFETY: the child only reads atomics and makes system calls.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let nothing = region.pin(id(2)).is_none()
            && region.reserve().is_none()
            && region.remove(id(2), None).is_none()
            && !region.contains(id(2))
            && region.is_empty();
        let _ = writer.write(&[u8::from(nothing)]);
        loop {
            // SAFETY: waits for a signal.
            unsafe { libc::pause() };
        }
    }
    let mut answer = [0];
    reader.read_exact(&mut answer).unwrap();
    assert_eq!(answer, [1], "the child has something of the region");
    assert!(region.contains(id(2)), "the parent keeps it");
    child
}

fn say(line: &str) {
    let mut out = std::io::stdout();
    writeln!(out, "\n@{line}").unwrap();
    out.flush().unwrap();
}

/// Waits until the test is over.
fn listen() {
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
}

/// Another process, killed at the end of the test at the latest.
struct Other {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    _stdin: ChildStdin,
}

impl Other {
    fn start(role: &str, dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "region_processes::other_process",
                "--ignored",
                "--nocapture",
            ])
            .env(ROLE, role)
            .env(DIR, dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            lines: BufReader::new(child.stdout.take().unwrap()).lines(),
            _stdin: child.stdin.take().unwrap(),
            child,
        }
    }

    /// What it says next.
    fn hear(&mut self) -> String {
        let said = self.lines.by_ref().map(Result::unwrap);
        let mut said = said.filter_map(|line| line.strip_prefix('@').map(str::to_owned));
        said.next().unwrap()
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.kill();
    }
}

fn look(dir: &Path, known: &[Arc<RegionView>]) -> Scan {
    let wanted = Wanted {
        namespace: NAMESPACE,
        record_len: (LEN, LEN),
        own: None,
    };
    Registry::new(dir).scan(&wanted, known).unwrap()
}

/// Copies a record if it exists, and verifies it.
fn copy(view: &RegionView, n: u8, out: &mut [u8]) -> bool {
    let whole = 0..out.len();
    let copied = view.copy_parts(id(n), &[whole], out).is_some();
    assert!(!copied || out.iter().all(|&byte| byte == out[0]), "torn");
    copied
}

#[test]
fn a_writer_killed_in_the_middle_of_a_record_leaves_a_miss_and_then_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = Other::start("half", dir.path());
    assert_eq!(other.hear(), "half written");
    let views = look(dir.path(), &[]).views;
    let (view, mut out) = (&views[0], vec![0; LEN]);
    assert_eq!((views.len(), view.pid()), (1, other.child.id()));
    assert!(!copy(view, 1, &mut out) && copy(view, 2, &mut out) && out[0] == 2);
    other.kill();
    // A mapped region stays readable until the next scan.
    assert!(!copy(view, 1, &mut out) && copy(view, 3, &mut out) && out[0] == 3);
    let scan = look(dir.path(), &views);
    assert_eq!((scan.views.len(), scan.swept), (0, 1));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_writer_killed_at_any_moment_never_leaves_a_wrong_byte() {
    for round in 0..5 {
        let dir = tempfile::tempdir().unwrap();
        let mut other = Other::start("busy", dir.path());
        assert_eq!(other.hear(), "busy");
        let views = look(dir.path(), &[]).views;
        let (mut out, mut hits) = (vec![0; LEN], 0);
        while hits < 20 + round {
            hits += (1..=3).filter(|&n| copy(&views[0], n, &mut out)).count();
        }
        other.kill();
        let readable = (1..=3).filter(|&n| copy(&views[0], n, &mut out)).count();
        assert!(readable >= 2, "at most the one being written is lost");
        assert_eq!(look(dir.path(), &views).swept, 1);
    }
}

#[test]
fn a_child_that_outlives_the_writer_keeps_neither_lock_nor_memory() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = Other::start("forks", dir.path());
    let child = other
        .hear()
        .strip_prefix("child ")
        .unwrap()
        .parse()
        .unwrap();
    let child = Pid::from_raw(child).unwrap();
    assert_eq!(look(dir.path(), &[]).views.len(), 1);
    let open = |pid: Pid| {
        let entries = std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).unwrap();
        let links = entries.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        let ours = |link: &std::path::PathBuf| {
            let link = link.to_string_lossy().into_owned();
            link.contains("ucm-region") || link.ends_with(".region")
        };
        links.filter(ours).count()
    };
    let mapped = |pid: Pid| {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", pid.as_raw_nonzero())).unwrap();
        maps.contains("ucm-region")
    };
    let parent = Pid::from_child(&other.child);
    assert!(open(parent) == 2 && mapped(parent));
    let kept = (open(child), mapped(child));
    other.kill();
    let scan = look(dir.path(), &[]);
    let alive = test_kill_process(child).is_ok();
    kill_process(child, Signal::KILL).unwrap();
    assert!(alive, "the child was to outlive its parent");
    assert_eq!(kept, (0, false));
    assert_eq!((scan.views.len(), scan.swept), (0, 1));
}

#[test]
#[allow(unsafe_code, reason = "fork")]
fn a_child_forked_at_any_moment_has_nothing_of_a_region() {
    let (made, read) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let create = || {
        let options = RegionOptions {
            capacity: 8 * (LEN as u64 + 8192),
            record_len: LEN,
            namespace: NAMESPACE,
            huge_pages: false,
        };
        SharedRegion::create(options).unwrap()
    };
    let steady = create();
    steady.announce(&Registry::new(read.path())).unwrap();
    let over = AtomicBool::new(false);
    let kept = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                // Up to eight forks may interfere; then it is not announced.
                let _ = create().announce(&Registry::new(made.path()));
            }
        });
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                assert_eq!(look(read.path(), &[]).views.len(), 1);
            }
        });
        let kept = (0..400).find_map(|_| {
            let (mut reader, mut writer) = std::io::pipe().unwrap();
            // SAFETY: the child only writes a byte and waits for a signal.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let _ = writer.write(&[1]); // its fork handlers have run
                loop {
                    // SAFETY: waits for a signal.
                    unsafe { libc::pause() };
                }
            }
            reader.read_exact(&mut [0]).unwrap();
            let maps = std::fs::read_to_string(format!("/proc/{child}/maps")).unwrap();
            let mut has: Vec<String> = maps.lines().map(str::to_owned).collect();
            for entry in std::fs::read_dir(format!("/proc/{child}/fd")).unwrap() {
                let entry = entry.unwrap().file_name().into_string().unwrap();
                let link = std::fs::read_link(format!("/proc/{child}/fd/{entry}")).unwrap();
                has.push(link.to_string_lossy().into_owned());
                // An abandoned file may exist; only its lock matters.
                let info =
                    std::fs::read_to_string(format!("/proc/{child}/fdinfo/{entry}")).unwrap();
                let locked = info.lines().find(|line| line.starts_with("lock:"));
                has.extend(locked.map(|line| format!("{line} of {}", link.display())));
            }
            kill_process(Pid::from_raw(child).unwrap(), Signal::KILL).unwrap();
            // SAFETY: our own child, which ends.
            unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
            has.into_iter()
                .find(|text| text.contains("memfd:ucm-region") || text.starts_with("lock:"))
        });
        over.store(true, Ordering::Relaxed);
        kept
    });
    assert_eq!(kept, None);
}
