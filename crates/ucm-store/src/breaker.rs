//! The breaker of one backend: after a run of failures that speak of the medium (not of one block),
//! operations fail at once for a while, then a single request is let through to probe it. A tier
//! has a second one for writes alone: a medium that is read and takes no writes is used for its
//! records.
//!
//! More than a few damaged records a minute speak of the medium too: its answers are wrong, so the
//! breaker stays open for all of the cool-down.

use std::collections::VecDeque;
use std::time::Duration;

use ucm_core::sync::Mutex;
use ucm_core::{Error, ErrorKind};
use ucm_infra::MonotonicTime;
use ucm_io::EROFS;

/// Error numbers (the same on every Linux) that do not speak of a sick medium: it denies access, or
/// the process itself lacks something.
const EPERM: i32 = 1;
const ENOMEM: i32 = 12;
const EACCES: i32 = 13;
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;

/// When to open and for how long.
#[derive(Debug, Clone, Copy)]
pub struct BreakerConfig {
    /// Failures in a row that open it.
    pub threshold: u32,
    /// Failures further apart than this are not in a row.
    pub window: Duration,
    /// Time it stays open before one request is let through.
    pub cool_down: Duration,
    /// Workers lost in operations stuck past their deadline that open it at once.
    pub max_stuck: usize,
    /// Damaged records within a minute that it tolerates: the next one opens it.
    pub damaged_per_minute: u32,
}

/// The span in which damaged records are counted.
const MINUTE: Duration = Duration::from_secs(60);

impl Default for BreakerConfig {
    fn default() -> Self {
        Self {
            threshold: 4,
            window: Duration::from_secs(60),
            cool_down: Duration::from_secs(10),
            max_stuck: 8,
            damaged_per_minute: 16,
        }
    }
}

