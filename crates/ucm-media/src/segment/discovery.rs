//! The segments of others below a root: their directory is listed, and their footers are read.
//!
//! The directory is listed when its time has changed, once more when it has changed no further (two
//! changes may share one time), when a read misses a record that should be there, and every half
//! minute whatever its time is (a network file system may show an old one). Footers of segments
//! that are known are read again now and then ([`super::recheck`]): a medium forgets.

use std::sync::Arc;
use std::time::Duration;

use tracing::warn;
use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;
use ucm_io::{Close, FileMeta, IoJob, MAX_LIST};

use super::cache::SegmentCache;
use super::files::SegmentFiles;
use super::recheck::Recheck;
use super::unread::{ListingAll, UnreadSegments};
use crate::blobs::BlobMeta;
use crate::layout::SegmentName;
use crate::shared::{Shared, is_link};
use crate::turns::is_due;

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
    recheck: Recheck,
}

#[derive(Default)]
struct State {
    /// The directory before it was last listed, and whether it was the same before.
    seen: Option<FileMeta>,
    settled: bool,
    listed: Option<MonotonicTime>,
    unread: UnreadSegments,
    /// When it was last logged that the end of a segment cannot be read.
    logged_unreadable: Option<MonotonicTime>,
    /// When unused segments were last closed.
    closed: Option<MonotonicTime>,
}

impl SegmentDiscovery {
    pub(super) fn new(cache: &Arc<SegmentCache<SegmentFiles>>) -> Self {
        Self {
            shared: Arc::clone(&cache.blobs.shared),
            cache: Arc::clone(cache),
            state: Mutex::default(),
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
            self.log_unreadable(&mut state, meta.blob.name, error);
        }
        self.learn_lengths(deadline);
        let more = !state.unread.queue.is_empty();
        let closes = is_due(&mut state.closed, shared.clock.now(), CLOSE_UNUSED);
        let looked = self.cache.looks.looked();
        drop(state);
        looked.tell(&listed);
        // One that was removed by another process must not hold its space, and a share can be
        // unmounted then.
        if closes {
            shared.io.close_kept(Close::Unused);
        }
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
    fn log_unreadable(&self, state: &mut State, name: SegmentName, error: &Error) {
        let (shared, logged) = (&self.shared, &mut state.logged_unreadable);
        let matters = error.kind() == ErrorKind::Io || is_link(error);
        if matters && is_due(logged, shared.clock.now(), LOG_AGAIN) {
            let path = shared.layout.segment(name);
            warn!(
                store = shared.config.scope.writer,
                path = %path.display(),
                error = %error,
                "a segment cannot be read, so its blocks are misses here: {error}"
            );
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
