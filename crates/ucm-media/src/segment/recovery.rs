//! Private segments of dead writers: their complete records are copied into a segment of our own.
//!
//! A private file belongs to its writer alone. To others it is dead when its head names a process
//! of this host that has ended, or when it was not written for ten minutes by the file server's own
//! clock. The process that recovers it renames it first, to a private name of its own: of several
//! that try one succeeds, and a writer that was only asleep does not find its file and fails,
//! harmlessly. It is copied and not sealed as it is, for a sleeper may still hold it open, and a
//! segment that has a name is never written. A record counts only if its header and every checksum
//! are right.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind, PAGE, Result, limits, round_up};
use ucm_infra::MonotonicTime;
use ucm_io::{FileMeta, ReadMode};
use ucm_record::{MAGIC, RecordHeader};

use super::cache::SegmentCache;
use super::discovery::SegmentDiscovery;
use super::files::SegmentFiles;
use super::format::{Entry, HEAD_LEN, MAX_ENTRIES, decode_head};
use super::reclaim::reinsert::{Piece, Reinsertion};
use super::reclaim::uses::Uses;
use crate::blobs::AppendBlobs;
use crate::layout::SegmentName;
use crate::turns::is_due;

/// Time between two searches for private segments.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// Silence after which the writer of a private segment is taken for dead.
pub(super) const SILENCE_NS: i64 = 600_000_000_000;
/// Most private segments recovered in one turn.
const PER_TURN: usize = 4;
/// Bytes searched at once for the beginnings of records.
const LOOK_AT: u64 = 1 << 20;

/// Recovers the segments of dead writers.
pub(super) struct Recovery<'a> {
    pub(super) cache: &'a SegmentCache<SegmentFiles>,
    pub(super) discovery: &'a SegmentDiscovery,
    pub(super) uses: &'a Uses,
    /// Names that this writer's own segments will have.
    pub(super) living: HashSet<SegmentName>,
    /// When it has to be over.
    pub(super) until: MonotonicTime,
}

/// When dead writers' segments were last searched for.
pub(super) type RecoveredAt = Mutex<Option<MonotonicTime>>;