const CLOSED: BreakerState = BreakerState::Closed {
    failures: 0,
    last: MonotonicTime(0),
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BreakerState {
    Closed {
        failures: u32,
        /// When the latest of them was.
        last: MonotonicTime,
    },
    Open {
        until: MonotonicTime,
        /// Stays open until then, though the medium answers: its answers are wrong.
        held: bool,
    },
    /// One request is let through; another may follow after that time, should it be lost.
    Probing { until: MonotonicTime, request: u64 },
}

impl BreakerState {
    fn would_allow(&self, request: u64, now: MonotonicTime) -> bool {
        match *self {
            Self::Closed { .. } => true,
            Self::Open { until, .. } => now >= until,
            Self::Probing { until, request: of } => of == request || now >= until,
        }
    }
}

/// Closed: everything passes. Open: nothing does. Probing: what belongs to one request does.
pub struct Breaker {
    config: BreakerConfig,
    state: Mutex<BreakerState>,
    /// Times of the damaged records within the last minute, oldest first.
    damaged: Mutex<VecDeque<MonotonicTime>>,
}

/// What a failed operation says of a medium.
enum Verdict {
    /// It answers.
    Answers,
    /// It does not, or cannot do the operation.
    Sick,
    /// It refuses such operations for now.
    Refuses,
    /// Nothing: the operation did not reach it.
    Nothing,
}

/// Whether the process itself lacked memory or descriptors.
fn is_own_lack(error: &Error) -> bool {
    matches!(error.os_code(), Some(ENOMEM | ENFILE | EMFILE))
}

/// What this failure says of a medium. A file that is absent, foreign or damaged, and a full,
/// read-only or closed medium, are answers too; a full queue, or a process without descriptors,
/// says nothing.
fn of_medium(error: &Error) -> Verdict {
    match error.kind() {
        ErrorKind::Io if matches!(error.os_code(), Some(EPERM | EACCES | EROFS)) => {
            Verdict::Answers
        }
        ErrorKind::Io if is_own_lack(error) => Verdict::Nothing,
        ErrorKind::Timeout | ErrorKind::Io => Verdict::Sick,
        ErrorKind::NotFound | ErrorKind::NoSpace | ErrorKind::Corrupt | ErrorKind::Foreign => {
            Verdict::Answers
        }
        _ => Verdict::Nothing,
    }
}

/// What the failure of a write says of writes. A backend reports as `Unhealthy` that it takes none
/// for now. One that is full makes room, and a directory that is read-only or denies access reports
/// that without an operation on the medium (`ucm_media::quota`).
fn of_writes(error: &Error) -> Verdict {
    match error.kind() {
        ErrorKind::Unhealthy => Verdict::Refuses,
        _ => match of_medium(error) {
            Verdict::Sick => Verdict::Sick,
            _ => Verdict::Nothing,
        },
    }
}

/// The change after an observation, for the log and the counters.
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
            state: Mutex::new(CLOSED),
            damaged: Mutex::default(),
        }
    }

    /// Whether an operation of this request may go ahead now; an open breaker past its cool-down
    /// lets all of one request through.
    pub fn allows(&self, request: u64, now: MonotonicTime) -> bool {
        let mut state = self.state.lock();
        let allowed = state.would_allow(request, now);
        let of_this = match *state {
            BreakerState::Probing { request: of, .. } => of == request,
            _ => false,
        };
        if allowed && !of_this && !matches!(*state, BreakerState::Closed { .. }) {
            let until = now.after(self.config.cool_down);
            *state = BreakerState::Probing { until, request };
        }
        allowed
    }

    /// Whether [`Breaker::allows`] would say yes now, without letting anything through.
    pub fn would_allow(&self, request: u64, now: MonotonicTime) -> bool {
        self.state.lock().would_allow(request, now)
    }

    /// Whether everything passes (without letting anything through).
    pub fn is_closed(&self) -> bool {
        matches!(*self.state.lock(), BreakerState::Closed { .. })
    }

    /// An operation ended well: the medium answers.
    pub fn success(&self) -> Option<Change> {
        let mut state = self.state.lock();
        if matches!(*state, BreakerState::Open { held: true, .. }) {
            return None;
        }
        let was = std::mem::replace(&mut *state, CLOSED);
        (!matches!(was, BreakerState::Closed { .. })).then_some(Change::Recovered)
    }

    /// An operation failed: what that says of the medium.
    pub fn failure(&self, error: &Error, now: MonotonicTime) -> Option<Change> {
        self.judged(of_medium(error), now)
    }

    /// A write failed: what that says of writes, for the breaker of writes. One that the medium
    /// refuses as such opens it at once.
    pub fn write_failure(&self, error: &Error, now: MonotonicTime) -> Option<Change> {
        self.judged(of_writes(error), now)
    }

    fn judged(&self, verdict: Verdict, now: MonotonicTime) -> Option<Change> {
        match verdict {
            Verdict::Answers => self.success(),
            Verdict::Sick => self.count_failure(now),
            Verdict::Refuses => self.trip(now),
            Verdict::Nothing => {
                self.undecided(now);
                None
            }
        }
    }

    fn count_failure(&self, now: MonotonicTime) -> Option<Change> {
        let mut state = self.state.lock();
        let open = BreakerState::Open {
            until: now.after(self.config.cool_down),
            held: false,
        };
        match *state {
            BreakerState::Closed { failures, last } => {
                let in_a_row = now.since(last) <= self.config.window;
                let failures = if in_a_row { failures + 1 } else { 1 };
                let opens = failures >= self.config.threshold;
                *state = if opens {
                    open
                } else {
                    BreakerState::Closed {
                        failures,
                        last: now,
                    }
                };
                opens.then_some(Change::Opened)
            }
            BreakerState::Open { .. } => None,
            BreakerState::Probing { .. } => {
                *state = open;
                None
            }
        }
    }

    /// The request that was let through never reached the medium: another may follow at once.
    pub fn undecided(&self, now: MonotonicTime) {
        let mut state = self.state.lock();
        if matches!(*state, BreakerState::Probing { .. }) {
            *state = BreakerState::Open {
                until: now,
                held: false,
            };
        }
    }

    /// Workers lost in operations stuck past their deadline that shall open it.
    pub fn max_stuck(&self) -> usize {
        self.config.max_stuck
    }

    /// Opens at once (too many stuck threads or slots).
    pub fn trip(&self, now: MonotonicTime) -> Option<Change> {
        self.open(now, false)
    }

    /// A record was damaged. More than [`BreakerConfig::damaged_per_minute`] open the breaker, for
    /// all of the cool-down whatever is answered in that time.
    pub fn damaged(&self, now: MonotonicTime) -> Option<Change> {
        let mut damaged = self.damaged.lock();
        while damaged
            .front()
            .is_some_and(|&first| now.since(first) >= MINUTE)
        {
            damaged.pop_front();
        }
        if damaged.len() < self.config.damaged_per_minute as usize {
            damaged.push_back(now);
            return None;
        }
        drop(damaged);
        self.open(now, true)
    }

    fn open(&self, now: MonotonicTime, hold: bool) -> Option<Change> {
        let mut state = self.state.lock();
        let was_closed = matches!(*state, BreakerState::Closed { .. });
        let held = hold || matches!(*state, BreakerState::Open { held: true, .. });
        *state = BreakerState::Open {
            until: now.after(self.config.cool_down),
            held,
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
            window: Duration::from_secs(60),
            max_stuck: 1,
            ..BreakerConfig::default()
        };
        let breaker = Breaker::new(config);
        let timeout = Error::new(ErrorKind::Timeout, "t");
        let at = |ms: u64| MonotonicTime(ms * 1_000_000);
        assert_eq!(breaker.failure(&timeout, at(0)), None);
        assert!(breaker.allows(1, at(0)));
        assert_eq!(breaker.failure(&timeout, at(0)), Some(Change::Opened));
        assert!(!breaker.allows(2, at(999)));
        assert!(breaker.allows(3, at(1000)), "one is let through");
        assert!(
            breaker.allows(3, at(1001)) && !breaker.allows(4, at(1001)),
            "all of one request"
        );
        assert_eq!(breaker.failure(&timeout, at(1002)), None);
        assert!(!breaker.allows(5, at(2001)));
        assert!(breaker.allows(6, at(2002)));
        assert!(
            breaker.allows(7, at(3002)),
            "a lost probe is followed by another"
        );
        assert_eq!(breaker.success(), Some(Change::Recovered));
        assert!(breaker.allows(8, at(3003)) && breaker.is_closed());
        assert_eq!(breaker.success(), None);
    }

    #[test]
    fn an_answer_of_the_medium_is_no_failure_of_it() {
        let breaker = Breaker::new(BreakerConfig {
            threshold: 2,
            cool_down: Duration::from_secs(1),
            window: Duration::from_secs(60),
            max_stuck: 1,
            ..BreakerConfig::default()
        });
        let fail =
            |kind, ms: u64| breaker.failure(&Error::new(kind, "x"), MonotonicTime(ms * 1_000_000));
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
            assert!(breaker.allows(9, MonotonicTime(1_000_000_000)));
            assert_eq!(fail(kind, 1000), Some(Change::Recovered), "{kind:?}");
        }
    }

    #[test]
    fn a_probe_that_never_reached_the_medium_is_followed_by_another_at_once() {
        let breaker = Breaker::new(BreakerConfig {
            threshold: 1,
            cool_down: Duration::from_secs(1),
            window: Duration::from_secs(60),
            max_stuck: 1,
            ..BreakerConfig::default()
        });
        let busy = Error::new(ErrorKind::Busy, "b");
        assert_eq!(breaker.failure(&busy, MonotonicTime(0)), None);
        assert!(breaker.is_closed());
        assert_eq!(breaker.trip(MonotonicTime(0)), Some(Change::Opened));
        assert_eq!(breaker.failure(&busy, MonotonicTime(1)), None);
        assert!(!breaker.allows(10, MonotonicTime(1)), "open stays open");
        let then = MonotonicTime(1_000_000_000);
        assert!(breaker.allows(11, then) && !breaker.allows(12, then));
        assert_eq!(breaker.failure(&busy, then), None);
        assert!(breaker.allows(13, then));
    }

    #[test]
    fn a_medium_that_refuses_writes_opens_their_breaker_at_once_and_not_its_own() {
        let (medium, writes) = (two_in_a_row(), two_in_a_row());
        let read_only = Error::new(ErrorKind::Unhealthy, "takes no writes");
        assert_eq!(medium.failure(&read_only, at(0)), None);
        assert_eq!(
            writes.write_failure(&read_only, at(0)),
            Some(Change::Opened)
        );
        assert!(medium.is_closed() && !writes.allows(1, at(0)));
        assert!(writes.allows(2, at(1)), "one is let through");
        assert_eq!(
            writes.write_failure(&read_only, at(1)),
            None,
            "it is logged once"
        );
        assert!(!writes.allows(3, at(1)) && writes.allows(4, at(2)));
        assert_eq!(writes.success(), Some(Change::Recovered));
        let (full, broken) = (
            Error::new(ErrorKind::NoSpace, "full"),
            Error::new(ErrorKind::Io, "x"),
        );
        for _ in 0..3 {
            assert_eq!(writes.write_failure(&full, at(2)), None);
        }
        assert_eq!(writes.write_failure(&broken, at(2)), None);
        assert_eq!(writes.write_failure(&broken, at(2)), Some(Change::Opened));
    }

    fn two_in_a_row() -> Breaker {
        Breaker::new(BreakerConfig {
            threshold: 2,
            cool_down: Duration::from_secs(1),
            window: Duration::from_secs(60),
            max_stuck: 1,
            ..BreakerConfig::default()
        })
    }

    fn at(seconds: u64) -> MonotonicTime {
        MonotonicTime(seconds * 1_000_000_000)
    }

    #[test]
    fn failures_far_apart_are_not_in_a_row() {
        let breaker = two_in_a_row();
        let failed = Error::new(ErrorKind::Io, "x");
        assert_eq!(breaker.failure(&failed, at(100)), None);
        assert_eq!(breaker.failure(&failed, at(161)), None);
        assert_eq!(breaker.failure(&failed, at(221)), Some(Change::Opened));
    }

    #[test]
    fn a_minute_passes_before_more_damaged_records_are_few_again() {
        let breaker = Breaker::new(BreakerConfig {
            damaged_per_minute: 2,
            cool_down: Duration::ZERO,
            ..BreakerConfig::default()
        });
        assert_eq!(
            (breaker.damaged(at(0)), breaker.damaged(at(30))),
            (None, None)
        );
        assert_eq!(
            breaker.damaged(at(59)),
            Some(Change::Opened),
            "the third within a minute"
        );
        assert!(breaker.allows(1, at(59)));
        assert_eq!(breaker.success(), Some(Change::Recovered));
        assert_eq!(breaker.damaged(at(60)), None, "the first is a minute ago");
        assert_eq!(breaker.damaged(at(61)), Some(Change::Opened));
    }

    #[test]
    fn a_medium_whose_answers_are_wrong_stays_off_for_its_time() {
        let breaker = Breaker::new(BreakerConfig {
            damaged_per_minute: 0,
            cool_down: Duration::from_secs(1),
            ..BreakerConfig::default()
        });
        assert_eq!(breaker.damaged(at(0)), Some(Change::Opened));
        assert_eq!((breaker.success(), breaker.trip(at(0))), (None, None));
        assert_eq!(breaker.success(), None);
        assert!(!breaker.allows(14, at(0)) && breaker.allows(15, at(1)));
        assert_eq!(breaker.success(), Some(Change::Recovered));
    }

    #[test]
    fn limits_and_rights_of_the_process_are_no_failure_of_the_medium() {
        let os = |code| Error::from_io(std::io::Error::from_raw_os_error(code), "x");
        let breaker = two_in_a_row();
        for code in [EPERM, EACCES, EROFS, ENOMEM, ENFILE, EMFILE] {
            for _ in 0..3 {
                assert_eq!(breaker.failure(&os(code), at(0)), None, "{code}");
            }
        }
        assert!(breaker.is_closed());
        // A probe without a descriptor is followed by another; one that is denied has reached the
        // medium.
        breaker.trip(at(0));
        assert!(breaker.allows(16, at(1)));
        assert_eq!(breaker.failure(&os(EMFILE), at(1)), None);
        assert!(breaker.allows(17, at(1)));
        assert_eq!(breaker.failure(&os(EROFS), at(1)), Some(Change::Recovered));
    }
}
