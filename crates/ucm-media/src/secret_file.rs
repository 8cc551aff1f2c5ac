//! Files that hold a secret: keys of encryption, of TLS, of S3. One rule holds for all of them.
//!
//! A file of our own that other users may read is refused. One of another owner is read with a
//! warning: it may be a secret that was mounted for us, whose mode we cannot change.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::process::geteuid;
use tracing::warn;
use ucm_core::{Error, ErrorKind, Result};

/// Mode bits of all users but the owner.
const OTHERS: u32 = 0o077;
/// Most bytes of such a file.
const LONGEST: u64 = 1 << 20;

/// Whether a file is refused because others than its owner may read it; none where they may not.
fn refused(mode: u32, owner: u32, us: u32) -> Option<bool> {
    (mode & OTHERS != 0).then_some(owner == us)
}

/// The bytes of a file that holds a secret; `what` is its key in the configuration, or what it
/// holds. `Config` where it cannot be read, or is ours and others may read it.
pub fn read(path: &Path, what: &str) -> Result<Vec<u8>> {
    let unread = |error| failed(format!("{what} cannot be read"), path, error);
    let file = File::open(path).map_err(unread)?;
    let bytes = bytes_of(&file).map_err(unread)?;
    check(&file, path, what)?;
    Ok(bytes)
}

fn failed(text: String, path: &Path, error: std::io::Error) -> Error {
    let failed = Error::new(ErrorKind::Config, text).with("file", path.display());
    failed.caused_by(error)
}

/// The bytes of an open file.
pub(crate) fn bytes_of(file: &File) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(LONGEST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Whether an open file may be used as one that holds a secret.
pub(crate) fn check(file: &File, path: &Path, what: &str) -> Result<()> {
    let unread = |error| failed(format!("the mode of {what} cannot be read"), path, error);
    let meta = file.metadata().map_err(unread)?;
    let (mode, path) = (meta.mode() & 0o777, path.display());
    match refused(mode, meta.uid(), geteuid().as_raw()) {
        None => Ok(()),
        Some(true) => {
            let text = format!(
                "{what} is a secret, and its file {path} is open to other users (mode {mode:04o}): \
                 run chmod 600 {path} (where Kubernetes mounts it: defaultMode: 0400)"
            );
            Err(Error::new(ErrorKind::Config, text))
        }
        Some(false) => {
            warn!(
                path = %path,
                "{what} is a secret, and its file {path} is open to other users (mode {mode:04o}); \
                 it belongs to another user and is used all the same: let its owner run chmod 600 \
                 {path}"
            );
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_secret_of_our_own_that_others_may_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, b"secret").unwrap();
        let read_with = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            read(&path, "encryption_key_file")
        };
        for mode in [0o600, 0o400, 0o700] {
            assert_eq!(read_with(mode).unwrap(), b"secret", "{mode:o}");
        }
        for mode in [0o644, 0o640, 0o604, 0o620, 0o601] {
            let error = read_with(mode).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            let text = error.to_string();
            assert!(
                text.contains(&format!("chmod 600 {}", path.display())),
                "{text}"
            );
            assert!(
                text.contains("encryption_key_file") && text.contains(&format!("{mode:04o}")),
                "{text}"
            );
            assert!(!text.contains("secret\""), "{text}");
        }
        let error = read(&dir.path().join("none"), "redis_tls_key")
            .unwrap_err()
            .to_string();
        assert!(error.contains("redis_tls_key cannot be read"), "{error}");
    }

    #[test]
    fn a_secret_of_another_owner_is_read() {
        assert_eq!(refused(0o644, 7, 8), Some(false));
        assert_eq!(refused(0o644, 0, 8), Some(false), "mounted by root");
        assert_eq!(refused(0o600, 7, 8), None);
        assert_eq!(refused(0o640, 8, 8), Some(true));
        if geteuid().is_root() {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("key");
            std::fs::write(&path, b"secret").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
            std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
            assert_eq!(read(&path, "key").unwrap(), b"secret");
        }
    }
}
