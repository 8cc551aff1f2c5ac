//! Memory of the machine and the container, against which the size of a cache is checked at start.
//!
//! The machine's figures are in `/proc/meminfo`. A container's are in its control groups, version 2
//! (`memory.max`) or 1 (`memory.limit_in_bytes`): every group from the process's own up to the root
//! of the mount may set a limit. A group's inactive file cache can be reclaimed, so it counts as
//! free.

use std::path::{Path, PathBuf};

use ucm_core::{Error, ErrorKind, Result};

/// Memory of the machine, or of the container if that is less.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MachineMemory {
    /// Most bytes that this process can have.
    pub total: u64,
    /// Bytes available now without eviction of others.
    pub available: u64,
    /// The limit behind `available`, as text for a message.
    pub limited_by: String,
}

impl MachineMemory {
    /// The current values. `Io` if the system does not report them.
    pub fn now() -> Result<Self> {
        Self::below(Path::new("/"))
    }

    /// The values in the files below `root`, which has the layout of `/`.
    pub fn below(root: &Path) -> Result<Self> {
        let path = root.join("proc/meminfo");
        let text = std::fs::read_to_string(&path).map_err(|error| {
            Error::from_io(error, "cannot find out how much memory the machine has")
                .with("path", path.display())
        })?;
        let field = |name: &str| {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
                .and_then(|kib| kib.checked_mul(1024))
        };
        let total = field("MemTotal").ok_or_else(|| {
            Error::new(
                ErrorKind::Io,
                "the system does not report how much memory it has",
            )
            .with("path", path.display())
        })?;
        let mut memory = Self {
            total,
            // A kernel before 3.14 has no estimate.
            available: field("MemAvailable")
                .or_else(|| field("MemFree"))
                .unwrap_or(total)
                .min(total),
            limited_by: "the machine".to_owned(),
        };
        for group in groups(root) {
            if let Some((limit, available)) = group.limit() {
                memory.total = memory.total.min(limit);
                if available < memory.available {
                    memory.available = available;
                    memory.limited_by = format!("the control group {}", group.dir.display());
                }
            }
        }
        Ok(memory)
    }

    /// Checks that `bytes` are available now; else `Config`, with the available amount.
    pub fn check(&self, key: &'static str, bytes: u64) -> Result<()> {
        if bytes <= self.available {
            return Ok(());
        }
        let text = format!("{key} is more than the available memory; lower it or free some");
        Err(Error::new(ErrorKind::Config, text)
            .with(key, bytes)
            .with("available", self.available)
            .with("total", self.total)
            .with("limited_by", &self.limited_by))
    }
}

/// A control group that may limit memory.
struct Group {
    dir: PathBuf,
    files: Files,
}

