//! Which engine serves a root: asked for by configuration, decided when the file system has been probed.
//!
//! A store starts with the thread pool, which is right everywhere. When the answer to the first [`IoOp::Probe`] goes by,
//! the type of the file system is known, and reads and publishes go through a ring from then on where that was asked for
//! (or is worth it), the file system is local, and the kernel lets us. What was chosen and why is in the log.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::Mono;

use crate::engine::{Done, IoEngine};
use crate::op::{IoDone, IoOp};
use crate::probe::Probe;
use crate::psync::{PsyncEngine, PsyncOptions};
use crate::uring::{UringEngine, UringOptions};

/// What the configuration asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum IoChoice {
    /// io_uring for direct I/O on a local file system, else the thread pool.
    #[default]
    Auto,
    /// The thread pool.
    Psync,
    /// io_uring wherever it can be had.
    Uring,
}

impl IoChoice {
    /// By its name in the configuration; `Config` for another.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "psync" => Ok(Self::Psync),
            "io_uring" => Ok(Self::Uring),
            _ => Err(Error::new(ErrorKind::Config, "io_engine is auto, psync or io_uring").with("got", name)),
        }
    }
}

/// The thread pool, and a ring in its place where that is chosen.
pub struct ChosenEngine(Arc<Chosen>);

struct Chosen {
    choice: IoChoice,
    options: UringOptions,
    psync: Arc<PsyncEngine>,
    /// Made when it is first wanted; the error is why there is none.
    ring: OnceLock<Result<Arc<UringEngine>>>,
    on: AtomicBool,
    said: Mutex<Said>,
}

#[derive(Default)]
struct Said {
    why: String,
    warning: Option<String>,
}

impl ChosenEngine {
    /// Starts the thread pool. Errors as of [`PsyncEngine::new`].
    pub fn new(choice: IoChoice, psync: PsyncOptions) -> Result<Arc<Self>> {
        Self::with(choice, UringOptions::beside(psync))
    }

    /// The same with all options of the ring.
    pub fn with(choice: IoChoice, options: UringOptions) -> Result<Arc<Self>> {
        let why = match choice {
            IoChoice::Psync => "as configured",
            IoChoice::Auto | IoChoice::Uring => "the file system was not probed",
        };
        Ok(Arc::new(Self(Arc::new(Chosen {
            choice,
            psync: PsyncEngine::paired(options.with_left())?,
            options,
            ring: OnceLock::new(),
            on: AtomicBool::new(false),
            said: Mutex::new(Said {
                why: why.to_owned(),
                warning: None,
            }),
        }))))
    }

    /// How many operations wanted direct I/O and went through the page cache.
    pub fn direct_fallbacks(&self) -> u64 {
        self.0.psync.direct_fallbacks()
    }

    /// The ring, if it is in use.
    pub fn ring(&self) -> Option<&Arc<UringEngine>> {
        self.0.made().filter(|_| self.0.on.load(Ordering::Acquire))
    }
}

impl Chosen {
    fn made(&self) -> Option<&Arc<UringEngine>> {
        self.ring.get().and_then(|ring| ring.as_ref().ok())
    }

    /// The file system is known now, or known again.
    fn decide(&self, found: &Probe) {
        let (on, why) = self.judge(found);
        let mut said = self.said.lock();
        if !on && self.choice == IoChoice::Uring && said.why != why {
            let text = format!("io_engine is io_uring, but the thread pool (psync) is used: {why}");
            said.warning = Some(text);
        }
        said.why = why;
        self.on.store(on, Ordering::Release);
    }

    fn judge(&self, found: &Probe) -> (bool, String) {
        let fs = found.fs.name();
        if self.choice == IoChoice::Psync {
            return (false, "as configured".to_owned());
        }
        if found.fs.maybe_shared() {
            return (false, format!("a {fs} mount may be on the network"));
        }
        let worth_it = match self.choice {
            IoChoice::Uring => "as configured",
            _ if !self.options.psync.direct => {
                return (false, "auto: buffered I/O".to_owned());
            }
            _ if found.direct.is_none() => return (false, format!("auto: no direct I/O on {fs}")),
            _ => "auto: direct I/O on a local file system",
        };
        let make = || UringEngine::over(Arc::clone(&self.psync), &self.options);
        match self.ring.get_or_init(make) {
            Ok(_) => (true, worth_it.to_owned()),
            Err(error) => (false, error.to_string()),
        }
    }
}

impl IoEngine for ChosenEngine {
    fn submit(&self, lane: usize, deadline: Mono, op: IoOp, done: Done) {
        if matches!(op, IoOp::Probe { .. }) {
            let chosen = Arc::downgrade(&self.0);
            let look = move |result: Result<IoDone>| {
                if let (Ok(IoDone::Probe(found)), Some(chosen)) = (&result, chosen.upgrade()) {
                    chosen.decide(found);
                }
                done(result);
            };
            return UringEngine::submit_whole(&self.0.psync, lane, deadline, op, Box::new(look));
        }
        match self.ring() {
            Some(ring) => ring.submit(lane, deadline, op, done),
            None => UringEngine::submit_whole(&self.0.psync, lane, deadline, op, done),
        }
    }

    fn width(&self, lane: usize) -> usize {
        UringEngine::width_whole(&self.0.psync, lane)
    }

    fn close_kept(&self, gone: &[PathBuf], unused: bool) {
        UringEngine::close_kept_whole(&self.0.psync, gone, unused);
    }

    fn kept(&self) -> usize {
        self.0.psync.kept()
    }

    fn stuck(&self) -> usize {
        self.0
            .made()
            .map_or_else(|| self.0.psync.stuck(), |ring| ring.stuck())
    }

    fn lost_workers(&self) -> usize {
        self.0
            .made()
            .map_or_else(|| self.0.psync.stuck(), |ring| ring.lost_workers())
    }

    fn name(&self) -> &'static str {
        self.ring().map_or("psync", |ring| ring.name())
    }

    fn describe(&self) -> String {
        format!("{} engine ({})", self.name(), self.0.said.lock().why)
    }

    fn warning(&self) -> Option<String> {
        self.0.said.lock().warning.take()
    }

    fn shutdown(&self, drain: Duration) {
        match self.0.made() {
            Some(ring) => ring.shutdown(drain),
            None => self.0.psync.shutdown(drain),
        }
    }
}
