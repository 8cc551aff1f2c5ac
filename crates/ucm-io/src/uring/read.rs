//! Reading through the ring: open, look, read until it is all there, close. As `Files::read` in every answer.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::{FileType, OFlags, Statx};
use rustix::io::Errno;
use ucm_core::Result;

use super::hold::{Call, Hold};
use super::work::{Core, Next, gone};
use crate::file::{CANNOT_READ, Files, READ_FLAGS, check_read, fits_direct_read, not_regular};
use crate::into::check_into;
use crate::meta::failed;
use crate::op::{IoDone, IoOp, ReadMode};
use crate::probe::stated;
use crate::sys::{GiveUp, Port, SECTOR};

/// A read on its way.
pub(super) struct Reading {
    path: PathBuf,
    /// It came as a read into several buffers, and is answered as one.
    into: bool,
    /// The descriptor may be kept, or have been.
    keep: bool,
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
        if let IoOp::ReadInto { .. } = op {
            return Self::take_into(op, files);
        }
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
            into: false,
            keep: false,
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

    /// One into several buffers. What is wrong with it, or is done by reading nothing, the pool says.
    fn take_into(op: IoOp, files: &Arc<Files>) -> std::result::Result<Result<(Core, Self)>, IoOp> {
        let IoOp::ReadInto {
            path,
            offset,
            into,
            keep,
        } = op
        else {
            return Err(op);
        };
        let checked = check_into(&path, offset, into.iter().map(|(buf, len)| (buf, *len)));
        let (len, fits) = match checked {
            Ok((len, fits)) if len > 0 && !path.as_os_str().as_bytes().contains(&0) => (len, fits),
            _ => {
                return Err(IoOp::ReadInto {
                    path,
                    offset,
                    into,
                    keep,
                });
            }
        };
        let script = Self {
            into: true,
            keep: keep && (fits || !files.direct()),
            offset,
            len,
            wants_direct: files.direct(),
            direct: files.direct() && fits,
            wait: OFlags::NONBLOCK,
            ask: len,
            got: 0,
            file_len: 0,
            dev: 0,
            path,
        };
        let hold = Hold::into_several(&script.path, into).map_err(|errno| script.failed(errno));
        Ok(hold.map(|hold| (Core::new(Arc::clone(files), hold), script)))
    }

    /// The first call.
    pub(super) fn begin(&mut self, core: &mut Core) -> Next {
        if self.keep
            && let Some(file) = core.files.kept.get(&self.path)
        {
            core.hold.kept = Some(file);
            return match core.hold.look() {
                Ok(seen) if seen.stx_nlink > 0 => {
                    self.ask_for(core);
                    self.go_on(core)
                }
                Ok(_) | Err(Errno::STALE) => self.stop(core, Errno::NOENT),
                Err(_) => self.open_anew(core),
            };
        }
        self.open(core)
    }

    /// A kept descriptor is of no use any more: an own one tells why.
    fn open_anew(&mut self, core: &mut Core) -> Next {
        if let Some(file) = core.hold.kept.take() {
            core.files.kept.drop_file(&self.path, &file);
        }
        self.got = 0;
        self.ask = self.len;
        self.open(core)
    }

    /// Ends with an error, after which no descriptor is kept.
    fn stop(&mut self, core: &mut Core, errno: Errno) -> Next {
        if let Some(file) = core.hold.kept.take() {
            core.files.kept.drop_file(&self.path, &file);
        }
        self.end(core, Err(self.failed(errno)))
    }

    /// Whole sectors for direct I/O; a slot always has room for them.
    fn ask_for(&mut self, core: &Core) {
        self.ask = self.len;
        if core.hold.is_direct() {
            let room = if self.into {
                self.len + core.hold.spare()
            } else {
                core.hold.buf.len()
            };
            self.ask = self.len.next_multiple_of(SECTOR).min(room);
        }
    }

    fn failed(&self, errno: Errno) -> ucm_core::Error {
        failed(errno, CANNOT_READ, &self.path)
    }

    fn open(&mut self, core: &mut Core) -> Next {
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
                    return self.end(core, Err(gone()));
                }
                let seen = core.hold.look();
                self.looked(core, seen)
            }
            (_, Err(_)) if !wanted => self.end(core, Err(gone())),
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
                _ => self.end(core, Err(self.failed(errno))),
            },
            (_, _) if !wanted => self.end(core, Err(gone())),
            (_, answer) => self.moved(core, answer),
        }
    }

    fn looked(&mut self, core: &mut Core, seen: rustix::io::Result<Statx>) -> Next {
        let seen = match seen {
            Ok(seen) => seen,
            Err(errno) => return self.end(core, Err(self.failed(errno))),
        };
        if FileType::from_raw_mode(seen.stx_mode.into()) != FileType::RegularFile {
            return self.end(core, Err(not_regular(&self.path)));
        }
        self.file_len = seen.stx_size;
        self.dev = rustix::fs::makedev(seen.stx_dev_major, seen.stx_dev_minor);
        if let Some(file) = &mut core.hold.file
            && file.is_direct()
            && !core.files.usable(self.dev, || stated(&seen))
        {
            file.set_direct(false);
        }
        self.keep &= seen.stx_nlink > 0; // one that tells of no names would look like one that is gone
        self.ask_for(core);
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
            Err(Errno::STALE) if core.hold.kept.is_some() => self.stop(core, Errno::STALE),
            Err(_) if core.hold.kept.is_some() => self.open_anew(core),
            Err(errno) => self.end(core, Err(self.failed(errno))),
        }
    }

    fn all_there(&mut self, core: &mut Core) -> Next {
        if let Some(file) = &core.hold.file {
            core.files.note(file, self.dev, self.wants_direct);
        }
        if let Some(file) = &core.hold.kept {
            core.files.count_fallback(self.wants_direct && !file.direct);
        }
        if self.keep
            && let Some(file) = core.hold.file.take()
        {
            core.files.keep(&self.path, file);
        }
        self.end(core, Ok(self.got.min(self.len)))
    }

    /// Closes what is open and is not kept (nothing was written to it, so on a local file system that says nothing and
    /// does not wait) and answers.
    fn end(&self, core: &mut Core, outcome: Result<usize>) -> Next {
        core.hold.file = None;
        core.hold.kept = None;
        if self.into {
            return Next::Done(Ok(IoDone::ReadInto {
                bufs: core.hold.take_bufs(),
                read: outcome,
            }));
        }
        Next::Done(outcome.map(|read| IoDone::Read {
            buf: core.hold.take_buf(),
            read,
            file_len: self.file_len,
        }))
    }
}

/// Goes on through the page cache; `false` when that was so already.
pub(super) fn give_up(core: &mut Core, why: GiveUp) -> bool {
    core.hold
        .file
        .as_mut()
        .is_some_and(|file| file.give_up_direct(why))
}
