//! How fast this root takes records in either layout: a short look with the root's own I/O engine and block size.
//!
//! Both write the same few records, as many at once as a small burst of dumps: one arm publishes a file for each
//! (create, write, close, rename), the other appends them to preallocated files as segments do. Making and sealing those is
//! not counted, for it happens once in a whole segment. The arms take turns, and the quickest turn of each counts. All names
//! are private ones, so that whatever is left behind by a crash is swept like every private file.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use ucm_core::{Error, ErrorKind, PAGE, Result, round_up};
use ucm_device::{HostArena, SlotPool};
use ucm_infra::{Clock, Completion, Mono};
use ucm_io::{IoBuf, IoDone, IoEngine, IoOp};

use super::kept::LayoutKind;
use crate::engine::{LANE_DUMP, LANE_SPACE};

/// Longest the look may take.
const LONGEST: Duration = Duration::from_millis(500);
/// Turns of each arm.
const TURNS: usize = 3;
/// Bytes of one turn, about, and the least and most records in it.
const TURN: u64 = 2 << 20;
const LEAST: u64 = 2;
const MOST: u64 = 16;
/// Longest record that is measured, bytes: creating a file is little beside writing more.
const LARGE: u64 = 3 << 20;
/// How much faster appending must be, in tenths.
const CLEARLY: u64 = 13;

/// What was measured; bytes a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Figures {
    /// Bytes of a record.
    pub record_bytes: u64,
    /// With a file for each record.
    pub file_bytes_per_s: u64,
    /// With the records appended to one file, or to as many as are filled side by side there.
    pub segment_bytes_per_s: u64,
}

impl Figures {
    /// The layout to use: segments where they are clearly faster, at least 1.3 times.
    pub fn choice(&self) -> LayoutKind {
        let clearly = self.file_bytes_per_s.saturating_mul(CLEARLY);
        if self.segment_bytes_per_s.saturating_mul(10) >= clearly {
            LayoutKind::Segment
        } else {
            LayoutKind::File
        }
    }
}

/// Where and how it is measured.
pub struct Place<'a> {
    /// The engine of the root, with its options.
    pub io: &'a Arc<dyn IoEngine>,
    /// Measures the time.
    pub clock: &'a dyn Clock,
    /// Bytes of a record.
    pub record_len: usize,
    /// Permissions of the files.
    pub file_mode: u32,
    /// A new private name in a directory that is there.
    pub name: &'a dyn Fn() -> PathBuf,
    /// Files that are appended to side by side, with one write at a time each; `None`: one file, all at once.
    pub abreast: Option<usize>,
}

/// Bytes of records that measuring this length writes at most, beside a page at the head of each file appended to;
/// `None`: they are too long to be measured.
pub fn cost(record_len: usize) -> Option<u64> {
    let len = round_up(record_len as u64, PAGE);
    (len <= LARGE).then(|| 2 * TURNS as u64 * count(len) * len)
}

fn count(len: u64) -> u64 {
    (TURN / len).clamp(LEAST, MOST)
}

/// Measures both layouts, within half a second and the deadline. The error says what failed, or that time was over; what
/// is under way then ends by itself, and its files are removed when it does.
pub fn measure(place: &Place<'_>, deadline: Mono) -> Result<Figures> {
    let len = round_up(place.record_len as u64, PAGE);
    let count = count(len) as usize;
    let arena = HostArena::new(count * len as usize)?;
    let slots = SlotPool::new(arena, place.record_len)?;
    let swept = Arc::new(Swept {
        io: Arc::clone(place.io),
        paths: Mutex::default(),
        deadline,
    });
    let end = place.clock.now().after(LONGEST).min(deadline);
    let turn = Turn {
        place,
        slots,
        count,
        swept,
        end,
        deadline,
    };
    turn.fill();
    let mut best = [Duration::MAX; 2];
    for number in 0..TURNS {
        let begun = place.clock.now();
        for arm in [number % 2, 1 - number % 2] {
            let took = if arm == 0 { turn.files()? } else { turn.appended()? };
            best[arm] = best[arm].min(took);
        }
        let now = place.clock.now();
        if now.after(now.since(begun)) > end {
            break; // another turn would be too late
        }
    }
    let bytes = (count * place.record_len) as u128 * 1_000_000_000;
    let rate = |took: Duration| bytes.checked_div(took.as_nanos());
    let stood = || Error::new(ErrorKind::Io, "the clock stood still while it was measured");
    let rate = |took| {
        let rate = rate(took).ok_or_else(stood)?;
        Ok::<_, Error>(u64::try_from(rate).unwrap_or(u64::MAX))
    };
    Ok(Figures {
        record_bytes: place.record_len as u64,
        file_bytes_per_s: rate(best[0])?,
        segment_bytes_per_s: rate(best[1])?,
    })
}

struct Turn<'a> {
    place: &'a Place<'a>,
    slots: Arc<SlotPool>,
    count: usize,
    swept: Arc<Swept>,
    /// When waiting ends, and when what is under way does.
    end: Mono,
    deadline: Mono,
}

/// Removes files when the last operation on them has ended.
struct Swept {
    io: Arc<dyn IoEngine>,
    paths: Mutex<Vec<PathBuf>>,
    deadline: Mono,
}

