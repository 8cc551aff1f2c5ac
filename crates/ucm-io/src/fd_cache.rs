//! A cache of open descriptors of files that never change, between reads: the most recently used
//! ones.
//!
//! Opening a file by its path costs more than reading a small record from it. A kept descriptor
//! must not outlive its file, because it would hold the file's space. So every read checks that the
//! file still has a name; code that removes a file or finds it missing removes its descriptor; and
//! descriptors without use are closed after a while. No lock is held over a system call. Forked
//! children inherit none of them. A process that runs out of descriptors closes them.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hashlink::LruCache;
use ucm_core::sync::Mutex;
use ucm_device::OwnFd;

use crate::usrbio::RingFile;

/// Most kept descriptors of one engine.
pub(crate) const MOST: usize = 128;
/// Most kept descriptors of all engines of a process together.
const MOST_IN_ALL: usize = 512;

/// Number of kept descriptors in this process.
static IN_ALL: AtomicUsize = AtomicUsize::new(0);

/// An open read-only file, shared by the threads that read it; closed with the last reference.
#[derive(Debug)]
pub(crate) struct KeptFile {
    /// The registration with rings; declared before the descriptor so that it is dropped first.
    ring: Option<RingFile>,
    fd: OwnFd,
    /// True if it is read past the page cache. Never changed, because other threads may be reading.
    pub(crate) direct: bool,
}

impl KeptFile {
    /// Keeps an open file. Returns `None` and closes it if there are too many.
    pub(crate) fn new(ring: Option<RingFile>, fd: OwnedFd, direct: bool) -> Option<Arc<Self>> {
        if IN_ALL.fetch_add(1, Ordering::Relaxed) >= MOST_IN_ALL {
            IN_ALL.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        match OwnFd::of_file(fd) {
            Ok(fd) => Some(Arc::new(Self { ring, fd, direct })),
            Err(_) => {
                IN_ALL.fetch_sub(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// The descriptor.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// As preadv(2).
    pub(crate) fn read(&self, bufs: &mut [IoSliceMut<'_>], at: u64) -> rustix::io::Result<usize> {
        match self.ring.as_ref().and_then(|ring| ring.read(bufs, at)) {
            Some(read) => read,
            None => rustix::io::preadv(self.fd(), bufs, at),
        }
    }
}

impl Drop for KeptFile {
    fn drop(&mut self) {
        IN_ALL.fetch_sub(1, Ordering::Relaxed);
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct FdCache {
    files: Mutex<LruCache<PathBuf, Entry>>,
}

#[derive(Debug)]
struct Entry {
    file: Arc<KeptFile>,
    /// Since [`FdCache::take`] last looked.
    used: bool,
}

impl Default for FdCache {
    fn default() -> Self {
        Self {
            files: Mutex::new(LruCache::new(MOST)),
        }
    }
}

impl FdCache {
    /// The kept file of that name.
    pub(crate) fn get(&self, path: &Path) -> Option<Arc<KeptFile>> {
        let mut files = self.files.lock();
        let entry = files.get_mut(path)?;
        entry.used = true;
        Some(Arc::clone(&entry.file))
    }

    /// Keeps an open file under its name, in place of the least recently used one.
    pub(crate) fn put(&self, path: &Path, file: Arc<KeptFile>) {
        let mut files = self.files.lock();
        let oldest = if files.len() >= MOST && !files.contains_key(path) {
            files.remove_lru()
        } else {
            None
        };
        let before = files.insert(path.to_owned(), Entry { file, used: true });
        drop(files);
        drop((oldest, before)); // closed with no lock held
    }

    /// Removes the files of these names, and with `unused` those not used since the last such call.
    /// Dropping the result closes them.
    pub(crate) fn take(&self, gone: &[PathBuf], unused: bool) -> Vec<Arc<KeptFile>> {
        let mut files = self.files.lock();
        if files.is_empty() {
            return Vec::new();
        }
        let mut taken: Vec<_> = gone.iter().filter_map(|path| files.remove(path)).collect();
        if unused {
            let idle = |(path, entry): (&PathBuf, &mut Entry)| {
                (!std::mem::take(&mut entry.used)).then(|| path.clone())
            };
            let idle: Vec<PathBuf> = files.iter_mut().filter_map(idle).collect();
            taken.extend(idle.iter().filter_map(|path| files.remove(path)));
        }
        drop(files);
        taken.into_iter().map(|entry| entry.file).collect()
    }

    /// Closes one file, if it is still the kept one.
    pub(crate) fn drop_file(&self, path: &Path, file: &Arc<KeptFile>) {
        let mut files = self.files.lock();
        let same = files
            .peek(path)
            .is_some_and(|entry| Arc::ptr_eq(&entry.file, file));
        let taken = if same { files.remove(path) } else { None };
        drop(files);
        drop(taken);
    }

    /// Takes all out.
    pub(crate) fn take_all(&self) -> Vec<Arc<KeptFile>> {
        let all = std::mem::replace(&mut *self.files.lock(), LruCache::new(MOST));
        all.into_iter().map(|(_, entry)| entry.file).collect()
    }

    /// Closes all, because the process has no descriptors left; true if there were any.
    pub(crate) fn give_up(&self) -> bool {
        !self.take_all().is_empty()
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.files.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open() -> Arc<KeptFile> {
        KeptFile::new(
            None,
            std::fs::File::open("/dev/null").unwrap().into(),
            false,
        )
        .unwrap()
    }

    fn name(n: usize) -> PathBuf {
        format!("/x/{n}").into()
    }

    #[test]
    fn the_one_used_longest_ago_makes_room() {
        let kept = FdCache::default();
        for n in 0..MOST {
            kept.put(&name(n), open());
        }
        assert!(kept.get(&name(0)).is_some());
        kept.put(&name(MOST), open());
        assert_eq!(kept.count(), MOST);
        assert!(kept.get(&name(0)).is_some() && kept.get(&name(1)).is_none());
        kept.put(&name(0), open());
        assert_eq!(kept.count(), MOST, "two threads opened the same");
    }

    #[test]
    fn what_is_gone_or_unused_is_taken_out() {
        let kept = FdCache::default();
        (0..4).for_each(|n| kept.put(&name(n), open()));
        assert_eq!(kept.take(&[name(2), name(9)], false).len(), 1);
        assert_eq!(kept.take(&[], true).len(), 0, "all are new");
        kept.get(&name(1));
        assert_eq!(kept.take(&[], true).len(), 2);
        assert!(kept.get(&name(1)).is_some() && kept.count() == 1);
        let other = open();
        kept.drop_file(&name(1), &other);
        assert_eq!(kept.count(), 1, "another thread's file stays");
        assert!(kept.give_up() && !kept.give_up());
    }
}
