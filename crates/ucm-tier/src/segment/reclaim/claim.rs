//! One that reclaims at a time: a small private file of one name for each namespace and part, which
//! only one writer can make.
//!
//! Its bytes are the head of a segment, so it says whose it is. The claim of somebody who is gone,
//! or silent for as long as a dead writer is, is taken away by a rename, which one of several does.
//! Two who reclaim the same all the same do no harm; the claim only saves the work.

use std::path::PathBuf;

use ucm_core::{ErrorKind, Result};
use ucm_io::{IoJob, ReadMode};
use ucm_quota::Reservation;
use ucm_quota::layout::SegmentName;

use crate::segment::Segments;
use crate::segment::format::{HEAD_LEN, decode_head, encode_head};
use crate::segment::recovery::SILENCE_NS;

/// Begins the name of every claim.
const MARK: [u8; 4] = *b"merg";
/// The error number of a name that is taken.
const EEXIST: i32 = 17;

/// The right to reclaim, until it is dropped.
pub(super) struct Claim<'a> {
    segments: &'a Segments,
    /// The name that stands for it.
    path: PathBuf,
    room: Reservation,
    /// Whether it is this writer's turn.
    held: bool,
}

impl Drop for Claim<'_> {
    /// It is somebody else's turn.
    fn drop(&mut self) {
        let (segments, path) = (self.segments, self.path.clone());
        let remove = move |io: &IoJob| Ok(io.remove(&[path])?.iter().all(Result::is_ok));
        let gone = !self.held
            || segments
                .shared
                .call(segments.step(), remove)
                .unwrap_or(false);
        // What stays is known by its writer, or swept by its age. Where the medium is full no one
        // is to make room for this.
        segments
            .shared
            .space
            .commit(self.room, if gone { 0 } else { HEAD_LEN }, None);
    }
}

impl<'a> Claim<'a> {
    /// Makes it this writer's turn, the root being ours; `None` when it is another one's. What
    /// others copied before is known by then.
    pub(super) fn take(segments: &'a Segments) -> Result<Option<Self>> {
        segments.shared.check_marker(segments.step())?;
        let part = segments.shared.config.part;
        let number = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let name = SegmentName {
            writer: number(u32::from_be_bytes(MARK), part.group),
            sequence: number(part.pipeline_rank, part.tensor_rank),
        };
        let mut claim = Self {
            segments,
            path: segments.private(name),
            room: segments.shared.space.try_reserve(HEAD_LEN)?,
            held: false,
        };
        claim.held = claim.make()? || (claim.take_away()? && claim.make()?);
        if !claim.held {
            return Ok(None);
        }
        segments.find_all(segments.step());
        Ok(Some(claim))
    }

    /// Whether there was none.
    fn make(&self) -> Result<bool> {
        let segments = self.segments;
        let owner = segments.owner(segments.next_name());
        let head = encode_head(&owner, &segments.shared.config.process);
        match segments.create_private(self.path.clone(), head, segments.step()) {
            Err(error) if error.os_code() == Some(EEXIST) => Ok(false),
            made => made.map(|()| true),
        }
    }

    /// Takes a claim away that no one holds any more; whether the way is free.
    fn take_away(&self) -> Result<bool> {
        let (segments, shared) = (self.segments, &self.segments.shared);
        let path = self.path.clone();
        let Some(meta) = shared.call(segments.step(), move |io| io.look(path))? else {
            return Ok(true); // released a moment ago
        };
        let (path, mode) = (self.path.clone(), ReadMode::Default);
        let Some(head) = segments.read_piece(path, 0, HEAD_LEN as usize, mode, segments.step())?
        else {
            return Ok(true);
        };
        let held = match decode_head(&head) {
            Ok((owner, process)) => owner.name.writer != shared.config.writer && !process.is_gone(),
            Err(_) => true, // being made, or by somebody who died at it
        };
        let silent = |now: i64| now.saturating_sub(meta.mtime_ns) >= SILENCE_NS;
        if held && !silent(segments.server_time(segments.step())?) {
            return Ok(false);
        }
        let aside = segments.private(segments.next_name());
        let (from, to) = (self.path.clone(), aside.clone());
        if !shared.call(segments.step(), move |io| io.rename(&from, &to, meta.ino))? {
            return Ok(false);
        }
        match shared.call(segments.step(), move |io| io.remove(&[aside])) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(true),
        }
    }
}
