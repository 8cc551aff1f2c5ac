//! What an operator should hear: a bounded list of messages that the Python side drains into its log, at a bounded
//! rate, so that a medium full of damage does not fill the log too.
//!
//! No thread of the core ever takes the GIL, so nothing here calls Python; a full list counts what it drops.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use ucm_infra::MonotonicTime;

/// How loud a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// For whoever is looking.
    Info,
    /// An operator would act on it.
    Warning,
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// How loud.
    pub level: Level,
    /// One line.
    pub text: String,
}

/// Most messages in one window of time.
const LIMIT: usize = 64;
/// Length of that window.
const WINDOW: Duration = Duration::from_secs(60);
/// Most messages kept between two drains.
const KEPT: usize = 4 * LIMIT;

#[derive(Default)]
struct Inner {
    events: VecDeque<Event>,
    dropped: u64,
    /// When the current window began, and how many messages it has brought.
    window: Option<MonotonicTime>,
    brought: usize,
}

/// The bounded list.
#[derive(Default)]
pub struct Events(Mutex<Inner>);

impl Events {
    /// Adds a message; when there are too many, in all or of late, it is dropped and counted.
    pub fn push(&self, level: Level, text: impl Into<String>, now: MonotonicTime) {
        let mut inner = self.0.lock();
        if inner.window.is_none_or(|began| now.since(began) >= WINDOW) {
            inner.window = Some(now);
            inner.brought = 0;
        }
        inner.brought += 1;
        if inner.brought <= LIMIT && inner.events.len() < KEPT {
            inner.events.push_back(Event {
                level,
                text: text.into(),
            });
        } else {
            inner.dropped += 1;
        }
    }

    /// Takes all messages; a last one tells how many were dropped.
    pub fn drain(&self) -> Vec<Event> {
        let mut inner = self.0.lock();
        let mut events: Vec<Event> = inner.events.drain(..).collect();
        let dropped = std::mem::take(&mut inner.dropped);
        if dropped > 0 {
            events.push(Event {
                level: Level::Warning,
                text: format!("{dropped} further messages were dropped"),
            });
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounded_and_honest_about_it() {
        let events = Events::default();
        let push = |n: usize, now| (0..n).for_each(|i| events.push(Level::Info, i.to_string(), now));
        push(LIMIT + 3, MonotonicTime(0));
        let drained = events.drain();
        assert_eq!(drained.len(), LIMIT + 1);
        assert!(drained[LIMIT].text.starts_with("3 further"));
        push(1, MonotonicTime(1));
        assert_eq!(
            events.drain().len(),
            1,
            "the same minute: only how many were dropped"
        );
        let minute = |n: u32| MonotonicTime(0).after(WINDOW * n);
        (1..=9).for_each(|n| push(LIMIT, minute(n)));
        assert_eq!(events.drain().len(), KEPT + 1);
        assert!(events.drain().is_empty());
    }
}
