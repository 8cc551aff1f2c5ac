//! What one writer may write: its grant, what it used of it, writes that wait for more, and the
//! times when nothing may be written at all (the medium is full, or too little of it is free).

use std::collections::VecDeque;
use std::time::Duration;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::MonotonicTime;
use ucm_io::{ELOOP, EROFS};

use crate::pause::Pause;

/// How long a write waits for more before it is refused: a collector at rest wakes once a second.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// The same for a writer that was never granted anything: what lies there is counted first, and a
/// collector that stands still is followed. Within the time that a dump has, unless its deadline is
/// another one.
const FIRST: Duration = Duration::from_secs(25);
/// Most writes that wait.
const MOST_WAITING: usize = 1 << 16;
/// Least time between two wakes of the quota agent while no write waits.
const ASK_AGAIN: Duration = Duration::from_millis(50);
/// How long a grant holds without news from its writer, by the writer's own clock; half of what the
/// collector waits.
pub const HOLDS: Duration = Duration::from_secs(300);

/// How long a writer with this grant lets a write wait for more.
pub fn patience(granted: u64) -> Duration {
    if granted == 0 { FIRST } else { PATIENCE }
}

/// What a reserved write hands back when it ended.
#[derive(Debug, Clone, Copy)]
pub struct Reservation {
    bytes: u64,
    /// The writer's id at that time.
    writer: u64,
}

/// Called with the answer to a write's question, exactly once.
pub type OnReserved = Box<dyn FnOnce(Result<Reservation>) + Send>;

struct Waiting {
    bytes: u64,
    until: MonotonicTime,
    then: OnReserved,
}

/// Answers to give, once the writer quota is not locked any more.
pub(super) type Answers = Vec<(OnReserved, Result<Reservation>)>;

/// Gives answers, with nothing locked.
pub(super) fn answer(answers: Answers) {
    for (then, answer) in answers {
        then(answer);
    }
}

/// What one writer used and may use. All totals are bytes since it took its id.
#[derive(Default)]
pub(super) struct WriterQuota {
    /// Its id among the writers of the root; another one after a silence that made its grant void.
    pub(super) writer: u64,
    /// Total of the writes that were begun.
    pub(super) reserved: u64,
    /// Bytes of them whose write has not ended.
    pub(super) pending: u64,
    pub(super) granted: u64,
    /// Until when the grant holds.
    pub(super) holds_until: MonotonicTime,
    /// Bytes of the largest write so far.
    pub(super) unit: u64,
    pub(super) told: Told,
    pub(super) removed: Removed,
    pub(super) free: Free,
    pub(super) pause: Pause,
    pub(super) queue: Queue,
    /// Why the last turn of the quota agent failed, if it did.
    pub(super) trouble: Option<Error>,
}

/// The root, and what its collector reported of it.
#[derive(Default)]
pub(super) struct Told {
    /// Its path, for errors.
    pub(super) root: String,
    pub(super) limit: u64,
    /// Bytes below the root without those of this writer since `seen`.
    pub(super) others: u64,
    pub(super) seen: u64,
    pub(super) records: u64,
    pub(super) counted: bool,
}

/// What this writer removed as the collector.
#[derive(Default)]
pub(super) struct Removed {
    pub(super) records: u64,
    pub(super) bytes: u64,
}

/// How much of the medium was free when that was last read; nothing before the first time.
#[derive(Default)]
pub(super) struct Free {
    /// Bytes that were free.
    pub(super) bytes: Option<u64>,
    /// Bytes that stay free.
    pub(super) floor: u64,
    /// The total of writes begun from which on they count.
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

/// Writes that wait for more.
#[derive(Default)]
pub(super) struct Queue {
    waiting: VecDeque<Waiting>,
    /// A write waited without success; until there is a grant no write waits.
    pub(super) hopeless: bool,
    /// When the quota agent was last woken while no write waited.
    asked: Option<MonotonicTime>,
    closed: bool,
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

    /// Bytes below the root, as far as is known.
    pub(super) fn used(&self) -> u64 {
        self.told
            .others
            .saturating_add(self.reserved.saturating_sub(self.told.seen))
    }

    /// Bytes of the grant that are left.
    fn left(&self, now: MonotonicTime) -> u64 {
        if now >= self.holds_until {
            return 0;
        }
        self.granted.saturating_sub(self.reserved)
    }

    /// Whether more should be requested, when a grant reaches this far ahead.
    pub(super) fn is_low(&self, ahead: u64, now: MonotonicTime) -> bool {
        !self.queue.waiting.is_empty() || self.left(now) < (ahead / 2).max(self.unit)
    }

    /// Bytes that a write waits for, at least one record.
    pub(super) fn wanted(&self) -> u64 {
        let front = self
            .queue
            .waiting
            .front()
            .map_or(0, |waiting| waiting.bytes);
        front.max(self.unit).max(1)
    }

