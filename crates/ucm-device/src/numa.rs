//! Memory near a device: on a machine with several nodes, a device reaches the memory of its own
//! node faster.
#![allow(unsafe_code, reason = "a system call that has no safe form")]

use std::ffi::c_void;
use std::path::Path;

use tracing::debug;

/// Linux's description of the machine.
const SYSFS: &str = "/sys";

/// Words of a set of nodes, for the most nodes that Linux supports.
const WORDS: usize = 1024 / 64;

/// The node of the device at this address of the PCI bus (`0000:3B:00.0`). `None` if the machine
/// has one node only, or does not report it.
pub(crate) fn node_of(pci: &str) -> Option<u32> {
    node_in(Path::new(SYSFS), pci)
}

fn node_in(sysfs: &Path, pci: &str) -> Option<u32> {
    let online = std::fs::read_to_string(sysfs.join("devices/system/node/online")).ok()?;
    if !online.contains([',', '-']) {
        return None; // a single number
    }
    let device = sysfs
        .join("bus/pci/devices")
        .join(pci.trim().to_ascii_lowercase());
    let node = std::fs::read_to_string(device.join("numa_node")).ok()?;
    let node = node.trim().parse().ok()?; // -1: not known
    (node < 64 * WORDS as u32).then_some(node)
}

/// Makes pages of a mapping that are first touched from now on come from this node, as long as it
/// has any.
///
/// # Safety
/// The range is whole pages of one mapping of this process.
pub(crate) unsafe fn prefer(start: *mut c_void, len: usize, node: u32) {
    let mut nodes = [0_u64; WORDS];
    if let Some(word) = nodes.get_mut(node as usize / 64) {
        *word = 1 << (node % 64);
    }
    // One more than there are bits: the kernel counts one less.
    let (count, flags) = (64 * WORDS + 1, 0);
    // SAFETY: the caller's promise; no byte changes, and the set is read during the call.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start,
            len,
            libc::MPOL_PREFERRED,
            nodes.as_ptr(),
            count,
            flags,
        )
    };
    if answer != 0 {
        // A container may forbid it: then memory comes from the thread's node.
        debug!(node, error = %std::io::Error::last_os_error(), "memory near the device cannot be \
        asked for");
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, write};

    use super::*;
    use crate::arena::{ArenaOptions, HostArena};

    #[test]
    fn the_node_of_a_device_is_what_the_machine_says_where_it_has_several() {
        let sysfs = tempfile::tempdir().unwrap();
        let nodes = sysfs.path().join("devices/system/node");
        let device = sysfs.path().join("bus/pci/devices/0000:3b:00.0");
        let node = |online: &str, of_device: &str| {
            write(nodes.join("online"), online).unwrap();
            write(device.join("numa_node"), of_device).unwrap();
            node_in(sysfs.path(), "0000:3B:00.0")
        };
        assert_eq!(
            node_in(sysfs.path(), "0000:3B:00.0"),
            None,
            "nothing is there"
        );
        create_dir_all(&nodes).unwrap();
        create_dir_all(&device).unwrap();
        assert_eq!(node("0-1\n", "1\n"), Some(1));
        assert_eq!(node("0,4\n", "4\n"), Some(4));
        assert_eq!(node("0-1\n", "0\n"), Some(0));
        assert_eq!(node("0-1\n", "-1\n"), None, "not known");
        assert_eq!(node("0-1\n", "4096\n"), None, "more than there can be");
        assert_eq!(node("0-1\n", "none"), None);
        assert_eq!(node("0\n", "0\n"), None, "one node");
        write(nodes.join("online"), "0-1").unwrap();
        assert_eq!(
            node_in(sysfs.path(), "0000:af:00.0"),
            None,
            "another device"
        );
    }

    /// Independent of whether the machine has the node and permits the call.
    #[test]
    fn memory_is_had_where_the_preferred_node_has_none() {
        for node in [0, 1000] {
            let options = ArenaOptions {
                node: Some(node),
                prefault: true,
                ..ArenaOptions::default()
            };
            assert!(HostArena::with(3 << 20, options).unwrap().len() >= 3 << 20);
        }
    }
}
