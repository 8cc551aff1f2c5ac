//! Operations done twice: a copy of one, and the answer of the second with the buffer of the first.

use crate::op::{IoBuf, IoDone, IoOp};

/// The same operation again, its buffer copied.
pub(super) fn copy_of(op: &IoOp) -> IoOp {
    let copy = |buf: &IoBuf| IoBuf::Heap(buf.to_vec());
    match op {
        IoOp::Read {
            path,
            offset,
            len,
            mode,
            ..
        } => IoOp::Read {
            path: path.clone(),
            offset: *offset,
            len: *len,
            // A read is not repeated (see `replay`), so it needs no room.
            buf: IoBuf::Heap(Vec::new()),
            mode: *mode,
        },
        IoOp::ReadInto {
            path,
            offset,
            into,
            keep,
        } => IoOp::ReadInto {
            path: path.clone(),
            offset: *offset,
            into: into
                .iter()
                .map(|(_, len)| (IoBuf::Heap(Vec::new()), *len))
                .collect(),
            keep: *keep,
        },
        IoOp::ReadParts {
            path,
            offset,
            parts,
            keep,
            ..
        } => IoOp::ReadParts {
            path: path.clone(),
            offset: *offset,
            parts: parts.clone(),
            buf: IoBuf::Heap(Vec::new()),
            keep: *keep,
        },
        IoOp::Publish {
            private,
            target,
            replace,
            buf,
            len,
            mode,
            mtime_ns,
            durable,
        } => IoOp::Publish {
            private: private.clone(),
            target: target.clone(),
            replace: *replace,
            buf: copy(buf),
            len: *len,
            mode: *mode,
            mtime_ns: *mtime_ns,
            durable: *durable,
        },
        IoOp::Stat {
            paths,
            stop_at_missing,
        } => IoOp::Stat {
            paths: paths.clone(),
            stop_at_missing: *stop_at_missing,
        },
        IoOp::Touch { files } => IoOp::Touch { files: files.clone() },
        IoOp::Remove { paths } => IoOp::Remove { paths: paths.clone() },
        IoOp::Rename { from, to, ino } => IoOp::Rename {
            from: from.clone(),
            to: to.clone(),
            ino: *ino,
        },
        IoOp::List { dir } => IoOp::List { dir: dir.clone() },
        IoOp::MakeDir { path, mode } => IoOp::MakeDir {
            path: path.clone(),
            mode: *mode,
        },
        IoOp::Space { path } => IoOp::Space { path: path.clone() },
        IoOp::Probe { dir } => IoOp::Probe { dir: dir.clone() },
        IoOp::Create {
            path,
            head,
            room,
            mode,
        } => IoOp::Create {
            path: path.clone(),
            head: head.clone(),
            room: *room,
            mode: *mode,
        },
        IoOp::WriteAt {
            path,
            offset,
            buf,
            len,
        } => IoOp::WriteAt {
            path: path.clone(),
            offset: *offset,
            buf: copy(buf),
            len: *len,
        },
        IoOp::Finish {
            private,
            target,
            foot,
            offset,
            mtime_ns,
        } => IoOp::Finish {
            private: private.clone(),
            target: target.clone(),
            foot: foot.clone(),
            offset: *offset,
            mtime_ns: *mtime_ns,
        },
    }
}

/// The second answer with the buffer that belongs to the caller.
pub(super) fn with_buf_of(second: IoDone, first: IoDone) -> IoDone {
    match (second, first) {
        (IoDone::Published { meta, .. }, IoDone::Published { buf, .. }) => IoDone::Published { buf, meta },
        (IoDone::Wrote { .. }, IoDone::Wrote { buf }) => IoDone::Wrote { buf },
        // A server that ran a repeated request finds its own file.
        (IoDone::Taken { .. }, first) => first,
        (second, _) => second,
    }
}