    /// A grant without news for too long is void, and its writer another one.
    pub(super) fn renew(&mut self, now: MonotonicTime, id: impl FnOnce() -> u64) -> bool {
        if self.holds_until == MonotonicTime::default() || now < self.holds_until {
            return false;
        }
        // What is under way still counts with the old id, and ends within its deadline.
        self.told.others = self.used();
        self.writer = id();
        self.free.bytes = self.free.bytes.map(|_| self.free.now(self.reserved));
        (
            self.reserved,
            self.pending,
            self.granted,
            self.told.seen,
            self.free.at,
        ) = (0, 0, 0, 0, 0);
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

    /// Why nothing may be written now, if so.
    fn barred(&self, bytes: u64, now: MonotonicTime) -> Option<Error> {
        if self.queue.closed {
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
                     before it is full: lower \
                     storage_capacity, or give free_space_floor a value such as 5%"
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
                .with("root", &self.told.root)
        })
    }

    /// What `bytes` can have at once; `None`: who wants them has to wait. And whether the quota
    /// agent should look.
    pub(super) fn reserve_now(
        &mut self,
        bytes: u64,
        now: MonotonicTime,
    ) -> (Result<Option<Reservation>>, bool) {
        if let Some(error) = self.barred(bytes, now) {
            return (Err(error), false);
        }
        if self.queue.waiting.is_empty() && bytes <= self.left(now) {
            let reservation = self.take(bytes);
            let low = self.is_half_free() || self.left(now) < self.unit.max(self.ahead_hint() / 2);
            return (Ok(Some(reservation)), low && self.may_ask(now));
        }
        self.unit = self.unit.max(bytes);
        if self.queue.hopeless || self.queue.waiting.len() >= MOST_WAITING {
            return (Err(self.refusal()), self.may_ask(now));
        }
        (Ok(None), true)
    }

    /// Asks for `bytes`. The answer comes at once or, when there is none yet, after the next news.
    /// Returns whether the quota agent should look.
    pub(super) fn reserve(
        &mut self,
        bytes: u64,
        now: MonotonicTime,
        deadline: MonotonicTime,
        then: OnReserved,
        answers: &mut Answers,
    ) -> bool {
        let (had, look) = self.reserve_now(bytes, now);
        let until = now.after(patience(self.granted)).min(deadline);
        match had.transpose() {
            Some(answer) => answers.push((then, answer)),
            None => self.queue.waiting.push_back(Waiting { bytes, until, then }),
        }
        look
    }

    /// What the grant has left; the agent is not woken for more.
    pub(super) fn try_reserve(&mut self, bytes: u64, now: MonotonicTime) -> Option<Reservation> {
        let free = self.queue.waiting.is_empty()
            && bytes <= self.left(now)
            && self.barred(bytes, now).is_none();
        free.then(|| self.take(bytes))
    }

    /// Whether the quota agent may be woken; not with every write, since one turn is several calls
    /// on the medium.
    fn may_ask(&mut self, now: MonotonicTime) -> bool {
        let may = self
            .queue
            .asked
            .is_none_or(|asked| now.since(asked) >= ASK_AGAIN);
        if may {
            self.queue.asked = Some(now);
        }
        may
    }

    fn ahead_hint(&self) -> u64 {
        super::grant_table::ahead(self.told.limit, 1)
    }

    /// After news: answers those that wait and can have theirs, or have waited too long.
    pub(super) fn answer_waiting(&mut self, now: MonotonicTime, answers: &mut Answers) {
        while let Some(front) = self.queue.waiting.front() {
            let (bytes, late) = (front.bytes, now >= front.until);
            let answer = if let Some(error) = self.barred(bytes, now) {
                Err(error)
            } else if bytes <= self.left(now) {
                self.queue.hopeless = false;
                Ok(self.take(bytes))
            } else if late || self.trouble.is_some() {
                self.queue.hopeless = true;
                Err(self.refusal())
            } else {
                return;
            };
            if let Some(front) = self.queue.waiting.pop_front() {
                answers.push((front.then, answer));
            }
        }
    }

    /// When the first of those that wait has waited too long.
    pub(super) fn next_late(&self) -> Option<MonotonicTime> {
        self.queue.waiting.front().map(|front| front.until)
    }

    /// Whether half of what may be written above the floor was written since that was looked at.
    pub(super) fn is_half_free(&self) -> bool {
        let written = self.reserved.saturating_sub(self.free.at);
        self.free
            .left(self.free.at)
            .is_some_and(|left| written > left / 2)
    }

    /// A larger grant.
    pub(super) fn adopt(&mut self, granted: u64) {
        if granted > self.granted {
            self.granted = granted;
            self.queue.hopeless = false;
        }
    }

