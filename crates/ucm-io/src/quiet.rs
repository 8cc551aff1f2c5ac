//! SHA-256 of files, computed by threads that run only on otherwise idle processors.
//!
//! Such a thread must not hold a lock that others wait for, nor that of an interpreter, because it
//! may not run for a second. It hashes one piece of a file while the caller waits.

use std::io;
use std::os::fd::BorrowedFd;

use sha2::{Digest, Sha256};

/// Bytes read at once.
const PIECE: usize = 1 << 20;
/// Nice value of these threads.
const NICE: i32 = 19;

/// A digest in progress.
///
/// ```
/// use std::io::Write;
/// use std::os::fd::AsFd;
///
/// let mut file = tempfile::tempfile()?;
/// file.write_all(b"some bytes")?;
/// let mut digest = ucm_io::QuietSha256::default();
/// assert_eq!(digest.update(file.as_fd(), 5, 100)?, 5);
/// assert_eq!(digest.finish()[..2], [0x27, 0x70]);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Default)]
pub struct QuietSha256(Sha256);

impl QuietSha256 {
    /// Adds `len` bytes of a file from `offset` on and waits. Returns the number added, which is
    /// smaller at the end of the file.
    pub fn update(&mut self, file: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<u64> {
        let hash = || self.add(file, offset, length);
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("ucm-hash".into());
            let hashing = thread.spawn_scoped(scope, hash)?;
            hashing
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("the thread that hashes panicked")))
        })
    }

    fn add(&mut self, file: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<u64> {
        // On Linux this affects the calling thread only. If it fails, hashing takes processor time
        // from others.
        #[cfg(target_os = "linux")]
        let _ = rustix::process::setpriority_process(None, NICE);
        let mut piece = vec![0; PIECE.min(usize::try_from(length).unwrap_or(PIECE))];
        let mut done = 0;
        while done < length {
            let want = piece
                .len()
                .min(usize::try_from(length - done).unwrap_or(PIECE));
            let got = match rustix::io::pread(file, &mut piece[..want], offset + done) {
                Ok(0) => break,
                Ok(got) => got,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            self.0.update(&piece[..got]);
            done += got as u64;
        }
        Ok(done)
    }

    /// The digest of the added bytes.
    pub fn finish(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}
