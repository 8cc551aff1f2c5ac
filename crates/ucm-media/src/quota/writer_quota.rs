//! The quota of one writer: its grant, the used part of it, and the times when nothing may be
//! written (the medium is full, or too little of it is free).

use std::time::Duration;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;
use ucm_io::{ELOOP, EROFS};

use super::grant_table::ahead;
use super::pause::Pause;

/// How long a write waits for a grant within the limit, and the control path for room: a collector
/// at rest wakes once a second.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// How long a first write waits for a grant: the root is counted first, and a collector that does
/// not run is replaced.
pub const FIRST: Duration = Duration::from_secs(25);
/// Least time between two notifications of the quota agent while no write waits.
const ASK_AGAIN: Duration = Duration::from_millis(50);
/// How long a grant is valid without a heartbeat of its writer, by the writer's own clock; half of
/// the time that the collector waits.
pub const HOLDS: Duration = Duration::from_secs(300);

/// True if the bytes of a write may be on the medium after this error.
pub fn is_unsure(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Timeout | ErrorKind::Io | ErrorKind::Closed
    )
}

/// A reserved write, which is returned when the write has ended.
#[derive(Debug, Clone, Copy)]
pub struct Reservation {
    bytes: u64,
    /// The writer's id at that time.
    writer: u64,
}

/// The bytes that one writer used and may use. Totals count since it took its id.
#[derive(Default)]
pub(super) struct WriterQuota {
    /// Its id among the writers of the root; a new one after its grant became invalid.
    pub(super) writer: u64,
    /// Total of the writes that have begun.
    pub(super) reserved: u64,
    /// Bytes of them whose write has not ended.
    pub(super) pending: u64,
    pub(super) granted: u64,
    /// End of the grant's validity.
    pub(super) holds_until: MonotonicTime,
    /// Bytes of the largest write so far.
    pub(super) unit: u64,
    pub(super) report: CollectorReport,
    /// Records and bytes that it removed as the collector.
    pub(super) removed: (u64, u64),
    pub(super) free: Free,
    pub(super) pause: Pause,
    pub(super) asking: Asking,
    /// The store is closed.
    pub(super) closed: bool,
}

/// Requests for a grant.
#[derive(Default)]
pub(super) struct Asking {
    /// Threads that wait for one.
    pub(super) waiting: usize,
    /// No grant was given in time; until there is one, no write waits.
    pub(super) unanswered: bool,
    /// When the quota agent was last notified.
    last: Option<MonotonicTime>,
}

/// The root, and the report of its collector.
#[derive(Default)]
pub(super) struct CollectorReport {
    /// Its path, for errors.
    pub(super) root: String,
    pub(super) limit: u64,
    /// Bytes below the root without those of this writer since `seen`.
    pub(super) others: u64,
    pub(super) seen: u64,
    pub(super) records: u64,
    pub(super) counted: bool,
    /// Why the last scan of the root failed, if it did.
    pub(super) trouble: Option<Error>,
}

/// Free bytes of the medium when they were last read.
#[derive(Default)]
pub(super) struct Free {
    /// Bytes that were free.
    pub(super) bytes: Option<u64>,
    /// Bytes that must stay free.
    pub(super) floor: u64,
    /// Total of the writes that had begun when it was read.
    pub(super) at: u64,
}

impl Free {
    /// Bytes that may still be written, of a total of `reserved`, before too little is free.
    fn left(&self, reserved: u64) -> Option<u64> {
        self.bytes?;
        Some(self.now(reserved).saturating_sub(self.floor))
    }

    /// Bytes that are free after writes of a total of `reserved`.
    fn now(&self, reserved: u64) -> u64 {
        let written = reserved.saturating_sub(self.at);
        self.bytes.unwrap_or(0).saturating_sub(written)
    }
}

impl WriterQuota {
    /// Nothing is granted yet. `unit`: bytes of one record.
    pub(super) fn new(writer: u64, unit: u64) -> Self {
        Self {
            writer,
            unit,
            ..Self::default()
        }
    }

