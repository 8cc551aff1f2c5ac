//! One root directory, for the backends of both layouts.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tracing::warn;
use ucm_core::sync::Mutex;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_infra::Clock;
use ucm_io::{ELOOP, FileMeta, IoJob, IoPool, Probe, Process};
use ucm_record::{RecordHeader, verify_stored};

use crate::backend::{MediumStats, OnSealed};
use crate::layout::{Layout, Modes};
use crate::layout_kind::{LayoutKind, RootLayout};
use crate::lengths::Lengths;
use crate::quota::{Capacity, Quota, QuotaConfig, Rules};
use crate::recency::Recency;
use crate::scope::Scope;
use crate::spread::RootFacts;

/// Error numbers of what is there for others but never for us as a record: no permission (of the
/// file, or of a directory above it), a directory, a link.
const FORBIDDEN: [i32; 2] = [1, 13];
const NO_FILE: [i32; 2] = [21, 40];
/// How long making the namespace's directories again may take.
pub(crate) const MAKE_DIRS: Duration = Duration::from_secs(5);

/// Configuration of the POSIX backend.
pub struct PosixConfig {
    /// The root directory.
    pub root: PathBuf,
    /// Whose records lie there.
    pub scope: Scope,
    /// Whether the I/O engine is configured to bypass the page cache.
    pub direct: bool,
    /// The limit on bytes below the root; `None`: the marker's, or a share of the file system.
    pub capacity: Option<Capacity>,
    /// Which records are removed besides the oldest ones above the limit, and how much of the
    /// medium stays free.
    pub rules: Rules,
    /// The process that writes, normally [`Process::this`]: others take over as soon as it ends.
    pub process: Process,
    /// Permissions of new files and directories below the root.
    pub modes: Modes,
    /// Its number among several roots; [`RootSlot::default`] for one alone.
    pub place: RootSlot,
}

/// A root's number among those that records are spread over.
#[derive(Debug, Clone, Default)]
pub struct RootSlot {
    /// Its number. Files of one process have names of their own in all roots, by this.
    pub number: u16,
    /// Where its UUID is noted.
    pub facts: Arc<RootFacts>,
}

/// See the module.
pub(crate) struct Shared {
    pub(crate) config: PosixConfig,
    pub(crate) layout: Layout,
    pub(crate) io: Arc<IoPool>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) root: Mutex<Root>,
    /// See [`Shared::writes_cached`].
    writes_cached: AtomicBool,
    /// Which of the 256 record directories are known to exist.
    pub(crate) dirs: Mutex<[bool; 256]>,
    pub(crate) sequence: AtomicU64,
    pub(crate) space: Arc<Quota>,
    pub(crate) recency: Recency,
    pub(crate) lengths: Arc<Lengths>,
    /// Called with the outcomes of receipts.
    pub(crate) on_sealed: Arc<OnceLock<OnSealed>>,
}

/// A directory that stands for a mount: an unmounted share leaves another one, or none, at its
/// path.
#[derive(Debug, Clone)]
pub(crate) struct MountPoint {
    pub(crate) path: PathBuf,
    /// Its device.
    pub(crate) dev: u64,
    /// Its inode.
    pub(crate) ino: u64,
}

/// The state of the root itself.
#[derive(Default)]
pub(crate) struct Root {
    /// Its device when it was first seen; another one means that a share was unmounted.
    pub(crate) device: Option<u64>,
    /// Its mount point then: while that is the same, a missing root was removed, not unmounted.
    pub(crate) mounted: Option<MountPoint>,
    /// Its UUID, which identifies it on another device (a share that was mounted again).
    pub(crate) uuid: Option<String>,
    /// The abilities of the file system.
    pub(crate) probed: Option<Probe>,
    /// The layout of its records, once that is known.
    pub(crate) kind: Option<LayoutKind>,
    /// The layout in its marker, or the one to be written there.
    pub(crate) layout: Option<RootLayout>,
    /// A configured layout that differs from the root's was logged.
    pub(crate) warned: bool,
    /// A symbolic link below it was logged.
    pub(crate) link_logged: bool,
    /// A limit that is larger than its file system was logged.
    pub(crate) limit_logged: bool,
    /// A thread is checking whether it is back.
    pub(crate) looking: bool,
}

impl Shared {
    /// The state for either layout, without access to the root yet. `Config` if the limit is too
    /// small.
    pub(crate) fn new(
        config: PosixConfig,
        kind: Option<LayoutKind>,
        io: Arc<IoPool>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let layout = Layout::new(&config.root, &config.scope.identity);
        let lengths = config.scope.lengths();
        io.keep_below(&config.root);
        let space = QuotaConfig {
            root: config.root.clone(),
            process: config.process.clone(),
            rules: config.rules,
            record_len: lengths.own_len(),
            modes: config.modes,
        };
        let space = Quota::new(space, Arc::clone(&io), Arc::clone(&clock))?;
        let root = Root {
            kind,
            ..Root::default()
        };
        let shared = Self {
            layout,
            io,
            clock,
            root: Mutex::new(root),
            writes_cached: AtomicBool::new(false),
            dirs: Mutex::new([false; 256]),
            sequence: AtomicU64::new(u64::from(config.place.number) << 48),
            space,
            recency: Recency::default(),
            lengths: Arc::new(lengths),
            on_sealed: Arc::default(),
            config,
        };
        if let Some(Capacity::Bytes(limit)) = shared.config.capacity
            && !shared.config.scope.lookup_only
        {
            shared.check_limit(limit.get())?;
        }
        Ok(shared)
    }

