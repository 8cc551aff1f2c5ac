//! Reinsertion: records that outlive their file are appended to a new segment of our own, both
//! those that reclaiming keeps and those that recovery finds in files of dead writers.
//!
//! Every record is verified before it is copied. The new segment gets its name with all of them or
//! not at all; room for all of it is reserved first, as for any other segment. Dumps do not write
//! to it: their records have the time of the clock, and are used now.

use std::collections::HashSet;
use std::path::PathBuf;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{LANE_SPACE, MonotonicTime};
use ucm_io::{FileMeta, Finish, IoJob, ReadMode};
use ucm_record::RecordMeta;

use super::uses::Uses;
use crate::blobs::AppendBlobs;
use crate::layout::SegmentName;
use crate::quota::is_unsure;
use crate::segment::cache::SegmentCache;
use crate::segment::files::SegmentFiles;
use crate::segment::format::{Entry, HEAD_LEN, Owner, encode_footer, encode_head, footer_len};
use crate::segment::index::stats::SegmentStats;
use crate::segment::index::{Known, SegmentNumber};

/// A record to append again.
pub(in crate::segment) struct Piece {
    pub(in crate::segment) from: PathBuf,
    /// Where it lies there, and which it must be.
    pub(in crate::segment) entry: Entry,
    /// The segment that is; none: a dead writer's.
    pub(in crate::segment) source: Option<SegmentNumber>,
    /// Whether it can be found here afterwards: not if it was dropped here before.
    pub(in crate::segment) found: bool,
}

/// How the new segment is made.
pub(in crate::segment) struct Reinsertion<'a> {
    pub(in crate::segment) cache: &'a SegmentCache<SegmentFiles>,
    pub(in crate::segment) uses: &'a Uses,
    /// The time at which it counts as sealed, among other copies of its records; `None`: now.
    pub(in crate::segment) sealed_ns: Option<u64>,
    /// It is as young as the youngest of these is when it gets its name; none: it is used now.
    pub(in crate::segment) as_young_as: &'a [SegmentStats],
    /// Called after every record with the bytes of all so far; an error ends it.
    pub(in crate::segment) pace: &'a dyn Fn(u64) -> Result<()>,
    /// Whether it is worth waiting for room, and other records' making room where the medium is
    /// full.
    pub(in crate::segment) needed: bool,
    /// When it has to be over.
    pub(in crate::segment) until: MonotonicTime,
}

/// The outcome.
#[derive(Default)]
pub(in crate::segment) struct Reinserted {
    /// The new segment, as the index knows it; `None`: not one record could be appended, and there
    /// is none.
    pub(in crate::segment) number: Option<SegmentNumber>,
    /// How many records are in it.
    pub(in crate::segment) records: u64,
    /// Segments that had a record which is not sound, by two reads where it is damaged.
    pub(in crate::segment) unsound: HashSet<SegmentNumber>,
}

