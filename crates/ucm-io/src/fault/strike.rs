//! What each fault does to an operation.

use std::path::PathBuf;
use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::Mono;

use super::copy::{copy_of, with_buf_of};
use super::rule::draw;
use super::{Fault, Shared, Tail, errno};
use crate::engine::Done;
use crate::op::{IoBuf, IoDone, IoOp};

impl Shared {
    /// Lets a fault befall an operation; `random` is a number for this operation.
    pub(super) fn strike(
        self: &Arc<Self>,
        fault: Fault,
        random: u64,
        lane: usize,
        deadline: Mono,
        op: IoOp,
        done: Done,
    ) {
        match fault {
            Fault::Errno(code) => done(op.failed(os_error(code))),
            Fault::Busy => {
                drop(op);
                done(Err(Error::new(ErrorKind::Busy, "the lane is full (scripted)")));
            }
            Fault::LostReply(code) => {
                let done = Box::new(move |result: Result<IoDone>| {
                    done(result.and_then(|answer| answer.failed(os_error(code))));
                });
                self.pass(lane, deadline, op, done);
            }
            Fault::HangBefore(gate) => {
                let shared = Arc::clone(self);
                self.hang(gate, deadline, op, move |result| match result {
                    Ok(op) => shared.pass(lane, deadline, op, done),
                    Err(error) => done(Err(error)),
                });
            }
            Fault::HangAfter(gate) => {
                let shared = Arc::clone(self);
                let done = Box::new(move |result: Result<IoDone>| {
                    shared.hang(gate, deadline, result, move |held| done(held.and_then(|r| r)));
                });
                self.pass(lane, deadline, op, done);
            }
            Fault::Replay => self.replay(lane, deadline, op, done),
            Fault::ShortRead(most) => {
                let done = Box::new(move |result: Result<IoDone>| {
                    done(result.map(|answer| match answer {
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
                    }));
                });
                self.pass(lane, deadline, op, done);
            }
            Fault::Flip(at) => self.flip(lane, deadline, op, done, move |bytes| flip_at(bytes, &at)),
            Fault::FlipRandom(count) => {
                self.flip(lane, deadline, op, done, move |bytes| {
                    flip_random(bytes, count, random)
                });
            }
            Fault::Torn { keep, tail } => self.tear(lane, deadline, op, done, keep, tail),
            Fault::Killed { keep } => self.kill(lane, deadline, op, done, keep),
            Fault::LateVisible(looks) => {
                let target = match &op {
                    IoOp::Publish { target, .. } | IoOp::Finish { target, .. } => Some(target.clone()),
                    _ => None,
                };
                let shared = Arc::clone(self);
                let done = Box::new(move |result: Result<IoDone>| {
                    if let (Ok(_), Some(target)) = (&result, target) {
                        shared.hidden.lock().hide(target, looks);
                    }
                    done(result);
                });
                self.pass(lane, deadline, op, done);
            }
        }
    }

    /// Does it twice; the second answer counts, with the buffer of the first.
    fn replay(self: &Arc<Self>, lane: usize, deadline: Mono, op: IoOp, done: Done) {
        let again = copy_of(&op);
        let shared = Arc::clone(self);
        let first = Box::new(move |result: Result<IoDone>| match result {
            Err(error) => done(Err(error)),
            Ok(IoDone::Read { .. } | IoDone::ReadInto { .. }) => done(result),
            Ok(answer) => {
                let done =
                    Box::new(move |second: Result<IoDone>| done(second.map(|s| with_buf_of(s, answer))));
                shared.pass(lane, deadline, again, done);
            }
        });
        self.pass(lane, deadline, op, first);
    }