/// The names of a group's files with its limit and its used bytes, and of the field of its
/// `memory.stat` with the file cache that can be reclaimed.
type Files = [&'static str; 3];
const VERSION_1: Files = [
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
];
const VERSION_2: Files = ["memory.max", "memory.current", "inactive_file"];

/// "No limit" in version 1: the largest number of pages.
const NO_LIMIT: u64 = 1 << 62;

impl Group {
    /// Its limit, and the unused part of it.
    fn limit(&self) -> Option<(u64, u64)> {
        let [limit, used, idle] = self.files;
        let read = |name: &str| std::fs::read_to_string(self.dir.join(name)).ok();
        let limit = read(limit)?.trim().parse::<u64>().ok()?; // "max" is none
        if limit >= NO_LIMIT {
            return None;
        }
        let used = read(used)
            .and_then(|text| text.trim().parse::<u64>().ok())
            .unwrap_or(0);
        let stat = read("memory.stat").unwrap_or_default();
        let idle = stat.lines().find_map(|line| {
            line.strip_prefix(idle)?
                .strip_prefix(' ')?
                .parse::<u64>()
                .ok()
        });
        let used = used.saturating_sub(idle.unwrap_or(0));
        Some((limit, limit.saturating_sub(used)))
    }
}

/// Every group that this process is in, with its ancestors. In a container the path may be the
/// host's, of which only the end, or nothing, is mounted: missing groups set no limit, and the root
/// of the mount is always read.
fn groups(root: &Path) -> Vec<Group> {
    let text = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mount = root.join("sys/fs/cgroup");
    let mut groups = Vec::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let (files, mounts) = if controllers.is_empty() {
            (VERSION_2, [mount.clone(), mount.join("unified")])
        } else if controllers.split(',').any(|name| name == "memory") {
            (VERSION_1, [mount.join("memory"), mount.join(controllers)])
        } else {
            continue;
        };
        let path = Path::new(path.trim_start_matches('/'));
        let plain = path
            .components()
            .all(|part| matches!(part, std::path::Component::Normal(_)));
        for mount in mounts {
            let root = |part: &&Path| part.as_os_str().is_empty();
            let ancestors = path.ancestors().filter(|part| plain || root(part));
            let group = |part| Group {
                dir: mount.join(part),
                files,
            };
            groups.extend(ancestors.map(group));
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A tree of files with the layout of `/`: a machine with 64 GiB, 48 of them available.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let meminfo =
            "MemTotal:       67108864 kB\nMemFree:  1048576 kB\nMemAvailable:   50331648 kB\n";
        for (name, text) in [("proc/meminfo", meminfo)].iter().chain(files) {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        dir
    }

    fn read(files: &[(&str, &str)]) -> MachineMemory {
        MachineMemory::below(tree(files).path()).unwrap()
    }

    #[test]
    fn a_machine_without_groups() {
        let memory = read(&[]);
        assert_eq!((memory.total, memory.available), (64 * GIB, 48 * GIB));
        assert_eq!(memory.limited_by, "the machine");
        assert!(memory.check("cache_size", 48 * GIB).is_ok());
        let error = memory.check("cache_size", 48 * GIB + 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        let text = error.to_string();
        assert!(
            text.contains("lower it") && text.contains("limited_by=the machine"),
            "{text}"
        );
    }

    #[test]
    fn the_tightest_group_of_version_2_counts_and_idle_files_are_free() {
        let memory = read(&[
            ("proc/self/cgroup", "0::/pods/one/engine\n"),
            ("sys/fs/cgroup/memory.stat", "inactive_file 5\n"),
            ("sys/fs/cgroup/pods/memory.max", "34359738368\n"),
            ("sys/fs/cgroup/pods/memory.current", "8589934592\n"),
            ("sys/fs/cgroup/pods/one/memory.max", "17179869184\n"),
            ("sys/fs/cgroup/pods/one/memory.current", "6442450944\n"),
            (
                "sys/fs/cgroup/pods/one/memory.stat",
                "anon 1\ninactive_file 2147483648\nactive_file 9\n",
            ),
            ("sys/fs/cgroup/pods/one/engine/memory.max", "max\n"),
        ]);
        assert_eq!((memory.total, memory.available), (16 * GIB, 12 * GIB));
        assert!(memory.limited_by.ends_with("cgroup/pods/one"), "{memory:?}");
    }

    #[test]
    fn a_container_that_sees_only_its_own_group() {
        let limit = [
            ("sys/fs/cgroup/memory.max", "8589934592"),
            ("sys/fs/cgroup/memory.current", "1073741824"),
        ];
        for line in [
            "0::/\n",
            "0::/system.slice/docker-abc.scope\n",
            "0::/../other\n",
        ] {
            let files: Vec<_> = [("proc/self/cgroup", line)]
                .into_iter()
                .chain(limit)
                .collect();
            let memory = read(&files);
            assert_eq!(
                (memory.total, memory.available),
                (8 * GIB, 7 * GIB),
                "{line}"
            );
        }
    }

    #[test]
    fn version_1_and_both_at_once() {
        let memory = read(&[
            (
                "proc/self/cgroup",
                "9:name=systemd:/\n4:cpu,memory:/box\n0::/\n",
            ),
            (
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712",
            ),
            (
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes",
                "4294967296",
            ),
            (
                "sys/fs/cgroup/memory/box/memory.usage_in_bytes",
                "3221225472",
            ),
            (
                "sys/fs/cgroup/memory/box/memory.stat",
                "inactive_file 7\ntotal_inactive_file 1073741824\n",
            ),
            ("sys/fs/cgroup/unified/memory.max", "max"),
        ]);
        assert_eq!((memory.total, memory.available), (4 * GIB, 2 * GIB));
    }

    #[test]
    fn nonsense_sets_no_limit_and_a_machine_that_says_nothing_is_an_error() {
        let memory = read(&[
            ("proc/self/cgroup", "\n::\n0:\nx:memory\n0::/a\n"),
            ("sys/fs/cgroup/a/memory.max", "-5"),
            ("sys/fs/cgroup/memory.max", "much"),
        ]);
        assert_eq!(memory.available, 48 * GIB);
        assert!(MachineMemory::below(Path::new("/nonexistent")).is_err());
        let dir = tree(&[("proc/meminfo", "MemTotal: many kB\n")]);
        assert!(MachineMemory::below(dir.path()).is_err());
    }

    #[test]
    fn this_machine_has_some() {
        let memory = MachineMemory::now().unwrap();
        assert!(memory.total > 0 && memory.available <= memory.total);
    }
}