impl Drop for Swept {
    fn drop(&mut self) {
        let paths = std::mem::take(self.paths.get_mut());
        if paths.is_empty() {
            return;
        }
        // What stays is swept by its age.
        let remove = IoOp::Remove { paths };
        self.io
            .submit(LANE_SPACE, self.deadline, remove, Box::new(|_| {}));
    }
}

impl Turn<'_> {
    /// Bytes that no file system finds shorter words for.
    fn fill(&self) {
        let mut state = crate::random_u64() | 1;
        let mut held = Vec::with_capacity(self.count);
        while let Some(mut slot) = self.slots.try_acquire() {
            for word in slot.as_mut_slice().chunks_exact_mut(8) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                word.copy_from_slice(&state.to_le_bytes());
            }
            held.push(slot);
        }
    }

    fn name(&self) -> PathBuf {
        let name = (self.place.name)();
        self.swept.paths.lock().push(name.clone());
        name
    }

    /// A file for each record.
    fn files(&self) -> Result<Duration> {
        let mtime_ns = i64::try_from(self.place.clock.wall_ns()).ok();
        let begun = self.place.clock.now();
        let publish = |buf| IoOp::Publish {
            private: self.name(),
            target: self.name(),
            replace: true,
            buf,
            len: self.place.record_len,
            mode: self.place.file_mode,
            mtime_ns,
            durable: false,
        };
        self.all((0..self.count).map(|_| publish), self.count)?;
        Ok(self.place.clock.now().since(begun))
    }

    /// Appended, to as many files and as many at once as segments would be.
    fn appended(&self) -> Result<Duration> {
        let files = self.place.abreast.map_or(1, |files| files.clamp(1, self.count));
        let at_once = self.place.abreast.map_or(self.count, |_| files);
        let stride = round_up(self.place.record_len as u64, PAGE);
        let paths: Vec<_> = std::iter::repeat_with(|| self.name()).take(files).collect();
        for path in &paths {
            let create = IoOp::Create {
                path: path.clone(),
                head: vec![0; PAGE as usize],
                room: PAGE + self.count.div_ceil(files) as u64 * stride,
                mode: self.place.file_mode,
            };
            self.wait(&self.submit(create))?;
        }
        let begun = self.place.clock.now();
        let append = |n: usize| {
            let path = paths[n % files].clone();
            move |buf| IoOp::WriteAt {
                path,
                offset: PAGE + (n / files) as u64 * stride,
                buf,
                len: self.place.record_len,
            }
        };
        self.all((0..self.count).map(append), at_once)?;
        Ok(self.place.clock.now().since(begun))
    }

    /// Runs operations with a slot each, so many at once.
    fn all<F: FnOnce(IoBuf) -> IoOp>(&self, ops: impl Iterator<Item = F>, at_once: usize) -> Result<()> {
        let slots: Vec<_> = std::iter::from_fn(|| self.slots.try_acquire())
            .take(self.count)
            .inspect(|slot| _ = slot.index()) // each has its own bytes, as they were filled
            .collect();
        if slots.len() < self.count {
            return Err(Error::internal("a slot was not given back"));
        }
        let mut under_way: Vec<Arc<Completion<_>>> = Vec::with_capacity(at_once);
        for (op, slot) in ops.zip(slots) {
            if under_way.len() == at_once {
                for over in under_way.drain(..) {
                    self.wait(&over)?;
                }
            }
            under_way.push(self.submit(op(IoBuf::Slot(slot))));
        }
        under_way.iter().try_for_each(|over| self.wait(over))
    }

    fn submit(&self, op: IoOp) -> Arc<Completion<Result<()>>> {
        let over = Completion::new();
        let (told, swept) = (Arc::clone(&over), Arc::clone(&self.swept));
        let done = move |result: Result<IoDone>| {
            let result = result.map(drop); // the slot is free again before anybody hears of it
            drop(swept);
            told.complete(result);
        };
        let place = self.place;
        place.io.submit(LANE_DUMP, self.deadline, op, Box::new(done));
        over
    }

    fn wait(&self, over: &Completion<Result<()>>) -> Result<()> {
        let late = || Error::new(ErrorKind::Timeout, "it took too long");
        let ended = over.wait(self.place.clock, Some(self.end));
        ended.ok_or_else(late)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_chosen_where_they_are_clearly_faster() {
        let choice = |file, segment| {
            let figures = Figures {
                record_bytes: 1,
                file_bytes_per_s: file,
                segment_bytes_per_s: segment,
            };
            figures.choice()
        };
        assert_eq!(choice(1000, 1299), LayoutKind::File);
        assert_eq!(choice(1000, 1300), LayoutKind::Segment);
        assert_eq!(choice(u64::MAX / 2, 1), LayoutKind::File, "no overflow");
    }

    #[test]
    fn little_is_written_whatever_the_length() {
        for len in [1, 4096, 8192, 1 << 18, 1 << 20, (3 << 20) - 1, 3 << 20] {
            assert!(cost(len).is_some_and(|bytes| bytes <= 36 << 20), "{len}");
        }
        assert_eq!(cost((3 << 20) + 1), None);
        assert_eq!(cost((1 << 20) + 4096), Some(2 * 3 * 2 * ((1 << 20) + 4096)));
    }
}
