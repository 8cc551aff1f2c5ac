//! Publishing through the ring: create, write until it is all there, close with its error seen. The rest (time, length,
//! name: short calls that io_uring would only hand to threads of the kernel, one by one) is one job of the thread pool,
//! and the same code as the thread-pool engine's own.

use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::Statx;
use rustix::io::Errno;
use ucm_core::{Error, Result};

use super::hold::{Call, Hold};
use super::read::give_up;
use super::work::{Core, Next, gone};
use crate::file::{
    CANNOT_CLOSE, CANNOT_CREATE, CANNOT_WRITE, CREATE_FLAGS, Files, Publish, StillWanted, check_publish,
    fits_direct_write,
};
use crate::meta::failed;
use crate::op::{IoDone, IoOp};
use crate::probe::stated;
use crate::sys::{GiveUp, SECTOR};

/// A publish on its way.
pub(super) struct Publishing {
    private: PathBuf,
    target: PathBuf,
    replace: bool,
    len: usize,
    mode: u32,
    mtime_ns: Option<i64>,
    /// Bytes written.
    put: usize,
    dev: u64,
    through_cache: bool,
    /// Why it fails, once that is known.
    error: Option<Error>,
}

impl Publishing {
    /// Takes a publish, or gives back what is none, or one that is to be durable: those are few, and the pool's.
    pub(super) fn take(op: IoOp, files: &Arc<Files>) -> std::result::Result<Result<(Core, Self)>, IoOp> {
        let IoOp::Publish {
            private,
            target,
            replace,
            buf,
            len,
            mode,
            mtime_ns,
            durable: false,
        } = op
        else {
            return Err(op);
        };
        let script = Self {
            private,
            target,
            replace,
            len,
            mode,
            mtime_ns,
            put: 0,
            dev: 0,
            through_cache: true,
            error: None,
        };
        let checked = check_publish(&script.job(), buf.len());
        Ok(checked.and_then(|()| {
            let hold =
                Hold::new(&script.private, buf).map_err(|errno| script.failed(errno, CANNOT_CREATE))?;
            Ok((Core::new(Arc::clone(files), hold), script))
        }))
    }

    fn job(&self) -> Publish<'_> {
        Publish {
            private: &self.private,
            target: &self.target,
            replace: self.replace,
            len: self.len,
            mode: self.mode,
            mtime_ns: self.mtime_ns,
            durable: false,
        }
    }

    fn failed(&self, errno: Errno, what: &'static str) -> Error {
        failed(errno, what, &self.private)
    }

    pub(super) fn create(&mut self, core: &mut Core) -> Next {
        core.call(Call::Open {
            flags: CREATE_FLAGS,
            mode: self.mode,
        })
    }

    pub(super) fn step(&mut self, core: &mut Core, answer: rustix::io::Result<u32>, wanted: bool) -> Next {
        match (core.call, answer) {
            (Call::Open { .. }, Ok(fd)) => {
                core.hold.opened(fd, false);
                if !wanted {
                    return self.fail(core, gone());
                }
                if !core.files.direct() {
                    return self.go_on(core);
                }
                let seen = core.hold.look();
                self.looked(core, seen)
            }
            (Call::Open { .. }, Err(Errno::INTR)) if wanted => self.create(core),
            // Whatever has that name is not ours and stays.
            (Call::Open { .. }, Err(errno)) => Next::Done(Err(self.failed(errno, CANNOT_CREATE))),
            (Call::Close, answer) => self.closed(core, answer, wanted),
            (Call::Unlink, _) => Next::Done(Err(self.error.take().unwrap_or_else(gone))),
            (_, _) if !wanted => self.fail(core, gone()),
            // Best effort: the kernel does it some time anyway.
            (Call::Advise, _) => core.call(Call::Close),
            (Call::Read { .. } | Call::Write { .. }, answer) => self.moved(core, answer),
        }
    }

    fn looked(&mut self, core: &mut Core, seen: rustix::io::Result<Statx>) -> Next {
        let seen = match seen {
            Ok(seen) => seen,
            Err(errno) => return self.fail(core, self.failed(errno, CANNOT_WRITE)),
        };
        self.dev = rustix::fs::makedev(seen.stx_dev_major, seen.stx_dev_minor);
        let fits = fits_direct_write(&core.hold.buf, self.len);
        if fits && core.files.usable(self.dev, || stated(&seen)) {
            if let Some(file) = &mut core.hold.file {
                file.set_direct(true);
            }
            self.through_cache = false;
        }
        self.go_on(core)
    }

    /// Writes what is missing, if anything.
    fn go_on(&mut self, core: &mut Core) -> Next {
        if self.put < self.len {
            return core.call(Call::Write {
                from: self.put,
                len: self.len - self.put,
            });
        }
        self.note(core);
        if self.through_cache && core.files.presses(self.len) {
            return core.call(Call::Advise);
        }
        core.call(Call::Close)
    }

    /// A write answered.
    fn moved(&mut self, core: &mut Core, answer: rustix::io::Result<u32>) -> Next {
        let errno = match answer {
            // A call that writes nothing is an error, not a loop for ever.
            Ok(0) => Errno::IO,
            Ok(n) => {
                core.progress();
                self.put += n as usize;
                if self.put < self.len && !self.put.is_multiple_of(SECTOR) {
                    give_up(core, GiveUp::InsideSector);
                }
                return self.go_on(core);
            }
            Err(Errno::INVAL) if give_up(core, GiveUp::Refused) => return self.go_on(core),
            Err(errno) if core.repeats(errno) => return self.go_on(core),
            Err(errno) => errno,
        };
        self.note(core);
        self.fail(core, self.failed(errno, CANNOT_WRITE))
    }

    fn note(&self, core: &Core) {
        if let (true, Some(file)) = (core.files.direct(), &core.hold.file) {
            core.files.note(file, self.dev, true);
        }
    }

    fn closed(&mut self, core: &mut Core, answer: rustix::io::Result<u32>, wanted: bool) -> Next {
        if self.error.is_none() {
            self.error = match answer {
                Err(errno) => Some(self.failed(errno, CANNOT_CLOSE)),
                Ok(_) if wanted => return Next::Pool,
                Ok(_) => Some(gone()),
            };
        }
        core.call(Call::Unlink)
    }

    /// Closes what is open and removes the private file, then answers.
    pub(super) fn fail(&mut self, core: &mut Core, error: Error) -> Next {
        self.error = Some(error);
        core.call(if core.hold.file.is_some() {
            Call::Close
        } else {
            Call::Unlink
        })
    }

    /// Gives the written file its time and its name, on a thread of the pool.
    pub(super) fn name(self, mut core: Core, wanted: StillWanted<'_>) -> Result<IoDone> {
        let buf = core.hold.take_buf();
        core.files.publish_written(&self.job(), buf, wanted)
    }
}
