//! What the kernel is given for one call, kept alive and in its place until the call has returned.
#![allow(unsafe_code, reason = "descriptors that the kernel hands over by number")]

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use io_uring::squeue::Entry;
use io_uring::{opcode, types};
use rustix::fs::{AtFlags, OFlags, Statx, StatxFlags};
use rustix::io::Errno;

use crate::kept::KeptFile;
use crate::op::IoBuf;
use crate::sys::{File, MOST_BUFFERS, retry};

/// Most bytes of one call; a whole number of sectors, and what every kernel takes.
pub(super) const MOST: usize = 1 << 30;
/// What is asked of an open file.
const MASK: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::DIOALIGN);

/// One call, with ranges of the buffer instead of pointers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Call {
    /// Opens the name; the answer is a descriptor.
    Open { flags: OFlags, mode: u32 },
    /// Reads into the buffer from byte `from` on, or into several as if they were one.
    Read { from: usize, len: usize, at: u64 },
    /// Writes the buffer from byte `from` on, to the same offset of the file.
    Write { from: usize, len: usize },
    /// Sends what is dirty of the file on its way to the disk.
    Advise,
    /// Closes the file.
    Close,
    /// Removes the name.
    Unlink,
}

impl Call {
    /// Whether it may be taken back: not what gives something up that would be lost otherwise.
    pub(super) fn is_cancellable(self) -> bool {
        !matches!(self, Self::Close | Self::Unlink)
    }
}

/// The memory and the descriptor of one operation.
pub(super) struct Hold {
    name: CString,
    pub(super) file: Option<File>,
    /// An open file that is shared with others, in the place of an own one.
    pub(super) kept: Option<Arc<KeptFile>>,
    pub(super) buf: IoBuf,
    /// The buffers after the first, if a read goes into several.
    more: Vec<IoBuf>,
    /// Bytes that each of several is filled with, and what the kernel is told of them.
    lens: Vec<usize>,
    vector: Vec<Piece>,
}

/// A piece of a buffer of the same [`Hold`].
#[repr(transparent)]
struct Piece(libc::iovec);

// SAFETY: it points into a buffer that is owned by the same `Hold` and goes where that goes; only the kernel uses it.
unsafe impl Send for Piece {}

impl Hold {
    /// `INVAL` for a name with a zero byte, as the system calls say.
    pub(super) fn new(path: &Path, buf: IoBuf) -> rustix::io::Result<Self> {
        Ok(Self {
            name: CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?,
            file: None,
            kept: None,
            buf,
            more: Vec::new(),
            lens: Vec::new(),
            vector: Vec::new(),
        })
    }

    /// For a read into several buffers, with the bytes that each of them gets; there is at least one.
    pub(super) fn into_several(path: &Path, into: Vec<(IoBuf, usize)>) -> rustix::io::Result<Self> {
        let (mut bufs, lens): (Vec<_>, Vec<_>) = into.into_iter().unzip();
        let more = bufs.split_off(1.min(bufs.len()));
        let first = bufs.pop().unwrap_or(IoBuf::Heap(Vec::new()));
        Ok(Self {
            more,
            lens,
            ..Self::new(path, first)?
        })
    }

    /// Whether a read goes into more than one buffer.
    pub(super) fn is_several(&self) -> bool {
        !self.more.is_empty()
    }

    /// Bytes that the last buffer has room for beyond what it is filled with.
    pub(super) fn spare(&self) -> usize {
        let last = self.more.last().unwrap_or(&self.buf);
        self.lens.last().map_or(0, |len| last.len() - len)
    }

