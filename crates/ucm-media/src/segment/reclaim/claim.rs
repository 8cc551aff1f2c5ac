//! One that reclaims at a time: a small private file of one name for each namespace and part, which
//! only one writer can make.
//!
//! Its bytes are the head of a segment, so it names its owner. The claim of a process that has
//! ended, or is silent for as long as a dead writer, is renamed away by one of the others. Two
//! processes that reclaim the same segments do no harm; the claim only saves work.

use std::path::PathBuf;

use ucm_core::{ErrorKind, Result};
use ucm_io::{IoJob, ReadMode};

use super::Reclaim;
use crate::blobs::AppendBlobs;
use crate::layout::SegmentName;
use crate::quota::Reservation;
use crate::segment::format::{HEAD_LEN, decode_head, encode_head};
use crate::segment::recovery::SILENCE_NS;

/// Begins the name of every claim.
const MARK: [u8; 4] = *b"merg";
/// The error number of a name that is taken.
const EEXIST: i32 = 17;

/// The right to reclaim, until it is dropped.
pub(super) struct Claim<'a> {
    reclaim: &'a Reclaim,
    /// The name that stands for it.
    path: PathBuf,
    room: Reservation,
    /// Whether it is this writer's turn.
    held: bool,
}

impl Drop for Claim<'_> {
    /// Ends this writer's turn.
    fn drop(&mut self) {
        let (reclaim, path) = (self.reclaim, self.path.clone());
        let remove = move |io: &IoJob| Ok(io.remove(&[path])?.iter().all(Result::is_ok));
        let step = reclaim.files.step();
        let gone = !self.held || reclaim.shared.call(step, remove).unwrap_or(false);
        // A file that stays is known by its writer, or swept by its age. No room is made for it
        // where the medium is full.
        let kept = if gone { 0 } else { HEAD_LEN };
        reclaim.shared.space.commit(self.room, kept, None);
    }
}

impl<'a> Claim<'a> {
    /// Begins this writer's turn, if the root is ours; `None` during another writer's turn. The
    /// segments that others made before are known when it returns.
    pub(super) fn take(reclaim: &'a Reclaim) -> Result<Option<Self>> {
        let (files, shared) = (&reclaim.files, &reclaim.shared);
        shared.check_marker(files.step())?;
        let part = shared.config.scope.part;
        let number = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let name = SegmentName {
            writer: number(u32::from_be_bytes(MARK), part.group),
            sequence: number(part.pipeline_rank, part.tensor_rank),
        };
        let mut claim = Self {
            reclaim,
            path: files.private(name),
            room: shared.space.try_reserve(HEAD_LEN)?,
            held: false,
        };
        claim.held = claim.make()? || (claim.take_away()? && claim.make()?);
        if !claim.held {
            return Ok(None);
        }
        reclaim.discovery.find_all(files.step());
        Ok(Some(claim))
    }

    /// Whether there was none.
    fn make(&self) -> Result<bool> {
        let files = &self.reclaim.files;
        let cache = &self.reclaim.cache;
        let owner = cache.owner(files.next_name(), files.shared.clock.wall_ns());
        let head = encode_head(&owner, &files.shared.config.process);
        match files.create_private(self.path.clone(), head, files.step()) {
            Err(error) if error.os_code() == Some(EEXIST) => Ok(false),
            made => made.map(|()| true),
        }
    }

    /// Renames a claim away whose owner has ended; whether a new one can be made.
    fn take_away(&self) -> Result<bool> {
        let (files, shared) = (&self.reclaim.files, &self.reclaim.shared);
        let path = self.path.clone();
        let Some(meta) = shared.call(files.step(), move |io| io.look(path))? else {
            return Ok(true); // released just now
        };
        let (path, mode) = (self.path.clone(), ReadMode::Default);
        let Some(head) = files.read_piece(path, 0, HEAD_LEN as usize, mode, files.step())? else {
            return Ok(true);
        };
        // One that is no head is being made, or its writer died while making it.
        let held = decode_head(&head).map_or(true, |(owner, process)| {
            owner.name.writer != shared.config.scope.writer && !process.is_gone()
        });
        let silent = |now: i64| now.saturating_sub(meta.mtime_ns) >= SILENCE_NS;
        if held && !silent(files.server_time(files.step())?) {
            return Ok(false);
        }
        let aside = files.private(files.next_name());
        let (from, to) = (self.path.clone(), aside.clone());
        if !shared.call(files.step(), move |io| io.rename(&from, &to, meta.ino))? {
            return Ok(false);
        }
        match shared.call(files.step(), move |io| io.remove(&[aside])) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(true),
        }
    }
}
