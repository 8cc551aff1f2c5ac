//! Reading records for a load, and reading a record back after it was published, if configured.

use std::collections::VecDeque;
use std::path::PathBuf;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_io::{IoJob, ReadMode};
use ucm_record::{Expect, RecordHeader, verify_stored};

use crate::backend::{BlockRead, Parts, ReadDone, ReadPart};
use crate::shared::Shared;

/// Error numbers of what is there for others but never for us as a record: no permission (of the
/// file, or of a directory above it), a directory, a link.
const FORBIDDEN: [i32; 2] = [1, 13];
const NO_FILE: [i32; 2] = [21, 40];

impl Shared {
    /// Reads a record into a slot, from its start, or the parts of it that are wanted.
    pub(crate) fn read(&self, io: &IoJob, read: BlockRead) -> Result<ReadDone> {
        let (mut slot, path) = (read.slot, self.layout.record(read.id));
        let len = self.lengths.own_len() as usize;
        let mode = match read.again {
            true => ReadMode::FreshDirect,
            false => ReadMode::Default,
        };
        let whole = 0..len.min(slot.len());
        let Parts { steps, mut arrived } = read.parts.unwrap_or_else(|| Parts {
            steps: vec![vec![whole]],
            arrived: Box::new(|_, _| None),
        });
        let (mut brought, mut stored_len, mut steps) = (0, 0, VecDeque::from(steps));
        'steps: while let Some(step) = steps.pop_front() {
            for part in &step {
                let room = &mut slot.as_mut_slice()[part.start..];
                let done = io.read(&path, part.start as u64, part.len(), room, mode);
                let done = done.map_err(|error| explain(io, path.clone(), error))?;
                (brought, stored_len) = (brought + done.bytes, done.file_len);
                // A record may be without side shards, or have others that lie elsewhere.
                if done.bytes < part.len() && !read.sides {
                    break 'steps;
                }
            }
            let part = ReadPart::of(&step, slot.as_slice(), stored_len);
            steps.extend(arrived(io, part));
        }
        Ok(ReadDone {
            slot,
            read: brought,
            stored_len,
            lent: None,
        })
    }

    /// Verifies the bytes of a record that was read, in whatever form it is stored: what is wrong
    /// with them, if anything. Of one that has KV its side shards are not looked at.
    pub(crate) fn verify(
        &self,
        id: BlockId,
        bytes: &[u8],
        stored_len: u64,
    ) -> Result<RecordHeader, MissReason> {
        Ok(verify_stored(bytes, stored_len, &self.expect(id, bytes))?)
    }

    /// The expected properties of the record that begins with these bytes.
    pub(crate) fn expect(&self, id: BlockId, bytes: &[u8]) -> Expect<'_> {
        let namespace = *self.config.scope.identity.digest();
        self.lengths.expect(id, namespace, bytes)
    }
}

/// Why a file could not be read: because of the record alone, or of the medium. A missing
/// permission is the record's own problem if its directories can be searched.
pub(crate) fn explain(io: &IoJob, path: PathBuf, error: Error) -> Error {
    let own = match error.os_code() {
        Some(code) if NO_FILE.contains(&code) => true,
        Some(code) if FORBIDDEN.contains(&code) => io.look(path).is_ok(),
        _ => false,
    };
    if !own {
        return error;
    }
    let text = "what has this record's name cannot be read as one";
    Error::new(ErrorKind::Foreign, text).caused_by(error)
}
