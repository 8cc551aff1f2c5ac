//! Bounds the dirty pages of our writes, so that the kernel does not throttle every writer of the
//! machine.
//!
//! A buffered write ends when the page cache has the bytes. If dumps are faster than the disk for
//! long, dirty pages fill the memory until the kernel throttles every writing process. So, above a
//! twentieth of the available memory (half of the kernel's own background threshold), each file is
//! written back before it is closed. That slows down its own writer only.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes written between two reads of the machine's memory state.
const LOOK_EVERY: u64 = 64 << 20;
/// Share of the available memory that may be dirty.
const SHARE: u64 = 20;

/// This engine's last reading of the machine's dirty memory.
#[derive(Debug)]
pub(crate) struct WritebackThrottle {
    /// Bytes written since the last reading; the first write reads.
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
    /// Counts bytes about to be written; true if they should be written back at once.
    pub(crate) fn write(&self, bytes: u64) -> bool {
        self.count(bytes, || fs::read_to_string("/proc/meminfo").ok())
    }

    fn count(&self, bytes: u64, memory: impl FnOnce() -> Option<String>) -> bool {
        let since = self.since.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if since >= LOOK_EVERY {
            self.since.store(0, Ordering::Relaxed);
            // If the state cannot be read, write-back is left to the kernel.
            let pressing = memory().is_some_and(|memory| is_pressing(&memory));
            self.pressing.store(pressing, Ordering::Relaxed);
        }
        self.pressing.load(Ordering::Relaxed)
    }
}

/// True if more than the share of the memory is dirty or under write-back; `memory` is the text of
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
        assert!(dirty.count(LOOK_EVERY - 1, || unreachable!("it was read just now")));
        assert!(!dirty.count(1, || memory(100, 0)));
        assert!(!dirty.count(1, || unreachable!("it was read just now")));
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
