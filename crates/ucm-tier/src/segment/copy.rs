//! Copying whole records into a new segment of our own: what the rescue of dead writers' records and merging share.
//!
//! Every record is judged on its way, so what is copied is what was judged. The new segment gets its name with all of
//! them or not at all; room for all of it is admitted first, like that of any other segment.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_infra::MonotonicTime;
use ucm_io::{FileMeta, Finish, IoJob, ReadMode};
use ucm_quota::evidence::is_damage;
use ucm_quota::layout::SegmentName;
use ucm_record::{RecordHeader, RecordMeta};

use super::Segments;
use super::format::{Entry, HEAD_LEN, Owner, encode_footer, encode_head, footer_len};
use super::index::Known;
use super::sealing::unsure;

/// How long one step may take.
const STEP: Duration = Duration::from_secs(30);

/// A record to copy.
pub(super) struct Piece {
    pub(super) from: PathBuf,
    /// Where it lies there, and which it must be.
    pub(super) entry: Entry,
}

/// What became of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carried {
    /// It lies here in the new segment.
    At(Entry),
    /// It is not the whole record it should be, by two looks if it is damaged.
    Unsound(MissReason),
    /// The file it lay in is gone.
    Gone,
}

impl Carried {
    /// Where it lies in the new segment, if it does.
    pub(super) fn entry(&self) -> Option<Entry> {
        match self {
            Self::At(entry) => Some(*entry),
            _ => None,
        }
    }
}

/// How the new segment is made.
pub(super) struct CopyOptions<'a> {
    /// By which its copies are told from others; `None`: now.
    pub(super) sealed_ns: Option<u64>,
    /// Its time of use, ns of Unix time, from its name and the least ordinal in it; asked when all is copied.
    pub(super) used: &'a dyn Fn(SegmentName, u32) -> Result<i64>,
    /// Called after every record with its bytes; an error ends the copying.
    pub(super) pace: &'a dyn Fn(u64) -> Result<()>,
    /// Whether it is worth waiting for room, and other records' making room where the medium is full.
    pub(super) needed: bool,
}

/// A segment that was made of copies.
pub(super) struct Copied {
    /// As the index takes it up; `None`: not one piece could be copied, and there is no segment.
    pub(super) known: Option<Known>,
    /// One for each piece.
    pub(super) carried: Vec<Carried>,
}

impl Segments {
    /// Copies these records into a segment of our own. It is for the caller to tell the index.
    pub(super) fn copy(&self, pieces: &[Piece], manner: &CopyOptions<'_>) -> Result<Copied> {
        let name = self.next_name();
        let records: u64 = pieces.iter().map(|piece| piece.entry.len).sum();
        let room = HEAD_LEN + records + footer_len(pieces.len());
        let space = &self.shared.space;
        let ticket = if manner.needed {
            space.admitted(room)
        } else {
            space.spared(room)
        }?;
        let copied = self.copy_admitted(name, pieces, manner);
        let spared = Error::new(ErrorKind::Busy, "there is no room for copies");
        let full = |error: &Error| error.kind() == ErrorKind::NoSpace && !manner.needed;
        let error = copied
            .as_ref()
            .err()
            .map(|error| if full(error) { &spared } else { error });
        let kept = match &copied {
            Ok((Some(known), _)) => known.len,
            Err(error) if unsure(error) => room,
            _ => 0,
        };
        self.shared.space.settled(ticket, kept, error);
        if !matches!(copied, Ok((Some(_), _))) {
            let paths = [self.private(name)];
            let _ = self.shared.call(self.step(), move |io| io.remove(&paths)); // else swept by its age
        }
        copied.map(|(known, carried)| Copied { known, carried })
    }

