//! Identity of a writing process, and whether it has ended: read from `/proc`, which never hangs.

use std::fs;

use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

/// A process of one boot of one host, so that a reused process id is not taken for it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Process {
    /// Boot of the host and namespace of its process ids; empty if they cannot be read.
    pub host: String,
    /// Its number there.
    pub pid: u32,
    /// Its start, in clock ticks since the boot.
    pub started: u64,
}

impl Process {
    /// This process.
    pub fn this() -> Self {
        let pid = std::process::id();
        Self {
            host: this_host(),
            pid,
            started: seen(pid).map_or(0, |seen| seen.started),
        }
    }

    /// True if it has certainly ended: it was on this host, and no such process exists. Nothing is
    /// known about processes of other hosts.
    pub fn is_gone(&self) -> bool {
        if self.host.is_empty() || self.host != this_host() {
            return false;
        }
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else {
            return false;
        };
        if test_kill_process(pid) == Err(rustix::io::Errno::SRCH) {
            return true;
        }
        // A process with that id exists; one that we may not inspect counts as the same.
        seen(self.pid).is_some_and(|seen| {
            (self.started != 0 && seen.started != self.started)
                || (seen.dead && threads(self.pid) <= 1)
        })
    }
}

/// The boot, and the namespace of process ids.
fn this_host() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let numbers = fs::read_link("/proc/self/ns/pid");
    match (boot, numbers) {
        (Ok(boot), Ok(numbers)) => format!("{} {}", boot.trim(), numbers.display()),
        _ => String::new(),
    }
}

struct Seen {
    started: u64,
    /// It ended and its parent has not waited for it yet.
    dead: bool,
}

fn seen(pid: u32) -> Option<Seen> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may contain any character; the fields after its closing bracket do not.
    let mut fields = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace();
    let state = fields.next()?;
    Some(Seen {
        started: fields.nth(18)?.parse().ok()?,
        dead: matches!(state, "Z" | "X"),
    })
}

/// Threads of a process. After the first thread ended, others may still write.
fn threads(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_lives_and_an_ended_child_does_not() {
        let this = Process::this();
        assert!(!this.is_gone() && this.started > 0 && !this.host.is_empty());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let of_child = |started| Process {
            pid: child.id(),
            started,
            ..Process::this()
        };
        let was = of_child(seen(child.id()).map_or(0, |seen| seen.started));
        let other_host = Process {
            host: "another".into(),
            ..was.clone()
        };
        child.wait().unwrap();
        assert!(was.is_gone(), "ended");
        assert!(!other_host.is_gone(), "nothing is known about another host");
        let reused = Process {
            started: this.started + 1,
            ..this
        };
        assert!(reused.is_gone(), "another process has the id");
    }
}
