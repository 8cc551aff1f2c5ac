//! The bytes of a segment besides its records: a page at its head that says whose it is, and a
//! footer that says where its records lie. `docs/format-segment.md` has every offset.
//!
//! The head is for the process that finds the segment of a dead writer; the footer, at the very end
//! of the file, for readers. A footer is believed only whole: its length, its checksums and every
//! entry are verified before one is used. Entries do not overlap, and none is longer than a record
//! of its part can be.

use std::ops::Range;

use ucm_core::{BlockId, MissReason, PAGE, Part, crc32c, round_up};
use ucm_io::Process;
use ucm_record::bytes::{array, part_at, u32_at, u64_at};

use crate::layout::SegmentName;

#[cfg(test)]
mod tests;

/// First bytes of a segment.
const HEAD_MAGIC: [u8; 4] = *b"UCMS";
/// First bytes of the trailer, which are the last 128 of the file.
const TRAILER_MAGIC: [u8; 4] = *b"UCMF";
/// Version that is written, and the newest that is read.
const VERSION: u32 = 1;
/// Length of the head, bytes.
pub(crate) const HEAD_LEN: u64 = PAGE;
/// Length of the trailer, bytes, in every version.
pub(crate) const TRAILER_LEN: usize = 128;
/// Length of an entry, bytes.
const ENTRY_LEN: usize = 32;
/// Most records of a segment.
pub(crate) const MAX_ENTRIES: usize = 1 << 20;
/// Longest text that names a host, bytes; a longer one is left out.
const HOST_LEN: usize = 160;

/// Offsets in the head and in the trailer.
mod at {
    pub(super) const VERSION: usize = 4;
    pub(super) const HEAD_WRITER: usize = 8;
    pub(super) const HEAD_SEQUENCE: usize = 16;
    pub(super) const HEAD_NAMESPACE: usize = 24;
    pub(super) const HEAD_PART: usize = 56;
    pub(super) const HEAD_FLAGS: usize = 68;
    pub(super) const HEAD_TIME: usize = 72;
    pub(super) const HEAD_PID: usize = 80;
    pub(super) const HEAD_HOST_LEN: usize = 84;
    pub(super) const HEAD_STARTED: usize = 88;
    pub(super) const HEAD_HOST: usize = 96;
    pub(super) const HEAD_CRC: usize = 4092;
    pub(super) const START: usize = 8;
    pub(super) const LEN: usize = 16;
    pub(super) const ENTRIES: usize = 24;
    pub(super) const ENTRY_LEN: usize = 28;
    pub(super) const NAMESPACE: usize = 32;
    pub(super) const WRITER: usize = 64;
    pub(super) const SEQUENCE: usize = 72;
    pub(super) const TIME: usize = 80;
    pub(super) const PART: usize = 88;
    pub(super) const FLAGS: usize = 100;
    pub(super) const ENTRIES_CRC: usize = 104;
    pub(super) const CRC: usize = 124;
}

/// Whose segment it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) name: SegmentName,
    /// Digest of the identity.
    pub(crate) namespace: [u8; 32],
    /// The part that its writer brings.
    pub(crate) part: Part,
    /// When it was begun or sealed, ns since 1970 by the writer's clock.
    pub(crate) time_ns: u64,
}

/// One record of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) id: BlockId,
    /// From the start of the file, a whole page.
    pub(crate) offset: u64,
    /// Bytes, whole pages.
    pub(crate) len: u64,
}

fn put(out: &mut [u8], offset: usize, bytes: &[u8]) {
    out[offset..offset + bytes.len()].copy_from_slice(bytes);
}

/// Which version these bytes are of, if they begin with `magic` and end with their checksum at
/// `crc`.
fn check(bytes: &[u8], magic: [u8; 4], crc: usize, flags: usize) -> Result<(), MissReason> {
    if bytes[..4] != magic {
        return Err(MissReason::NotARecord);
    }
    if crc32c(&bytes[..crc]) != u32_at(bytes, crc) {
        return Err(MissReason::BadHeader);
    }
    match u32_at(bytes, at::VERSION) {
        0 => Err(MissReason::BadHeader),
        VERSION if u32_at(bytes, flags) == 0 => Ok(()),
        _ => Err(MissReason::NewerVersion),
    }
}