    fn copy_admitted(
        &self,
        name: SegmentName,
        pieces: &[Piece],
        manner: &CopyOptions<'_>,
    ) -> Result<(Option<Known>, Vec<Carried>)> {
        let (config, path) = (&self.shared.config, self.private(name));
        let begun = self.owner(name);
        let owner = Owner {
            time_ns: manner.sealed_ns.unwrap_or(begun.time_ns),
            ..begun
        };
        self.create_private(path.clone(), encode_head(&begun, &config.process))?;
        let (mut end, mut first) = (HEAD_LEN, u32::MAX);
        let (mut entries, mut carried) = (Vec::new(), Vec::with_capacity(pieces.len()));
        for piece in pieces {
            let (meta, bytes) = match self.sound(piece)? {
                Ok(found) => found,
                Err(unsound) => {
                    carried.push(unsound);
                    continue;
                }
            };
            let path = path.clone();
            self.shared
                .call(self.step(), move |io| io.write_at(&path, end, &bytes))?;
            let entry = Entry {
                offset: end,
                ..piece.entry
            };
            entries.push(entry);
            carried.push(Carried::At(entry));
            first = first.min(meta.ordinal);
            end += entry.len;
            (manner.pace)(entry.len)?;
        }
        if entries.is_empty() {
            return Ok((None, carried));
        }
        let used_ns = (manner.used)(name, first)?;
        let (target, footer) = (
            self.shared.layout.segment(name),
            encode_footer(&owner, end, &entries),
        );
        let finish = move |io: &IoJob| {
            io.finish(Finish {
                private: &path,
                target: &target,
                footer: &footer,
                offset: end,
                mtime_ns: used_ns,
            })
        };
        let FileMeta { len, .. } = self.shared.call(self.step(), finish)?;
        let known = Known {
            name,
            part: config.part,
            private: false,
            sealed_ns: owner.time_ns,
            used_ns,
            len,
        };
        Ok((Some(known), carried))
    }

    /// Reads a record that is to be copied. What looks damaged is read once more past every cache before that is believed.
    fn sound(&self, piece: &Piece) -> Result<std::result::Result<(RecordMeta, Vec<u8>), Carried>> {
        let mut reason = MissReason::Absent;
        for mode in [ReadMode::Default, ReadMode::FreshDirect] {
            let Entry { id, offset, len } = piece.entry;
            let read = self.read_piece(piece.from.clone(), offset, len as usize, mode)?;
            let Some(bytes) = read else {
                return Ok(Err(Carried::Gone));
            };
            match self.judged(id, &bytes, len) {
                Ok(meta) => return Ok(Ok((meta, bytes))),
                Err(other) => reason = other,
            }
            if !is_damage(reason) {
                break;
            }
        }
        Ok(Err(Carried::Unsound(reason)))
    }

    fn judged(&self, id: BlockId, bytes: &[u8], len: u64) -> std::result::Result<RecordMeta, MissReason> {
        self.shared.judge(id, bytes, len)?;
        Ok(RecordHeader::decode(bytes)?.meta)
    }

    /// Reads a piece of a file; `None` when the file is gone.
    pub(super) fn read_piece(
        &self,
        path: PathBuf,
        offset: u64,
        len: usize,
        mode: ReadMode,
    ) -> Result<Option<Vec<u8>>> {
        let read = self
            .shared
            .call(self.step(), move |io| io.read_piece(&path, offset, len, mode))?;
        Ok(read.map(|(bytes, _)| bytes))
    }

    /// Makes a private file with these first bytes.
    pub(super) fn create_private(&self, path: PathBuf, head: Vec<u8>) -> Result<()> {
        let mode = self.shared.config.modes.file;
        self.shared
            .call(self.step(), move |io| io.create(&path, &head, 0, mode))
    }

    /// A name that was never used.
    pub(super) fn next_name(&self) -> SegmentName {
        SegmentName {
            writer: self.shared.config.writer,
            sequence: self.shared.sequence.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Until when the next step may take.
    pub(super) fn step(&self) -> MonotonicTime {
        self.shared.clock.now().after(STEP)
    }
}
