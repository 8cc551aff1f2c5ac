//! What an operator should hear: a bounded list of messages that the Python side drains into its log.
//!
//! No thread of the core ever takes the GIL, so nothing here calls Python; a full list counts what it drops.

use std::collections::VecDeque;

use parking_lot::Mutex;

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

/// Most messages kept between two drains.
const LIMIT: usize = 256;

#[derive(Default)]
struct Inner {
    events: VecDeque<Event>,
    dropped: u64,
}

/// The bounded list.
#[derive(Default)]
pub struct Events(Mutex<Inner>);

impl Events {
    /// Adds a message; when full it is dropped and counted.
    pub fn push(&self, level: Level, text: impl Into<String>) {
        let mut inner = self.0.lock();
        if inner.events.len() < LIMIT {
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
        for i in 0..LIMIT + 3 {
            events.push(Level::Info, i.to_string());
        }
        let drained = events.drain();
        assert_eq!(drained.len(), LIMIT + 1);
        assert!(drained[LIMIT].text.starts_with("3 further"));
        assert!(events.drain().is_empty());
    }
}