    /// Total of the writes that have ended.
    pub(super) fn committed(&self) -> u64 {
        self.reserved.saturating_sub(self.pending)
    }

    /// Bytes below the root, by the last count and the own writes since.
    pub(super) fn used(&self) -> u64 {
        let written = self.reserved.saturating_sub(self.report.seen);
        self.report.others.saturating_add(written)
    }

    /// Bytes of the grant that are left.
    fn left(&self, now: MonotonicTime) -> u64 {
        if now >= self.holds_until {
            return 0;
        }
        self.granted.saturating_sub(self.reserved)
    }

    /// Whether to request more, if a grant is `ahead` bytes: less than half of that is left, or
    /// less than two writes if the grant is that large.
    pub(super) fn is_low(&self, ahead: u64, now: MonotonicTime) -> bool {
        let two = (2 * self.unit).min(ahead);
        self.asking.waiting > 0 || self.left(now) < (ahead / 2).max(two).max(self.unit)
    }

    /// Ends a grant that is no longer valid: the writer takes a new id.
    pub(super) fn renew(&mut self, now: MonotonicTime, id: impl FnOnce() -> u64) -> bool {
        if self.holds_until == MonotonicTime::default() || now < self.holds_until {
            return false;
        }
        // Writes in progress still count with the old id, and end within their deadlines.
        self.report.others = self.used();
        self.writer = id();
        self.free.bytes = self.free.bytes.map(|_| self.free.now(self.reserved));
        (self.reserved, self.pending, self.granted) = (0, 0, 0);
        (self.report.seen, self.free.at) = (0, 0);
        self.holds_until = MonotonicTime::default();
        true
    }

    fn take(&mut self, bytes: u64) -> Reservation {
        self.reserved += bytes;
        self.pending += bytes;
        self.unit = self.unit.max(bytes);
        Reservation {
            bytes,
            writer: self.writer,
        }
    }

    /// Why nothing may be written now, if that is so.
    pub(super) fn barred(&self, bytes: u64, now: MonotonicTime) -> Option<Error> {
        if self.closed {
            return Some(Error::new(ErrorKind::Closed, "the store is closed"));
        }
        if let Err(full) = self.pause.check(now) {
            return Some(full);
        }
        (bytes > self.free.left(self.reserved)?).then(|| {
            let text = match self.free.floor {
                // There is nothing to lower.
                0 => {
                    "the file system is full; make room on it, or have the oldest blocks removed \
                     before it is full: lower storage_capacity, or give free_space_floor a value \
                     such as 5%"
                }
                _ => {
                    "too little of the file system is free; make room on it, or lower \
                      free_space_floor"
                }
            };
            Error::new(ErrorKind::NoSpace, text)
                .with("wanted", bytes)
                .with("free", self.free.now(self.reserved))
                .with("floor", self.free.floor)
                .with("root", &self.report.root)
        })
    }

    /// Reserves `bytes`; also returns whether to notify the quota agent. `None` if they only have
    /// to be granted; bytes that do not fit into the limit are refused.
    pub(super) fn reserve(
        &mut self,
        bytes: u64,
        now: MonotonicTime,
    ) -> (Result<Option<Reservation>>, bool) {
        if let Some(error) = self.barred(bytes, now) {
            return (Err(error), false);
        }
        if bytes <= self.left(now) {
            let reservation = self.take(bytes);
            let low = self.is_half_free() || self.is_low(ahead(self.report.limit, 1), now);
            return (Ok(Some(reservation)), low && self.may_ask(now));
        }
        self.unit = self.unit.max(bytes);
        if self.may_be_granted(bytes) {
            return (Ok(None), true);
        }
        (Err(self.refusal()), self.may_ask(now))
    }