/// The head of a segment that `process` begins to write.
pub(crate) fn encode_head(owner: &Owner, process: &Process) -> Vec<u8> {
    let mut out = vec![0; HEAD_LEN as usize];
    let host = Some(process.host.as_bytes()).filter(|host| host.len() <= HOST_LEN);
    let host = host.unwrap_or_default();
    let mut put_at = |offset, bytes: &[u8]| put(&mut out, offset, bytes);
    put_at(0, &HEAD_MAGIC);
    put_at(at::VERSION, &VERSION.to_le_bytes());
    put_at(at::HEAD_WRITER, &owner.name.writer.to_le_bytes());
    put_at(at::HEAD_SEQUENCE, &owner.name.sequence.to_le_bytes());
    put_at(at::HEAD_NAMESPACE, &owner.namespace);
    put_at(at::HEAD_PART, &owner.part.to_bytes());
    put_at(at::HEAD_TIME, &owner.time_ns.to_le_bytes());
    put_at(at::HEAD_PID, &process.pid.to_le_bytes());
    put_at(at::HEAD_HOST_LEN, &(host.len() as u32).to_le_bytes());
    put_at(at::HEAD_STARTED, &process.started.to_le_bytes());
    put_at(at::HEAD_HOST, host);
    let crc = crc32c(&out[..at::HEAD_CRC]);
    put(&mut out, at::HEAD_CRC, &crc.to_le_bytes());
    out
}

/// Whose segment it is and which process wrote it, by its first page.
pub(crate) fn decode_head(bytes: &[u8]) -> Result<(Owner, Process), MissReason> {
    let head = bytes.get(..HEAD_LEN as usize);
    let head = head.ok_or(MissReason::Truncated)?;
    check(head, HEAD_MAGIC, at::HEAD_CRC, at::HEAD_FLAGS)?;
    let len = u32_at(head, at::HEAD_HOST_LEN) as usize;
    if len > HOST_LEN {
        return Err(MissReason::BadHeader);
    }
    let host = std::str::from_utf8(&head[at::HEAD_HOST..at::HEAD_HOST + len]);
    let owner = Owner {
        name: SegmentName {
            writer: u64_at(head, at::HEAD_WRITER),
            sequence: u64_at(head, at::HEAD_SEQUENCE),
        },
        namespace: array(head, at::HEAD_NAMESPACE),
        part: part_at(head, at::HEAD_PART),
        time_ns: u64_at(head, at::HEAD_TIME),
    };
    let process = Process {
        host: host.map_err(|_| MissReason::BadHeader)?.to_owned(),
        pid: u32_at(head, at::HEAD_PID),
        started: u64_at(head, at::HEAD_STARTED),
    };
    Ok((owner, process))
}

/// Length of the footer of a segment with this many records, bytes.
pub(crate) fn footer_len(entries: usize) -> u64 {
    round_up((entries * ENTRY_LEN + TRAILER_LEN) as u64, PAGE)
}

/// The footer of a segment whose records end at `start`, a whole page.
pub(crate) fn encode_footer(owner: &Owner, start: u64, entries: &[Entry]) -> Vec<u8> {
    let len = footer_len(entries.len());
    let mut out = vec![0; len as usize];
    for (number, entry) in entries.iter().enumerate() {
        let place = number * ENTRY_LEN;
        put(&mut out, place, &entry.id.0);
        put(&mut out, place + 16, &entry.offset.to_le_bytes());
        put(&mut out, place + 24, &entry.len.to_le_bytes());
    }
    let (listed, trailer) = out.split_at_mut(len as usize - TRAILER_LEN);
    put(trailer, 0, &TRAILER_MAGIC);
    put(trailer, at::VERSION, &VERSION.to_le_bytes());
    put(trailer, at::START, &start.to_le_bytes());
    put(trailer, at::LEN, &len.to_le_bytes());
    put(trailer, at::ENTRIES, &(entries.len() as u32).to_le_bytes());
    put(trailer, at::ENTRY_LEN, &(ENTRY_LEN as u32).to_le_bytes());
    put(trailer, at::NAMESPACE, &owner.namespace);
    put(trailer, at::WRITER, &owner.name.writer.to_le_bytes());
    put(trailer, at::SEQUENCE, &owner.name.sequence.to_le_bytes());
    put(trailer, at::TIME, &owner.time_ns.to_le_bytes());
    put(trailer, at::PART, &owner.part.to_bytes());
    put(trailer, at::ENTRIES_CRC, &crc32c(listed).to_le_bytes());
    let crc = crc32c(&trailer[..at::CRC]);
    put(trailer, at::CRC, &crc.to_le_bytes());
    out
}