    /// The use of the root, and what was removed from it.
    pub(crate) fn stats(&self) -> MediumStats {
        let (records_removed, bytes_removed) = self.space.removed();
        MediumStats {
            usage: self.space.usage(),
            records_removed,
            bytes_removed,
            blocks_touched: self.recency.touched(),
            ..MediumStats::default()
        }
    }

    /// Whether writes fill the page cache of a local file system; false while that is not known.
    /// Only one thread at a time can fill the pages of one file there, because ext4 and XFS hold
    /// the inode's lock, and others spin. So several files are written side by side.
    pub(crate) fn writes_cached(&self) -> bool {
        self.writes_cached.load(Ordering::Acquire)
    }

    /// Stores what the file system of the root can do.
    pub(crate) fn learn(&self, probe: Probe) {
        let direct = self.config.direct && probe.direct.is_some();
        let cached = !direct && !probe.fs.maybe_shared();
        self.writes_cached.store(cached, Ordering::Release);
        let root = self.layout.root().display();
        let mut known = self.root.lock();
        let said = known.probed.as_ref().map(|before| &before.rings) == Some(&probe.rings);
        if let (Some(Err(why)), false) = (&probe.rings, said) {
            warn!(
                store = self.config.scope.writer,
                root = %root,
                "{root} is read and written without the rings of 3FS: {why}"
            );
        }
        known.probed = Some(probe);
    }

    /// Logs once that blocks are not found because of a symbolic link below the root.
    pub(crate) fn log_link(&self, error: &Error) {
        if is_link(error) && !std::mem::replace(&mut self.root.lock().link_logged, true) {
            let root = self.layout.root().display();
            warn!(
                store = self.config.scope.writer,
                %root,
                error = %error,
                "blocks below {root} are misses: {error}"
            );
        }
    }

    /// Checks that the marker is there, on the same device as before: writing is safe. Else
    /// `Foreign`: the medium answers, but it is not the root that was opened.
    pub(crate) fn check_root(&self, marker: Option<FileMeta>) -> Result<()> {
        let device = self.root.lock().device;
        if marker.is_some_and(|meta| Some(meta.dev) == device) {
            return Ok(());
        }
        let text = "the root lost its marker or changed its device; writing stops";
        Err(Error::new(ErrorKind::Foreign, text).with("root", self.layout.root().display()))
    }

    /// Verifies the bytes of a record that was read, in whatever form it is stored: what is wrong
    /// with them, if anything. Of one that has KV its side shards are not looked at.
    pub(crate) fn verify(
        &self,
        id: BlockId,
        bytes: &[u8],
        stored_len: u64,
    ) -> Result<RecordHeader, MissReason> {
        let namespace = *self.config.scope.identity.digest();
        let expected = self.lengths.expect(id, namespace, bytes);
        Ok(verify_stored(bytes, stored_len, &expected)?)
    }

    /// After a write without a directory: the directories were removed, so they are made again for
    /// the next write, with the manifest. Not if the root is lost: they would be on another file
    /// system.
    pub(crate) fn missed(self: &Arc<Self>, error: &Error) {
        if error.kind() != ErrorKind::NotFound {
            return;
        }
        *self.dirs.lock() = [false; 256];
        let deadline = self.clock.now().after(MAKE_DIRS);
        let shared = Arc::clone(self);
        let make = move || {
            shared.own_marker(deadline)?;
            shared.make_namespace(deadline).map(|_| ())
        };
        self.space.in_background(deadline, make, |_| {});
    }
}

/// Whether an operation failed at a symbolic link below a root.
pub(crate) fn is_link(error: &Error) -> bool {
    error.kind() == ErrorKind::Foreign && error.os_code() == Some(ELOOP)
}

/// Why a file could not be read: because of the record alone, or of the medium. A missing
/// permission is the record's own problem if its directories can be searched.
pub(crate) fn explain(io: &IoJob, path: PathBuf, error: Error) -> Error {
    let own = match error.os_code() {
        Some(code) if NO_FILE.contains(&code) => true,
        Some(code) if FORBIDDEN.contains(&code) => io.look(path).is_ok(),
        _ => false,
    };
    if !own {
        return error;
    }
    let text = "what has this record's name cannot be read as one";
    Error::new(ErrorKind::Foreign, text).caused_by(error)
}
