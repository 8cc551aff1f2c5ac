//! The segments of others: which there are is seen by listing their directory, what is in them by reading their feet.
//!
//! A segment never changes under its name, so its foot is read once. The directory is listed when its time has changed,
//! once more when it has changed no further (two changes may share one time), when somebody misses what should be
//! there, and every half minute whatever its time says (a network file system may show an old one).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, MissReason, Result};
use ucm_infra::{Completion, Mono};
use ucm_io::{FileMeta, IoBuf, IoDone, IoOp, MAX_LIST, ReadMode};

use super::Segments;
use super::format::{Entry, TRAILER_LEN, Trailer};
use crate::engine::LANE_LOOKUP;
use crate::layout::SegmentName;

/// Longest time between two listings.
const LIST_AGAIN: Duration = Duration::from_secs(30);
/// Feet read in one turn, and how many of them at once.
const PER_TURN: usize = 256;
const AT_ONCE: usize = 16;
/// Bytes read of a segment's end at first: the foot of a thousand records.
const TAIL: u64 = 32 << 10;
/// Longest foot that is read, bytes.
const LONGEST_FOOT: u64 = 64 << 20;
/// How often a segment whose foot cannot be used is looked at: it may not be seen whole yet.
const TRIES: u8 = 3;
/// Most reads that wait for a listing; further ones are misses at once.
const MAX_WAITING: usize = 1 << 16;

/// What is called after the next listing.
pub(super) type Retry = Box<dyn FnOnce() + Send>;

/// What the finder remembers between two turns.
#[derive(Default)]
pub(crate) struct Finder {
    state: Mutex<State>,
    waiting: Mutex<Vec<Retry>>,
    /// When the segments of dead writers were last looked for.
    pub(super) rescued: Mutex<Option<Mono>>,
}

#[derive(Default)]
struct State {
    /// The directory before it was last listed, and whether it was the same before.
    seen: Option<FileMeta>,
    settled: bool,
    listed: Option<Mono>,
    /// Segments whose feet are to be read, the newest last.
    queue: VecDeque<(SegmentName, FileMeta)>,
    /// Segments that cannot be used, as they were seen, and how often.
    odd: HashMap<SegmentName, (FileMeta, u8)>,
}

impl Segments {
    /// Looks until every segment that is there is known, or the deadline has passed.
    pub(super) fn find_all(self: &Arc<Self>, deadline: Mono) {
        while self.find(deadline) && self.shared.clock.now() < deadline {}
    }

    /// Calls `retry` after the next look; at once if too many wait for it.
    pub(super) fn after_look(&self, retry: Retry) {
        let mut waiting = self.finder.waiting.lock();
        if waiting.len() >= MAX_WAITING {
            drop(waiting);
            return retry();
        }
        waiting.push(retry);
        drop(waiting);
        self.find_bell.ring();
    }

    /// One look around; whether there is more to read at once.
    pub(super) fn find(self: &Arc<Self>, deadline: Mono) -> bool {
        let waiting = std::mem::take(&mut *self.finder.waiting.lock());
        let mut state = self.finder.state.lock();
        // What fails is looked at again with the next turn; until then everything is as it was.
        let _ = self.list_if_changed(&mut state, !waiting.is_empty(), deadline);
        self.read_feet(&mut state, deadline);
        let more = !state.queue.is_empty();
        drop(state);
        waiting.into_iter().for_each(|retry| retry());
        self.index.sweep_if_due();
        more
    }

