//! Loads and dumps of a store compared with a reference: plain system calls, or fio.
//!
//! Store and reference move the same bytes in turns, the order changes with each round, and the
//! fastest turn of each counts, because other load can only slow a turn down.
//!
//! * Load *to the slot*: read and verified in the store's memory, compared with open, pread and
//!   close of a file for each record, or fio's reads of one file.
//! * Load *to memory*: the same with a copy to the caller's memory; the loop copies too, fio does
//!   not.
//! * Dump: from the caller's memory until published, compared with a copy, open, pwrite, close and
//!   rename, or fio's writes to a just allocated file.
//!
//! "Workers" is the number of threads that read or write in both. The store has one more that
//! gathers from memory, as in production.

mod contest;
mod fio;
mod options;
mod plain;
mod rig;
mod scratch;

use std::cell::RefCell;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use serde::Serialize;

use contest::{Times, Turn, hold};
pub use options::{Mode, Options, Yardstick};
use rig::{Rig, Stock};
use scratch::Scratch;

/// A failed step of the bench.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
/// Result of a step of the bench.
pub type Result<T> = std::result::Result<T, Error>;

/// Layouts of a root, each measured in a store of its own.
const LAYOUTS: [&str; 2] = ["file", "segment"];

/// One row of the table. Speeds are GB/s of KV, the fastest turn.
#[derive(Serialize, Debug, Clone)]
pub struct Row {
    /// `load to slot`, `load to memory` or `dump`.
    pub what: &'static str,
    /// Layout of the root.
    pub layout: &'static str,
    /// Bytes of KV of a block.
    pub block_bytes: usize,
    /// Threads, on both sides of the ratio.
    pub workers: usize,
    /// Through or past the page cache.
    pub mode: Mode,
    /// Speed of the store.
    pub gbps: f64,
    /// Speed of the yardstick.
    pub yardstick_gbps: f64,
    /// The fastest turn of the store against the fastest of the reference.
    pub ratio: f64,
    /// The median of the ratios of single rounds.
    pub median_ratio: f64,
    /// Least ratio wanted.
    pub goal: f64,
    /// Processor time of the store, ms for a GB of KV, the least of all turns; other load hardly
    /// affects it.
    pub cpu_ms_per_gb: f64,
    /// The same of the reference; 0 for fio, which is another process.
    pub yardstick_cpu_ms_per_gb: f64,
}

/// One size of blocks, mode and number of threads.
struct Case<'a> {
    options: &'a Options,
    scratch: &'a Scratch,
    block: usize,
    workers: usize,
    mode: Mode,
}

