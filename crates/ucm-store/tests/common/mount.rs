//! File systems that a test may mount, fill, change and take away again; they need root.
#![allow(clippy::print_stderr, reason = "says why a test is skipped")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// A place for mounts; everything mounted in it is unmounted when dropped.
pub(crate) struct Place {
    base: TempDir,
    mounted: Vec<PathBuf>,
}

impl Place {
    /// A place with a first tmpfs of `kib` KiB at `root`; `None`, after saying why, where nothing
    /// can be mounted. With `UCM_REQUIRE_ROOT_TESTS` in the environment that fails the test
    /// instead.
    pub(crate) fn new(kib: u64) -> Option<Self> {
        let mut place = Self {
            base: super::directory(),
            mounted: Vec::new(),
        };
        match place.try_tmpfs("root", kib) {
            Ok(()) => Some(place),
            Err(why) => {
                assert!(
                    std::env::var_os("UCM_REQUIRE_ROOT_TESTS").is_none(),
                    "cannot mount: {why}"
                );
                eprintln!("skipped, nothing can be mounted here: {why}");
                None
            }
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.base.path().join(name)
    }

    /// Mounts a tmpfs at `name`, over what may be there.
    pub(crate) fn tmpfs(&mut self, name: &str, kib: u64) {
        self.try_tmpfs(name, kib).unwrap();
    }

    fn try_tmpfs(&mut self, name: &str, kib: u64) -> Result<(), String> {
        let dir = self.path(name);
        std::fs::create_dir_all(&dir).map_err(|error| error.to_string())?;
        let size = format!("size={kib}k");
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "ucm-test"])
            .arg(&dir))?;
        self.mounted.push(dir);
        Ok(())
    }

    /// Shows what is mounted at `from` at `to` too.
    pub(crate) fn bind(&mut self, from: &str, to: &str) {
        let dir = self.path(to);
        std::fs::create_dir_all(&dir).unwrap();
        run(Command::new("mount")
            .arg("--bind")
            .arg(self.path(from))
            .arg(&dir))
        .unwrap();
        self.mounted.push(dir);
    }

    /// Takes away what was mounted last at `name`, open files or not.
    pub(crate) fn unmount(&mut self, name: &str) {
        let dir = self.path(name);
        run(Command::new("umount").arg("-l").arg(&dir)).unwrap();
        let last = self
            .mounted
            .iter()
            .rposition(|mounted| *mounted == dir)
            .unwrap();
        self.mounted.remove(last);
    }

    /// Makes what is mounted at `name` read-only, or writable again. It is refused while a store
    /// writes a document there.
    pub(crate) fn read_only(&self, name: &str, on: bool) {
        let how = if on { "remount,ro" } else { "remount,rw" };
        super::eventually("it is mounted so", || {
            run(Command::new("mount").args(["-o", how]).arg(self.path(name))).is_ok()
        });
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for dir in self.mounted.iter().rev() {
            let _ = run(Command::new("umount").arg("-l").arg(dir));
        }
    }
}

/// Copies everything below one directory to another; again if an open store renames a file during
/// the copy.
pub(crate) fn copy_all(from: &Path, to: &Path) {
    super::eventually("it is copied", || {
        run(Command::new("cp").arg("-a").arg(from.join(".")).arg(to)).is_ok()
    });
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    ))
}
