//! Names below a root, resolved without following a symbolic link.
//!
//! The user chooses the root's path, which may contain links. Below the root all files are ours: a
//! link there would lead our reads, writes and removals to foreign files. So every operation opens
//! the root, walks from that descriptor to the directory of each name, and works relative to that
//! directory. The walk is one `openat2`. If the kernel, a seccomp filter or the file system refuses
//! that call, it is one `openat` for each directory.
//!
//! The descriptor of a root normally lives for one operation: a kept descriptor prevents an
//! unmount, and refers to the old share after another one is mounted in its place. Only appends to
//! segments (one for each record) and reads of segments use a kept one, because only segments have
//! their unused descriptors closed. A copy between roots opens its root for each piece. A kept root
//! is closed after some time without use, like descriptors of segments, and as soon as another
//! operation finds another directory or mount at the root's path: the marker is read about once a
//! second.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;
use ucm_core::sync::{Mutex, RwLock};

use crate::fd_cache::KeptFile;
use crate::op::{FileMeta, to_meta};
use crate::sys::retry;

/// Flags for opening a directory to resolve names in it.
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
const STRICTLY: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);

/// The roots of one engine. The kernel's rules apply to paths below none of them.
#[derive(Debug, Default)]
pub(crate) struct Roots {
    roots: RwLock<Vec<Arc<Path>>>,
    /// True if `openat2` cannot be used here.
    without_openat2: AtomicBool,
    kept: Mutex<Option<KeptRoot>>,
    pub(crate) plain: RwLock<Plain>,
    /// Directories that walks opened.
    #[cfg(test)]
    pub(crate) opened: std::sync::atomic::AtomicUsize,
}

/// Directories seen to be no links, until something in the one above them changes.
#[derive(Debug, Default)]
pub(crate) struct Plain {
    pub(crate) above: Option<FileMeta>,
    names: Arc<HashSet<OsString>>,
}

/// The root last used by an append to a segment or a read of one.
#[derive(Debug)]
struct KeptRoot {
    path: Arc<Path>,
    root: Arc<KeptFile>,
    /// Used since the last call of [`Roots::take_kept`].
    used: bool,
}

impl Roots {
    /// From now on no symbolic link below this directory is followed.
    pub(crate) fn add(&self, root: &Path) {
        let mut roots = self.roots.write();
        if !roots.iter().any(|known| **known == *root) {
            roots.push(root.into());
        }
    }

    /// As on a system without `openat2`.
    #[cfg(any(test, feature = "test-utils"))]
    pub(crate) fn forget_openat2(&self) {
        self.without_openat2.store(true, Ordering::Relaxed);
    }