    /// Whether a write waits for its grant: it is the first one, or the limit has room for it, and
    /// no wait has failed since the last grant.
    fn may_be_granted(&self, bytes: u64) -> bool {
        let fits = self.used().saturating_add(bytes) <= self.report.limit;
        !self.asking.unanswered && (self.reserved == 0 || fits)
    }

    /// How long a write waits for its grant.
    pub(super) fn patience(&self) -> Duration {
        match self.reserved {
            0 => FIRST,
            _ => PATIENCE,
        }
    }

    /// Whether the wait of a thread for `bytes` is over, with or without a grant.
    pub(super) fn answers(&self, bytes: u64, now: MonotonicTime) -> bool {
        bytes <= self.left(now) || self.asking.unanswered || self.barred(bytes, now).is_some()
    }

    /// Reserves `bytes` of the grant without requesting more.
    pub(super) fn try_reserve(&mut self, bytes: u64, now: MonotonicTime) -> Option<Reservation> {
        let free = self.asking.waiting == 0
            && bytes <= self.left(now)
            && self.barred(bytes, now).is_none();
        free.then(|| self.take(bytes))
    }

    /// Whether the quota agent may be notified. Not with every write, because it makes several
    /// calls on the medium each time.
    fn may_ask(&mut self, now: MonotonicTime) -> bool {
        let last = self.asking.last;
        let may = last.is_none_or(|asked| now.since(asked) >= ASK_AGAIN);
        if may {
            self.asking.last = Some(now);
        }
        may
    }

    /// Whether half of the free bytes above the floor were written since they were last read.
    pub(super) fn is_half_free(&self) -> bool {
        let written = self.reserved.saturating_sub(self.free.at);
        let left = self.free.left(self.free.at);
        left.is_some_and(|left| written > left / 2)
    }

    /// Stores a larger grant.
    pub(super) fn adopt(&mut self, granted: u64) {
        if granted > self.granted {
            self.granted = granted;
            self.asking.unanswered = false;
        }
    }

    /// See [`super::Quota::ended`]. Returns whether the medium was full.
    pub(super) fn ended(
        &mut self,
        reservation: Reservation,
        error: Option<&Error>,
        now: MonotonicTime,
    ) -> bool {
        let unsure = error.is_none_or(is_unsure);
        let kept = if unsure { reservation.bytes } else { 0 };
        self.commit(reservation, kept, error, now)
    }

    /// See [`super::Quota::commit`]. Returns whether the medium was full.
    pub(super) fn commit(
        &mut self,
        reservation: Reservation,
        kept: u64,
        error: Option<&Error>,
        now: MonotonicTime,
    ) -> bool {
        if reservation.writer == self.writer {
            self.pending = self.pending.saturating_sub(reservation.bytes);
            let unused = reservation.bytes.saturating_sub(kept);
            self.reserved = self.reserved.saturating_sub(unused);
        }
        self.pause.record(error, now)
    }

