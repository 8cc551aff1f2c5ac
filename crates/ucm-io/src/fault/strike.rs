//! What each fault does to an operation.

use std::path::PathBuf;

use ucm_core::{Error, ErrorKind, Result};

use super::copy::{copy_of, with_buf_of};
use super::rule::draw;
use super::{Fault, FaultyEngine, Tail, errno};
use crate::engine::StillWanted;
use crate::op::{IoBuf, IoDone, IoOp};

impl FaultyEngine {
    /// Lets a fault befall an operation; `random` is a number for this operation.
    pub(super) fn strike(
        &self,
        fault: Fault,
        random: u64,
        lane: usize,
        op: IoOp,
        wanted: StillWanted<'_>,
    ) -> Result<IoDone> {
        let pass = |op: IoOp| self.pass(lane, op, wanted);
        match fault {
            Fault::Errno(code) => op.failed(os_error(code)),
            Fault::Busy => Err(Error::new(ErrorKind::Busy, "the lane is full (scripted)")),
            Fault::LostReply(code) => pass(op)?.failed(os_error(code)),
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
            Fault::Replay => replay(op, pass),
            Fault::ShortRead(most) => pass(op).map(|answer| match answer {
                IoDone::Read { buf, read, file_len } => IoDone::Read {
                    buf,
                    read: read.min(most),
                    file_len,
                },
                IoDone::ReadInto { bufs, read } => IoDone::ReadInto {
                    bufs,
                    read: read.map(|read| read.min(most)),
                },
                other => other,
            }),
            Fault::Flip(at) => flip(op, pass, |bytes| flip_at(bytes, &at)),
            Fault::FlipRandom(count) => flip(op, pass, |bytes| flip_random(bytes, count, random)),
            Fault::Torn { keep, tail } => tear(op, pass, keep, tail),
            Fault::Killed { keep } => kill(op, pass, keep),
            Fault::LateVisible(looks) => {
                let target = match &op {
                    IoOp::Publish { target, .. } | IoOp::Finish { target, .. } => Some(target.clone()),
                    _ => None,
                };
                let result = pass(op);
                if let (Ok(_), Some(target)) = (&result, target) {
                    self.hidden.lock().hide(target, looks);
                }
                result
            }
        }
    }
}

/// Does it twice; the second answer counts, with the buffer of the first.
fn replay(op: IoOp, pass: impl Fn(IoOp) -> Result<IoDone>) -> Result<IoDone> {
    let again = copy_of(&op);
    match pass(op)? {
        answer @ (IoDone::Read { .. } | IoDone::ReadInto { .. }) => Ok(answer),
        answer => pass(again).map(|second| with_buf_of(second, answer)),
    }
}

/// Damages the bytes of a read after it, or of a publish before it (the caller's buffer stays as it is).
fn flip(op: IoOp, pass: impl Fn(IoOp) -> Result<IoDone>, damage: impl FnOnce(&mut [u8])) -> Result<IoDone> {
    match op {
        IoOp::Publish { ref buf, len, .. } => {
            let mut bytes = buf[..len.min(buf.len())].to_vec();
            damage(&mut bytes);
            publish_other(op, bytes, pass)
        }
        IoOp::WriteAt {
            path,
            offset,
            buf,
            len,
        } => {
            let mut bytes = buf[..len.min(buf.len())].to_vec();
            damage(&mut bytes);
            write_other((path, offset, bytes), buf, pass)
        }
        IoOp::Finish {
            private,
            target,
            mut foot,
            offset,
            mtime_ns,
        } => {
            damage(&mut foot);
            pass(IoOp::Finish {
                private,
                target,
                foot,
                offset,
                mtime_ns,
            })
        }
        IoOp::ReadInto { ref into, .. } => {
            let lens: Vec<usize> = into.iter().map(|(_, len)| *len).collect();
            let mut answer = pass(op)?;
            if let IoDone::ReadInto { bufs, read: Ok(read) } = &mut answer {
                damage_all(bufs, &lens, *read, damage);
            }
            Ok(answer)
        }
        IoOp::ReadParts { ref parts, .. } => {
            let end = parts.last().map_or(0, |part| part.end);
            let mut answer = pass(op)?;
            if let IoDone::ReadInto { bufs, read: Ok(_) } = &mut answer
                && let Some(buf) = bufs.first_mut()
            {
                damage(&mut buf[..end]);
            }
            Ok(answer)
        }
        op => {
            let mut answer = pass(op)?;
            if let IoDone::Read { buf, read, .. } = &mut answer {
                damage(&mut buf[..*read]);
            }
            Ok(answer)
        }
    }
}

