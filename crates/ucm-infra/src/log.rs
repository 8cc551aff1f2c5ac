//! Buffers of the core's log records: a subscriber of [`tracing`] with a bounded list for each
//! store.
//!
//! Python writes the log, and no thread of the core ever takes the GIL. So a thread that logs only
//! appends a [`Record`] to the list of its store, which the event names in its field `store`. The
//! Python object of that store takes the records out ([`take`]). Records without a store (of a
//! device that many stores share) go to the first caller of `take`. The number of records of one
//! part of the code is limited per minute, so that a medium full of damaged records does not flood
//! the log. Dropped records are counted and reported.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Once, OnceLock};
use std::time::Duration;

pub use tracing::Level;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id};
use tracing::{Event, Metadata, Subscriber};
use ucm_core::sync::Mutex;

use crate::per_process::PerProcess;
use crate::{Clock, MonotonicTime, SystemClock};

/// Most records of one part of the code per window.
const LIMIT: usize = 64;
/// Length of that window.
const WINDOW: Duration = Duration::from_secs(60);
/// Most records of one store kept between two calls of [`take`].
const KEPT: usize = 4 * LIMIT;
/// The list of records without a store; also the argument of [`take`] for a caller without a store.
pub const NO_STORE: u64 = 0;

/// One log line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// How loud.
    pub level: Level,
    /// The line.
    pub message: String,
    /// The fields of the event: `tier`, `block`, `reason`, `error`, `path` and the like.
    pub fields: Vec<(&'static str, String)>,
}

/// The records of one store.
#[derive(Default)]
struct Said {
    records: VecDeque<Record>,
    dropped: u64,
    /// Start of the current window of each part of the code, and its number of records in it.
    windows: HashMap<&'static str, (MonotonicTime, usize)>,
}

impl Said {
    fn push(&mut self, part: &'static str, record: Record, now: MonotonicTime) {
        let (began, brought) = self.windows.entry(part).or_insert((now, 0));
        if now.since(*began) >= WINDOW {
            (*began, *brought) = (now, 0);
        }
        *brought += 1;
        if *brought <= LIMIT && self.records.len() < KEPT {
            self.records.push_back(record);
        } else {
            self.dropped += 1;
        }
    }

    fn take(&mut self) -> Vec<Record> {
        let mut records: Vec<Record> = self.records.drain(..).collect();
        let dropped = std::mem::take(&mut self.dropped);
        if dropped > 0 {
            records.push(Record {
                level: Level::WARN,
                message: format!("{dropped} further messages were dropped"),
                fields: vec![("dropped", dropped.to_string())],
            });
        }
        records
    }
}

/// The lists of a process by store.
type Lists = Mutex<HashMap<u64, Said>>;

static LISTS: OnceLock<PerProcess<Lists>> = OnceLock::new();

/// Those of this process.
fn lists() -> &'static Lists {
    LISTS.get_or_init(PerProcess::new).here()
}

/// Keeps the log records of this process from now on, unless it has another subscriber already.
pub fn keep() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        lists(); // made now, while no other thread can fork
        let _ = tracing::subscriber::set_global_default(Collector);
    });
}

/// The records of a store since the last call, oldest first, after those without a store. A last
/// record of each list states how many were dropped.
pub fn take(store: u64) -> Vec<Record> {
    let mut stores = lists().lock();
    let said = [NO_STORE, store].map(|of| stores.get_mut(&of).map(Said::take).unwrap_or_default());
    said.concat()
}

/// Drops the list of a store that has ended.
pub fn forget(store: u64) {
    lists().lock().remove(&store);
}

/// Appends the events of our own crates to the lists. Spans are ignored.
struct Collector;

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event()
            && *metadata.level() <= Level::INFO
            && metadata.target().starts_with("ucm_")
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }

    fn event(&self, event: &Event<'_>) {
        let mut read = Fields::default();
        event.record(&mut read);
        let store = read.store.unwrap_or(NO_STORE);
        let record = Record {
            level: *event.metadata().level(),
            message: read.message,
            fields: read.fields,
        };
        let (part, now) = (event.metadata().target(), SystemClock.now());
        let mut stores = lists().lock();
        stores.entry(store).or_default().push(part, record, now);
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// The fields of one event.
#[derive(Default)]
struct Fields {
    store: Option<u64>,
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "store" => self.store = Some(value),
            name => self.fields.push((name, value.to_string())),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.push((field.name(), value.to_owned()));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        match field.name() {
            "message" => self.message = text,
            name => self.fields.push((name, text)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(text: &str) -> Record {
        Record {
            level: Level::INFO,
            message: text.to_owned(),
            fields: Vec::new(),
        }
    }

    #[test]
    fn bounded_and_honest_about_it() {
        let mut said = Said::default();
        let push =
            |said: &mut Said, n: usize, now| (0..n).for_each(|_| said.push("a", record("x"), now));
        push(&mut said, LIMIT + 3, MonotonicTime(0));
        let taken = said.take();
        assert_eq!(taken.len(), LIMIT + 1);
        assert!(taken[LIMIT].message.starts_with("3 further"));
        push(&mut said, 1, MonotonicTime(1));
        said.push(
            "b",
            record("another part has its own limit"),
            MonotonicTime(1),
        );
        assert_eq!(
            said.take().len(),
            2,
            "the same minute: b's, and how many were dropped"
        );
        let minute = |n: u32| MonotonicTime(0).after(WINDOW * n);
        (1..=9).for_each(|n| push(&mut said, LIMIT, minute(n)));
        assert_eq!(said.take().len(), KEPT + 1);
        assert!(said.take().is_empty());
    }

    #[test]
    fn each_store_gets_its_own_with_level_and_fields() {
        keep();
        keep(); // repeatable
        let (one, two) = (crate::random_u64(), crate::random_u64());
        let said = std::thread::spawn(move || {
            tracing::warn!(store = one, tier = "posix", left = 3, path = %"/a b", "{} of \
            it", "most");
            tracing::info!(store = two, "the other's");
            tracing::info!("for no store");
            tracing::debug!(store = one, "not kept");
        });
        said.join().unwrap();
        let expected = Record {
            level: Level::WARN,
            message: "most of it".to_owned(),
            fields: vec![
                ("tier", "posix".to_owned()),
                ("left", "3".to_owned()),
                ("path", "/a b".to_owned()),
            ],
        };
        let first = take(one);
        assert_eq!(first[0].message, "for no store");
        assert_eq!((&first[1..], take(two).len()), (&[expected][..], 1));
        assert!(take(one).is_empty());
        tracing::info!(store = two, "ended");
        forget(two);
        assert!(take(two).is_empty());
    }
}