    /// Why there is no room. `Busy` if more will be granted later.
    fn refusal(&self) -> Error {
        // A read-only file system and a link are no lack of space: their error says so.
        let no_way = |trouble: &&Error| matches!(trouble.os_code(), Some(EROFS | ELOOP));
        if let Some(trouble) = self.report.trouble.as_ref().filter(no_way) {
            return trouble.clone();
        }
        // No write was ever granted, or only this one is not granted now.
        let kind = match self.reserved {
            0 => ErrorKind::NoSpace,
            _ => ErrorKind::Busy,
        };
        let text = match self.report.counted {
            true => {
                "the configured storage_capacity is used up, or no more of it is granted yet; \
                 making room"
            }
            false => "what lies below the root is still being counted",
        };
        let error = Error::new(kind, text)
            .with("limit", self.report.limit)
            .with("used", self.used())
            .with("root", &self.report.root);
        match &self.report.trouble {
            Some(trouble) => error.caused_by(trouble.clone()),
            None => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> MonotonicTime {
        MonotonicTime(ms * 1_000_000)
    }

    fn granted(granted: u64) -> WriterQuota {
        WriterQuota {
            writer: 1,
            report: CollectorReport {
                root: "/r".to_owned(),
                limit: 1000,
                ..CollectorReport::default()
            },
            granted,
            holds_until: at(300_000),
            ..WriterQuota::default()
        }
    }

    /// Reserves room; `None`: there is no grant yet.
    fn ask(quota: &mut WriterQuota, bytes: u64, now: MonotonicTime) -> Option<Result<Reservation>> {
        quota.reserve(bytes, now).0.transpose()
    }

    fn kind(answer: Option<Result<Reservation>>) -> ErrorKind {
        answer.unwrap().unwrap_err().kind()
    }

    #[test]
    fn nothing_is_written_beyond_the_grant() {
        let mut quota = granted(100);
        ask(&mut quota, 60, at(0)).unwrap().unwrap();
        assert!(ask(&mut quota, 60, at(0)).is_none(), "its grant is raised");
        assert!(quota.is_low(100, at(0)) && quota.unit == 60);
        ask(&mut quota, 40, at(0)).unwrap().unwrap();
        quota.adopt(160);
        assert!(ask(&mut quota, 60, at(1)).unwrap().is_ok() && quota.reserved == 160);
        assert!(ask(&mut quota, 60, at(2)).is_none());
        quota.asking.unanswered = true;
        assert_eq!(kind(ask(&mut quota, 60, at(3))), ErrorKind::Busy);
    }

    #[test]
    fn a_write_that_the_limit_has_no_room_for_is_refused_at_once() {
        let mut quota = granted(100);
        ask(&mut quota, 60, at(0)).unwrap().unwrap();
        quota.report.others = 900;
        assert_eq!(kind(ask(&mut quota, 60, at(0))), ErrorKind::Busy);
    }

    #[test]
    fn a_first_grant_is_waited_for_once() {
        let mut quota = WriterQuota::new(1, 40);
        quota.holds_until = at(300_000);
        assert!(ask(&mut quota, 40, at(0)).is_none());
        assert!(!quota.answers(40, at(0)));
        quota.asking.unanswered = true;
        assert!(quota.answers(40, at(0)));
        assert_eq!(kind(ask(&mut quota, 40, at(1))), ErrorKind::NoSpace);
        quota.adopt(60);
        assert!(
            ask(&mut quota, 80, at(2)).is_none(),
            "nothing was written yet"
        );
        assert!(ask(&mut quota, 40, at(2)).unwrap().is_ok());
        assert_eq!(
            kind(ask(&mut quota, 40, at(3))),
            ErrorKind::Busy,
            "no limit"
        );
    }

    #[test]
    fn a_grant_is_raised_before_it_is_used_up() {
        let mut quota = granted(100);
        quota.unit = 40;
        assert!(!quota.is_low(100, at(0)));
        ask(&mut quota, 40, at(0)).unwrap().unwrap();
        assert!(quota.is_low(100, at(0)), "less than two writes are left");
        quota.unit = 100;
        assert!(quota.is_low(100, at(0)));
    }

    #[test]
    fn a_write_that_wrote_nothing_gives_its_bytes_back() {
        let mut quota = granted(100);
        let reservation = |quota: &mut WriterQuota| ask(quota, 40, at(0)).unwrap().unwrap();
        let (first, second) = (reservation(&mut quota), reservation(&mut quota));
        assert_eq!((quota.reserved, quota.committed()), (80, 0));
        quota.ended(first, Some(&Error::new(ErrorKind::NotFound, "x")), at(0));
        assert_eq!((quota.reserved, quota.committed()), (40, 0));
        quota.ended(second, Some(&Error::new(ErrorKind::Timeout, "x")), at(0));
        assert_eq!(
            (quota.reserved, quota.committed()),
            (40, 40),
            "it may have been written"
        );
    }

    #[test]
    fn room_that_was_not_needed_is_given_back() {
        let mut quota = granted(100);
        let reservation = ask(&mut quota, 80, at(0)).unwrap().unwrap();
        assert!(!quota.commit(reservation, 30, None, at(0)));
        assert_eq!((quota.reserved, quota.committed()), (30, 30));
        let reservation = ask(&mut quota, 70, at(0)).unwrap().unwrap();
        let full = Error::new(ErrorKind::NoSpace, "x");
        assert!(
            quota.commit(reservation, 20, Some(&full), at(0)),
            "the medium was full"
        );
        assert_eq!((quota.reserved, quota.committed()), (50, 50));
        assert!(ask(&mut quota, 10, at(1)).unwrap().is_err(), "a pause");
    }

    #[test]
    fn a_silent_writer_writes_no_more_and_comes_back_as_another() {
        let mut quota = granted(100);
        let old = ask(&mut quota, 40, at(0)).unwrap().unwrap();
        let void = ask(&mut quota, 10, at(300_000));
        assert!(void.is_none(), "its grant is void");
        assert!(quota.renew(at(300_000), || 2));
        assert_eq!((quota.writer, quota.reserved, quota.granted), (2, 0, 0));
        quota.ended(old, None, at(300_001));
        assert_eq!(quota.committed(), 0, "that was the other one's");
        assert!(!quota.renew(at(300_002), || 3), "new until it has a grant");
    }

    #[test]
    fn what_is_spare_is_had_at_once_or_not_at_all() {
        let mut quota = granted(100);
        assert!(quota.try_reserve(60, at(0)).is_some());
        assert!(quota.try_reserve(60, at(0)).is_none());
        assert!(ask(&mut quota, 40, at(0)).unwrap().is_ok());
    }

    #[test]
    fn a_full_medium_pauses_for_longer_and_longer() {
        let mut quota = granted(1000);
        let full = Error::new(ErrorKind::NoSpace, "x");
        let fail = |quota: &mut WriterQuota, now| {
            let reservation = ask(quota, 10, now).unwrap().unwrap();
            quota.ended(reservation, Some(&full), now)
        };
        assert!(fail(&mut quota, at(0)));
        assert!(ask(&mut quota, 10, at(249)).unwrap().is_err());
        assert!(fail(&mut quota, at(250)));
        assert!(
            ask(&mut quota, 10, at(749)).unwrap().is_err(),
            "twice as long"
        );
        let reservation = ask(&mut quota, 10, at(750)).unwrap().unwrap();
        quota.ended(reservation, None, at(751));
        assert!(fail(&mut quota, at(752)));
        assert!(
            ask(&mut quota, 10, at(1002)).unwrap().is_ok(),
            "as short as at first"
        );
    }

    #[test]
    fn the_floor_is_not_written_through() {
        let mut quota = granted(1000);
        let free = |at| Free {
            bytes: Some(1050),
            floor: 1000,
            at,
        };
        quota.free = free(0);
        assert!(ask(&mut quota, 40, at(0)).unwrap().is_ok());
        let refused = ask(&mut quota, 40, at(0)).unwrap().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NoSpace);
        assert!(
            refused
                .to_string()
                .contains("[wanted=40, free=1010, floor=1000, root=/r]"),
            "{refused}"
        );
        assert!(
            refused.to_string().contains("lower free_space_floor"),
            "{refused}"
        );
        quota.free = free(40);
        assert!(ask(&mut quota, 40, at(0)).unwrap().is_ok());
    }

    #[test]
    fn a_full_disk_without_a_floor_is_not_advised_to_lower_it() {
        let mut quota = granted(1000);
        quota.free = Free {
            bytes: Some(10),
            floor: 0,
            at: 0,
        };
        let refused = ask(&mut quota, 40, at(0)).unwrap().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NoSpace);
        let text = refused.to_string();
        assert!(
            text.starts_with("the file system is full; make room on it"),
            "{text}"
        );
        assert!(
            text.contains("lower storage_capacity") && text.contains("root=/r"),
            "{text}"
        );
        assert!(!text.contains("lower free_space_floor"), "{text}");
    }
}
