//! What the kernel is given for one call, kept alive and in its place until the call has returned.
#![allow(unsafe_code, reason = "descriptors that the kernel hands over by number")]

use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use io_uring::squeue::Entry;
use io_uring::{opcode, types};
use rustix::fs::{AtFlags, OFlags, Statx, StatxFlags};
use rustix::io::Errno;

use crate::op::IoBuf;
use crate::sys::{File, retry};

/// Most bytes of one call; a whole number of sectors, and what every kernel takes.
pub(super) const MOST: usize = 1 << 30;
/// What is asked of an open file.
const MASK: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::DIOALIGN);

/// One call, with ranges of the buffer instead of pointers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Call {
    /// Opens the name; the answer is a descriptor.
    Open { flags: OFlags, mode: u32 },
    /// Reads into the buffer from byte `from` on.
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
    pub(super) buf: IoBuf,
}

impl Hold {
    /// `INVAL` for a name with a zero byte, as the system calls say.
    pub(super) fn new(path: &Path, buf: IoBuf) -> rustix::io::Result<Self> {
        Ok(Self {
            name: CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?,
            file: None,
            buf,
        })
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
        let file = self.file.as_ref().ok_or(Errno::BADF)?;
        retry(|| rustix::fs::statx(file.fd(), c"", AtFlags::EMPTY_PATH, MASK))
    }

    /// The buffer, nothing being left in its place.
    pub(super) fn take_buf(&mut self) -> IoBuf {
        std::mem::replace(&mut self.buf, IoBuf::Heap(Vec::new()))
    }

    /// What to submit. All it points to lies in `self` or belongs to it, so `self` must stay where it is, and must not
    /// be touched, until the answer is there. `fixed`: the number under which the slot is registered.
    pub(super) fn entry(&mut self, call: Call, fixed: Option<u16>) -> Entry {
        let fd = types::Fd(self.file.as_ref().map_or(-1, |file| file.fd().as_raw_fd()));
        let here = types::Fd(libc::AT_FDCWD);
        match call {
            Call::Open { flags, mode } => opcode::OpenAt::new(here, self.name.as_ptr())
                .flags(flags.bits().cast_signed())
                .mode(mode)
                .build(),
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
