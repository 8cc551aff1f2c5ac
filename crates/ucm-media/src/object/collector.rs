//! Removal: the process that counts lists everything below the prefix, removes segments by oldest
//! use down to the low watermark and those older than `expire_after`, and writes down the rest.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::stream::StreamExt;
use object_store::path::Path;
use tracing::warn;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;

use super::bucket::{AT_ONCE, Bucket, time_of};
use super::names::Names;
use super::remote::ObjectConfig;
use super::space::{Grant, Space};
use super::uses::read_uses;
use crate::blobs::BlobName;
use crate::quota::Snapshot;
use crate::quota::space_document::{SpaceDocument, Use};

/// Use of the limit above which the oldest are removed, and down to which, percent.
const HIGH: u64 = 95;
const LOW: u64 = 85;
/// Time between two counts where nothing is short, least time between two others, and time between
/// two reports of a writer.
const COUNT_AGAIN: Duration = Duration::from_secs(600);
const LEAST_PAUSE: Duration = Duration::from_millis(250);
const SPEAK_AGAIN: Duration = Duration::from_secs(60);
/// How long a count may take.
const COUNT: Duration = Duration::from_secs(90);
/// How often one count chooses others in place of segments that it could not remove.
const ROUNDS: usize = 8;
/// How long the object with a writer's uses is kept, at least.
const USES_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);

/// The objects below the prefix.
struct Contents {
    segments: Vec<(BlobName, Path, u64)>,
    /// Bytes of everything, and how many segments.
    total: u64,
    /// When each was last used, by the objects of its writers.
    used: HashMap<BlobName, u64>,
    /// Old objects with uses.
    stale: Vec<Path>,
    /// The time of the server.
    now_ns: u64,
}

impl Space {
    /// One turn: reports the use, counts and makes room. When the next is due.
    pub(super) fn turn(&self) -> MonotonicTime {
        let now = self.remote.clock.now();
        if !self.may_write() {
            return now.after(SPEAK_AGAIN);
        }
        let deadline = now.after(COUNT);
        let (speak, short, due) = {
            let state = self.state.lock();
            let speak = state.spoke.is_none_or(|at| now.since(at) >= SPEAK_AGAIN);
            let due = state.counted.is_none_or(|at| now.since(at) >= COUNT_AGAIN);
            (speak, state.short, due)
        };
        if speak {
            // A failure is repaired by the next report.
            let _ = self.uses.write(deadline);
            if self.remote.has_conditions() {
                let _ = self.ask(0, deadline);
            }
            self.state.lock().spoke = Some(now);
        }
        let wanted = short || due || self.is_high();
        if wanted {
            // A count that makes no room, or fails, is not repeated at once, however many ask.
            let mut state = self.state.lock();
            let next = state.began.map_or(now, |began| began.after(LEAST_PAUSE));
            if now < next {
                return next;
            }
            state.began = Some(now);
        }
        let counted = if wanted { self.count(deadline) } else { Ok(()) };
        let too_much = counted.as_ref().err();
        let too_much = too_much.filter(|error| error.kind() == ErrorKind::NoSpace);
        let logged = {
            let mut state = self.state.lock();
            if wanted && counted.is_ok() {
                state.counted = Some(now);
            }
            state.short = false;
            too_much.is_some() && std::mem::replace(&mut state.logged_too_much, true)
        };
        if let Some(error) = too_much.filter(|_| !logged) {
            warn!(
                store = self.remote.config.scope.writer,
                "nothing can be counted or removed, and nothing more is stored once the grants are \
                 used up: {error}"
            );
        }
        self.changed.notify();
        match counted {
            Ok(()) => now.after(SPEAK_AGAIN),
            // the keys may not write any more
            Err(error) if error.kind() == ErrorKind::Unhealthy => now.after(SPEAK_AGAIN),
            // the server does not answer, or another one counts
            Err(_) => now.after(SPEAK_AGAIN / 12),
        }
    }

    fn is_high(&self) -> bool {
        let state = self.state.lock();
        let bound = state.grant.seen.bound().unwrap_or(0);
        self.remote.has_conditions() && bound > state.limit / 100 * HIGH
    }

    /// Counts the bytes below the prefix and removes segments that have to go. An error where
    /// another writer counts.
    fn count(&self, deadline: MonotonicTime) -> Result<()> {
        let before = match self.remote.has_conditions() {
            true => Some(self.begin_count(deadline)?),
            false => None,
        };
        let uses_kept = self.expiry().map_or(USES_KEPT, |life| life.max(USES_KEPT));
        let remote = &self.remote;
        let read = Contents::read(&remote.config, &remote.bucket, &remote.names, uses_kept);
        let mut contents = remote.call(deadline, read)?;
        let found = contents.segments.len() as u64;
        let (mut removed, mut freed) = (0, 0);
        for _ in 0..ROUNDS {
            let gone = self.choose(&contents);
            let stale = std::mem::take(&mut contents.stale);
            if remote.keeps_all() || (gone.is_empty() && stale.is_empty()) {
                break;
            }
            let tried: HashSet<Path> = gone.iter().map(|(path, _)| path.clone()).collect();
            let segments = &mut contents.segments;
            segments.retain(|(_, path, _)| !tried.contains(path));
            let (count, bytes) = self.remove(gone, stale, deadline)?;
            (removed, freed) = (removed + count, freed + bytes);
            contents.total -= bytes;
        }
        let (total, left) = (contents.total, found - removed);
        if let Some(before) = before {
            let end = move |document: &mut SpaceDocument| {
                document.end_count(&before, total, left);
                Some(())
            };
            if let Some(((), document)) = self.change(deadline, end)? {
                let mut state = self.state.lock();
                (state.grant.seen, state.grant.seen_at) = (document, state.grant.used.reserved);
            }
        }
        let mut state = self.state.lock();
        state.removed.0 += removed;
        state.removed.1 += freed;
        Ok(())
    }

