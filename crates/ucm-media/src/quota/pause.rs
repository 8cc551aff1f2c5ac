//! The times when nothing is written because the medium was full.

use std::time::Duration;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;

/// First pause after the medium was full; it doubles up to the longest.
const FIRST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(30);

/// Each pause is twice as long as the one before it, until something could be written again.
#[derive(Debug, Default)]
pub struct Pause {
    /// How often the medium was full.
    pub(crate) full: u64,
    length: Duration,
    until: MonotonicTime,
}

impl Pause {
    /// `NoSpace` while it lasts.
    pub fn check(&self, now: MonotonicTime) -> Result<()> {
        let text = "the medium was full a moment ago; dumps pause while room is made";
        let paused = || Error::new(ErrorKind::NoSpace, text);
        (now >= self.until).then_some(()).ok_or_else(paused)
    }

    /// A write ended, well or with this error; whether the medium was full.
    pub fn record(&mut self, error: Option<&Error>, now: MonotonicTime) -> bool {
        let over = now >= self.until;
        let Some(error) = error else {
            if over {
                self.length = Duration::ZERO;
            }
            return false;
        };
        if error.kind() != ErrorKind::NoSpace {
            return false;
        }
        if over {
            self.length = (self.length * 2).clamp(FIRST, LONGEST);
            self.until = now.after(self.length);
        }
        self.full += 1;
        true
    }
}
