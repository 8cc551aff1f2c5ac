//! One merging at a time: a small private file of one name for each namespace and part, which only one writer can make.
//!
//! Its bytes are the head of a segment, so it says whose it is. The claim of somebody who is gone, or silent for as long
//! as a dead writer is, is taken away by a rename, which one of several does. Two who merge the same all the same do no
//! harm; the claim only saves the work.

use std::path::PathBuf;

use ucm_core::{Error, ErrorKind, Result};
use ucm_io::{FileMeta, ReadMode};
use ucm_quota::Reservation;
use ucm_quota::layout::SegmentName;

use crate::segment::Segments;
use crate::segment::format::{HEAD_LEN, decode_head, encode_head};
use crate::segment::recovery::SILENCE_NS;

/// Begins the name of every claim.
const MARK: [u8; 4] = *b"merg";
/// The error number of a name that is taken.
const EEXIST: i32 = 17;

/// The right to merge.
struct Claim(Reservation);

impl Segments {
    /// The name that stands for merging of this part.
    fn claim_path(&self) -> PathBuf {
        let part = self.shared.config.part;
        let number = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let name = SegmentName {
            writer: number(u32::from_be_bytes(MARK), part.group),
            sequence: number(part.pipeline_rank, part.tensor_rank),
        };
        self.private(name)
    }

    /// Does something while it is this writer's turn and the root ours; `None` when it is another one's turn. What others
    /// copied before is known by then.
    pub(super) fn in_turn<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        self.shared.check_marker(self.step())?;
        let Some(claim) = self.claim()? else {
            return Ok(None);
        };
        self.find_all(self.step());
        let done = work();
        self.release(claim);
        done.map(Some)
    }

    /// Makes it this writer's turn; `None` when it is another one's.
    fn claim(&self) -> Result<Option<Claim>> {
        let ticket = self.shared.space.spared(HEAD_LEN)?;
        let claimed = match self.make_claim() {
            Ok(false) => self.take_away().and_then(|free| match free {
                true => self.make_claim(),
                false => Ok(false),
            }),
            made => made,
        };
        match claimed {
            Ok(true) => Ok(Some(Claim(ticket))),
            other => {
                // Where the medium is full nobody is to make room for this.
                let spared = Error::new(ErrorKind::Busy, "it is not this writer's turn");
                self.shared.space.settled(ticket, 0, Some(&spared));
                other.map(|_| None)
            }
        }
    }

    /// It is somebody else's turn.
    fn release(&self, claim: Claim) {
        let path = self.claim_path();
        let removed = self.shared.call(self.step(), move |io| io.remove(&[path]));
        let gone = removed.is_ok_and(|files| files.iter().all(Result::is_ok));
        // What stays is known by its writer, or swept by its age.
        self.shared
            .space
            .settled(claim.0, if gone { 0 } else { HEAD_LEN }, None);
    }

    /// Whether there was none.
    fn make_claim(&self) -> Result<bool> {
        let config = &self.shared.config;
        let head = encode_head(&self.owner(self.next_name()), &config.process);
        match self.create_private(self.claim_path(), head, self.step()) {
            Ok(()) => Ok(true),
            Err(error) if error.os_code() == Some(EEXIST) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Takes a claim away that nobody holds any more; whether the way is free.
    fn take_away(&self) -> Result<bool> {
        let Some(meta) = self.claim_meta()? else {
            return Ok(true); // released a moment ago
        };
        let Some(head) = self.read_piece(
            self.claim_path(),
            0,
            HEAD_LEN as usize,
            ReadMode::Default,
            self.step(),
        )?
        else {
            return Ok(true);
        };
        let held = match decode_head(&head) {
            Ok((owner, process)) => owner.name.writer != self.shared.config.writer && !process.is_gone(),
            Err(_) => true, // being made, or by somebody who died at it
        };
        if held && self.server_time(self.step())?.saturating_sub(meta.mtime_ns) < SILENCE_NS {
            return Ok(false);
        }
        let aside = self.private(self.next_name());
        let (from, to) = (self.claim_path(), aside.clone());
        if !self
            .shared
            .call(self.step(), move |io| io.rename(&from, &to, meta.ino))?
        {
            return Ok(false);
        }
        match self.shared.call(self.step(), move |io| io.remove(&[aside])) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(true),
        }
    }

    fn claim_meta(&self) -> Result<Option<FileMeta>> {
        let path = self.claim_path();
        self.shared.call(self.step(), move |io| io.look(path))
    }
}
