//! What dead writers left: the whole records of their private segments are copied into a segment of our own.
//!
//! A private file belongs to its writer alone. To others it is dead when its head names a process of this host that is
//! gone, or when it was not written for ten minutes by the file server's own clock. Whoever takes it up renames it first,
//! to a private name of its own: of several that try one has it, and a writer that was only asleep finds its file gone
//! and fails, harmlessly. It is copied and not sealed as it is, for a sleeper may still hold it open, and a segment
//! that has a name is never written. A record counts only if its header and every checksum are right.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ucm_core::{Error, ErrorKind, PAGE, Result, round_up};
use ucm_infra::Mono;
use ucm_io::{FileMeta, IoBuf, IoDone, IoOp, ReadMode};

use super::Segments;
use super::format::{Entry, HEAD_LEN, MAX_ENTRIES, decode_head, encode_foot, encode_head, foot_len};
use crate::layout::SegmentName;
use crate::record::{RecordHeader, RecordMeta};

/// Time between two looks for private segments.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// Silence after which the writer of a private segment is taken for dead.
const SILENCE_NS: i64 = 600_000_000_000;
/// Most private segments taken up in one turn.
const PER_TURN: usize = 4;
/// How long one step may take.
const STEP: Duration = Duration::from_secs(30);

impl Segments {
    /// Takes up what dead writers left, if it is time to look, as far as `most` bytes and the deadline allow; best effort:
    /// what fails is tried again with a later turn. Whoever opens a root waits for little of it only, the finder's thread
    /// does the rest.
    pub(super) fn rescue(self: &Arc<Self>, most: u64, deadline: Mono) {
        let now = self.shared.clock.now();
        {
            let mut last = self.finder.rescued.lock();
            if self.shared.config.lookup_only || last.is_some_and(|last| now.since(last) < LOOK_AGAIN) {
                return;
            }
            *last = Some(now);
        }
        let Ok(dead) = self.dead_segments(now.after(STEP).min(deadline)) else {
            return;
        };
        let mut left = most;
        for (number, (name, meta)) in dead.into_iter().enumerate() {
            let over = self.shared.clock.now() >= deadline || number >= PER_TURN || meta.len > left;
            if over || self.closing.load(Ordering::Acquire) {
                *self.finder.rescued.lock() = None; // the next turn goes on
                return;
            }
            left -= meta.len;
            let _ = self.rescue_one(name, &meta);
        }
    }

    /// Private segments of this namespace and part whose writers are dead.
    fn dead_segments(&self, deadline: Mono) -> Result<Vec<(SegmentName, FileMeta)>> {
        let own = self.living();
        let listed = self.list(self.shared.layout.tmp(), deadline)?;
        let mut unsure = Vec::new();
        let mut dead = Vec::new();
        for (name, meta) in listed.into_iter().filter(|(name, _)| !own.contains(name)) {
            let Some(head) = self.read_piece(self.private(name), 0, HEAD_LEN as usize)? else {
                continue; // sealed or removed meanwhile
            };
            let Ok((owner, process)) = decode_head(&head) else {
                continue; // no segment, or not one yet
            };
            let config = &self.shared.config;
            if owner.namespace != *config.identity.digest() || owner.part != config.part {
                continue; // another rank takes it up, or its age does
            }
            if process.is_gone() {
                dead.push((name, meta));
            } else if process != config.process {
                unsure.push((name, meta));
            }
        }
        if !unsure.is_empty() {
            let now = self.server_time(deadline)?;
            unsure.retain(|(_, meta)| now.saturating_sub(meta.mtime_ns) >= SILENCE_NS);
            dead.append(&mut unsure);
        }
        Ok(dead)
    }

