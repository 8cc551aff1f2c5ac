//! Records in segments beside what fio reaches on one preallocated file, with the same I/O engine,
//! the same number of operations under way, the same bytes for each and the same bytes in all; the
//! store with checksums and without.
//!
//! The contenders take turns, so that whatever disturbs the machine disturbs all of them. What each
//! does in a turn:
//!
//! * *fio, new*: writes a file that was allocated just before and never written, as a segment is;
//!   one block after the other, in as many ranges as there are threads.
//! * *fio, again*: the same to a file that was written before. Its blocks are mapped, and through
//!   the page cache its pages are there. The store never does this: what is published is not
//!   written again.
//! * *store, dump*: from filled slots until published: makes and allocates the segment, appends
//!   records, closes it with its footer and names it. Without checksums the records are written as
//!   they are in the slots.
//! * *fio, load*, *store, load*: what the last turn wrote, to host memory; the store to the slots,
//!   judged or not. *Engine*: the same by a load task of the engine that ends in the verified slot.
//!
//! fio has one buffer for each operation under way, the store another slot for each record. Loads
//! through the page cache find everything there, and everything is written back before every turn,
//! outside of what is timed.

use std::cell::RefCell;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use ucm_io::IoOptions;

use super::contest::{Spent, Times, Turn, hold};
use super::files::{Place, preallocate};
use super::fio::Pass;
use super::memory::Stock;
use super::report::Direction;
use super::rig::{Io, Rig, Shape};
use super::{Machine, Mode, Options, Result};

/// Least share of fio's speed that the store shall reach without checksums, and with them.
const GOALS: [f64; 2] = [0.9, 0.85];
/// Times that fio goes over a file that was written before, in one turn.
const LOOPS: usize = 4;

/// One direction of one case. Speeds are GB/s of records, headers included, the fastest turn of
/// each.
#[derive(Serialize, Debug, Clone)]
pub struct OneFileRow {
    /// Which way.
    pub direction: Direction,
    /// Operations under way, each on a thread of its own, on both sides.
    pub threads: usize,
    /// Past the page cache.
    pub direct: bool,
    /// Bytes of KV of a block.
    pub block_bytes: usize,
    /// Bytes of a record, which are those of an operation of fio.
    pub record_bytes: usize,
    /// fio on a file that is allocated and was never written (dump), or was (load); `None` without
    /// fio.
    pub fio: Option<f64>,
    /// fio on a file that was written before; dumps only.
    pub fio_again: Option<f64>,
    /// The store without checksums.
    pub plain: f64,
    /// The store with them.
    pub checked: f64,
    /// The same by a load task of the engine; loads only.
    pub engine_checked: Option<f64>,
    /// Shares of fio's speed without checksums and with them: the fastest turns compared.
    pub ratios: Option<[f64; 2]>,
    /// The same turn by turn, and of these the one in the middle.
    pub median_ratios: Option<[f64; 2]>,
}

/// Measures every case of the options: sizes of blocks, buffered and direct; `say` hears what is
/// done.
pub fn one_file(options: &Options, say: &dyn Fn(&str)) -> Result<(Machine, Vec<OneFileRow>)> {
    if !options
        .modes
        .iter()
        .any(|mode| matches!(mode, Mode::Buffered | Mode::Direct))
    {
        return Err("beside fio records are moved buffered or direct".into());
    }
    let turns = options.rounds as u64 + 1;
    // Two dumps of every round, two files of fio's, and what is loaded.
    let place = Place::for_bytes(&options.dir, options.turn_bytes as u64 * (2 * turns + 4))?;
    let machine = Machine::of(&place, options.fio);
    if machine.fio.is_none() {
        say("fio is not installed or not wanted: the store is measured alone");
    }
    place.warm(options.turn_bytes * 4)?;
    let mut rows = Vec::new();
    for &block in &options.block_bytes {
        for mode in [Mode::Buffered, Mode::Direct] {
            if !options.modes.contains(&mode) {
                continue;
            }
            if mode == Mode::Direct && !place.direct() {
                say("no O_DIRECT in this directory: those rows are left out");
                continue;
            }
            for &workers in &options.workers {
                let case = Case {
                    place: &place,
                    threads: workers,
                    direct: mode == Mode::Direct,
                    block,
                    with_fio: machine.fio.is_some(),
                };
                say(&case.words());
                rows.extend(case.rows(options)?);
            }
        }
    }
    Ok((machine, rows))
}

