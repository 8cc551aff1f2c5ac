//! What each fault does to an operation.

use ucm_core::{Error, ErrorKind, Result};

use super::rule::draw;
use super::{Fault, FaultyEngine, Tail, errno};
use crate::engine::StillWanted;
use crate::op::{Finish, IoDone, IoOp, Publish};

impl FaultyEngine {
    /// Lets a fault befall an operation; `random` is a number for this operation.
    pub(super) fn strike(
        &self,
        fault: Fault,
        random: u64,
        lane: usize,
        op: &mut IoOp<'_>,
        wanted: StillWanted<'_>,
    ) -> Result<IoDone> {
        let pass = |op: &mut IoOp<'_>| self.pass(lane, op, wanted);
        match fault {
            Fault::Errno(code) => Err(os_error(code)),
            Fault::Busy => Err(Error::new(ErrorKind::Busy, "the lane is full (scripted)")),
            Fault::LostReply(code) => pass(op).and(Err(os_error(code))),
            Fault::HangBefore(gate) => {
                gate.pass();
                if wanted() {
                    return pass(op);
                }
                Err(Error::new(ErrorKind::Timeout, "it hung too long (scripted)"))
            }
            Fault::HangAfter(gate) => {
                let result = pass(op);
                gate.pass();
                result
            }
            Fault::Replay => {
                let first = pass(op)?;
                // A client that has its bytes does not ask for them again.
                match first {
                    IoDone::Read(..) | IoDone::ReadInto(_) => Ok(first),
                    _ => pass(op),
                }
            }
            Fault::ShortRead(most) => pass(op).map(|answer| match answer {
                IoDone::Read(read, file_len) => IoDone::Read(read.min(most), file_len),
                IoDone::ReadInto(read) => IoDone::ReadInto(read.min(most)),
                other => other,
            }),
            Fault::Flip(at) => damaged(op, pass, |bytes| flip_at(bytes, &at)),
            Fault::FlipRandom(count) => damaged(op, pass, |bytes| flip_random(bytes, count, random)),
            Fault::Torn { keep, tail } => match written(op) {
                Some(bytes) => with_bytes(op, &torn(bytes, keep, tail), pass),
                None => pass(op),
            },
            Fault::Killed { keep } => kill(op, pass, keep),
            Fault::LateVisible(looks) => {
                let result = pass(op);
                if let (Ok(_), IoOp::Publish(Publish { target, .. }) | IoOp::Finish(Finish { target, .. })) =
                    (&result, op)
                {
                    self.hidden.lock().hide(target.to_path_buf(), looks);
                }
                result
            }
        }
    }
}

/// The bytes that an operation writes.
fn written<'b>(op: &IoOp<'b>) -> Option<&'b [u8]> {
    match op {
        IoOp::Publish(Publish { bytes, .. })
        | IoOp::WriteAt { bytes, .. }
        | IoOp::Finish(Finish { footer: bytes, .. }) => Some(bytes),
        _ => None,
    }
}

/// Does an operation with other bytes than its own, and answers as if it were those.
fn with_bytes(op: &IoOp<'_>, bytes: &[u8], pass: impl Fn(&mut IoOp<'_>) -> Result<IoDone>) -> Result<IoDone> {
    match *op {
        IoOp::Publish(job) => pass(&mut IoOp::Publish(Publish { bytes, ..job })).map(|answer| match answer {
            IoDone::Published(Some(mut meta)) => {
                meta.len = job.bytes.len() as u64;
                IoDone::Published(Some(meta))
            }
            other => other,
        }),
        IoOp::WriteAt { path, offset, .. } => pass(&mut IoOp::WriteAt { path, offset, bytes }),
        IoOp::Finish(job) => pass(&mut IoOp::Finish(Finish { footer: bytes, ..job })),
        _ => Err(Error::internal("this operation writes nothing")),
    }
}

/// Damages the bytes of a read after it, and what is written before it.
fn damaged(
    op: &mut IoOp<'_>,
    pass: impl Fn(&mut IoOp<'_>) -> Result<IoDone>,
    damage: impl FnOnce(&mut [u8]),
) -> Result<IoDone> {
    if let Some(bytes) = written(op) {
        let mut bytes = bytes.to_vec();
        damage(&mut bytes);
        return with_bytes(op, &bytes, pass);
    }
    let answer = pass(op)?;
    match (&answer, op) {
        (IoDone::Read(read, _), IoOp::Read { buf, .. }) => damage(&mut buf[..*read]),
        (IoDone::ReadInto(read), IoOp::ReadInto { into, .. }) => damage_all(into, *read, damage),
        (IoDone::ReadInto(_), IoOp::ReadParts { parts, buf, .. }) => {
            damage(&mut buf[..parts.last().map_or(0, |part| part.end)]);
        }
        _ => {}
    }
    Ok(answer)
}

fn torn(bytes: &[u8], keep: usize, tail: Tail) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let keep = keep.min(bytes.len());
    match tail {
        Tail::Zeros => bytes[keep..].fill(0),
        Tail::Cut => bytes.truncate(keep),
    }
    bytes
}

/// Leaves a private file with the first `keep` bytes (of what is written to it now) and no target.
fn kill(op: &mut IoOp<'_>, pass: impl Fn(&mut IoOp<'_>) -> Result<IoDone>, keep: usize) -> Result<IoDone> {
    let first = written(op).map_or(&[][..], |bytes| &bytes[..keep.min(bytes.len())]);
    match *op {
        IoOp::WriteAt { path, offset, .. } => pass(&mut IoOp::WriteAt {
            path,
            offset,
            bytes: first,
        }),
        IoOp::Finish(Finish { private, offset, .. }) => pass(&mut IoOp::WriteAt {
            path: private,
            offset,
            bytes: first,
        }),
        IoOp::Publish(job) => {
            let mut name = job.private.to_path_buf().into_os_string();
            name.push(".dying");
            pass(&mut IoOp::Publish(Publish {
                private: name.as_ref(),
                target: job.private,
                replace: true,
                bytes: first,
                mtime_ns: None,
                durable: false,
                ..job
            }))
        }
        _ => return pass(op),
    }
    .and(Err(os_error(errno::EIO)))
}

/// A failure as the operating system reports it.
pub(super) fn os_error(code: i32) -> Error {
    Error::from_io(std::io::Error::from_raw_os_error(code), "scripted fault")
}

/// Damages what was read into several buffers as if they were one.
fn damage_all(into: &mut [(&mut [u8], usize)], read: usize, damage: impl FnOnce(&mut [u8])) {
    let pieces = into.iter().flat_map(|(buf, len)| &buf[..*len]);
    let mut bytes: Vec<u8> = pieces.copied().collect();
    damage(&mut bytes[..read]);
    let mut rest = bytes.as_slice();
    for (buf, len) in into {
        let (piece, others) = rest.split_at(*len);
        buf[..*len].copy_from_slice(piece);
        rest = others;
    }
}

fn flip_at(bytes: &mut [u8], at: &[usize]) {
    for &at in at {
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= 0xFF;
        }
    }
}

/// Changes exactly `count` bytes (all, if there are fewer), each for sure.
fn flip_random(bytes: &mut [u8], count: usize, seed: u64) {
    let mut places: Vec<usize> = (0..bytes.len()).collect();
    for i in 0..count.min(places.len()) {
        let with = i + draw(seed, i as u64, 7) as usize % (places.len() - i);
        places.swap(i, with);
        // Never zero, so that the byte really changes.
        bytes[places[i]] ^= (draw(seed, i as u64, 8) % 255 + 1) as u8;
    }
}
