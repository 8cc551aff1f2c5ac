//! The I/O engines alone, without a store above them: the thread pool and the ring beside one plain loop of system calls.
//!
//! The three take turns over the same number of files of one size. The loop has one thread; the engines get everything at
//! once, as a store with deep queues gives it. A publish of an engine sets the file's time and looks at its length before
//! it gives it its name, as always; the loop writes, closes and renames.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use ucm_device::{HostArena, Slot, SlotPool};
use ucm_infra::Mono;
use ucm_io::{IoBuf, IoDone, IoEngine, IoOp, PsyncEngine, PsyncOptions, ReadMode, UringEngine, UringOptions};

use super::contest::{Spent, Times, Turn, Watch, hold};
use super::files::{Place, hollow};
use super::rig::Batch;
use super::{KIB, MIB, Options, Result, plain};

/// Sizes of files.
const SIZES: [usize; 3] = [32 * KIB, 256 * KIB, MIB];
/// Threads of the pool, and of the pool beside the ring.
const WORKERS: usize = 4;
/// Most files of a turn.
const MAX_FILES: usize = 512;

/// One size, one direction, one way.
#[derive(Serialize, Debug, Clone)]
pub struct EngineRow {
    /// Whether files are published, not read.
    pub publishes: bool,
    /// Past the page cache.
    pub direct: bool,
    /// Bytes of a file.
    pub bytes: usize,
    /// GB/s of the loop, and its processor time in ms per GB.
    pub plain: (f64, f64),
    /// The same of the thread pool.
    pub psync: (f64, f64),
    /// The same of the ring; `None` where there is none to be had.
    pub uring: Option<(f64, f64)>,
}

/// Measures every row; `say` hears what is being done.
pub fn engines(options: &Options, say: &dyn Fn(&str)) -> Result<Vec<EngineRow>> {
    let place = Place::new(options)?;
    place.warm(options.turn_bytes * 4)?;
    let mut rows = Vec::new();
    for bytes in SIZES {
        for direct in [false, true] {
            if direct && !place.direct() {
                say("no O_DIRECT in this directory: those rows are left out");
                continue;
            }
            for publishes in [false, true] {
                let way = if direct { "O_DIRECT" } else { "buffered" };
                let what = if publishes { "publishes" } else { "reads" };
                say(&format!("{what} of {} KiB, {way}", bytes / KIB));
                let case = Case {
                    place: &place,
                    bytes,
                    direct,
                    files: (options.turn_bytes / bytes).clamp(WORKERS, MAX_FILES),
                };
                rows.push(case.row(publishes, options.rounds)?);
            }
        }
    }
    Ok(rows)
}

struct Case<'a> {
    place: &'a Place,
    bytes: usize,
    direct: bool,
    files: usize,
}