    /// Resolves the names of one operation.
    pub(crate) fn walk(&self) -> Walk<'_> {
        Walk {
            roots: self,
            root: None,
            dir: None,
            known: None,
            seen: HashSet::new(),
        }
    }

    /// Opens a file as [`Walk::open`] does, through a root that stays open for the next such call.
    pub(crate) fn open_often(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let Some((root, rest)) = self.split(path) else {
            return retry(|| rustix::fs::open(path, flags, Mode::empty()));
        };
        let root = match self.kept(&root) {
            Some(kept) => kept,
            None => match KeptFile::new(None, open_root(&root)?, false) {
                Some(opened) => self.keep(root, opened),
                None => return self.walk().open(path, flags), // too many descriptors are kept
            },
        };
        match self.open_from(root.fd(), rest, flags, Mode::empty()) {
            // The server no longer knows that directory; it may know the one at its path now.
            Err(Errno::STALE) => {
                drop(self.take_kept(false));
                self.walk().open(path, flags)
            }
            opened => opened,
        }
    }

    fn kept(&self, path: &Arc<Path>) -> Option<Arc<KeptFile>> {
        let mut kept = self.kept.lock();
        let kept = kept.as_mut().filter(|kept| kept.path == *path)?;
        kept.used = true;
        Some(Arc::clone(&kept.root))
    }

    fn keep(&self, path: Arc<Path>, root: Arc<KeptFile>) -> Arc<KeptFile> {
        let (kept, used) = (Arc::clone(&root), true);
        let kept = self.kept.lock().replace(KeptRoot {
            path,
            root: kept,
            used,
        });
        drop(kept); // closed with no lock held
        root
    }

    /// Removes and returns the kept root; with `unused` only if it was not used since the last such
    /// call.
    pub(crate) fn take_kept(&self, unused: bool) -> Option<Arc<KeptFile>> {
        let mut kept = self.kept.lock();
        let taken = kept.take_if(|kept| !unused || !std::mem::take(&mut kept.used));
        taken.map(|kept| kept.root)
    }

    /// Closes the kept root if it is not this one, the current root of the path.
    fn compare_kept(&self, path: &Arc<Path>, now: &OwnedFd) {
        let kept = self.kept.lock();
        let known = kept.as_ref().filter(|kept| kept.path == *path);
        let Some(known) = known.map(|kept| Arc::clone(&kept.root)) else {
            return;
        };
        drop(kept); // no lock is held over a system call
        let places = (place_of(known.fd()), place_of(now.as_fd()));
        if places.0.is_none() || places.0 != places.1 {
            let same = |kept: &mut KeptRoot| Arc::ptr_eq(&kept.root, &known);
            let taken = self.kept.lock().take_if(same);
            drop(taken); // here too
        }
    }

    /// The innermost root above a path, and the path from there.
    fn split<'p>(&self, path: &'p Path) -> Option<(Arc<Path>, &'p Path)> {
        let roots = self.roots.read();
        let above = |root: &Arc<Path>| Some((Arc::clone(root), below(root, path)?));
        let found = roots.iter().filter_map(above);
        found.min_by_key(|(_, rest)| rest.as_os_str().len())
    }

    /// Opens a name from a descriptor of its root. No link is followed, on the way or at the end.
    fn open_from(
        &self,
        root: BorrowedFd<'_>,
        path: &Path,
        flags: OFlags,
        mode: Mode,
    ) -> rustix::io::Result<OwnedFd> {
        let mut refused = false;
        if !self.without_openat2.load(Ordering::Relaxed) {
            // `O_NOFOLLOW` reports a link as such also if a directory is wanted.
            let flags = flags - OFlags::NOFOLLOW;
            match retry(|| rustix::fs::openat2(root, path, flags, mode, STRICTLY)) {
                Err(Errno::NOSYS) => self.without_openat2.store(true, Ordering::Relaxed),
                // A seccomp filter, or an error that the walk below also returns.
                Err(Errno::PERM) => refused = true,
                opened => return opened,
            }
        }
        let opened = open_by_parts(root, path, flags, mode);
        if refused && opened.is_ok() {
            self.without_openat2.store(true, Ordering::Relaxed); // only the call was refused
        }
        opened
    }
}

/// True if a directory last changed so long ago that its next change is sure to show in its time.
fn has_rested(dir: &FileMeta) -> bool {
    let changed = Duration::from_nanos(dir.mtime_ns.unsigned_abs());
    UNIX_EPOCH
        .elapsed()
        .is_ok_and(|now| now > changed + Duration::from_millis(100))
}

/// The same without `openat2`: one `openat` for each directory on the way.
fn open_by_parts(
    root: BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
    mode: Mode,
) -> rustix::io::Result<OwnedFd> {
    let mut dir: Option<OwnedFd> = None;
    let mut parts = path.components().peekable();
    while let Some(part) = parts.next() {
        let name = match part {
            Component::Normal(name) => name,
            Component::CurDir => continue,
            _ => return Err(Errno::XDEV),
        };
        let from = dir.as_ref().map_or(root, |dir| dir.as_fd());
        if parts.peek().is_none() {
            return open_here(from, name, flags, mode);
        }
        dir = Some(open_here(from, name, DIRECTORY, Mode::empty())?);
    }
    Err(Errno::INVAL) // no name
}

