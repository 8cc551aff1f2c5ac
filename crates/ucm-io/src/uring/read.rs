//! Reading through the ring: open, look, read until it is all there, close. As `Files::read` in every answer.

use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::{FileType, OFlags, Statx};
use rustix::io::Errno;
use ucm_core::Result;

use super::hold::{Call, Hold};
use super::work::{Core, Next, gone};
use crate::file::{CANNOT_READ, Files, READ_FLAGS, check_read, fits_direct_read, not_regular};
use crate::meta::failed;
use crate::op::{IoDone, IoOp, ReadMode};
use crate::probe::stated;
use crate::sys::{GiveUp, Port, SECTOR};

/// A read on its way.
pub(super) struct Reading {
    path: PathBuf,
    offset: u64,
    len: usize,
    /// Whether direct I/O was wanted, for the count of fallbacks.
    wants_direct: bool,
    /// How the file is opened: past the page cache, and without waiting for the other end of a pipe.
    direct: bool,
    wait: OFlags,
    /// Bytes to ask for (whole sectors for direct I/O) and bytes that are there.
    ask: usize,
    got: usize,
    file_len: u64,
    dev: u64,
}

impl Reading {
    /// Takes a read, or gives it back if it is none for the ring.
    pub(super) fn take(op: IoOp, files: &Arc<Files>) -> std::result::Result<Result<(Core, Self)>, IoOp> {
        let IoOp::Read {
            path,
            offset,
            len,
            buf,
            mode,
        } = op
        else {
            return Err(op);
        };
        let (fresh, fits) = (mode == ReadMode::FreshDirect, fits_direct_read(&buf, offset));
        if fresh && !fits {
            // Goes through a window of whole pages.
            return Err(IoOp::Read {
                path,
                offset,
                len,
                buf,
                mode,
            });
        }
        let script = Self {
            offset,
            len,
            wants_direct: fresh || files.direct(),
            direct: fresh || (files.direct() && fits),
            wait: OFlags::NONBLOCK,
            ask: len,
            got: 0,
            file_len: 0,
            dev: 0,
            path,
        };
        let checked = check_read(&script.path, offset, len, buf.len());
        Ok(checked.and_then(|()| {
            let hold = Hold::new(&script.path, buf).map_err(|errno| script.failed(errno))?;
            Ok((Core::new(Arc::clone(files), hold), script))
        }))
    }

    fn failed(&self, errno: Errno) -> ucm_core::Error {
        failed(errno, CANNOT_READ, &self.path)
    }

    pub(super) fn open(&mut self, core: &mut Core) -> Next {
        let mut flags = READ_FLAGS | self.wait;
        if self.direct {
            flags |= OFlags::DIRECT;
        }
        core.call(Call::Open { flags, mode: 0 })
    }

    pub(super) fn step(&mut self, core: &mut Core, answer: rustix::io::Result<u32>, wanted: bool) -> Next {
        match (core.call, answer) {
            (Call::Open { .. }, Ok(fd)) => {
                core.hold.opened(fd, self.direct);
                if !wanted {
                    return Self::end(core, Err(gone()));
                }
                let seen = core.hold.look();
                self.looked(core, seen)
            }
            (_, Err(_)) if !wanted => Self::end(core, Err(gone())),
            (Call::Open { .. }, Err(errno)) => match errno {
                Errno::INVAL if self.direct => {
                    self.direct = false;
                    self.open(core)
                }
                // A lease on the file is being taken back; that is worth the wait, until our deadline.
                Errno::AGAIN if !self.wait.is_empty() => {
                    self.wait = OFlags::empty();
                    self.open(core)
                }
                Errno::INTR => self.open(core),
                _ => Self::end(core, Err(self.failed(errno))),
            },
            (_, _) if !wanted => Self::end(core, Err(gone())),
            (_, answer) => self.moved(core, answer),
        }
    }

    fn looked(&mut self, core: &mut Core, seen: rustix::io::Result<Statx>) -> Next {
        let seen = match seen {
            Ok(seen) => seen,
            Err(errno) => return Self::end(core, Err(self.failed(errno))),
        };
        if FileType::from_raw_mode(seen.stx_mode.into()) != FileType::RegularFile {
            return Self::end(core, Err(not_regular(&self.path)));
        }
        self.file_len = seen.stx_size;
        self.dev = rustix::fs::makedev(seen.stx_dev_major, seen.stx_dev_minor);
        if let Some(file) = &mut core.hold.file {
            if file.is_direct() && !core.files.usable(self.dev, || stated(&seen)) {
                file.set_direct(false);
            }
            if file.is_direct() {
                // Whole sectors; a slot always has room for them.
                self.ask = self.len.next_multiple_of(SECTOR).min(core.hold.buf.len());
            }
        }
        self.go_on(core)
    }

    /// Asks for what is missing, if anything.
    fn go_on(&mut self, core: &mut Core) -> Next {
        if self.got < self.len {
            return core.call(Call::Read {
                from: self.got,
                len: self.ask - self.got,
                at: self.offset + self.got as u64,
            });
        }
        self.all_there(core)
    }

    /// A read answered.
    fn moved(&mut self, core: &mut Core, answer: rustix::io::Result<u32>) -> Next {
        match answer {
            Ok(0) => self.all_there(core),
            Ok(n) => {
                core.progress();
                self.got += n as usize;
                if self.got < self.len && !self.got.is_multiple_of(SECTOR) {
                    give_up(core, GiveUp::InsideSector);
                }
                self.go_on(core)
            }
            Err(Errno::INVAL) if give_up(core, GiveUp::Refused) => self.go_on(core),
            Err(errno) if core.repeats(errno) => self.go_on(core),
            Err(errno) => Self::end(core, Err(self.failed(errno))),
        }
    }

    fn all_there(&mut self, core: &mut Core) -> Next {
        if let Some(file) = &core.hold.file {
            core.files.note(file, self.dev, self.wants_direct);
        }
        let read = IoDone::Read {
            buf: core.hold.take_buf(),
            read: self.got.min(self.len),
            file_len: self.file_len,
        };
        Self::end(core, Ok(read))
    }

    /// Closes what is open (nothing was written to it, so on a local file system that says nothing and does not wait)
    /// and answers.
    fn end(core: &mut Core, outcome: Result<IoDone>) -> Next {
        core.hold.file = None;
        Next::Done(outcome)
    }
}

/// Goes on through the page cache; `false` when that was so already.
pub(super) fn give_up(core: &mut Core, why: GiveUp) -> bool {
    core.hold
        .file
        .as_mut()
        .is_some_and(|file| file.give_up_direct(why))
}