impl Case<'_> {
    fn row(&self, publishes: bool, rounds: usize) -> Result<EngineRow> {
        let psync = PsyncOptions {
            direct: self.direct,
            ..PsyncOptions::with_workers(WORKERS)
        };
        let ring = UringEngine::new(&UringOptions::beside(psync.clone())).ok();
        let pool: Arc<dyn IoEngine> = PsyncEngine::new(psync)?;
        // Without a ring its turns are those of the pool again, and are not shown.
        let second = ring.clone().map_or_else(|| Arc::clone(&pool), |ring| ring as _);
        let arena = HostArena::new(self.files * self.bytes)?;
        let slots = SlotPool::new(arena, self.bytes)?;
        let mut all: Vec<_> = std::iter::from_fn(|| slots.try_acquire()).collect();
        for slot in &mut all {
            slot.as_mut_slice().fill(0x5A); // so that no turn pays for the first touch
        }
        drop(all);
        let [plain, psync, uring] = if publishes {
            self.publishes(rounds, &slots, &*pool, &*second)?
        } else {
            self.reads(rounds, &slots, &*pool, &*second)?
        };
        let total = self.files * self.bytes;
        let figures = |times: &Times| {
            (
                total as f64 / times.fastest().as_secs_f64() / 1e9,
                times.least_cpu().as_secs_f64() * 1e3 / (total as f64 / 1e9),
            )
        };
        Ok(EngineRow {
            publishes,
            direct: self.direct,
            bytes: self.bytes,
            plain: figures(&plain),
            psync: figures(&psync),
            uring: ring.map(|_| figures(&uring)),
        })
    }

    fn reads(
        &self,
        rounds: usize,
        pool: &Arc<SlotPool>,
        first: &dyn IoEngine,
        second: &dyn IoEngine,
    ) -> Result<[Times; 3]> {
        let paths = names(&self.place.make("reads")?, self.files);
        for (path, slot) in paths.iter().zip(acquire(pool)) {
            plain::write(
                &path.with_extension("private"),
                path,
                self.direct,
                slot.as_slice(),
            )?;
        }
        self.place.sync()?;
        let looped: Turn<'_> = Box::new(|| plain::read_to_slots(&paths, &mut acquire(pool), self.direct, 1));
        let by = |engine| -> Turn<'_> {
            let paths = &paths;
            Box::new(move || {
                let ops = paths.iter().zip(acquire(pool)).map(|(path, slot)| IoOp::Read {
                    path: path.clone(),
                    offset: 0,
                    len: self.bytes,
                    buf: IoBuf::Slot(slot),
                    mode: ReadMode::Default,
                });
                run(engine, 0, ops)
            })
        };
        hold(rounds, [looped, by(first), by(second)])
    }

    fn publishes(
        &self,
        rounds: usize,
        pool: &Arc<SlotPool>,
        first: &dyn IoEngine,
        second: &dyn IoEngine,
    ) -> Result<[Times; 3]> {
        // A new directory for every turn, and the one before made empty: see `Place::make`.
        let fresh = || -> Result<Vec<PathBuf>> { Ok(names(&self.place.make("publishes")?, self.files)) };
        let looped: Turn<'_> = Box::new(|| {
            let (paths, slots) = (fresh()?, acquire(pool));
            let watch = Watch::start();
            for (path, slot) in paths.iter().zip(&slots) {
                plain::write(
                    &path.with_extension("private"),
                    path,
                    self.direct,
                    slot.as_slice(),
                )?;
            }
            let spent = watch.stop();
            hollow(&paths)?;
            Ok(spent)
        });
        let by = |engine| -> Turn<'_> {
            let fresh = &fresh;
            Box::new(move || {
                let paths = fresh()?;
                let ops = paths.iter().zip(acquire(pool)).map(|(path, slot)| IoOp::Publish {
                    private: path.with_extension("private"),
                    target: path.clone(),
                    replace: true,
                    buf: IoBuf::Slot(slot),
                    len: self.bytes,
                    mode: 0o600,
                    mtime_ns: Some(1_600_000_000_000_000_000),
                    durable: false,
                });
                let spent = run(engine, 2, ops)?;
                hollow(&paths)?;
                Ok(spent)
            })
        };
        hold(rounds, [looped, by(first), by(second)])
    }
}

fn names(dir: &Path, count: usize) -> Vec<PathBuf> {
    (0..count)
        .map(|number| dir.join(format!("{number:04}")))
        .collect()
}

fn acquire(pool: &Arc<SlotPool>) -> Vec<Slot> {
    std::iter::from_fn(|| pool.try_acquire()).collect()
}

/// Gives an engine all operations at once and waits until the last has ended.
fn run(engine: &dyn IoEngine, lane: usize, ops: impl Iterator<Item = IoOp>) -> Result<Spent> {
    let ops: Vec<IoOp> = ops.collect();
    let batch = Batch::new(ops.len());
    let watch = Watch::start();
    for op in ops {
        let batch = Arc::clone(&batch);
        let done = move |result: ucm_core::Result<IoDone>| batch.one(result.map(|_| None));
        engine.submit(lane, Mono::NEVER, op, Box::new(done));
    }
    batch.wait()?;
    Ok(watch.stop())
}

/// The rows as text.
pub fn engines_table(rows: &[EngineRow]) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "engines   KiB  way       loop GB/s  psync / loop  uring / loop  CPU ms/GB: loop  psync  uring"
    );
    for row in rows {
        let or_none = |figure: Option<f64>, digits: usize| {
            figure.map_or_else(|| "-".to_owned(), |figure| format!("{figure:.digits$}"))
        };
        let _ = writeln!(
            text,
            "{:<8} {:>4}  {:<8}  {:>9.2}  {:>12.2}  {:>12}  {:>15.0}  {:>5.0}  {:>5}",
            if row.publishes { "publish" } else { "read" },
            row.bytes / KIB,
            if row.direct { "O_DIRECT" } else { "buffered" },
            row.plain.0,
            row.psync.0 / row.plain.0,
            or_none(row.uring.map(|(rate, _)| rate / row.plain.0), 2),
            row.plain.1,
            row.psync.1,
            or_none(row.uring.map(|(_, cpu)| cpu), 0),
        );
    }
    text
}
