//! The one state of the process, behind one lock.
//!
//! Calls and the threads of streams take the lock for bookkeeping only; bytes are moved and kernels
//! run without it.

use std::collections::BTreeMap;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::clock::Clock;
use crate::context::Context;
use crate::control::Control;
use crate::device::DEVICES;
use crate::event::Event;
use crate::memory::Memory;
use crate::module::{Function, Module};
use crate::stream::Stream;

/// A context, stream, event, module or function: an opaque pointer to the caller, a key here. It is
/// no readable address and is never reused, so that a stale handle is detected.
pub type Handle = usize;

/// The locked state.
pub(crate) type Locked = MutexGuard<'static, State>;

static STATE: Mutex<State> = Mutex::new(State::new());

/// Notified when an operation of a stream has ended, or a test releases calls; waiting calls wait
/// on it.
pub(crate) static ENDED: Condvar = Condvar::new();

/// Everything the driver knows.
pub(crate) struct State {
    pub(crate) initialized: bool,
    /// The primary context of each device, while it is retained.
    pub(crate) contexts: [Option<Context>; DEVICES],
    /// Contexts besides, each with the index of its device.
    pub(crate) others: Vec<(usize, Context)>,
    pub(crate) streams: BTreeMap<Handle, Stream>,
    pub(crate) events: BTreeMap<Handle, Event>,
    pub(crate) modules: BTreeMap<Handle, Module>,
    pub(crate) functions: BTreeMap<Handle, Function>,
    pub(crate) memory: Memory,
    pub(crate) clock: Clock,
    pub(crate) control: Control,
    /// How many streams capture.
    pub(crate) captures: usize,
    handles: usize,
}

impl State {
    const fn new() -> Self {
        Self {
            initialized: false,
            contexts: [const { None }; DEVICES],
            others: Vec::new(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            memory: Memory::new(),
            clock: Clock::new(),
            control: Control::new(),
            captures: 0,
            handles: 0,
        }
    }

    /// A new handle.
    pub(crate) fn new_handle(&mut self) -> Handle {
        self.handles += 1;
        // Bit 52 lies outside of every address a program can have.
        (1 << 52) | (self.handles << 4)
    }
}

/// Takes the lock.
pub(crate) fn lock() -> Locked {
    STATE.lock()
}