    /// A reserved write ended. If it wrote nothing its bytes are free again; when that is not sure
    /// they count until a count has looked. Returns whether the medium was full.
    pub(super) fn ended(
        &mut self,
        reservation: Reservation,
        error: Option<&Error>,
        now: MonotonicTime,
    ) -> bool {
        if reservation.writer == self.writer {
            self.pending = self.pending.saturating_sub(reservation.bytes);
        }
        let unsure = error.is_none_or(|error| {
            matches!(
                error.kind(),
                ErrorKind::Timeout | ErrorKind::Io | ErrorKind::Closed
            )
        });
        if !unsure && reservation.writer == self.writer {
            self.reserved = self.reserved.saturating_sub(reservation.bytes);
        }
        self.pause.record(error, now)
    }

    /// A reserved write of which `kept` bytes are on the medium has ended: the others are free
    /// again. Returns whether the medium was full.
    pub(super) fn commit(
        &mut self,
        reservation: Reservation,
        kept: u64,
        error: Option<&Error>,
        now: MonotonicTime,
    ) -> bool {
        if reservation.writer == self.writer {
            self.pending = self.pending.saturating_sub(reservation.bytes);
            self.reserved = self
                .reserved
                .saturating_sub(reservation.bytes.saturating_sub(kept));
        }
        self.pause.record(error, now)
    }

    /// Whether nothing may be written for a while because the medium was full, or too little of it
    /// is free.
    pub(super) fn is_barred(&self, now: MonotonicTime) -> bool {
        self.barred(self.unit, now).is_some()
    }

    /// No more writes; those that wait are refused.
    pub(super) fn close(&mut self, answers: &mut Answers) {
        self.queue.closed = true;
        while let Some(waiting) = self.queue.waiting.pop_front() {
            let error = Error::new(ErrorKind::Closed, "the store is closed");
            answers.push((waiting.then, Err(error)));
        }
    }

    fn refusal(&self) -> Error {
        // On a read-only file system or behind a link nothing is short: that error is returned.
        let no_way = |trouble: &&Error| matches!(trouble.os_code(), Some(EROFS | ELOOP));
        if let Some(trouble) = self.trouble.as_ref().filter(no_way) {
            return trouble.clone();
        }
        let text = if self.told.counted {
            "the configured storage_capacity is used up, or nobody grants more of it; making room"
        } else {
            "what lies below the root is still being counted"
        };
        let error = Error::new(ErrorKind::NoSpace, text)
            .with("limit", self.told.limit)
            .with("used", self.used())
            .with("root", &self.told.root);
        match &self.trouble {
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
            told: Told {
                root: "/r".to_owned(),
                limit: 1000,
                ..Told::default()
            },
            granted,
            holds_until: at(300_000),
            ..WriterQuota::default()
        }
    }

    /// Asks, and answers the kind of the refusal; `None`: it waits.
    fn ask(quota: &mut WriterQuota, bytes: u64, now: MonotonicTime) -> Option<Result<Reservation>> {
        let mut answers = Answers::new();
        quota.reserve(
            bytes,
            now,
            MonotonicTime::NEVER,
            Box::new(|_| {}),
            &mut answers,
        );
        answers.pop().map(|(_, answer)| answer)
    }

    #[test]
    fn nothing_is_written_beyond_the_grant() {
        let mut quota = granted(100);
        ask(&mut quota, 60, at(0)).unwrap().unwrap();
        assert!(ask(&mut quota, 60, at(0)).is_none(), "waits");
        assert!(ask(&mut quota, 10, at(0)).is_none(), "in order");
        let mut answers = Answers::new();
        quota.answer_waiting(at(1), &mut answers);
        assert!(answers.is_empty());
        quota.adopt(125);
        quota.answer_waiting(at(1), &mut answers);
        assert!(answers.pop().unwrap().1.is_ok() && quota.reserved == 120);
        quota.answer_waiting(at(2001), &mut answers);
        assert_eq!(
            answers.pop().unwrap().1.unwrap_err().kind(),
            ErrorKind::NoSpace
        );
        assert!(
            ask(&mut quota, 60, at(2002)).unwrap().is_err(),
            "nobody waits in vain twice"
        );
        quota.adopt(400);
        assert!(ask(&mut quota, 60, at(2003)).unwrap().is_ok());
    }

    #[test]
    fn the_first_grant_is_waited_for_longer_once() {
        let mut quota = WriterQuota::new(1, 40);
        let mut answers = Answers::new();
        assert!(ask(&mut quota, 40, at(0)).is_none());
        quota.answer_waiting(at(24_999), &mut answers);
        assert!(answers.is_empty(), "it may still be counted");
        quota.answer_waiting(at(25_000), &mut answers);
        assert_eq!(
            answers.pop().unwrap().1.unwrap_err().kind(),
            ErrorKind::NoSpace
        );
        assert!(ask(&mut quota, 40, at(25_001)).unwrap().is_err());
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
        assert!(
            ask(&mut quota, 10, at(300_000)).is_none(),
            "its grant is void"
        );
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
        assert!(
            !quota.queue.hopeless && quota.next_late().is_none(),
            "nobody waits for it"
        );
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