    fn list_if_changed(&self, state: &mut State, asked: bool, deadline: Mono) -> Result<()> {
        let now = self.shared.clock.now();
        let dir = self.shared.layout.segments();
        let op = IoOp::Stat {
            paths: vec![dir.clone()],
            stop_at_missing: false,
        };
        let IoDone::Stat(metas) = self.shared.call(deadline, op)? else {
            return Err(Error::internal("a stat answered with something else"));
        };
        let meta = metas.into_iter().next().flatten();
        let same = state.seen == meta;
        let recent = state.listed.is_some_and(|at| now.since(at) < LIST_AGAIN);
        if same && state.settled && recent && !asked {
            return Ok(());
        }
        let before = self.index.public();
        let listed = match self.shared.call(deadline, IoOp::List { dir }) {
            Ok(IoDone::List(entries)) => entries,
            Ok(_) => return Err(Error::internal("a listing answered with something else")),
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        (state.seen, state.settled, state.listed) = (meta, same, Some(now));
        let whole = listed.len() < MAX_LIST;
        let files = listed.into_iter().filter(|(_, meta)| !meta.is_dir);
        let there: HashMap<SegmentName, FileMeta> = files
            .filter_map(|(name, meta)| Some((SegmentName::parse(&name)?, meta)))
            .collect();
        if whole {
            let gone = before.into_iter().filter(|(name, _)| !there.contains_key(name));
            gone.for_each(|(_, number)| self.index.vanished(number));
            state.odd.retain(|name, _| there.contains_key(name));
        }
        let mut fresh: Vec<_> = there
            .into_iter()
            .filter(|(name, meta)| !self.index.knows(*name) && !state.is_hopeless(*name, meta))
            .collect();
        fresh.sort_unstable_by_key(|(name, meta)| (meta.mtime_ns, *name));
        state.queue = fresh.into();
        Ok(())
    }

    /// Reads feet of segments that are new, the newest first.
    fn read_feet(&self, state: &mut State, deadline: Mono) {
        let mut left = PER_TURN;
        while left > 0 && !state.queue.is_empty() && self.shared.clock.now() < deadline {
            let some = state.queue.len().min(AT_ONCE).min(left);
            let batch = state.queue.split_off(state.queue.len() - some);
            left -= some;
            let reads: Vec<_> = batch
                .into_iter()
                .map(|(name, meta)| {
                    let len = meta.len.min(TAIL);
                    (name, meta, self.begin_read(name, meta.len - len, len, deadline))
                })
                .collect();
            for (name, meta, read) in reads.into_iter().rev() {
                let found =
                    read(self).and_then(|(tail, file_len)| self.foot(name, &tail, file_len, deadline));
                match found {
                    Ok(Ok((sealed_ns, entries))) => {
                        if let Some(number) = self.index.begin(name, false, sealed_ns, meta.mtime_ns) {
                            self.index.add(number, &entries);
                        }
                    }
                    // It was removed meanwhile, or belongs to another listing.
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    Ok(Err(MissReason::NewerVersion)) => {
                        state.odd.insert(name, (meta, TRIES));
                    }
                    Ok(Err(_)) | Err(_) => {
                        let tries = state.odd.get(&name).map_or(0, |(_, tries)| *tries);
                        state.odd.insert(name, (meta, tries + 1));
                    }
                }
            }
        }
    }

    /// The entries of a segment, of whose end `tail` was read, and when it was sealed.
    #[allow(
        clippy::type_complexity,
        reason = "two kinds of failure: of the medium, and of what it holds"
    )]
    fn foot(
        &self,
        name: SegmentName,
        tail: &[u8],
        file_len: u64,
        deadline: Mono,
    ) -> Result<Result<(u64, Vec<Entry>), MissReason>> {
        let trailer = match Trailer::decode(tail, file_len) {
            Ok(trailer) => trailer,
            Err(reason) => return Ok(Err(reason)),
        };
        if trailer.owner.namespace != *self.shared.config.identity.digest() {
            return Ok(Err(MissReason::ForeignIdentity));
        }
        if trailer.owner.name != name {
            return Ok(Err(MissReason::ForeignId));
        }
        let len = trailer.foot.end - trailer.foot.start;
        let entries = if len <= tail.len() as u64 {
            trailer.entries(&tail[tail.len() - len as usize..])
        } else if len <= LONGEST_FOOT {
            let read = self.begin_read(name, trailer.foot.start, len, deadline);
            trailer.entries(&read(self)?.0)
        } else {
            Err(MissReason::BadHeader)
        };
        Ok(entries.map(|entries| (trailer.owner.time_ns, entries)))
    }

    /// Starts reading a piece of a segment; the answer waits for it and gives the bytes and the file's length.
    fn begin_read(
        &self,
        name: SegmentName,
        offset: u64,
        len: u64,
        deadline: Mono,
    ) -> impl FnOnce(&Self) -> Result<(Vec<u8>, u64)> + use<> {
        let len = (len as usize).max(TRAILER_LEN);
        let op = IoOp::Read {
            path: self.shared.layout.segment(name),
            offset,
            len,
            buf: IoBuf::Heap(vec![0; len]),
            mode: ReadMode::Default,
        };
        let completion: Arc<Completion<Answer>> = Completion::new();
        let answer = Arc::clone(&completion);
        let read = move |result: Result<IoDone>| {
            let read = result.and_then(|answer| match answer {
                IoDone::Read { buf, read, file_len } => Ok((buf[..read].to_vec(), file_len)),
                _ => Err(Error::internal("a read answered with something else")),
            });
            answer.complete(Arc::new(Mutex::new(Some(read))));
        };
        self.shared.io.submit(LANE_LOOKUP, deadline, op, Box::new(read));
        move |segments: &Self| {
            let late = || Error::new(ErrorKind::Timeout, "the file system did not answer in time");
            let until = deadline.after(Duration::from_millis(100));
            let answer = completion
                .wait(&*segments.shared.clock, Some(until))
                .ok_or_else(late)?;
            let answer = answer.lock().take();
            answer.unwrap_or_else(|| Err(Error::internal("an answer was taken twice")))
        }
    }
}

/// An answer that is handed on once although completions are shared.
type Answer = Arc<Mutex<Option<Result<(Vec<u8>, u64)>>>>;

impl State {
    /// Whether a segment was looked at often enough and is as it was.
    fn is_hopeless(&self, name: SegmentName, meta: &FileMeta) -> bool {
        let same = |seen: &FileMeta| (seen.len, seen.ino) == (meta.len, meta.ino);
        self.odd
            .get(&name)
            .is_some_and(|(seen, tries)| same(seen) && *tries >= TRIES)
    }
}