impl Reinsertion<'_> {
    /// Appends these records to a segment of our own and takes it into the index.
    pub(in crate::segment) fn append(&self, pieces: &[Piece]) -> Result<Reinserted> {
        let files = &self.cache.blobs;
        let (name, space) = (files.next_name(), &files.shared.space);
        let records: u64 = pieces.iter().map(|piece| piece.entry.len).sum();
        let room = HEAD_LEN + records + footer_len(pieces.len());
        let reservation = match self.needed {
            true => space.reserve_blocking(room, self.until),
            false => space.try_reserve(room),
        }?;
        let mut copies = Vec::new();
        let mut done = Reinserted::default();
        let made = self.write(name, pieces, &mut copies, &mut done);
        let error = made.as_ref().err().map(|error| match error.kind() {
            // No room is made for copies.
            ErrorKind::NoSpace if !self.needed => {
                Error::new(ErrorKind::Busy, "there is no room for copies")
            }
            _ => error.clone(),
        });
        let kept = match (&made, &error) {
            (Ok(Some(known)), _) => known.len,
            (_, Some(error)) if is_unsure(error) => room,
            _ => 0,
        };
        space.commit(reservation, kept, error.as_ref());
        if let Ok(Some(known)) = &made {
            done.number = self.take_up(known, &copies);
            if done.number.is_none() {
                let text = "the new segment was removed already";
                return Err(Error::new(ErrorKind::NotFound, text));
            }
        } else {
            let paths = [files.private(name)];
            let remove = move |io: &IoJob| io.remove(&paths).map(|_| ());
            let io = &files.shared.io;
            io.job(LANE_SPACE, files.step(), remove, |_| {}); // else swept by its age
        }
        made.map(|_| done)
    }

    /// Writes the file and gives it its name. `copies`: where every record that it has lies there.
    fn write<'p>(
        &self,
        name: SegmentName,
        pieces: &'p [Piece],
        copies: &mut Vec<(&'p Piece, Entry)>,
        done: &mut Reinserted,
    ) -> Result<Option<Known>> {
        let (files, shared) = (&self.cache.blobs, &self.cache.blobs.shared);
        let begun = self.cache.owner(name, shared.clock.wall_ns());
        let path = files.private(name);
        let head = encode_head(&begun, &shared.config.process);
        files.create_private(path.clone(), head, self.step())?;
        let (mut end, mut first) = (HEAD_LEN, u32::MAX);
        for piece in pieces {
            let Some((meta, bytes)) = self.read(piece, done)? else {
                continue;
            };
            let into = path.clone();
            let write = move |io: &IoJob| io.write_at(&into, end, &bytes, false);
            shared.call(self.step(), write)?;
            let (offset, entry) = (end, piece.entry);
            let entry = Entry { offset, ..entry };
            copies.push((piece, entry));
            first = first.min(meta.ordinal);
            end += entry.len;
            (self.pace)(end)?;
        }
        done.records = copies.len() as u64;
        if copies.is_empty() {
            return Ok(None);
        }
        let owner = Owner {
            time_ns: self.sealed_ns.unwrap_or(begun.time_ns),
            ..begun
        };
        let entries: Vec<Entry> = copies.iter().map(|(_, entry)| *entry).collect();
        let (used_ns, target) = (self.used(name, first)?, shared.layout.segment(name));
        let footer = encode_footer(&owner, end, &entries);
        let finish = move |io: &IoJob| {
            io.finish(Finish {
                private: &path,
                target: &target,
                footer: &footer,
                offset: end,
                mtime_ns: used_ns,
            })
        };
        let FileMeta { len, .. } = shared.call(self.step(), finish)?;
        Ok(Some(Known {
            name,
            part: shared.config.scope.part,
            private: false,
            sealed_ns: owner.time_ns,
            used_ns,
            len,
        }))
    }

    /// Its time of use, ns of Unix time.
    fn used(&self, name: SegmentName, ordinal: u32) -> Result<i64> {
        let (files, shared) = (&self.cache.blobs, &self.cache.blobs.shared);
        if self.as_young_as.is_empty() {
            let now = shared.clock.wall_ns();
            return Ok(shared.recency.published(name.as_id(), ordinal, now));
        }
        let names = self.as_young_as.iter().map(|segment| segment.name);
        let times = files.stat(names)?.into_iter().flatten();
        let known = self.as_young_as.iter().map(|segment| segment.used_ns);
        let all = times.map(|meta| meta.mtime_ns).chain(known);
        Ok(all.max().unwrap_or(0))
    }

    /// Takes the segment into the index, and which of its records are in use; discovery may have
    /// been faster.
    fn take_up(&self, known: &Known, copies: &[(&Piece, Entry)]) -> Option<SegmentNumber> {
        let (index, uses) = (&self.cache.index, self.uses);
        let Some(number) = index.begin(*known) else {
            return index.number_of(known.name);
        };
        let found = copies.iter().filter(|(piece, _)| piece.found);
        index.add(number, &found.map(|(_, entry)| *entry).collect::<Vec<_>>());
        for (piece, entry) in copies {
            let was_used = |source| uses.has(source, piece.entry.offset);
            if piece.source.is_some_and(was_used) {
                uses.note(number, entry.offset);
            }
        }
        Some(number)
    }

    /// Reads a record that is to be copied; `None` where it is not sound, or its file was removed.
    /// A damaged one is read once more past every cache.
    fn read(&self, piece: &Piece, done: &mut Reinserted) -> Result<Option<(RecordMeta, Vec<u8>)>> {
        let (Entry { id, offset, len }, files) = (piece.entry, &self.cache.blobs);
        for mode in [ReadMode::Default, ReadMode::FreshDirect] {
            let (from, step) = (piece.from.clone(), self.step());
            let read = files.read_piece(from, offset, len as usize, mode, step)?;
            let Some(bytes) = read else { return Ok(None) };
            // Its side shards are copied as they are.
            match files.shared.verify(id, &bytes, len) {
                Ok(header) => return Ok(Some((header.meta, bytes))),
                Err(reason) if !reason.is_damage() => break,
                Err(_) => {}
            }
        }
        done.unsound.extend(piece.source);
        Ok(None)
    }

    /// Until when the next step may take.
    fn step(&self) -> MonotonicTime {
        self.cache.blobs.step().min(self.until)
    }
}