/// Opens a root, by links too.
fn open_root(path: &Path) -> rustix::io::Result<OwnedFd> {
    let here = path.as_os_str().is_empty().then_some(Path::new("."));
    retry(|| rustix::fs::open(here.unwrap_or(path), DIRECTORY, Mode::empty()))
}

/// Identity of an open directory: device, inode, and mount (0 if the kernel does not report it).
pub(crate) fn place_of(dir: BorrowedFd<'_>) -> Option<[u64; 4]> {
    let how = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC; // no request to a server
    let what = StatxFlags::INO | StatxFlags::MNT_ID;
    let found = retry(|| rustix::fs::statx(dir, c"", how, what)).ok()?;
    let device = [found.stx_dev_major, found.stx_dev_minor].map(u64::from);
    Some([device[0], device[1], found.stx_ino, found.stx_mnt_id])
}

/// Opens a name in a directory unless it is a link (LOOP).
fn open_here(
    dir: BorrowedFd<'_>,
    name: &OsStr,
    flags: OFlags,
    mode: Mode,
) -> rustix::io::Result<OwnedFd> {
    match retry(|| rustix::fs::openat(dir, name, flags | OFlags::NOFOLLOW, mode)) {
        // If a directory is wanted, the kernel does not report a link as such.
        Err(Errno::NOTDIR) if is_link(dir, name.as_ref()) => Err(Errno::LOOP),
        opened => opened,
    }
}

/// True if a name is a symbolic link.
fn is_link(dir: BorrowedFd<'_>, name: &Path) -> bool {
    retry(|| rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW))
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink)
}

/// The link nearest to the end of a path, for an error about a link that was not followed.
pub(crate) fn link_on(path: &Path) -> Option<&Path> {
    path.ancestors().find(|path| is_link(CWD, path))
}

/// The rest of a path behind a directory, if any.
fn below<'p>(dir: &Path, path: &'p Path) -> Option<&'p Path> {
    // Compares bytes, not components, because it runs for every name.
    let rest = path
        .as_os_str()
        .as_bytes()
        .strip_prefix(dir.as_os_str().as_bytes())?;
    let ends = dir.as_os_str().is_empty() || dir.as_os_str().as_bytes().ends_with(b"/");
    let slashes = rest.iter().take_while(|&&byte| byte == b'/').count();
    let rest = rest.get(slashes..)?;
    ((ends || slashes > 0) && !rest.is_empty()).then(|| Path::new(OsStr::from_bytes(rest)))
}

/// Slashes in a name. As [`below`], it runs for every name.
fn slashes(name: &Path) -> usize {
    let bytes = name.as_os_str().as_bytes().iter();
    bytes.filter(|&&byte| byte == b'/').count()
}

/// Resolution of the names of one operation. The root and the last directory stay open until it
/// ends.
pub(crate) struct Walk<'r> {
    roots: &'r Roots,
    root: Option<(Arc<Path>, Arc<OwnedFd>)>,
    /// With its metadata if names in its directories are looked up and it has rested.
    dir: Option<(PathBuf, Arc<OwnedFd>, Option<FileMeta>)>,
    /// Directories in it that are no links, as known before and as found by this walk.
    known: Option<Arc<HashSet<OsString>>>,
    seen: HashSet<OsString>,
}

impl Drop for Walk<'_> {
    fn drop(&mut self) {
        self.remember();
    }
}

/// A name in an open directory below a root, or a path that lies below none.
#[derive(Clone)]
pub(crate) struct At<'p> {
    dir: Option<Arc<OwnedFd>>,
    name: &'p Path,
    /// The whole path, for errors.
    pub(crate) path: &'p Path,
}

