//! What the store costs beside plain system calls: loads, dumps, lookups, and an engine that does
//! nothing.
//!
//! Every figure stands beside a yardstick of the same run. The two take turns, the one that begins
//! changes with each round, and the fastest turn of each counts: other load on the machine can only
//! slow a turn down.
//!
//! * Load *to the slot*: a backend's reads, each record judged in its slot, beside a loop of open,
//!   pread, close.
//! * Load *to memory*: an engine's load task beside that loop with a memcpy to the same memory.
//! * Dump *from the slot*: sealing a filled slot and writing it by a backend, beside open, pwrite,
//!   close, rename.
//! * Dump *from memory*: an engine's dump task, until published, beside that loop after a memcpy.
//!
//! "Workers" is the number of threads that may work on the records of that row in both: the pool's
//! lane, the loop's threads. The engine has one thread more that gathers from memory, as it has in
//! production.

mod case;
mod contest;
mod dumps;
mod files;
mod fio;
mod idle;
mod loads;
mod lookup;
mod machine;
mod memory;
mod one_file;
mod plain;
mod report;
mod rig;

use std::path::PathBuf;
use std::time::Duration;

pub use machine::Machine;
pub use one_file::{OneFileRow, one_file, one_file_table};
pub use report::{Direction, Figures, Mode, Row};

use files::Place;
use memory::Stock;
use rig::Shape;

/// What went wrong, in words.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
/// Result of a step of the bench.
pub type Result<T> = std::result::Result<T, Error>;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Most bytes on disk for each MiB of a turn: the records to load, those of a dump turn, fio's
/// file, the warm-up.
const SHARES: u64 = 5;
/// Bytes on disk that do not depend on the size of a turn: the records of lookups.
const FIXED: u64 = 256 << 20;

/// What to measure, and how long.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where the files lie while they are measured; a directory of its own is made there and
    /// removed.
    pub dir: PathBuf,
    /// Sizes of blocks, bytes of KV.
    pub block_bytes: Vec<usize>,
    /// Numbers of threads.
    pub workers: Vec<usize>,
    /// Ways of reading and writing.
    pub modes: Vec<Mode>,
    /// Bytes moved in one turn.
    pub turn_bytes: usize,
    /// Turns of each contender.
    pub rounds: usize,
    /// Blocks looked up at once.
    pub prefix: usize,
    /// Blocks published to see what memory each takes.
    pub cached: usize,
    /// How long the idle engine is watched.
    pub idle: Duration,
    /// Whether fio is run, if it is installed.
    pub fio: bool,
}

impl Options {
    /// The sizes of the published table: a few minutes.
    pub fn full(dir: PathBuf) -> Self {
        Self {
            dir,
            block_bytes: vec![256 * KIB, MIB, 2 * MIB],
            workers: vec![1, 4],
            modes: Mode::ALL.to_vec(),
            turn_bytes: 32 * MIB,
            rounds: 9,
            prefix: 1024,
            cached: 4 * 1024,
            idle: Duration::from_secs(2),
            fio: true,
        }
    }

    /// Every kind of row once, in a few seconds: that it runs, not what it costs.
    pub fn quick(dir: PathBuf) -> Self {
        Self {
            block_bytes: vec![256 * KIB, MIB],
            turn_bytes: 4 * MIB,
            rounds: 1,
            prefix: 128,
            cached: 512,
            idle: Duration::from_millis(100),
            fio: false,
            ..Self::full(dir)
        }
    }

    /// Most bytes that lie in `dir` at one time.
    pub fn disk_bytes(&self) -> u64 {
        self.turn_bytes as u64 * SHARES + FIXED
    }
}

/// Measures everything; `say` hears what is being done.
pub fn run(options: &Options, say: &dyn Fn(&str)) -> Result<Figures> {
    let place = Place::new(options)?;
    let mut figures = Figures::new(Machine::of(&place, options.fio));
    say(&format!(
        "{}: at most {} MiB",
        place.dir().display(),
        options.disk_bytes() >> 20
    ));
    if !place.direct() {
        say("no O_DIRECT in this directory: those rows are left out");
    }
    if figures.machine.fio.is_none() {
        say("fio is not installed or not wanted: its figures are left out");
    }
    say("warming memory");
    place.warm(options.turn_bytes * 4)?;
    figures.idle = idle::measure(&place, options)?;
    say("lookups");
    (figures.lookups, figures.bytes_per_block) = lookup::measure(&place, options)?;
    let most_workers = options.workers.iter().copied().max().unwrap_or(1);
    for &block in &options.block_bytes {
        let shape = Shape::of(block)?;
        let mut stock = Stock::new(&shape, (options.turn_bytes / block).max(most_workers))?;
        for &workers in &options.workers {
            say(&format!("{} KiB blocks, {workers} workers", block / KIB));
            let memcpy = plain::memcpy(&mut stock, workers, options.rounds);
            figures.memcpy.push((block, workers, memcpy));
            if figures.machine.fio.is_some() {
                figures
                    .fio
                    .extend(fio::measure(&place, block, workers, options)?);
            }
            for &mode in &options.modes {
                if mode == Mode::Direct && !place.direct() {
                    continue;
                }
                figures.rows.extend(loads::measure(
                    &place, &shape, &mut stock, workers, mode, options,
                )?);
                figures.rows.extend(dumps::measure(
                    &place, &shape, &mut stock, workers, mode, options,
                )?);
            }
        }
    }
    figures.set_limits();
    Ok(figures)
}
