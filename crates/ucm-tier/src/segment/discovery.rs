//! The segments of others below a root: their directory is listed, and their footers are read.
//!
//! The directory is listed when its time has changed, once more when it has changed no further (two
//! changes may share one time), when a read misses a record that should be there, and every half
//! minute whatever its time is (a network file system may show an old one). Footers of segments
//! that are known are read again now and then ([`super::recheck`]): a medium forgets.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tracing::warn;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;
use ucm_io::{Close, FileMeta, IoJob, MAX_LIST};
use ucm_quota::layout::SegmentName;

use super::cache::SegmentCache;
use super::files::SegmentFiles;
use super::recheck::Recheck;
use super::unread::{ListingAll, UnreadSegments};
use crate::blobs::BlobMeta;
use crate::shared::{Shared, is_link};

/// How long one turn may take; a hanging root costs no more.
pub(super) const TURN: Duration = Duration::from_secs(5);
/// Longest time between two listings.
const LIST_AGAIN: Duration = Duration::from_secs(30);
/// How long after a segment got its name every process that polls has found it: the longest time
/// between two listings, and a few polls more.
pub(super) const FOUND_BY: Duration = LIST_AGAIN.saturating_add(Duration::from_secs(5));
/// A segment that was not read for this long, and at most twice as long, is closed.
const CLOSE_UNUSED: Duration = Duration::from_secs(10);
/// Time between two messages that segments cannot be read.
const LOG_AGAIN: Duration = Duration::from_secs(600);

/// See the module.
pub(crate) struct SegmentDiscovery {
    shared: Arc<Shared>,
    cache: Arc<SegmentCache<SegmentFiles>>,
    state: Mutex<State>,
    /// When the log last said that the end of a segment cannot be read.
    logged_unreadable: Mutex<Option<MonotonicTime>>,
    /// When unused segments were last closed.
    closed: Mutex<Option<MonotonicTime>>,
    recheck: Recheck,
}

#[derive(Default)]
struct State {
    /// The directory before it was last listed, and whether it was the same before.
    seen: Option<FileMeta>,
    settled: bool,
    listed: Option<MonotonicTime>,
    unread: UnreadSegments,
}

impl SegmentDiscovery {
    pub(super) fn new(cache: &Arc<SegmentCache<SegmentFiles>>) -> Self {
        Self {
            shared: Arc::clone(&cache.blobs.shared),
            cache: Arc::clone(cache),
            state: Mutex::default(),
            logged_unreadable: Mutex::default(),
            closed: Mutex::default(),
            recheck: Recheck::default(),
        }
    }

    /// Lists until every segment that is there is known, or the deadline has passed.
    pub(super) fn find_all(&self, deadline: MonotonicTime) {
        while self.find(deadline) && self.shared.clock.now() < deadline {}
    }

    /// Lists for callers that wait for that: between two steps of work that keeps this thread.
    pub(super) fn look_if_asked(&self) {
        if self.cache.looks.is_asked() {
            self.find(self.shared.clock.now().after(TURN));
        }
    }

    /// One turn; whether there are more footers to read at once.
    pub(super) fn find(&self, deadline: MonotonicTime) -> bool {
        let shared = &self.shared;
        let mut state = self.state.lock(); // one turn at a time
        let asked = self.cache.looks.begin();
        // A failure is tried again with the next turn; until then everything is as it was.
        let listed = self.list_if_changed(&mut state, asked, deadline);
        let failed = state.unread.read(&self.cache, &*shared.clock, deadline);
        if let Some((meta, error)) = failed.first() {
            self.log_unreadable(meta.blob.name, error);
        }
        self.learn_lengths(deadline);
        let more = !state.unread.queue.is_empty();
        let looked = self.cache.looks.looked();
        drop(state);
        looked.tell(&listed);
        self.close_unused();
        if !shared.config.scope.lookup_only {
            self.recheck.turn(&self.cache, deadline);
        }
        let (store, root) = (shared.config.scope.writer, shared.layout.root().display());
        self.cache.after_listing(store, &root);
        more
    }

    /// Reads the manifest where a record was found whose length is not known: one of a writer that
    /// keeps other side shards.
    fn learn_lengths(&self, deadline: MonotonicTime) {
        if self.shared.has_lengths_to_learn() {
            let shared = Arc::clone(&self.shared);
            let learn = move |io: &IoJob| {
                shared.learn_lengths(io);
                Ok(())
            };
            let _ = self.shared.call(deadline, learn); // late: with the next such record
        }
    }

    /// Logs, once in a while, that the records of a segment are misses because its end cannot be
    /// read.
    fn log_unreadable(&self, name: SegmentName, error: &Error) {
        if error.kind() != ErrorKind::Io && !is_link(error) {
            return;
        }
        let shared = &self.shared;
        let now = shared.clock.now();
        let mut logged = self.logged_unreadable.lock();
        if logged.is_some_and(|at| now.since(at) < LOG_AGAIN) {
            return;
        }
        *logged = Some(now);
        let path = shared.layout.segment(name);
        warn!(
            store = shared.config.scope.writer,
            path = %path.display(),
            error = %error,
            "a segment cannot be read, so its blocks are misses here: {error}"
        );
    }

    /// Closes segments that were not read for a while: one that was removed by another process must
    /// not hold its space, and a share can be unmounted then.
    fn close_unused(&self) {
        let now = self.shared.clock.now();
        let mut closed = self.closed.lock();
        if closed.is_none_or(|at| now.since(at) >= CLOSE_UNUSED) {
            *closed = Some(now);
            drop(closed);
            self.shared.io.close_kept(Close::Unused);
        }
    }

    /// The outcome, or nothing behind a symbolic link, which is not followed.
    fn unless_linked<T: Default>(&self, found: Result<T>) -> Result<T> {
        match found {
            Err(error) if is_link(&error) => {
                self.shared.log_link(&error);
                Ok(T::default())
            }
            found => found,
        }
    }

    fn list_if_changed(
        &self,
        state: &mut State,
        asked: bool,
        deadline: MonotonicTime,
    ) -> Result<()> {
        let shared = &self.shared;
        let now = shared.clock.now();
        let dir = shared.layout.segments();
        let path = dir.clone();
        let meta = self.unless_linked(shared.call(deadline, move |io| io.look(path)))?;
        let same = state.seen == meta;
        let recent = state.listed.is_some_and(|at| now.since(at) < LIST_AGAIN);
        if same && state.settled && recent && !asked {
            return Ok(());
        }
        let mut all = ListingAll::begin(&self.cache);
        let listed = self.unless_linked(shared.call(deadline, move |io| io.list_if_there(&dir)))?;
        (state.seen, state.settled, state.listed) = (meta, same, Some(now));
        let whole = listed.len() < MAX_LIST;
        let mut found = Vec::new();
        for (file, meta) in listed {
            if let Some(name) = SegmentName::parse(&file)
                && !meta.is_dir
            {
                found.push(BlobMeta::of_file(name, &meta));
            }
        }
        state.unread.queue.clear(); // this listing shows them again
        all.take(&self.cache, &mut state.unread, &found);
        if whole {
            let gone = all.end(&self.cache, &mut state.unread).into_iter();
            let gone: Vec<_> = gone.map(|name| shared.layout.segment(name)).collect();
            shared.io.close_kept(Close::Gone(&gone));
        }
        Ok(())
    }
}