impl Walk<'_> {
    /// The directory of a name and the name in it. Fails if the directory does not exist or a link
    /// is on the way (LOOP).
    pub(crate) fn at<'p>(&mut self, path: &'p Path) -> rustix::io::Result<At<'p>> {
        self.from(path, 1)
    }

    /// As [`Self::at`] from one directory further up, which most names of a job share. The
    /// directory between, part of the name, may be a link.
    pub(crate) fn above<'p>(&mut self, path: &'p Path) -> rustix::io::Result<At<'p>> {
        self.from(path, 2)
    }

    fn from<'p>(&mut self, path: &'p Path, parts: usize) -> rustix::io::Result<At<'p>> {
        let at = |dir, name| Ok(At { dir, name, path });
        if let Some((known, dir, _)) = &self.dir
            && let Some(name) = below(known, path).filter(|name| slashes(name) + 1 == parts)
        {
            return at(Some(Arc::clone(dir)), name);
        }
        let Some((root, rest)) = self.roots.split(path) else {
            return at(None, path);
        };
        if rest.file_name().is_none() {
            return Err(Errno::INVAL);
        }
        let root = self.root(&root)?;
        let parents = path.ancestors().nth(parts).zip(rest.ancestors().nth(parts));
        let named = parents.and_then(|(whole, parent)| Some((whole, parent, below(parent, rest)?)));
        let Some((whole, parent, name)) = named.filter(|(.., name)| *name != rest) else {
            self.remember(); // of another directory
            self.dir = None;
            return at(Some(root), rest);
        };
        #[cfg(test)]
        self.roots.opened.fetch_add(1, Ordering::Relaxed);
        let dir = (self.roots).open_from(root.as_fd(), parent, DIRECTORY, Mode::empty())?;
        self.remember();
        let mut above = None;
        if parts > 1 {
            above = Some(to_meta(&retry(|| rustix::fs::fstat(&dir))?)).filter(has_rested);
            let plain = self.roots.plain.read();
            let names = (above.is_some() && plain.above == above).then_some(&plain.names);
            self.known = names.map(Arc::clone);
        }
        let (_, dir, _) = self.dir.insert((whole.to_owned(), Arc::new(dir), above));
        at(Some(Arc::clone(dir)), name)
    }

    /// True if the directory in this name, made by [`Self::above`], is a link.
    pub(crate) fn is_by_link(&mut self, at: &At<'_>) -> bool {
        let bytes = at.name.as_os_str().as_bytes();
        let end = bytes.iter().rposition(|&byte| byte == b'/');
        let Some(between) = end.filter(|_| at.is_below()) else {
            return false;
        };
        let name = OsStr::from_bytes(&bytes[..between]);
        let is_in = |names: &HashSet<OsString>| names.contains(name);
        if self.known.as_deref().is_some_and(is_in) || is_in(&self.seen) {
            return false;
        }
        let link = at.name.parent().is_some_and(|dir| is_link(at.dir(), dir));
        if !link {
            self.seen.insert(name.into());
        }
        link
    }

    /// Later walks know what this one has found in its directory, if that has rested.
    fn remember(&mut self) {
        self.known = None;
        let seen = std::mem::take(&mut self.seen);
        let above = self.dir.as_ref().and_then(|(.., above)| *above);
        if above.is_none() || seen.is_empty() {
            return;
        }
        let mut plain = self.roots.plain.write();
        if plain.above != above {
            (plain.above, plain.names) = (above, Arc::default());
        }
        Arc::make_mut(&mut plain.names).extend(seen);
    }

    /// Opens this path. Below a root no link is followed, on the way or at the end.
    pub(crate) fn open(&mut self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let Some((root, rest)) = self.roots.split(path) else {
            return retry(|| rustix::fs::open(path, flags, Mode::empty()));
        };
        let root = self.root(&root)?;
        (self.roots).open_from(root.as_fd(), rest, flags, Mode::empty())
    }

    fn root(&mut self, path: &Arc<Path>) -> rustix::io::Result<Arc<OwnedFd>> {
        if let Some((known, root)) = &self.root
            && known == path
        {
            return Ok(Arc::clone(root));
        }
        let root = Arc::new(open_root(path)?);
        self.roots.compare_kept(path, &root);
        self.root = Some((Arc::clone(path), Arc::clone(&root)));
        Ok(root)
    }
}

