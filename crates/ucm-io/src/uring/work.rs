//! One operation on its way through the ring: what comes after each answer of the kernel. No kernel in here, so that
//! every order of answers can be tried.

use std::sync::Arc;

use rustix::io::Errno;
use ucm_core::{Error, ErrorKind, Result};

use super::hold::{Call, Hold};
use super::publish::Publishing;
use super::read::Reading;
use crate::file::{Files, StillWanted};
use crate::op::{IoDone, IoOp};

/// How often in a row a call is repeated that has found too little of something (EAGAIN).
const PATIENCE: u32 = 16;

/// What comes next.
#[derive(Debug)]
pub(super) enum Next {
    /// This call.
    Call(Call),
    /// The rest is for the thread pool.
    Pool,
    /// Nothing: this is the answer.
    Done(Result<IoDone>),
}

/// An operation that the ring runs.
pub(super) struct Work {
    pub(super) core: Core,
    script: Script,
}

enum Script {
    Read(Reading),
    Publish(Publishing),
}

/// What both scripts work with.
pub(super) struct Core {
    pub(super) files: Arc<Files>,
    pub(super) hold: Hold,
    /// The call that is answered next.
    pub(super) call: Call,
    repeated: u32,
}

impl Core {
    pub(super) fn new(files: Arc<Files>, hold: Hold) -> Self {
        Self {
            files,
            hold,
            call: Call::Unlink,
            repeated: 0,
        }
    }

    pub(super) fn call(&mut self, call: Call) -> Next {
        self.call = call;
        Next::Call(call)
    }

    /// Whether a call that moved no bytes for this reason is made again as it was.
    pub(super) fn repeats(&mut self, errno: Errno) -> bool {
        match errno {
            Errno::INTR => true,
            Errno::AGAIN => {
                if self.hold.file.as_ref().is_some_and(|file| file.wait()) {
                    return true;
                }
                self.repeated += 1;
                self.repeated <= PATIENCE
            }
            _ => false,
        }
    }

    pub(super) fn progress(&mut self) {
        self.repeated = 0;
    }
}

impl Work {
    /// Takes an operation that the ring can run, or gives it back: whatever is not listed here, and reads whose buffer
    /// or offset needs a detour.
    pub(super) fn new(op: IoOp, files: &Arc<Files>) -> std::result::Result<Result<Self>, IoOp> {
        let taken = match op {
            IoOp::Read { .. } | IoOp::ReadInto { .. } => {
                Reading::take(op, files)?.map(|(core, script)| Self {
                    core,
                    script: Script::Read(script),
                })
            }
            IoOp::Publish { .. } => Publishing::take(op, files)?.map(|(core, script)| Self {
                core,
                script: Script::Publish(script),
            }),
            other => return Err(other),
        };
        Ok(taken)
    }

    /// The first call.
    pub(super) fn begin(&mut self) -> Next {
        match &mut self.script {
            Script::Read(script) => script.begin(&mut self.core),
            Script::Publish(script) => script.create(&mut self.core),
        }
    }

    /// The answer to the last call. `wanted`: whether anybody still waits for the operation; if not, it is brought to
    /// its end on the shortest way.
    pub(super) fn step(&mut self, answer: rustix::io::Result<u32>, wanted: bool) -> Next {
        match &mut self.script {
            Script::Read(script) => script.step(&mut self.core, answer, wanted),
            Script::Publish(script) => script.step(&mut self.core, answer, wanted),
        }
    }

    /// The pool did not take it, or gave it back untouched: what is left to tidy up.
    pub(super) fn abandon(&mut self) -> Next {
        match &mut self.script {
            Script::Read(_) => Next::Done(Err(gone())),
            Script::Publish(script) => script.fail(&mut self.core, gone()),
        }
    }

    /// The rest, on a thread of the pool.
    pub(super) fn run(self, wanted: StillWanted<'_>) -> Result<IoDone> {
        match self.script {
            Script::Read(_) => Err(Error::internal("a read has nothing left for the pool")),
            Script::Publish(script) => script.name(self.core, wanted),
        }
    }
}

/// For an operation that nobody waits for; nobody reads it.
pub(super) fn gone() -> Error {
    Error::new(ErrorKind::Timeout, "nobody waits for the operation any more")
}