    fn begin_count(&self, deadline: MonotonicTime) -> Result<Snapshot> {
        // The silence of others is kept here, by our own clock.
        let (writer, limit, used, mut silence) = {
            let mut state = self.state.lock();
            let Grant { writer, used, .. } = state.grant;
            (
                writer,
                state.limit,
                used,
                std::mem::take(&mut state.silence),
            )
        };
        let now = self.remote.clock.now();
        let begun = self.change(deadline, |document| {
            document.ask(writer, Use { wanted: 0, ..used }, limit);
            document.begin_count(writer, &mut silence, now)
        });
        self.state.lock().silence = silence;
        let other = || Error::new(ErrorKind::Busy, "another writer counts what is stored");
        begun?.map(|(before, _)| before).ok_or_else(other)
    }

    /// Segments to remove: those not used for too long, then the oldest use above the limit.
    fn choose(&self, contents: &Contents) -> Vec<(Path, u64)> {
        let used = |segment: &BlobName| {
            let told = contents.used.get(segment).copied().unwrap_or(0);
            // a clock that is ahead makes nothing last
            told.max(segment.sealed_ns).min(contents.now_ns)
        };
        let mut oldest: Vec<_> = contents.segments.iter().collect();
        oldest.sort_unstable_by_key(|(segment, ..)| (used(segment), *segment));
        let ago = |age: Duration| u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        let expiry = self.expiry();
        let before = expiry.map_or(0, |age| contents.now_ns.saturating_sub(ago(age)));
        let mut left = contents.total;
        let short = self.state.lock().short;
        let limit = self.limit();
        let too_much = |left: u64| limit.is_some_and(|limit| left > limit / 100 * LOW);
        let makes_room =
            limit.is_some_and(|limit| short || left > limit / 100 * HIGH) || self.is_high();
        let mut gone = Vec::new();
        for (segment, path, size) in oldest {
            if used(segment) < before || (makes_room && too_much(left)) {
                left -= size;
                gone.push((path.clone(), *size));
            }
        }
        gone
    }

    /// Removes these segments, and stale objects: the segments that were removed, and their bytes.
    /// One that cannot be removed (a lock on it, no right) still counts, and others are removed in
    /// its place.
    fn remove(
        &self,
        segments: Vec<(Path, u64)>,
        stale: Vec<Path>,
        deadline: MonotonicTime,
    ) -> Result<(u64, u64)> {
        let segments = segments.into_iter().map(|(path, size)| (path, 1, size));
        let all = segments.chain(stale.into_iter().map(|path| (path, 0, 0)));
        let removals = all.map(|(path, count, size)| async move {
            let removed = self.remote.bucket.delete(&path).await;
            removed.map(|()| (count, size))
        });
        let (gone, error) = self.remote.call(deadline, async {
            let mut removals = futures_util::stream::iter(removals).buffer_unordered(AT_ONCE);
            let (mut gone, mut failed) = ((0, 0), None);
            while let Some(removed) = removals.next().await {
                match removed {
                    Ok((count, size)) => gone = (gone.0 + count, gone.1 + size),
                    Err(error) => failed = Some(error),
                }
            }
            Ok((gone, failed))
        })?;
        let logged =
            error.is_some() && std::mem::replace(&mut self.state.lock().logged_stuck, true);
        if let Some(error) = error.filter(|_| !logged) {
            let store = self.remote.config.scope.writer;
            warn!(
                store,
                "some of what should go cannot be removed, and others go in its place: {error}"
            );
        }
        Ok(gone)
    }
}

impl Contents {
    /// Lists what lies below the prefix, and reads the uses by its writers. Those written longer
    /// ago than `uses_kept` are old.
    async fn read(
        config: &ObjectConfig,
        bucket: &Bucket,
        names: &Names,
        uses_kept: Duration,
    ) -> Result<Self> {
        // The time of the server is that of an object put just now.
        let clock = names.clock(config.scope.writer);
        bucket.put(&clock, bytes::Bytes::new()).await?;
        let now = bucket.head(&clock).await?;
        match bucket.delete(&clock).await {
            Err(error) if error.kind() != ErrorKind::Unhealthy => return Err(error),
            _ => {} // keys that may not delete leave it there
        }
        let now_ns = now.as_ref().map_or(0, time_of);
        let listed = bucket.list(names.prefix()).await?;
        let kept = u64::try_from(uses_kept.as_nanos()).unwrap_or(u64::MAX);
        let before = now_ns.saturating_sub(kept);
        let mut contents = Self {
            segments: Vec::new(),
            total: 0,
            used: read_uses(&listed, bucket, names).await,
            stale: Vec::new(),
            now_ns,
        };
        for meta in listed {
            if let Some(segment) = names.parse_segment(&meta.location) {
                contents.total += meta.size;
                contents.segments.push((segment, meta.location, meta.size));
            } else if meta.location.prefix_matches(&names.all_uses()) {
                contents.total += meta.size;
                if time_of(&meta) < before {
                    contents.stale.push(meta.location);
                }
            }
        }
        Ok(contents)
    }
}