impl At<'_> {
    /// The directory.
    pub(crate) fn dir(&self) -> BorrowedFd<'_> {
        self.dir.as_ref().map_or(CWD, |dir| dir.as_fd())
    }

    /// The name in it.
    pub(crate) fn name(&self) -> &Path {
        self.name
    }

    /// True if it lies below a root, so that a link in its place is foreign.
    pub(crate) fn is_below(&self) -> bool {
        self.dir.is_some()
    }

    /// Creates the file; an existing one, or a link, is an error (EXIST).
    pub(crate) fn create(&self, mode: u32) -> rustix::io::Result<OwnedFd> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        retry(|| rustix::fs::openat(self.dir(), self.name, flags, Mode::from_raw_mode(mode)))
    }

    /// Removes the name: a link itself, never what it leads to.
    pub(crate) fn unlink(&self) -> rustix::io::Result<()> {
        retry(|| rustix::fs::unlinkat(self.dir(), self.name, AtFlags::empty()))
    }

    /// Renames this name, replacing an existing target.
    pub(crate) fn rename(&self, to: &At<'_>) -> rustix::io::Result<()> {
        retry(|| rustix::fs::renameat(self.dir(), self.name, to.dir(), to.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_below_a_root_is_known_by_its_path() {
        let rest = |dir: &str, path: &'static str| below(Path::new(dir), Path::new(path));
        assert_eq!(rest("/r", "/r/a/b"), Some(Path::new("a/b")));
        assert_eq!(rest("/r/", "/r/a"), Some(Path::new("a")));
        assert_eq!(rest("/r", "/r//a"), Some(Path::new("a")));
        assert_eq!(rest("/", "/a"), Some(Path::new("a")));
        assert_eq!(rest("", "a/b"), Some(Path::new("a/b")));
        for (dir, path) in [
            ("/r", "/r"),
            ("/r", "/r/"),
            ("/r", "/rest"),
            ("/r", "/q/a"),
            ("/r", "/"),
        ] {
            assert_eq!(rest(dir, path), None, "{dir} {path}");
        }
        let roots = Roots::default();
        for root in ["/r", "/r/inner", "/r"] {
            roots.add(Path::new(root));
        }
        assert_eq!(roots.roots.read().len(), 2);
        let (root, rest) = roots.split(Path::new("/r/inner/a")).unwrap();
        assert_eq!((&*root, rest), (Path::new("/r/inner"), Path::new("a")));
    }

    /// What one operation sees to be no link counts for the directory in which it was seen.
    #[test]
    fn a_link_is_seen_in_each_root() {
        let place = tempfile::tempdir().unwrap();
        let (one, other) = (place.path().join("one"), place.path().join("other"));
        std::fs::create_dir_all(one.join("ns/d")).unwrap();
        std::fs::create_dir_all(one.join("d")).unwrap();
        std::fs::create_dir_all(&other).unwrap();
        std::os::unix::fs::symlink(one.join("d"), other.join("d")).unwrap();
        let roots = Roots::default();
        roots.add(&one);
        roots.add(&other);
        let mut walk = roots.walk();
        for (path, link) in [
            (one.join("ns/d/f"), false),
            (one.join("d/f"), false),
            (other.join("d/f"), true),
            (one.join("ns/d/f"), false),
        ] {
            let at = walk.above(&path).unwrap();
            assert_eq!(walk.is_by_link(&at), link, "{}", path.display());
        }
    }

    #[test]
    fn a_path_that_leaves_its_root_is_not_opened() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("root");
        std::fs::create_dir_all(root.join("a")).unwrap();
        std::fs::write(place.path().join("outside"), b"x").unwrap();
        for walks in [false, true] {
            let roots = Roots::default();
            roots.add(&root);
            if walks {
                roots.forget_openat2();
            }
            let open = |path: &str| roots.walk().open(&root.join(path), OFlags::RDONLY);
            assert_eq!(open("../outside").unwrap_err(), Errno::XDEV, "{walks}");
            assert_eq!(open("a/../../outside").unwrap_err(), Errno::XDEV, "{walks}");
            assert!(open("a").is_ok() && open("./a").is_ok(), "{walks}");
            assert_eq!(
                roots.walk().at(&root.join("a/..")).err(),
                Some(Errno::INVAL)
            );
        }
    }

    /// Makes `openat2` fail with EPERM on this thread, as seccomp filters of containers do.
    #[allow(unsafe_code, reason = "a filter of system calls")]
    fn refuse_openat2() {
        let jump = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        let (load, ret) = (
            (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16,
            (libc::BPF_RET | libc::BPF_K) as u16,
        );
        let step = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
        let mut steps = [
            step(load, 0, 0), // the number of the call
            step(jump, 1, libc::SYS_openat2 as u32),
            step(ret, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
            step(ret, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let filter = libc::sock_fprog {
            len: steps.len() as u16,
            filter: steps.as_mut_ptr(),
        };
        // SAFETY: the calls change this thread alone, and the kernel copies the filter before it
        // returns.
        let done = unsafe {
            [
                libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
                libc::prctl(
                    libc::PR_SET_SECCOMP,
                    libc::SECCOMP_MODE_FILTER,
                    &raw const filter,
                ),
            ]
        };
        assert_eq!(done, [0; 2], "{}", std::io::Error::last_os_error());
    }

    #[test]
    fn a_refused_openat2_is_remembered_once_a_walk_without_it_succeeds() {
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("file"), b"x").unwrap();
        let opens = || {
            refuse_openat2();
            let roots = Roots::default();
            roots.add(place.path());
            let open = |name: &str| roots.walk().open(&place.path().join(name), OFlags::RDONLY);
            let forgot = || roots.without_openat2.load(Ordering::Relaxed);
            assert_eq!(open("absent").unwrap_err(), Errno::NOENT);
            assert!(!forgot(), "the name may be the reason");
            open("file").unwrap();
            assert!(forgot());
            open("file").unwrap();
        };
        std::thread::scope(|scope| scope.spawn(opens).join()).unwrap();
    }

    #[test]
    fn a_kept_root_is_closed_when_it_is_unused_or_another_is_in_its_place() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("root");
        let make = || {
            std::fs::create_dir_all(root.join("a")).unwrap();
            std::fs::write(root.join("a/file"), b"x").unwrap();
        };
        make();
        let roots = Roots::default();
        roots.add(&root);
        let file = root.join("a/file");
        let often = || roots.open_often(&file, OFlags::RDONLY).map(drop);
        let keeps = || roots.kept.lock().is_some();
        often().unwrap();
        assert!(keeps());
        assert!(roots.take_kept(true).is_none(), "it was used");
        assert!(roots.take_kept(true).is_some() && !keeps());
        often().unwrap();
        roots.walk().open(&file, OFlags::RDONLY).unwrap();
        assert!(keeps(), "the same directory");
        std::fs::rename(&root, place.path().join("moved")).unwrap();
        make();
        roots.walk().at(&file).unwrap();
        assert!(!keeps(), "another directory");
        often().unwrap();
        assert!(roots.take_kept(false).is_some() && !keeps());
        // This way does not follow links either.
        std::fs::rename(root.join("a"), root.join("b")).unwrap();
        std::os::unix::fs::symlink("b", root.join("a")).unwrap();
        assert_eq!(often().unwrap_err(), Errno::LOOP);
        roots.forget_openat2();
        assert_eq!(often().unwrap_err(), Errno::LOOP);
    }
}