fn tear(op: IoOp, pass: impl Fn(IoOp) -> Result<IoDone>, keep: usize, tail: Tail) -> Result<IoDone> {
    let torn = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        let keep = keep.min(bytes.len());
        match tail {
            Tail::Zeros => bytes[keep..].fill(0),
            Tail::Cut => bytes.truncate(keep),
        }
        bytes
    };
    match op {
        IoOp::Publish { ref buf, len, .. } => {
            let bytes = torn(&buf[..len.min(buf.len())]);
            publish_other(op, bytes, pass)
        }
        IoOp::WriteAt {
            path,
            offset,
            buf,
            len,
        } => {
            let bytes = torn(&buf[..len.min(buf.len())]);
            write_other((path, offset, bytes), buf, pass)
        }
        IoOp::Finish {
            private,
            target,
            foot,
            offset,
            mtime_ns,
        } => pass(IoOp::Finish {
            private,
            target,
            foot: torn(&foot),
            offset,
            mtime_ns,
        }),
        op => pass(op),
    }
}

/// Writes `bytes` in the place of an operation's own and hands its own buffer back.
fn write_other(
    (path, offset, bytes): (PathBuf, u64, Vec<u8>),
    own: IoBuf,
    pass: impl Fn(IoOp) -> Result<IoDone>,
) -> Result<IoDone> {
    pass(IoOp::WriteAt {
        path,
        offset,
        len: bytes.len(),
        buf: IoBuf::Heap(bytes),
    })?;
    Ok(IoDone::Wrote { buf: own })
}

/// Publishes `bytes` in the place of an operation's own and reports as if they were those.
fn publish_other(op: IoOp, bytes: Vec<u8>, pass: impl Fn(IoOp) -> Result<IoDone>) -> Result<IoDone> {
    let IoOp::Publish {
        private,
        target,
        replace,
        buf: own,
        len: own_len,
        mode,
        mtime_ns,
        durable,
    } = op
    else {
        return Err(Error::internal("not a publish"));
    };
    let answer = pass(IoOp::Publish {
        private,
        target,
        replace,
        len: bytes.len(),
        buf: IoBuf::Heap(bytes),
        mode,
        mtime_ns,
        durable,
    })?;
    Ok(match answer {
        IoDone::Published { mut meta, .. } => {
            meta.len = own_len as u64;
            IoDone::Published { buf: own, meta }
        }
        IoDone::Taken { .. } => IoDone::Taken { buf: own },
        other => other,
    })
}

/// Leaves a private file with the first `keep` bytes (of what is written to it now) and no target.
fn kill(op: IoOp, pass: impl Fn(IoOp) -> Result<IoDone>, keep: usize) -> Result<IoDone> {
    let piece = match &op {
        IoOp::WriteAt {
            path,
            offset,
            buf,
            len,
        } => Some((
            path.clone(),
            *offset,
            buf[..keep.min(*len).min(buf.len())].to_vec(),
        )),
        IoOp::Finish {
            private,
            foot,
            offset,
            ..
        } => Some((private.clone(), *offset, foot[..keep.min(foot.len())].to_vec())),
        _ => None,
    };
    if let Some(piece) = piece {
        write_other(piece, IoBuf::Heap(Vec::new()), pass)?;
        return Err(os_error(errno::EIO));
    }
    let IoOp::Publish {
        private,
        buf,
        len,
        mode,
        ..
    } = op
    else {
        return pass(op);
    };
    let mut name = private.clone().into_os_string();
    name.push(".dying");
    pass(IoOp::Publish {
        private: name.into(),
        target: private,
        replace: true,
        len: keep.min(len).min(buf.len()),
        buf,
        mode,
        mtime_ns: None,
        durable: false,
    })?;
    Err(os_error(errno::EIO))
}

/// A failure as the operating system reports it.
pub(super) fn os_error(code: i32) -> Error {
    Error::from_io(std::io::Error::from_raw_os_error(code), "scripted fault")
}

/// Damages what was read into several buffers as if they were one.
fn damage_all(bufs: &mut [IoBuf], lens: &[usize], read: usize, damage: impl FnOnce(&mut [u8])) {
    let pieces = bufs.iter().zip(lens).flat_map(|(buf, &len)| &buf[..len]);
    let mut bytes: Vec<u8> = pieces.copied().collect();
    damage(&mut bytes[..read]);
    let mut rest = bytes.as_slice();
    for (buf, &len) in bufs.iter_mut().zip(lens) {
        let (piece, others) = rest.split_at(len);
        buf[..len].copy_from_slice(piece);
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