impl Recovery<'_> {
    /// Makes a turn, if it is time to, as far as `most` bytes and the deadline allow. The rest, and
    /// a failure, is left to a later turn. A process that opens a root waits for little of it; the
    /// discovery thread does the rest.
    pub(super) fn run(&self, last: &RecoveredAt, most: u64) {
        let shared = &self.cache.blobs.shared;
        let (writes, now) = (!shared.config.scope.lookup_only, shared.clock.now());
        if !(writes && is_due(&mut last.lock(), now, LOOK_AGAIN)) {
            return;
        }
        if !self.turn(most).unwrap_or(false) {
            *last.lock() = None;
        }
    }

    /// Whether nothing is left for the next one.
    fn turn(&self, most: u64) -> Result<bool> {
        let (mut left, mut all) = (most, true);
        for (number, (name, meta)) in self.dead_segments()?.into_iter().enumerate() {
            let over = self.cache.blobs.shared.clock.now() >= self.until;
            if over || number >= PER_TURN || meta.len > left {
                return Ok(false);
            }
            self.go_on()?;
            left -= meta.len;
            all &= self.recover_segment(name, &meta).is_ok();
        }
        Ok(all)
    }

    /// Private segments of this namespace and part whose writers are dead.
    fn dead_segments(&self) -> Result<Vec<(SegmentName, FileMeta)>> {
        let (files, shared) = (&self.cache.blobs, &self.cache.blobs.shared);
        let (own, config) = (&self.living, &shared.config);
        let (mut dead, mut unsure) = (Vec::new(), Vec::new());
        let dir = shared.layout.tmp();
        let listed = shared.call(self.step(), move |io| io.list_if_there(&dir))?;
        for (file, meta) in listed {
            let name = SegmentName::parse_private(&file).filter(|name| !own.contains(name));
            let Some(name) = name.filter(|_| !meta.is_dir && meta.len > HEAD_LEN) else {
                continue;
            };
            self.go_on()?;
            let Some(head) = self.read(files.private(name), 0, HEAD_LEN)? else {
                continue; // sealed or removed since
            };
            let Ok((owner, process)) = decode_head(&head) else {
                continue; // no segment, or not one yet
            };
            if owner.namespace != *config.scope.identity.digest() || owner.part != config.scope.part
            {
                continue; // another rank recovers it, or it is swept by its age
            }
            if process.is_gone() {
                dead.push((name, meta));
            } else if process != config.process {
                unsure.push((name, meta));
            }
        }
        if !unsure.is_empty() {
            let now = files.server_time(self.step())?;
            unsure.retain(|(_, meta)| now.saturating_sub(meta.mtime_ns) >= SILENCE_NS);
            dead.append(&mut unsure);
        }
        Ok(dead)
    }

    fn recover_segment(&self, dead: SegmentName, meta: &FileMeta) -> Result<()> {
        let (files, shared) = (&self.cache.blobs, &self.cache.blobs.shared);
        let claimed = files.private(files.next_name());
        let before = shared.space.counts(); // a count that runs may see both copies
        let (from, to, ino) = (files.private(dead), claimed.clone(), meta.ino);
        if !shared.call(self.step(), move |io| io.rename(&from, &to, ino))? {
            return Ok(()); // another process has it
        }
        let found = self.whole_records(&claimed, meta.len)?;
        if !found.is_empty() {
            self.take_over(&claimed, found)?;
        }
        shared.call(self.step(), move |io| io.remove(&[claimed]))?;
        shared.space.deleted(meta.len, before, true);
        Ok(())
    }

    /// Records in a private segment that are whole and not stored elsewhere; where they lie there.
    /// They need not be equally long, and there may be holes between them: a record begins at a
    /// page.
    fn whole_records(&self, path: &Path, file_len: u64) -> Result<Vec<Entry>> {
        let mut found = Vec::new();
        let mut offset = HEAD_LEN;
        while let Some(page) = self.next_record(path, offset, file_len)?
            && found.len() < MAX_ENTRIES
        {
            let whole = self.whole_record(path, page)?;
            offset = page + whole.map_or(PAGE, |entry| entry.len);
            found.extend(whole.filter(|entry| self.cache.index.find(entry.id).is_none()));
        }
        Ok(found)
    }

    /// The next page, from `offset` on, that begins as a record does.
    fn next_record(&self, path: &Path, mut offset: u64, file_len: u64) -> Result<Option<u64>> {
        let mut look = PAGE; // mostly the next one begins where the one before ended
        while offset < file_len {
            self.go_on()?;
            let len = look.min(file_len - offset);
            let piece = self.read(path.to_owned(), offset, len)?.ok_or_else(gone)?;
            let mut pages = piece.chunks(PAGE as usize);
            if let Some(page) = pages.position(|page| page.starts_with(&MAGIC)) {
                return Ok(Some(offset + page as u64 * PAGE));
            }
            offset += len;
            look = (look * 4).min(LOOK_AT);
        }
        Ok(None)
    }

    /// Where the record at a place lies, if it is whole.
    fn whole_record(&self, path: &Path, offset: u64) -> Result<Option<Entry>> {
        let shared = &self.cache.blobs.shared;
        let len = shared.lengths.own_len();
        let mut bytes = self.read(path.to_owned(), offset, len)?.ok_or_else(gone)?;
        let Ok(header) = RecordHeader::decode(&bytes) else {
            return Ok(None);
        };
        if (len + 1..=len + limits::MAX_SIDES_BYTES).contains(&header.record_len) {
            let whole = self.read(path.to_owned(), offset, header.record_len)?;
            bytes = whole.ok_or_else(gone)?; // with side shards that this writer has not
        }
        bytes.truncate(usize::try_from(header.record_len).unwrap_or(usize::MAX));
        let checked = shared.verify(header.meta.id, &bytes, header.record_len);
        let entry = Entry {
            id: header.meta.id,
            offset,
            len: round_up(header.record_len, PAGE),
        };
        Ok((checked.is_ok() && bytes.len() as u64 == header.record_len).then_some(entry))
    }

    /// Appends records to a segment of our own.
    fn take_over(&self, from: &Path, found: Vec<Entry>) -> Result<()> {
        let piece = |entry| Piece {
            from: from.to_owned(),
            entry,
            source: None,
            found: true,
        };
        let pieces: Vec<_> = found.into_iter().map(piece).collect();
        let reinsertion = Reinsertion {
            cache: self.cache,
            uses: self.uses,
            sealed_ns: None,
            as_young_as: &[],
            pace: &|_| self.go_on(),
            needed: true,
            until: self.until,
        };
        reinsertion.append(&pieces).map(|_| ())
    }

    /// Between two steps: an error once the store closes; lists for callers that wait for that.
    fn go_on(&self) -> Result<()> {
        self.discovery.look_if_asked();
        self.cache.looks.unless_closed()
    }

    fn read(&self, path: PathBuf, offset: u64, len: u64) -> Result<Option<Vec<u8>>> {
        let (files, mode) = (&self.cache.blobs, ReadMode::Default);
        files.read_piece(path, offset, len as usize, mode, self.step())
    }

    /// Until when the next step may take.
    fn step(&self) -> MonotonicTime {
        self.cache.blobs.step().min(self.until)
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::NotFound, "the private segment was removed")
}