struct Case<'a> {
    place: &'a Place,
    threads: usize,
    direct: bool,
    block: usize,
    with_fio: bool,
}

impl Case<'_> {
    fn words(&self) -> String {
        let way = if self.direct { "O_DIRECT" } else { "buffered" };
        format!("{} KiB, {way}, {} threads", self.block >> 10, self.threads)
    }

    /// The store's I/O engine with a thread for each load and for each dump.
    fn io(&self) -> Result<Io> {
        let mut options = IoOptions::with_workers(self.threads * 2);
        for lane in &mut options.lanes {
            lane.max_running = self.threads;
        }
        Io::new(self.direct, &options)
    }

    /// A dump and a load.
    fn rows(&self, options: &Options) -> Result<Vec<OneFileRow>> {
        let shape = Shape::of(self.block)?;
        let count = (options.turn_bytes / self.block).next_multiple_of(self.threads);
        let mut stock = Stock::new(&shape, count)?;
        let record = shape.layout.record_len();
        let root = self.place.make("segments")?;
        // A part of the slots is never given to anything but loads.
        let rig = Rig::segments(
            &root,
            Shape::of(self.block)?,
            self.io()?,
            self.direct,
            count + 4,
        )?;
        let files = [
            self.place.dir().join("new.dat"),
            self.place.dir().join("again.dat"),
        ];
        let row = |direction, times: &[Times; 4]| self.row(direction, record, count, times);
        let dumps = self.dumps(&rig, &mut stock, &files, record, options.rounds)?;
        let loads = self.loads(&rig, &mut stock, &files[1], record, options.rounds)?;
        // Two dumps of every round, each record with an operation of its own.
        let appended = count * 2 * (options.rounds + 1);
        rig.retire(&root, self.direct.then_some(appended))?;
        for file in files.iter().filter(|file| file.exists()) {
            std::fs::remove_file(file)?;
        }
        Ok(vec![
            row(Direction::Dump, &dumps),
            row(Direction::Load, &loads),
        ])
    }

    /// fio to a new file, and to one that was written before; the store without and with checksums.
    fn dumps(
        &self,
        rig: &Rig,
        stock: &mut Stock,
        [new, again]: &[PathBuf; 2],
        record: usize,
        rounds: usize,
    ) -> Result<[Times; 4]> {
        let count = stock.count();
        let bytes = (count * record) as u64;
        if self.with_fio {
            preallocate(again, bytes)?;
        }
        let stock = RefCell::new(stock);
        let store = |seal: bool| -> Turn<'_> {
            let (stock, place) = (&stock, self.place);
            Box::new(move || {
                place.sync()?;
                let ids = stock.borrow_mut().fresh_ids();
                rig.write(&ids, stock.borrow().slots(), seal)
            })
        };
        let contenders: [Turn<'_>; 4] = [
            Box::new(|| {
                if !self.with_fio {
                    return Ok(Spent::default());
                }
                if new.exists() {
                    std::fs::remove_file(new)?;
                }
                preallocate(new, bytes)?;
                self.fio(new, record, count, Direction::Dump, 1)
            }),
            // Its first turn, which does not count, is the one that writes the file.
            Box::new(|| self.fio(again, record, count, Direction::Dump, LOOPS)),
            store(false),
            store(true),
        ];
        hold(rounds, contenders)
    }

    /// fio from a file, the store without and with checksums, and the engine.
    fn loads(
        &self,
        rig: &Rig,
        stock: &mut Stock,
        file: &Path,
        record: usize,
        rounds: usize,
    ) -> Result<[Times; 4]> {
        let count = stock.count();
        let ids = stock.fresh_ids();
        rig.write(&ids, stock.slots(), true)?;
        let stock = &*stock;
        let ids = &ids;
        let store = |judge: bool| -> Turn<'_> {
            Box::new(move || {
                self.place.sync()?;
                Ok(rig.read(ids, stock.slots(), judge)?.0)
            })
        };
        let contenders: [Turn<'_>; 4] = [
            Box::new(|| self.fio(file, record, count, Direction::Load, LOOPS)),
            store(false),
            store(true),
            Box::new(|| {
                self.place.sync()?;
                rig.verify(ids)
            }),
        ];
        hold(rounds, contenders)
    }

    /// A turn of fio's: nothing where there is none.
    fn fio(
        &self,
        file: &Path,
        block: usize,
        count: usize,
        direction: Direction,
        loops: usize,
    ) -> Result<Spent> {
        if !self.with_fio {
            return Ok(Spent::default());
        }
        self.place.sync()?;
        let pass = Pass {
            file,
            block,
            count,
            threads: self.threads,
            direct: self.direct,
            loops,
        };
        Ok(Spent {
            wall: pass.run(direction)?,
            ..Spent::default()
        })
    }

    fn row(
        &self,
        direction: Direction,
        record: usize,
        count: usize,
        times: &[Times; 4],
    ) -> OneFileRow {
        let gbps = |times: &Times| (count * record) as f64 / times.fastest().as_secs_f64() / 1e9;
        let loads = direction == Direction::Load;
        // fio, and the store without and with checksums; what is left is fio's other way, or the
        // engine's.
        let (fio, other, plain, checked) = match (loads, times) {
            (true, [fio, plain, checked, other]) | (false, [fio, other, plain, checked]) => {
                (fio, other, plain, checked)
            }
        };
        let both = |of: fn(&Times, &Times) -> f64| {
            self.with_fio.then(|| [of(plain, fio), of(checked, fio)])
        };
        OneFileRow {
            direction,
            threads: self.threads,
            direct: self.direct,
            block_bytes: self.block,
            record_bytes: record,
            fio: self.with_fio.then(|| gbps(fio)),
            fio_again: (self.with_fio && !loads).then(|| gbps(other)),
            plain: gbps(plain),
            checked: gbps(checked),
            engine_checked: loads.then(|| gbps(other)),
            ratios: both(Times::ratio),
            median_ratios: both(Times::median_ratio),
        }
    }
}

