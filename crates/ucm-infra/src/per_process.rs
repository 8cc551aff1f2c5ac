//! A value of which each process has one. A forked child gets its own: the lock of the parent's
//! value may be held by a thread that does not exist in the child.

use std::sync::OnceLock;

/// The value of this process, and those of its forked children.
pub(crate) struct PerProcess<T> {
    pid: u32,
    value: T,
    of_child: OnceLock<Box<Self>>,
}

impl<T: Default> PerProcess<T> {
    /// The value of the calling process. The first call must happen before other threads can fork.
    pub(crate) fn new() -> Self {
        Self {
            pid: std::process::id(),
            value: T::default(),
            of_child: OnceLock::new(),
        }
    }

    /// That of this process.
    pub(crate) fn here(&self) -> &T {
        let (pid, mut found) = (std::process::id(), self);
        while found.pid != pid {
            found = found.of_child.get_or_init(|| Box::new(Self::new()));
        }
        &found.value
    }
}
