//! The breaker of one backend: after a run of failures that speak of the medium (not of one block), everything
//! answers at once for a while, then a single operation is let through to see whether it is back.

use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::{Error, ErrorKind};
use ucm_infra::Mono;

/// When to open and for how long.
#[derive(Debug, Clone, Copy)]
pub struct BreakerConfig {
    /// Failures in a row that open it.
    pub threshold: u32,
    /// Time it stays open before one operation is let through.
    pub cool_down: Duration,
    /// Operations stuck past their deadline that open it at once.
    pub max_stuck: usize,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self {
            threshold: 4,
            cool_down: Duration::from_secs(10),
            max_stuck: 8,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Closed {
        failures: u32,
    },
    Open {
        until: Mono,
    },
    /// One operation is under way since; another may follow when it was lost.
    Probing {
        since: Mono,
    },
}

/// Closed: everything passes. Open: nothing does. Probing: one operation does.
pub struct Breaker {
    config: BreakerConfig,
    state: Mutex<State>,
}

/// What an observation changed, for the log and the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It opened.
    Opened,
    /// It closed again.
    Recovered,
}

impl Breaker {
    /// A closed breaker.
    pub fn new(config: BreakerConfig) -> Self {
        Self {
            config,
            state: Mutex::new(State::Closed { failures: 0 }),
        }
    }

    /// Whether an operation may go ahead now; an open breaker past its cool-down lets one through.
    pub fn allows(&self, now: Mono) -> bool {
        let mut state = self.state.lock();
        match *state {
            State::Closed { .. } => true,
            State::Open { until } | State::Probing { since: until } if now < until => false,
            State::Open { .. } | State::Probing { .. } => {
                *state = State::Probing {
                    since: now.after(self.config.cool_down),
                };
                true
            }
        }
    }

    /// Whether everything passes (without letting anything through).
    pub fn is_closed(&self) -> bool {
        matches!(*self.state.lock(), State::Closed { .. })
    }

    /// An operation ended well: the medium answers.
    pub fn success(&self) -> Option<Change> {
        let mut state = self.state.lock();
        let was = std::mem::replace(&mut *state, State::Closed { failures: 0 });
        (!matches!(was, State::Closed { .. })).then_some(Change::Recovered)
    }

    /// An operation failed. A file that is absent, foreign or damaged, or a full medium, is an answer of the medium
    /// all the same; a queue that is full says nothing.
    pub fn failure(&self, error: &Error, now: Mono) -> Option<Change> {
        match error.kind() {
            ErrorKind::Timeout | ErrorKind::Io => {}
            ErrorKind::NotFound | ErrorKind::NoSpace | ErrorKind::Corrupt | ErrorKind::Foreign => {
                return self.success();
            }
            _ => {
                self.undecided(now);
                return None;
            }
        }
        let mut state = self.state.lock();
        let open = State::Open {
            until: now.after(self.config.cool_down),
        };
        match *state {
            State::Closed { failures } if failures + 1 < self.config.threshold => {
                *state = State::Closed {
                    failures: failures + 1,
                };
                None
            }
            State::Closed { .. } => {
                *state = open;
                Some(Change::Opened)
            }
            State::Open { .. } => None,
            State::Probing { .. } => {
                *state = open;
                None
            }
        }
    }

    /// The operation that was let through never reached the medium: another may follow at once.
    pub fn undecided(&self, now: Mono) {
        let mut state = self.state.lock();
        if matches!(*state, State::Probing { .. }) {
            *state = State::Open { until: now };
        }
    }

    /// Operations stuck past their deadline that shall open it.
    pub fn max_stuck(&self) -> usize {
        self.config.max_stuck
    }

    /// Opens at once (too many stuck threads or slots).
    pub fn trip(&self, now: Mono) -> Option<Change> {
        let mut state = self.state.lock();
        let was_closed = matches!(*state, State::Closed { .. });
        *state = State::Open {
            until: now.after(self.config.cool_down),
        };
        was_closed.then_some(Change::Opened)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_probes_and_recovers() {
        let config = BreakerConfig {
            threshold: 2,
            cool_down: Duration::from_secs(1),
            max_stuck: 1,
        };
        let breaker = Breaker::new(config);
        let timeout = Error::new(ErrorKind::Timeout, "t");
        let at = |ms: u64| Mono(ms * 1_000_000);
        assert_eq!(breaker.failure(&timeout, at(0)), None);
        assert!(breaker.allows(at(0)));
        assert_eq!(breaker.failure(&timeout, at(0)), Some(Change::Opened));
        assert!(!breaker.allows(at(999)));
        assert!(breaker.allows(at(1000)), "one is let through");
        assert!(!breaker.allows(at(1001)), "only one");
        assert_eq!(breaker.failure(&timeout, at(1002)), None);
        assert!(!breaker.allows(at(2001)));
        assert!(breaker.allows(at(2002)));
        assert!(breaker.allows(at(3002)), "a lost probe is followed by another");
        assert_eq!(breaker.success(), Some(Change::Recovered));
        assert!(breaker.allows(at(3003)) && breaker.is_closed());
        assert_eq!(breaker.success(), None);
    }

    #[test]
    fn what_the_medium_answers_is_no_failure_of_it() {
        let breaker = Breaker::new(BreakerConfig {
            threshold: 2,
            cool_down: Duration::from_secs(1),
            max_stuck: 1,
        });
        let fail = |kind, ms: u64| breaker.failure(&Error::new(kind, "x"), Mono(ms * 1_000_000));
        for kind in [
            ErrorKind::NotFound,
            ErrorKind::NoSpace,
            ErrorKind::Corrupt,
            ErrorKind::Foreign,
        ] {
            assert_eq!(fail(ErrorKind::Io, 0), None);
            assert_eq!(fail(kind, 0), None, "ends the run of failures");
            assert_eq!(fail(ErrorKind::Io, 0), None);
            assert_eq!(fail(ErrorKind::Io, 0), Some(Change::Opened));
            assert!(breaker.allows(Mono(1_000_000_000)));
            assert_eq!(fail(kind, 1000), Some(Change::Recovered), "{kind:?}");
        }
    }

    #[test]
    fn a_probe_that_never_reached_the_medium_is_followed_by_another_at_once() {
        let breaker = Breaker::new(BreakerConfig {
            threshold: 1,
            cool_down: Duration::from_secs(1),
            max_stuck: 1,
        });
        let busy = Error::new(ErrorKind::Busy, "b");
        assert_eq!(breaker.failure(&busy, Mono(0)), None);
        assert!(breaker.is_closed());
        assert_eq!(breaker.trip(Mono(0)), Some(Change::Opened));
        assert_eq!(breaker.failure(&busy, Mono(1)), None);
        assert!(!breaker.allows(Mono(1)), "open stays open");
        let then = Mono(1_000_000_000);
        assert!(breaker.allows(then) && !breaker.allows(then));
        assert_eq!(breaker.failure(&busy, then), None);
        assert!(breaker.allows(then));
    }
}