    /// Whether the open file is read and written past the page cache.
    pub(super) fn is_direct(&self) -> bool {
        match &self.kept {
            Some(kept) => kept.direct,
            None => self.file.as_ref().is_some_and(File::is_direct),
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.kept {
            Some(kept) => Some(kept.fd()),
            None => self.file.as_ref().map(|file| file.fd().as_fd()),
        }
    }

    /// Tells the vector of `len` bytes from `from` on in the row of the buffers: how many pieces they are.
    fn fill_vector(&mut self, from: usize, len: usize) -> u32 {
        self.vector.clear();
        let (mut skip, mut left) = (from, len);
        let bufs = std::iter::once(&mut self.buf).chain(&mut self.more);
        let last = self.lens.len().saturating_sub(1);
        for (number, (buf, &filled)) in bufs.zip(&self.lens).enumerate() {
            // What is asked for beyond the last byte wanted (whole sectors) goes into the last.
            let end = if number == last { buf.len() } else { filled };
            let start = skip.min(end);
            let take = left.min(end - start);
            skip -= start;
            left -= take;
            if take > 0 && self.vector.len() < MOST_BUFFERS {
                self.vector.push(Piece(libc::iovec {
                    iov_base: buf[start..start + take].as_mut_ptr().cast(),
                    iov_len: take,
                }));
            }
        }
        self.vector.len() as u32
    }

    /// Takes over a descriptor that an `Open` answered.
    pub(super) fn opened(&mut self, fd: u32, direct: bool) {
        // SAFETY: the kernel has just made this descriptor for us and told nobody else of it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd.cast_signed()) };
        self.file = Some(File::new(fd, direct));
    }

    /// What the open file is. A call of this thread: on a local file system it does not wait, and costs a tenth of one
    /// through the ring, which always takes another thread of the kernel.
    pub(super) fn look(&self) -> rustix::io::Result<Statx> {
        let fd = self.fd().ok_or(Errno::BADF)?;
        retry(|| rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, MASK))
    }

    /// The buffer, nothing being left in its place.
    pub(super) fn take_buf(&mut self) -> IoBuf {
        std::mem::replace(&mut self.buf, IoBuf::Heap(Vec::new()))
    }

    /// The buffers of a read into several.
    pub(super) fn take_bufs(&mut self) -> Vec<IoBuf> {
        let mut bufs = vec![self.take_buf()];
        bufs.append(&mut self.more);
        bufs
    }

    /// What to submit. All it points to lies in `self` or belongs to it, so `self` must stay where it is, and must not
    /// be touched, until the answer is there. `fixed`: the number under which the slot is registered.
    pub(super) fn entry(&mut self, call: Call, fixed: Option<u16>) -> Entry {
        let fd = types::Fd(self.fd().map_or(-1, |fd| fd.as_raw_fd()));
        let here = types::Fd(libc::AT_FDCWD);
        match call {
            Call::Open { flags, mode } => opcode::OpenAt::new(here, self.name.as_ptr())
                .flags(flags.bits().cast_signed())
                .mode(mode)
                .build(),
            Call::Read { from, len, at } if self.is_several() => {
                let pieces = self.fill_vector(from, len.min(MOST));
                opcode::Readv::new(fd, self.vector.as_ptr().cast(), pieces)
                    .offset(at)
                    .build()
            }
            Call::Read { from, len, at } => {
                let bytes = &mut self.buf[from..][..len.min(MOST)];
                let (start, len) = (bytes.as_mut_ptr(), bytes.len() as u32);
                match fixed {
                    Some(index) => opcode::ReadFixed::new(fd, start, len, index).offset(at).build(),
                    None => opcode::Read::new(fd, start, len).offset(at).build(),
                }
            }
            Call::Write { from, len } => {
                let bytes = &self.buf[from..][..len.min(MOST)];
                let (start, len, at) = (bytes.as_ptr(), bytes.len() as u32, from as u64);
                match fixed {
                    Some(index) => opcode::WriteFixed::new(fd, start, len, index).offset(at).build(),
                    None => opcode::Write::new(fd, start, len).offset(at).build(),
                }
            }
            Call::Advise => opcode::Fadvise::new(fd, 0, libc::POSIX_FADV_DONTNEED).build(),
            // From here on the kernel owns the descriptor: a call that is never taken back.
            Call::Close => {
                let fd = self.file.take().map_or(-1, |file| file.into_fd().into_raw_fd());
                opcode::Close::new(types::Fd(fd)).build()
            }
            Call::Unlink => opcode::UnlinkAt::new(here, self.name.as_ptr()).build(),
        }
    }
}