    fn list(&self, dir: PathBuf, deadline: Mono) -> Result<Vec<(SegmentName, FileMeta)>> {
        let entries = match self.shared.call(deadline, IoOp::List { dir }) {
            Ok(IoDone::List(entries)) => entries,
            Ok(_) => return Err(Error::internal("a listing answered with something else")),
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        let segments = entries
            .into_iter()
            .filter(|(_, meta)| !meta.is_dir && meta.len > HEAD_LEN);
        Ok(segments
            .filter_map(|(name, meta)| Some((SegmentName::parse_private(&name)?, meta)))
            .collect())
    }

    /// The time of the file server: that of a file made just now.
    fn server_time(&self, deadline: Mono) -> Result<i64> {
        let path = self.private(self.next_name());
        let op = IoOp::Create {
            path: path.clone(),
            head: vec![0],
            room: 0,
            mode: self.shared.config.modes.file,
        };
        self.shared.call(deadline, op)?;
        let op = IoOp::Stat {
            paths: vec![path.clone()],
            stop_at_missing: false,
        };
        let looked = self.shared.call(deadline, op);
        let _ = self.shared.call(deadline, IoOp::Remove { paths: vec![path] }); // what stays is swept by its age
        match looked? {
            IoDone::Stat(metas) => {
                let gone = || Error::new(ErrorKind::NotFound, "a private file of our own is gone");
                metas
                    .into_iter()
                    .next()
                    .flatten()
                    .ok_or_else(gone)
                    .map(|meta| meta.mtime_ns)
            }
            _ => Err(Error::internal("a stat answered with something else")),
        }
    }

    fn rescue_one(self: &Arc<Self>, dead: SegmentName, meta: &FileMeta) -> Result<()> {
        let claimed = self.private(self.next_name());
        let op = IoOp::Rename {
            from: self.private(dead),
            to: claimed.clone(),
            ino: meta.ino,
        };
        let IoDone::Renamed(true) = self.shared.call(self.step(), op)? else {
            return Ok(()); // somebody else has it
        };
        let found = self.whole_records(&claimed, meta.len)?;
        if !found.is_empty() {
            self.copy(&claimed, &found)?;
        }
        let paths = vec![claimed];
        self.shared.call(self.step(), IoOp::Remove { paths }).map(|_| ())
    }

    /// Records in a private segment that are whole and not stored elsewhere; where they lie there.
    fn whole_records(&self, path: &std::path::Path, file_len: u64) -> Result<Vec<Entry>> {
        let stride = round_up(self.shared.config.record.record_len() as u64, PAGE);
        let mut found = Vec::new();
        let mut offset = HEAD_LEN;
        while offset + stride <= file_len && found.len() < MAX_ENTRIES {
            if self.closing.load(Ordering::Acquire) {
                return Err(Error::new(ErrorKind::Closed, "the store is closed"));
            }
            if let Some(meta) = self.whole_record(path, offset)?.map(|(meta, _)| meta)
                && self.index.find(meta.id).is_none()
            {
                found.push(Entry {
                    id: meta.id,
                    offset,
                    len: stride,
                });
            }
            offset += stride;
        }
        Ok(found)
    }

    /// The record at a place, if it is whole.
    fn whole_record(&self, path: &std::path::Path, offset: u64) -> Result<Option<(RecordMeta, Vec<u8>)>> {
        let len = self.shared.config.record.record_len();
        let Some(bytes) = self.read_piece(path.to_owned(), offset, len)? else {
            return Err(Error::new(ErrorKind::NotFound, "the private segment is gone"));
        };
        let Ok(header) = RecordHeader::decode(&bytes) else {
            return Ok(None);
        };
        let judged = self.shared.judge(header.meta.id, &bytes, header.record_len);
        Ok((judged.is_ok() && bytes.len() as u64 == header.record_len).then_some((header.meta, bytes)))
    }

    /// Copies records into a segment of our own and seals it.
    fn copy(&self, from: &std::path::Path, found: &[Entry]) -> Result<()> {
        let name = self.next_name();
        let records: u64 = found.iter().map(|entry| entry.len).sum();
        let room = HEAD_LEN + records + foot_len(found.len());
        let ticket = self.shared.space.admitted(room)?;
        let copied = self.copy_admitted(name, from, found);
        let error = copied.as_ref().err();
        let kept = if error.is_none_or(super::sealing::unsure) {
            room
        } else {
            0
        };
        self.shared.space.settled(ticket, kept, error);
        let (entries, sealed_ns, used_ns) = match copied {
            Ok(copied) => copied,
            Err(error) => {
                let paths = vec![self.private(name)];
                let _ = self.shared.call(self.step(), IoOp::Remove { paths }); // else swept by its age
                return Err(error);
            }
        };
        if let Some(number) = self.index.begin(name, false, sealed_ns, used_ns) {
            self.index.add(number, &entries);
        }
        Ok(())
    }

    fn copy_admitted(
        &self,
        name: SegmentName,
        from: &std::path::Path,
        found: &[Entry],
    ) -> Result<(Vec<Entry>, u64, i64)> {
        let (config, path) = (&self.shared.config, self.private(name));
        let owner = self.owner(name);
        let op = IoOp::Create {
            path: path.clone(),
            head: encode_head(&owner, &config.process),
            room: 0,
            mode: config.modes.file,
        };
        self.shared.call(self.step(), op)?;
        let (mut end, mut entries, mut first) = (HEAD_LEN, Vec::with_capacity(found.len()), u32::MAX);
        for entry in found {
            // Read and judged again: what is copied is what was judged.
            let Some((meta, bytes)) = self.whole_record(from, entry.offset)? else {
                continue;
            };
            let op = IoOp::WriteAt {
                path: path.clone(),
                offset: end,
                len: bytes.len(),
                buf: IoBuf::Heap(bytes),
            };
            self.shared.call(self.step(), op)?;
            entries.push(Entry {
                id: meta.id,
                offset: end,
                len: entry.len,
            });
            first = first.min(meta.ordinal);
            end += entry.len;
        }
        let used = self
            .shared
            .recency
            .published(name.as_id(), first, self.shared.clock.wall_ns());
        let op = IoOp::Finish {
            private: path,
            target: self.shared.layout.segment(name),
            foot: encode_foot(&owner, end, &entries),
            offset: end,
            mtime_ns: used,
        };
        self.shared.call(self.step(), op)?;
        Ok((entries, owner.time_ns, used))
    }

    /// Reads a piece of a file; `None` when the file is gone.
    fn read_piece(&self, path: PathBuf, offset: u64, len: usize) -> Result<Option<Vec<u8>>> {
        let op = IoOp::Read {
            path,
            offset,
            len,
            buf: IoBuf::Heap(vec![0; len]),
            mode: ReadMode::Default,
        };
        match self.shared.call(self.step(), op) {
            Ok(IoDone::Read {
                buf: IoBuf::Heap(mut bytes),
                read,
                ..
            }) => {
                bytes.truncate(read);
                Ok(Some(bytes))
            }
            Ok(_) => Err(Error::internal("a read answered with something else")),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn next_name(&self) -> SegmentName {
        SegmentName {
            writer: self.shared.config.writer,
            sequence: self.shared.sequence.fetch_add(1, Ordering::Relaxed),
        }
    }

    fn step(&self) -> Mono {
        self.shared.clock.now().after(STEP)
    }
}