    /// Damages the bytes of a read after it, or of a publish before it (the caller's buffer stays as it is).
    fn flip(
        self: &Arc<Self>,
        lane: usize,
        deadline: Mono,
        op: IoOp,
        done: Done,
        damage: impl FnOnce(&mut [u8]) + Send + 'static,
    ) {
        match op {
            IoOp::Publish { ref buf, len, .. } => {
                let mut bytes = buf[..len.min(buf.len())].to_vec();
                damage(&mut bytes);
                self.publish_other(lane, deadline, op, bytes, done);
            }
            IoOp::WriteAt {
                path,
                offset,
                buf,
                len,
            } => {
                let mut bytes = buf[..len.min(buf.len())].to_vec();
                damage(&mut bytes);
                self.write_other(lane, deadline, (path, offset, bytes), buf, done);
            }
            IoOp::Finish {
                private,
                target,
                mut foot,
                offset,
                mtime_ns,
            } => {
                damage(&mut foot);
                let op = IoOp::Finish {
                    private,
                    target,
                    foot,
                    offset,
                    mtime_ns,
                };
                self.pass(lane, deadline, op, done);
            }
            IoOp::ReadInto { ref into, .. } => {
                let lens: Vec<usize> = into.iter().map(|(_, len)| *len).collect();
                let done = Box::new(move |result: Result<IoDone>| {
                    done(result.map(|mut answer| {
                        if let IoDone::ReadInto { bufs, read: Ok(read) } = &mut answer {
                            damage_all(bufs, &lens, *read, damage);
                        }
                        answer
                    }));
                });
                self.pass(lane, deadline, op, done);
            }
            IoOp::ReadParts { ref parts, .. } => {
                let end = parts.last().map_or(0, |part| part.end);
                let done = Box::new(move |result: Result<IoDone>| {
                    done(result.map(|mut answer| {
                        if let IoDone::ReadInto { bufs, read: Ok(_) } = &mut answer
                            && let Some(buf) = bufs.first_mut()
                        {
                            damage(&mut buf[..end]);
                        }
                        answer
                    }));
                });
                self.pass(lane, deadline, op, done);
            }
            op => {
                let done = Box::new(move |result: Result<IoDone>| {
                    done(result.map(|mut answer| {
                        if let IoDone::Read { buf, read, .. } = &mut answer {
                            damage(&mut buf[..*read]);
                        }
                        answer
                    }));
                });
                self.pass(lane, deadline, op, done);
            }
        }
    }

    fn tear(self: &Arc<Self>, lane: usize, deadline: Mono, op: IoOp, done: Done, keep: usize, tail: Tail) {
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
                self.publish_other(lane, deadline, op, bytes, done);
            }
            IoOp::WriteAt {
                path,
                offset,
                buf,
                len,
            } => {
                let bytes = torn(&buf[..len.min(buf.len())]);
                self.write_other(lane, deadline, (path, offset, bytes), buf, done);
            }
            IoOp::Finish {
                private,
                target,
                foot,
                offset,
                mtime_ns,
            } => {
                let op = IoOp::Finish {
                    private,
                    target,
                    foot: torn(&foot),
                    offset,
                    mtime_ns,
                };
                self.pass(lane, deadline, op, done);
            }
            op => self.pass(lane, deadline, op, done),
        }
    }

    /// Writes `bytes` in the place of an operation's own and hands its own buffer back.
    fn write_other(
        self: &Arc<Self>,
        lane: usize,
        deadline: Mono,
        (path, offset, bytes): (PathBuf, u64, Vec<u8>),
        own: IoBuf,
        done: Done,
    ) {
        let op = IoOp::WriteAt {
            path,
            offset,
            len: bytes.len(),
            buf: IoBuf::Heap(bytes),
        };
        let done = Box::new(move |result: Result<IoDone>| done(result.map(|_| IoDone::Wrote { buf: own })));
        self.pass(lane, deadline, op, done);
    }

    /// Publishes `bytes` in the place of an operation's own and reports as if they were those.
    fn publish_other(self: &Arc<Self>, lane: usize, deadline: Mono, op: IoOp, bytes: Vec<u8>, done: Done) {
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
            return done(Err(Error::internal("not a publish")));
        };
        let done = Box::new(move |result: Result<IoDone>| {
            done(result.map(|answer| match answer {
                IoDone::Published { mut meta, .. } => {
                    meta.len = own_len as u64;
                    IoDone::Published { buf: own, meta }
                }
                IoDone::Taken { .. } => IoDone::Taken { buf: own },
                other => other,
            }));
        });
        let op = IoOp::Publish {
            private,
            target,
            replace,
            len: bytes.len(),
            buf: IoBuf::Heap(bytes),
            mode,
            mtime_ns,
            durable,
        };
        self.pass(lane, deadline, op, done);
    }

    /// Leaves a private file with the first `keep` bytes (of what is written to it now) and no target.
    fn kill(self: &Arc<Self>, lane: usize, deadline: Mono, op: IoOp, done: Done, keep: usize) {
        let dead = |done: Done| -> Done {
            Box::new(move |result: Result<IoDone>| done(result.and_then(|_| Err(os_error(errno::EIO)))))
        };
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
            return self.write_other(lane, deadline, piece, IoBuf::Heap(Vec::new()), dead(done));
        }
        let IoOp::Publish {
            private,
            buf,
            len,
            mode,
            ..
        } = op
        else {
            return self.pass(lane, deadline, op, done);
        };
        let mut name = private.clone().into_os_string();
        name.push(".dying");
        let op = IoOp::Publish {
            private: name.into(),
            target: private,
            replace: true,
            len: keep.min(len).min(buf.len()),
            buf,
            mode,
            mtime_ns: None,
            durable: false,
        };
        self.pass(lane, deadline, op, dead(done));
    }
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
