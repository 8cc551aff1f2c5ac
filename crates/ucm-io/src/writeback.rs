//! Written pages that no disk has yet: so many that the kernel would slow every writer of the
//! machine down are not left behind.
//!
//! A buffered write ends when the page cache has the bytes. Dumps that outrun the disk for long
//! would fill the memory with dirty pages, until the kernel makes every process wait that writes
//! anything. So, above a twentieth of the memory that is available (half of where the kernel itself
//! begins to write back), each file is sent on its way to the disk before it is closed, which
//! brings its writer down to the disk's pace and no one else.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes written between two looks at the machine's memory.
const LOOK_EVERY: u64 = 64 << 20;
/// Share of the available memory that may be dirty.
const SHARE: u64 = 20;

/// How much of the machine's memory is dirty, as far as this engine looked.
#[derive(Debug)]
pub(crate) struct WritebackThrottle {
    /// Bytes written since the last look; the first write looks.
    since: AtomicU64,
    pressing: AtomicBool,
}

impl Default for WritebackThrottle {
    fn default() -> Self {
        Self {
            since: AtomicU64::new(LOOK_EVERY),
            pressing: AtomicBool::new(false),
        }
    }
}

impl WritebackThrottle {
    /// Counts what is about to be written; whether it should be sent to the disk at once.
    pub(crate) fn write(&self, bytes: u64) -> bool {
        self.count(bytes, || fs::read_to_string("/proc/meminfo").ok())
    }

    fn count(&self, bytes: u64, memory: impl FnOnce() -> Option<String>) -> bool {
        let since = self.since.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if since >= LOOK_EVERY {
            self.since.store(0, Ordering::Relaxed);
            // Where nothing is known the kernel looks after it alone.
            let pressing = memory().is_some_and(|memory| is_pressing(&memory));
            self.pressing.store(pressing, Ordering::Relaxed);
        }
        self.pressing.load(Ordering::Relaxed)
    }
}

/// Whether more than the share of the memory is dirty or on its way to a disk; `memory` is as in
/// `/proc/meminfo`.
fn is_pressing(memory: &str) -> bool {
    let kib = |key: &str| {
        let line = memory.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
    };
    match (kib("MemAvailable:"), kib("Dirty:"), kib("Writeback:")) {
        (Some(available), Some(dirty), Some(writeback)) => dirty + writeback > available / SHARE,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(dirty: u64, writeback: u64) -> Option<String> {
        Some(format!(
            "MemTotal:  4000 kB\nMemAvailable:    2000 kB\nDirty:   {dirty} kB\nWriteback: \
             {writeback} kB\n"
        ))
    }

    #[test]
    fn a_twentieth_of_what_is_available_may_be_dirty() {
        let pressing =
            |dirty, writeback| is_pressing(&memory(dirty, writeback).unwrap_or_default());
        assert!(!pressing(60, 40));
        assert!(pressing(60, 41));
        assert!(pressing(101, 0));
        assert!(!is_pressing(""), "nothing is known");
        assert!(!is_pressing(
            "MemAvailable: much\nDirty: 1 kB\nWriteback: 1 kB"
        ));
    }

    #[test]
    fn the_first_write_looks_and_then_one_in_so_many_bytes() {
        let dirty = WritebackThrottle::default();
        assert!(dirty.count(1, || memory(101, 0)));
        assert!(dirty.count(LOOK_EVERY - 1, || unreachable!("it looked just now")));
        assert!(!dirty.count(1, || memory(100, 0)));
        assert!(!dirty.count(1, || unreachable!("it looked just now")));
        assert!(!dirty.count(LOOK_EVERY, || None));
    }

    #[test]
    fn this_machine_says_what_is_asked() {
        let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        for key in ["MemAvailable:", "Dirty:", "Writeback:"] {
            let line = memory.lines().find(|line| line.starts_with(key));
            assert!(line.is_some_and(|line| line.ends_with(" kB")), "{key}");
        }
    }
}
