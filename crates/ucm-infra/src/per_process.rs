//! What each process has one of: a forked child has its own, for a thread that it does not have may
//! hold the lock of its parent's for ever.

use std::sync::OnceLock;

/// A value of this process, and those of its forked children.
pub(crate) struct PerProcess<T> {
    pid: u32,
    value: T,
    of_child: OnceLock<Box<Self>>,
}

impl<T: Default> PerProcess<T> {
    /// That of the process which calls. To be made before other threads can fork.
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