/// The table, in Markdown; a ratio in bold reaches its goal.
pub fn one_file_table(machine: &Machine, rows: &[OneFileRow]) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_table(&mut text, machine, rows);
    text
}

fn write_table(text: &mut String, machine: &Machine, rows: &[OneFileRow]) -> std::fmt::Result {
    let fio = machine.fio.as_deref().unwrap_or("no fio");
    writeln!(
        text,
        "{} cores of {}, Linux {}, {}, {fio}; GB/s of records, the fastest turn of each. Ratios to \
         fio: of the fastest \
         turns, in brackets the median round by round; goals {} without checksums, {} with them.",
        machine.cores, machine.processor, machine.kernel, machine.file_system, GOALS[0], GOALS[1]
    )?;
    for direction in [Direction::Dump, Direction::Load] {
        let (head, others) = match direction {
            Direction::Dump => ("dump", "fio, new file | fio, again"),
            Direction::Load => ("load", "fio | ucm, engine"),
        };
        writeln!(
            text,
            "\n| {head} | block | threads | {others} | ucm, no checksums | ratio | ucm | ratio |"
        )?;
        writeln!(text, "|---|---|---|---|---|---|---|---|---|")?;
        for row in rows.iter().filter(|row| row.direction == direction) {
            let number = |value: Option<f64>| {
                value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))
            };
            let ratio = |which: usize| match (row.ratios, row.median_ratios) {
                (Some(fastest), Some(median)) if fastest[which] >= GOALS[which] => {
                    format!("**{:.2}** ({:.2})", fastest[which], median[which])
                }
                (Some(fastest), Some(median)) => {
                    format!("{:.2} ({:.2})", fastest[which], median[which])
                }
                _ => "-".to_owned(),
            };
            writeln!(
                text,
                "| {} | {} KiB | {} | {} | {} | {:.2} | {} | {:.2} | {} |",
                if row.direct { "O_DIRECT" } else { "page cache" },
                row.block_bytes >> 10,
                row.threads,
                number(row.fio),
                number(row.fio_again.or(row.engine_checked)),
                row.plain,
                ratio(0),
                row.checked,
                ratio(1),
            )?;
        }
    }
    Ok(())
}