/// The contents of the last bytes of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trailer {
    pub(crate) owner: Owner,
    /// Where the footer lies in the file.
    pub(crate) footer: Range<u64>,
    entries: usize,
    entries_crc: u32,
}

impl Trailer {
    /// Verifies the last bytes of a file of `file_len` bytes; `tail` ends where the file does.
    pub(crate) fn decode(tail: &[u8], file_len: u64) -> Result<Self, MissReason> {
        let (_, bytes) = tail
            .split_last_chunk::<TRAILER_LEN>()
            .ok_or(MissReason::Truncated)?;
        check(bytes, TRAILER_MAGIC, at::CRC, at::FLAGS)?;
        let (start, len) = (u64_at(bytes, at::START), u64_at(bytes, at::LEN));
        let entries = u32_at(bytes, at::ENTRIES) as usize;
        let whole = start >= HEAD_LEN
            && start.is_multiple_of(PAGE)
            && entries <= MAX_ENTRIES
            && entries as u64 <= (start - HEAD_LEN) / PAGE // each has a page of its own
            && len == footer_len(entries)
            && u32_at(bytes, at::ENTRY_LEN) as usize == ENTRY_LEN;
        if !whole {
            return Err(MissReason::BadHeader);
        }
        let end = start.checked_add(len).ok_or(MissReason::BadHeader)?;
        if end != file_len {
            return Err(MissReason::WrongLength);
        }
        Ok(Self {
            owner: Owner {
                name: SegmentName {
                    writer: u64_at(bytes, at::WRITER),
                    sequence: u64_at(bytes, at::SEQUENCE),
                },
                namespace: array(bytes, at::NAMESPACE),
                part: part_at(bytes, at::PART),
                time_ns: u64_at(bytes, at::TIME),
            },
            footer: start..end,
            entries,
            entries_crc: u32_at(bytes, at::ENTRIES_CRC),
        })
    }

    /// The footer in the last bytes of the file; its length where it begins before them.
    pub(crate) fn footer_in<'a>(&self, tail: &'a [u8]) -> Result<&'a [u8], u64> {
        let len = self.footer.end - self.footer.start;
        let start = (tail.len() as u64).checked_sub(len).ok_or(len)?;
        Ok(&tail[start as usize..])
    }

    /// Verifies the whole footer and gives its entries: records of at most `longest` bytes that lie
    /// side by side.
    pub(crate) fn entries(&self, footer: &[u8], longest: u64) -> Result<Vec<Entry>, MissReason> {
        if footer.len() as u64 != self.footer.end - self.footer.start {
            return Err(MissReason::Truncated);
        }
        let listed = &footer[..footer.len() - TRAILER_LEN];
        if crc32c(listed) != self.entries_crc {
            return Err(MissReason::BadChecksum);
        }
        let entry = |bytes: &[u8]| {
            let entry = Entry {
                id: BlockId(array(bytes, 0)),
                offset: u64_at(bytes, 16),
                len: u64_at(bytes, 24),
            };
            let end = entry.offset.checked_add(entry.len)?;
            let whole = entry.offset.is_multiple_of(PAGE)
                && entry.len.is_multiple_of(PAGE)
                && entry.len > 0
                && entry.len <= longest
                && entry.offset >= HEAD_LEN
                && end <= self.footer.start;
            whole.then_some(entry)
        };
        let entries = listed.chunks_exact(ENTRY_LEN).take(self.entries).map(entry);
        let entries: Option<Vec<Entry>> = entries.collect();
        let entries = entries.ok_or(MissReason::BadHeader)?;
        let places = entries.iter().map(|entry| (entry.offset, entry.len));
        let mut places: Vec<(u64, u64)> = places.collect();
        places.sort_unstable();
        // What is read of a segment is never more than the segment.
        let overlap = |pair: &[(u64, u64)]| pair[1].0 < pair[0].0 + pair[0].1;
        if places.windows(2).any(overlap) {
            return Err(MissReason::BadHeader);
        }
        Ok(entries)
    }
}
