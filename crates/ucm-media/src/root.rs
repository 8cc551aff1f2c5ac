//! The root of a POSIX backend: its marker, the namespace's directories and manifest, what the file
//! system is.
//!
//! Everything here waits, with a deadline, on a thread of the control path; records never go this
//! way.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::Deserialize;
use tracing::warn;
use ucm_core::{Error, ErrorKind, Result, in_units, limits};
use ucm_infra::{LANE_LOAD, LANE_SPACE, MonotonicTime};
use ucm_io::{EROFS, FileMeta, IoJob, Publish, ReadMode};

use crate::layout::Marker;
use crate::layout_kind::RootLayout;
use crate::quota::Capacity;
use crate::shared::{MAKE_DIRS, MountPoint, Shared};

/// Records that must fit below the limit.
const LEAST_RECORDS: u64 = 8;

/// A marked root on a read-only file system can be read: what cannot be written there is left out.
pub(crate) fn unless_read_only<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Err(error) if error.os_code() == Some(EROFS) => Ok(None),
        result => result.map(Some),
    }
}

/// The current directory instead of an empty path.
fn or_here(path: &Path) -> &Path {
    if path.as_os_str().is_empty() {
        Path::new(".")
    } else {
        path
    }
}

impl Shared {
    /// Does something below the root and waits for it; for the control path only.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        deadline: MonotonicTime,
        work: impl FnOnce(&IoJob) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.io.call(LANE_SPACE, deadline, work)
    }

    pub(crate) fn read_document(
        &self,
        path: PathBuf,
        deadline: MonotonicTime,
    ) -> Result<Option<Vec<u8>>> {
        let (len, at) = (limits::MAX_DOCUMENT_BYTES, path.display().to_string());
        let read = self.call(deadline, move |io| {
            io.read_piece(&path, 0, len, ReadMode::Default)
        })?;
        match read {
            Some((_, file_len)) if file_len > len as u64 => {
                let long = Error::new(ErrorKind::Config, "this document is too long to be ours");
                let long = long.with("path", at).with("bytes", file_len);
                Err(long.with("most", len))
            }
            found => Ok(found.map(|(bytes, _)| bytes)),
        }
    }

    /// Publishes the marker or a manifest, durably: they are few, and without its marker a root is
    /// no root. A name that a power cut left without bytes would switch it off for good.
    pub(crate) fn publish_document(
        &self,
        private: PathBuf,
        target: PathBuf,
        bytes: Vec<u8>,
        replace: bool,
        deadline: MonotonicTime,
    ) -> Result<()> {
        let mode = self.config.modes.file;
        let publish = move |io: &IoJob| {
            let publish = Publish {
                private: &private,
                target: &target,
                replace,
                bytes: &bytes,
                mode,
                mtime_ns: None,
                durable: true,
            };
            io.publish(publish).map(|_| ())
        };
        self.call(deadline, publish)
    }

    pub(crate) fn make_dir(&self, path: PathBuf, deadline: MonotonicTime) -> Result<()> {
        let mode = self.config.modes.dir;
        self.call(deadline, move |io| io.make_dir(&path, mode).map(|_| ()))
    }

    pub(crate) fn next_private(&self) -> PathBuf {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        self.layout.private(self.config.scope.writer, sequence)
    }

    fn stat(&self, path: PathBuf, deadline: MonotonicTime) -> Result<Option<FileMeta>> {
        self.call(deadline, move |io| io.look(path))
    }

    /// Whether the root still has our marker: nothing is written or removed below another one.
    pub(crate) fn check_marker(&self, deadline: MonotonicTime) -> Result<()> {
        self.check_root(self.stat(self.layout.marker(), deadline)?)
    }

    /// Makes and marks the root where it is new, makes the namespace, writes its manifest, starts
    /// the first count. A root that was opened before is not made because it is missing: it may be
    /// unmounted ([`Shared::reopen`]).
    pub(crate) fn open_root(self: &Arc<Self>, deadline: MonotonicTime) -> Result<()> {
        if self.config.scope.lookup_only {
            // Nothing there yet means that nothing is stored yet; but what is there must be ours to
            // read.
            let marker = self.read_marker(deadline)?;
            if let Some(marker) = &marker {
                self.config.place.facts.learn(&marker.uuid);
            }
            return Ok(());
        }
        if self.root.lock().uuid.is_none() {
            return self.begin_root(deadline);
        }
        let marker = self.own_marker(deadline)?;
        self.use_root(marker, deadline)
    }

    /// Makes and marks the root if need be, and notes where it is mounted.
    fn begin_root(self: &Arc<Self>, deadline: MonotonicTime) -> Result<()> {
        self.make_root(deadline)?;
        let mounted = self.mount_point(deadline)?;
        let marker = match self.read_marker(deadline)? {
            Some(marker) => marker,
            None => self.mark(deadline)?,
        };
        {
            let mut known = self.root.lock();
            (known.device, known.mounted) = (Some(mounted.dev), Some(mounted));
        }
        self.use_root(marker, deadline)
    }

    /// Logs once that the configured layout differs from the root's.
    fn tell_of_another_layout(&self, marker: &Marker) {
        let mut known = self.root.lock();
        if let Some(said) = &marker.layout
            && let (Ok(marked), Some(own)) = (RootLayout::deserialize(said), known.kind)
            && marked.kind != own
            && !std::mem::replace(&mut known.warned, true)
        {
            let root = self.layout.root().display();
            warn!(
                store = self.config.scope.writer,
                %root,
                "{root}: layout {} is asked for (by layout, or by codec), and other processes keep \
                 its blocks in layout {}: neither finds the other's; leave both keys out, or take \
                 another directory",
                own.name(),
                marked.kind.name()
            );
        }
    }

    /// Makes the namespace below a marked root, probes the file system, starts the first count.
    fn use_root(self: &Arc<Self>, marker: Marker, deadline: MonotonicTime) -> Result<()> {
        if self.make_namespace(deadline)? {
            self.probe_io(deadline)?;
        }
        self.tell_of_another_layout(&marker);
        let limit = self.limit(&marker, deadline)?;
        self.compare_with_disk(limit, deadline);
        self.config.place.facts.learn(&marker.uuid);
        self.root.lock().uuid = Some(marker.uuid);
        let gone = || Error::new(ErrorKind::Closed, "the backend is closed");
        let weak = Arc::downgrade(self);
        let check = move |deadline| {
            let shared = weak.upgrade().ok_or_else(gone)?;
            shared.check_marker(deadline)
        };
        let weak = Arc::downgrade(self);
        let tend = move |deadline| weak.upgrade().ok_or_else(gone)?.tend(deadline);
        self.space.open(limit, check, tend);
        Ok(())
    }

    /// The root's directory and what it lies in.
    pub(crate) fn make_root(&self, deadline: MonotonicTime) -> Result<()> {
        for dir in self.missing_ancestors(self.layout.root(), deadline)? {
            self.make_dir(dir, deadline)?;
        }
        Ok(())
    }

    /// Looks what the file system is and can do.
    pub(crate) fn probe_io(&self, deadline: MonotonicTime) -> Result<()> {
        let dir = self.layout.tmp();
        if let Some(probe) = unless_read_only(self.call(deadline, move |io| io.probe(&dir)))? {
            self.learn(probe);
        }
        Ok(())
    }

    /// Where the root is mounted: the outermost directory of its path that lies in the same mount.
    fn mount_point(&self, deadline: MonotonicTime) -> Result<MountPoint> {
        let root = self.layout.root().to_owned();
        self.call(deadline, move |io| {
            let mount_of = |path: &Path| io.space(path).map(|space| (space.dev, space.mount));
            let mount = mount_of(&root)?;
            let above = root.ancestors().skip(1).map(or_here);
            let same = above.take_while(|above| mount_of(above).is_ok_and(|found| found == mount));
            let path = same.last().unwrap_or(&root).to_owned();
            let gone = || Error::new(ErrorKind::Io, "the root was removed");
            let meta = io.look(path.clone())?;
            let meta = meta.ok_or_else(|| gone().with("root", root.display()))?;
            let FileMeta { dev, ino, .. } = meta;
            Ok(MountPoint { path, dev, ino })
        })
    }

    /// Before every count: the root is still ours (nothing is removed from another), and a part
    /// that another rank wrote over is added again. Answers the limit.
    fn tend(self: &Arc<Self>, deadline: MonotonicTime) -> Result<u64> {
        let marker = self.own_marker(deadline)?;
        self.config.place.facts.learn(&marker.uuid);
        self.root.lock().uuid = Some(marker.uuid.clone());
        self.make_namespace(deadline)?;
        self.limit(&marker, deadline)
    }

    /// The marker of the root that was opened, which is taken up again first where it was lost; an
    /// error as long as it is.
    pub(crate) fn own_marker(self: &Arc<Self>, deadline: MonotonicTime) -> Result<Marker> {
        let marker = self.stat(self.layout.marker(), deadline)?;
        if self.check_root(marker).is_err() {
            self.reopen(deadline)?;
        }
        let marker = self.read_marker(deadline);
        if let Err(ErrorKind::Foreign) = marker.as_ref().map_err(Error::kind) {
            self.root.lock().device = None; // a newer format: writing stops
        }
        let Some(marker) = marker? else {
            let lost = Error::new(ErrorKind::Io, "the root lost its marker");
            return Err(lost.with("path", self.layout.marker().display()));
        };
        Ok(marker)
    }

    /// The namespace's directories and its manifest; false on a read-only file system.
    pub(crate) fn make_namespace(&self, deadline: MonotonicTime) -> Result<bool> {
        let made = unless_read_only(self.make_dirs(deadline))?.is_some();
        if made {
            unless_read_only(self.describe_parts(deadline))?;
        }
        Ok(made)
    }

    /// Looks in the background whether a root that was lost is back; one look at a time.
    pub(crate) fn look_again(self: &Arc<Self>) {
        if std::mem::replace(&mut self.root.lock().looking, true) {
            return;
        }
        let deadline = self.clock.now().after(MAKE_DIRS);
        let (shared, done) = (Arc::clone(self), Arc::clone(self));
        let look = move || shared.reopen(deadline);
        let ended = move |_| done.root.lock().looking = false;
        self.space.in_background(deadline, look, ended);
    }

    /// Opens a root again that was lost: the one that was opened, known by its marker, on whatever
    /// device; or a new one in the place of one that was removed. Any other is an error.
    fn reopen(self: &Arc<Self>, deadline: MonotonicTime) -> Result<()> {
        if let Some(marker) = self.read_marker(deadline)? {
            let known = self.root.lock().uuid.clone();
            if known.is_none_or(|known| known != marker.uuid) {
                let text =
                    "another root was mounted or put in the place of the one that was opened";
                let other = Error::new(ErrorKind::Foreign, text);
                return Err(other.with("root", self.layout.root().display()));
            }
            let mounted = self.mount_point(deadline)?;
            let Some(meta) = self.stat(self.layout.marker(), deadline)? else {
                return self.check_root(None);
            };
            *self.dirs.lock() = [false; 256];
            self.make_dirs(deadline)?;
            {
                let mut known = self.root.lock();
                (known.device, known.mounted) = (Some(meta.dev), Some(mounted));
            }
            self.space.lost();
            return Ok(());
        }
        // Removed, not unmounted: the root is not there at all, and what it was mounted with is.
        // Where a share is unmounted, its mount point is another directory from then on, though it
        // may be on the same device.
        let (mounted, device) = {
            let known = self.root.lock();
            (known.mounted.clone(), known.device)
        };
        let mounted = mounted.filter(|mounted| device == Some(mounted.dev));
        let root = self.stat(self.layout.root().to_owned(), deadline)?;
        let (Some(mounted), None) = (mounted, root) else {
            return self.check_root(None);
        };
        let there = self.stat(mounted.path.clone(), deadline)?;
        if there.map(|meta| (meta.dev, meta.ino)) != Some((mounted.dev, mounted.ino)) {
            return self.check_root(None);
        }
        *self.dirs.lock() = [false; 256];
        self.begin_root(deadline)?;
        let (store, root) = (self.config.scope.writer, self.layout.root().display());
        warn!(store, %root, "{root} was removed or renamed: it was made anew, without its blocks");
        self.space.lost();
        Ok(())
    }

    /// The limit on bytes below this root; an error if too few records fit.
    fn limit(&self, marker: &Marker, deadline: MonotonicTime) -> Result<u64> {
        let limit = match self.config.capacity {
            Some(Capacity::Bytes(bytes)) => bytes.get(),
            Some(capacity) => capacity.bytes(self.space_info(deadline)?.0),
            None => marker.storage_capacity,
        };
        self.check_limit(limit)?;
        Ok(limit)
    }

    /// Logs once that the limit is larger than the file system, and what removes blocks then.
    fn compare_with_disk(&self, limit: u64, deadline: MonotonicTime) {
        let Ok((total, _)) = self.space_info(deadline) else {
            return;
        };
        if limit <= total || std::mem::replace(&mut self.root.lock().limit_logged, true) {
            return;
        }
        let then = match self.config.rules.floor(total) {
            0 => "nothing is removed before the file system is full, because free_space_floor is 0"
                .to_owned(),
            floor => format!(
                "the oldest blocks are removed when less than {} of the file system is free \
                 (free_space_floor)",
                in_units(floor)
            ),
        };
        let (limit, total) = (in_units(limit), in_units(total));
        let root = self.layout.root().display();
        warn!(
            store = self.config.scope.writer,
            %root,
            "storage_capacity of {root} is {limit}, and its file system has {total}: the limit is \
             never reached, and {then}; lower storage_capacity"
        );
    }

    /// Whether enough records fit that those just written are not removed for the next.
    pub(crate) fn check_limit(&self, limit: u64) -> Result<()> {
        let least = self.lengths.own_len() * LEAST_RECORDS;
        if limit >= least {
            return Ok(());
        }
        let text = "storage_capacity must hold at least 8 blocks; raise it or make room";
        Err(Error::new(ErrorKind::Config, text)
            .with("storage_capacity", limit)
            .with("at_least", least)
            .with("root", self.layout.root().display()))
    }

    /// Makes the directories of the namespace; again after they were removed. That of private files
    /// comes last: a segment that could be created there finds the directory of its final name.
    pub(crate) fn make_dirs(&self, deadline: MonotonicTime) -> Result<()> {
        let namespace = self.layout.namespace();
        let kind = self.root.lock().kind;
        let records = kind.map(|kind| namespace.join(kind.directory()));
        self.make_dir(namespace, deadline)?;
        if let Some(records) = records {
            self.make_dir(records, deadline)?;
        }
        self.make_dir(self.layout.tmp(), deadline)
    }

    /// The root, the engine and the file system in words.
    pub(crate) fn words(&self) -> String {
        let (root, io) = (self.layout.root().display(), self.io.width(LANE_LOAD));
        let Some(probe) = self.root.lock().probed.clone() else {
            return format!("{root}, {io} I/O threads");
        };
        let fs = probe.fs.name();
        let direct = match (self.config.direct, probe.direct) {
            (true, Some(_)) => "direct I/O",
            (true, None) => "buffered I/O (io_direct is set, this file system has no direct I/O)",
            (false, Some(_)) => "buffered I/O (io_direct would be possible)",
            (false, None) => "buffered I/O",
        };
        let rings = match &probe.rings {
            None => String::new(),
            Some(Ok(memory)) => {
                let memory = in_units(*memory as u64);
                format!(", records through the rings of 3FS, which have {memory} of memory at most")
            }
            Some(Err(why)) => format!(", no rings of 3FS ({why})"),
        };
        let limit = in_units(self.space.usage().capacity);
        format!("{root} on {fs}, {io} I/O threads, {direct}{rings}, at most {limit} stored")
    }

    pub(crate) fn read_marker(&self, deadline: MonotonicTime) -> Result<Option<Marker>> {
        let bytes = self.read_document(self.layout.marker(), deadline)?;
        let marker = bytes.map(|bytes| Marker::parse(&bytes)).transpose();
        marker.map_err(|error| error.with("root", self.layout.root().display()))
    }

    /// The directories to make before the root exists, outermost first.
    fn missing_ancestors(&self, root: &Path, deadline: MonotonicTime) -> Result<Vec<PathBuf>> {
        let mut paths: Vec<PathBuf> = root.ancestors().map(Path::to_owned).collect();
        paths.retain(|path| !path.as_os_str().is_empty());
        paths.reverse();
        let asked = paths.clone();
        let metas = self.call(deadline, move |io| io.stat(&asked, false))?;
        let all = paths.into_iter().zip(metas);
        let missing = all.filter(|(_, meta)| meta.is_none());
        Ok(missing.map(|(path, _)| path).collect())
    }

    /// Bytes of the file system in all, and those that are free.
    pub(crate) fn space_info(&self, deadline: MonotonicTime) -> Result<(u64, u64)> {
        let root = self.layout.root().to_owned();
        let space = self.call(deadline, move |io| io.space(&root))?;
        Ok((space.total, space.free))
    }

    /// Marks the root, with the layout that was decided; the answer is the marker that counts.
    pub(crate) fn mark(&self, deadline: MonotonicTime) -> Result<Marker> {
        let (total, free) = self.space_info(deadline)?;
        let capacity = match self.config.capacity {
            Some(capacity) => capacity.bytes(total),
            None => Capacity::default_bytes(total, free),
        };
        let mut marker = Marker::new(crate::random_hex(), self.clock.wall_ns(), capacity);
        let layout = self.root.lock().layout.clone();
        marker.layout = layout.and_then(|layout| serde_json::to_value(layout).ok());
        self.publish_marker(&marker, false, deadline)?;
        // Another process may have done the same at the same time: of all markers one stays.
        Ok(self.read_marker(deadline)?.unwrap_or(marker))
    }

    /// Writes the marker; one that is there stays unless it is to be replaced.
    pub(crate) fn publish_marker(
        &self,
        marker: &Marker,
        replace: bool,
        deadline: MonotonicTime,
    ) -> Result<()> {
        let private = format!(".{}.tmp", crate::random_hex());
        let (private, target) = (self.layout.root().join(private), self.layout.marker());
        self.publish_document(private, target, marker.to_bytes(), replace, deadline)
    }

    /// Whether the manifest is to be read for a record of unknown length.
    pub(crate) fn has_lengths_to_learn(&self) -> bool {
        self.lengths.is_look_due(self.clock.now())
    }

    /// Reads which lengths records may have. Where that fails, those that are not known stay misses
    /// for now.
    pub(crate) fn learn_lengths(&self, io: &IoJob) {
        let (path, len) = (self.layout.manifest(), limits::MAX_DOCUMENT_BYTES);
        if let Ok(Some((bytes, _))) = io.read_piece(&path, 0, len, ReadMode::Default) {
            self.lengths.learn_from_document(&bytes);
        }
    }

    /// Adds the own parts to the manifest. Ranks do so at the same time: the rank that finds its
    /// part lost adds it again, at the latest with the next count.
    fn describe_parts(&self, deadline: MonotonicTime) -> Result<()> {
        let (scope, lengths) = (&self.config.scope, &self.lengths);
        for _ in 0..8 {
            let stored = match self.read_document(self.layout.manifest(), deadline) {
                Err(error) if error.kind() == ErrorKind::Config => None, // too long to be ours
                stored => stored?,
            };
            let (manifest, changed) = scope.describe(lengths, lengths.own(), stored.as_deref());
            if !changed {
                return Ok(());
            }
            let (private, target) = (self.next_private(), self.layout.manifest());
            self.publish_document(private, target, manifest, true, deadline)?;
        }
        Ok(()) // explains only; records are checked by their own header
    }
}