/// The program of a bench, named by its reference. An error is printed and ends it with 1.
pub fn program(name: &str, yardstick: Yardstick) -> ExitCode {
    if !crate::asked_for(name) {
        return ExitCode::SUCCESS;
    }
    // Standard error may be closed.
    let say = |text: &str| drop(writeln!(std::io::stderr(), "{name} bench: {text}"));
    let bench = || -> Result<()> {
        let options = Options::parse(std::env::args().skip(1), yardstick)?;
        let rows = run(&options, &say)?;
        writeln!(std::io::stdout(), "{}", table(&rows))?;
        if let Some(path) = &options.json {
            std::fs::write(path, serde_json::to_vec_pretty(&rows)?)?;
        }
        Ok(())
    };
    match bench() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("failed: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Measures all cases; `say` is called with the progress.
pub fn run(options: &Options, say: &dyn Fn(&str)) -> Result<Vec<Row>> {
    if options.yardstick == Yardstick::Fio && !fio::is_installed() {
        return Err("fio is not installed (a package of the system)".into());
    }
    let scratch = Scratch::new(&options.dir, options.disk_bytes())?;
    scratch.warm(options.turn_bytes * 4)?;
    let mut rows = Vec::new();
    for &block in &options.block_bytes {
        for &workers in &options.workers {
            for &mode in &options.modes {
                if mode == Mode::Direct && !scratch.direct() {
                    say("no O_DIRECT in this directory: those rows are left out");
                    continue;
                }
                say(&format!(
                    "{} KiB, {workers} workers, {}",
                    block >> 10,
                    mode.name()
                ));
                let case = Case {
                    options,
                    scratch: &scratch,
                    block,
                    workers,
                    mode,
                };
                rows.extend(case.rows()?);
            }
        }
    }
    Ok(rows)
}

impl Case<'_> {
    fn direct(&self) -> bool {
        self.mode == Mode::Direct
    }

    /// Dumps and loads of both layouts.
    fn rows(&self) -> Result<Vec<Row>> {
        let count = (self.options.turn_bytes / self.block).next_multiple_of(self.workers);
        let open = |layout| {
            let root = self.scratch.make(layout)?;
            Rig::open(root, layout, self.block, self.workers, self.direct(), count)
        };
        let rigs = LAYOUTS
            .iter()
            .map(|layout| open(layout))
            .collect::<Result<Vec<_>>>()?;
        let record = rigs[0].record_len();
        let stock = RefCell::new(Stock::new(self.block, record, count)?);
        let yard = self.scratch.make("yardstick")?;
        let mut rows = self.dumps(&rigs, &stock, &yard)?;
        rows.extend(self.loads(&rigs, &stock, &yard)?);
        rigs.into_iter().try_for_each(Rig::retire)?;
        std::fs::remove_dir_all(yard)?;
        Ok(rows)
    }

    fn dumps(&self, rigs: &[Rig], stock: &RefCell<Stock>, yard: &Path) -> Result<Vec<Row>> {
        let mut turns: Vec<Turn<'_>> = vec![Box::new(|| {
            self.scratch.sync()?;
            let ids = stock.borrow_mut().fresh_ids();
            match self.options.yardstick {
                Yardstick::Loop => self.to_device(|| {
                    plain::dump(
                        yard,
                        &ids,
                        &mut stock.borrow_mut(),
                        self.direct(),
                        self.workers,
                    )
                }),
                Yardstick::Fio => self.fio(yard, &stock.borrow(), "write"),
            }
        })];
        for rig in rigs {
            turns.push(Box::new(|| {
                self.scratch.sync()?;
                let ids = stock.borrow_mut().fresh_ids();
                let rows = stock.borrow_mut().rows(&ids);
                self.to_device(|| rig.dump(rows))
            }));
        }
        let times = hold(self.options.rounds, turns)?;
        let bytes = stock.borrow().bytes();
        let rows = LAYOUTS.iter().zip(&times[1..]);
        Ok(rows
            .map(|(layout, own)| self.row("dump", layout, own, &times[0], bytes))
            .collect())
    }

    fn loads(&self, rigs: &[Rig], stock: &RefCell<Stock>, yard: &Path) -> Result<Vec<Row>> {
        let ids = stock.borrow_mut().fresh_ids();
        plain::dump(
            yard,
            &ids,
            &mut stock.borrow_mut(),
            self.direct(),
            self.workers,
        )?;
        for rig in rigs {
            rig.dump(stock.borrow_mut().rows(&ids))?;
        }
        let prepare = |root: &Path| {
            self.scratch.sync()?;
            if self.mode == Mode::Synced {
                scratch::evict(root)
            } else {
                Ok(())
            }
        };
        let mut turns: Vec<Turn<'_>> = Vec::new();
        for to_memory in [false, true] {
            let ids = &ids;
            turns.push(Box::new(move || {
                prepare(yard)?;
                match self.options.yardstick {
                    Yardstick::Fio => self.fio(yard, &stock.borrow(), "read"),
                    Yardstick::Loop => {
                        let (stock, direct) = (&mut stock.borrow_mut(), self.direct());
                        plain::load(yard, ids, stock, direct, self.workers, to_memory)
                    }
                }
            }));
            for rig in rigs {
                turns.push(Box::new(move || {
                    prepare(rig.root())?;
                    if to_memory {
                        rig.load(stock.borrow_mut().rows(ids))
                    } else {
                        rig.verify(ids)
                    }
                }));
            }
        }
        let times = hold(self.options.rounds, turns)?;
        let (slot, memory) = times.split_at(1 + LAYOUTS.len());
        let bytes = stock.borrow().bytes();
        let mut rows = Vec::new();
        for (what, times) in [("load to slot", slot), ("load to memory", memory)] {
            for (layout, own) in LAYOUTS.iter().zip(&times[1..]) {
                rows.push(self.row(what, layout, own, &times[0], bytes));
            }
        }
        Ok(rows)
    }

    /// A dump, in [`Mode::Synced`] up to the end of a syncfs.
    fn to_device(&self, dump: impl FnOnce() -> Result<contest::Spent>) -> Result<contest::Spent> {
        let mut spent = dump()?;
        if self.mode == Mode::Synced {
            let watch = contest::Watch::start();
            self.scratch.sync()?;
            spent.add(watch.stop());
        }
        Ok(spent)
    }

    fn fio(&self, yard: &Path, stock: &Stock, kind: &str) -> Result<contest::Spent> {
        let file = yard.join("fio.dat");
        let pass = fio::Pass {
            file: &file,
            record: stock.record_len(),
            count: stock.count(),
            threads: self.workers,
            direct: self.direct(),
        };
        if kind == "write" {
            pass.write_new()
        } else {
            pass.read()
        }
    }

    fn row(
        &self,
        what: &'static str,
        layout: &'static str,
        own: &Times,
        yardstick: &Times,
        bytes: usize,
    ) -> Row {
        let gbps = |times: &Times| bytes as f64 / times.fastest().as_secs_f64() / 1e9;
        let cpu = |times: &Times| times.least_cpu().as_secs_f64() * 1e12 / bytes as f64;
        let goal = match (self.options.yardstick, what, self.mode) {
            (Yardstick::Loop, "dump", _) => 1.0,
            (Yardstick::Loop, _, Mode::Direct) => 0.97,
            _ => 0.85,
        };
        Row {
            what,
            layout,
            block_bytes: self.block,
            workers: self.workers,
            mode: self.mode,
            gbps: gbps(own),
            yardstick_gbps: gbps(yardstick),
            ratio: own.ratio(yardstick),
            median_ratio: own.median_ratio(yardstick),
            goal,
            cpu_ms_per_gb: cpu(own),
            yardstick_cpu_ms_per_gb: cpu(yardstick),
        }
    }
}

/// The rows in Markdown; a ratio in bold reaches its goal.
pub fn table(rows: &[Row]) -> String {
    let mut text =
        "| what | layout | KiB | workers | mode | ucm GB/s | yardstick | ratio | median | \
                    goal | CPU ms/GB, yardstick |\n|---|---|---|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    for row in rows {
        let bold = if row.ratio >= row.goal { "**" } else { "" };
        text += &format!(
            "| {} | {} | {} | {} | {} | {:.2} | {:.2} | {bold}{:.2}{bold} | {:.2} | {:.2} | {:.0}, \
             {:.0} |\n",
            row.what,
            row.layout,
            row.block_bytes >> 10,
            row.workers,
            row.mode.name(),
            row.gbps,
            row.yardstick_gbps,
            row.ratio,
            row.median_ratio,
            row.goal,
            row.cpu_ms_per_gb,
            row.yardstick_cpu_ms_per_gb,
        );
    }
    text
}
