//! The figures of a run, as a table to read and as JSON to draw.

use std::fmt::Write;

use serde::Serialize;

use super::contest::Times;
use super::machine::Machine;

/// Least share of its yardstick that a load through the page cache shall reach, with checksums.
const LOAD_GOAL: f64 = 0.85;
/// The same past the page cache.
const DIRECT_LOAD_GOAL: f64 = 0.97;
/// The same for a dump.
const DUMP_GOAL: f64 = 1.0;
/// Most that a lookup shall cost, us per id.
const LOOKUP_GOAL: f64 = 1.5;
/// Most processor time of an idle engine, percent of a core.
const IDLE_GOAL: f64 = 1.0;

/// Which way the bytes go.
#[derive(Serialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From files.
    Load,
    /// To files.
    Dump,
}

/// Where the bytes are on our side of the file.
#[derive(Serialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// In a staging slot.
    Slot,
    /// In the caller's memory.
    Memory,
}

/// How files are read and written.
#[derive(Serialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Through the page cache, which holds what is read.
    Buffered,
    /// The same with the device in it: a load after syncfs and POSIX_FADV_DONTNEED, a dump up to
    /// the end of a syncfs.
    Synced,
    /// Past the page cache (O_DIRECT).
    Direct,
}

impl Mode {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Buffered, Self::Synced, Self::Direct];

    fn name(self, direction: Direction) -> &'static str {
        match (self, direction) {
            (Self::Buffered, _) => "buffered",
            (Self::Synced, Direction::Load) => "evicted",
            (Self::Synced, Direction::Dump) => "syncfs",
            (Self::Direct, _) => "O_DIRECT",
        }
    }
}

/// One row of the table of loads and dumps.
#[derive(Serialize, Debug, Clone)]
pub struct Row {
    /// Which way.
    pub direction: Direction,
    /// To or from where.
    pub side: Side,
    /// Bytes of KV of a block.
    pub block_bytes: usize,
    /// Threads, on both sides of the ratio.
    pub workers: usize,
    /// Through or past the page cache.
    pub mode: Mode,
    /// Whether checksums were taken and compared.
    pub checksums: bool,
    /// Ours, bytes of KV, GB/s, the fastest turn.
    pub gbps: f64,
    /// The plain loop's.
    pub yardstick_gbps: f64,
    /// The fastest turn of ours against the fastest of the loop.
    pub ratio: f64,
    /// The median of the ratios of single rounds.
    pub median_ratio: f64,
    /// Processor time of ours, ms for a GB of KV, the least of any turn: other load on the machine
    /// hardly shows in it.
    pub cpu_ms_per_gb: f64,
    /// The plain loop's.
    pub yardstick_cpu_ms_per_gb: f64,
    /// Least ratio wanted, where there is a goal.
    pub goal: Option<f64>,
    /// What bounds both.
    pub limit: String,
    /// How much that gives, GB/s.
    pub limit_gbps: Option<f64>,
}

impl Row {
    pub(super) fn new(
        direction: Direction,
        side: Side,
        block_bytes: usize,
        workers: usize,
        mode: Mode,
        checksums: bool,
    ) -> Self {
        let goal = match direction {
            _ if !checksums => None,
            Direction::Dump => Some(DUMP_GOAL),
            Direction::Load if mode == Mode::Direct => Some(DIRECT_LOAD_GOAL),
            Direction::Load => Some(LOAD_GOAL),
        };
        Self {
            direction,
            side,
            block_bytes,
            workers,
            mode,
            checksums,
            gbps: 0.0,
            yardstick_gbps: 0.0,
            ratio: 0.0,
            median_ratio: 0.0,
            cpu_ms_per_gb: 0.0,
            yardstick_cpu_ms_per_gb: 0.0,
            goal,
            limit: String::new(),
            limit_gbps: None,
        }
    }

    pub(super) fn with(mut self, own: &Times, yardstick: &Times, bytes: usize) -> Self {
        let gbps = |times: &Times| bytes as f64 / times.fastest().as_secs_f64() / 1e9;
        self.gbps = gbps(own);
        self.yardstick_gbps = gbps(yardstick);
        self.ratio = own.ratio(yardstick);
        self.median_ratio = own.median_ratio(yardstick);
        let cpu = |times: &Times| times.least_cpu().as_secs_f64() * 1e12 / bytes as f64;
        self.cpu_ms_per_gb = cpu(own);
        self.yardstick_cpu_ms_per_gb = cpu(yardstick);
        self
    }

    fn same_case(&self, block: usize, workers: usize) -> bool {
        (self.block_bytes, self.workers) == (block, workers)
    }
}

/// What one way of asking costs.
#[derive(Serialize, Debug, Clone)]
pub struct Lookup {
    /// The engine's method.
    pub call: &'static str,
    /// Which ids are there: all, none, or half of them.
    pub ids_are: &'static str,
    /// Ids of a call.
    pub ids: usize,
    /// Microseconds of a call, the fastest.
    pub call_us: f64,
    /// Microseconds for each id of the call.
    pub us_per_id: f64,
    /// The same for a loop of stat on one thread.
    pub stat_us_per_id: f64,
    /// Most microseconds per id wanted.
    pub goal_us: f64,
}

impl Lookup {
    pub(super) fn new(
        call: &'static str,
        ids_are: &'static str,
        ids: usize,
        us: f64,
        stat_us: f64,
    ) -> Self {
        Self {
            call,
            ids_are,
            ids,
            call_us: us,
            us_per_id: us / ids as f64,
            stat_us_per_id: stat_us / ids as f64,
            goal_us: LOOKUP_GOAL,
        }
    }
}

/// What an open engine takes while it has nothing to do.
#[derive(Serialize, Debug, Clone, Default)]
pub struct Idle {
    /// Processor time, percent of one core.
    pub cpu_percent: f64,
    /// How long it was watched.
    pub seconds: f64,
    /// Threads it has.
    pub threads: usize,
    /// Descriptors it has open.
    pub descriptors: usize,
    /// Anonymous memory that it touched by being opened.
    pub memory_bytes: u64,
}

/// What fio reached on one large file.
#[derive(Serialize, Debug, Clone)]
pub struct Fio {
    /// Which way.
    pub direction: Direction,
    /// Bytes of one operation.
    pub block_bytes: usize,
    /// Threads.
    pub workers: usize,
    /// Past the page cache.
    pub direct: bool,
    /// GB/s.
    pub gbps: f64,
}

/// Everything one run found.
#[derive(Serialize, Debug, Clone)]
pub struct Figures {
    /// Where.
    pub machine: Machine,
    /// Loads and dumps.
    pub rows: Vec<Row>,
    /// (bytes of a block, threads, GB/s) of a plain memcpy.
    pub memcpy: Vec<(usize, usize, f64)>,
    /// fio's, none if it was not run.
    pub fio: Vec<Fio>,
    /// Lookups.
    pub lookups: Vec<Lookup>,
    /// Memory of the process that each published block takes, bytes.
    pub bytes_per_block: f64,
    /// An engine without work.
    pub idle: Idle,
}

impl Figures {
    pub(super) fn new(machine: Machine) -> Self {
        Self {
            machine,
            rows: Vec::new(),
            memcpy: Vec::new(),
            fio: Vec::new(),
            lookups: Vec::new(),
            bytes_per_block: 0.0,
            idle: Idle::default(),
        }
    }

    /// Names what bounds each row: memory where the page cache has the bytes, else the device,
    /// which gives at least what the fastest of fio and the plain loops got past the page cache.
    pub(super) fn set_limits(&mut self) {
        let device = |row: &Row| {
            let fio = self.fio.iter().filter(|fio| {
                fio.direct
                    && fio.direction == row.direction
                    && row.same_case(fio.block_bytes, fio.workers)
            });
            let loops = self.rows.iter().filter(|other| {
                other.mode == Mode::Direct
                    && other.direction == row.direction
                    && row.same_case(other.block_bytes, other.workers)
            });
            fio.map(|fio| fio.gbps)
                .chain(loops.map(|other| other.yardstick_gbps))
                .reduce(f64::max)
        };
        let memory = |row: &Row| {
            let mut figures = self.memcpy.iter();
            figures
                .find(|(block, workers, _)| row.same_case(*block, *workers))
                .map(|(_, _, gbps)| *gbps)
        };
        let limits: Vec<_> = self
            .rows
            .iter()
            .map(|row| match row.mode {
                Mode::Buffered => ("memory", memory(row)),
                Mode::Synced | Mode::Direct => ("device", device(row)),
            })
            .collect();
        for (row, (limit, gbps)) in self.rows.iter_mut().zip(limits) {
            (row.limit, row.limit_gbps) = (limit.to_owned(), gbps);
        }
    }

    /// The table.
    pub fn table(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_table(&mut text);
        text
    }

    fn write_table(&self, text: &mut String) -> std::fmt::Result {
        let machine = &self.machine;
        writeln!(
            text,
            "{} cores of {}, Linux {}, {}; GB/s of KV, the fastest turn of each; ratio: ucm / \
             plain loop",
            machine.cores, machine.processor, machine.kernel, machine.file_system
        )?;
        for direction in [Direction::Load, Direction::Dump] {
            let head = match direction {
                Direction::Load => "\nload   to    ",
                Direction::Dump => "\ndump   from  ",
            };
            writeln!(
                text,
                "{head}  KiB  workers  mode      crc   ucm GB/s  plain GB/s  ratio  median  \
                 goal         limit GB/s  CPU ms/GB, plain"
            )?;
            for row in self.rows.iter().filter(|row| row.direction == direction) {
                writeln!(
                    text,
                    "       {:<6}{:>5}  {:>7}  {:<8}  {:<3}  {:>9.2}  {:>10.2}  {:>5.2}  {:>6.2}  \
                     {:<11}  {:<6} {:>5}  {:>9.0}  {:>5.0}",
                    if row.side == Side::Slot {
                        "slot"
                    } else {
                        "memory"
                    },
                    row.block_bytes >> 10,
                    row.workers,
                    row.mode.name(direction),
                    if row.checksums { "on" } else { "off" },
                    row.gbps,
                    row.yardstick_gbps,
                    row.ratio,
                    row.median_ratio,
                    row.goal.map_or_else(
                        || "-".to_owned(),
                        |goal| verdict(row.ratio >= goal, &format!("{goal:.2}"))
                    ),
                    row.limit,
                    row.limit_gbps
                        .map_or_else(|| "-".to_owned(), |gbps| format!("{gbps:.2}")),
                    row.cpu_ms_per_gb,
                    row.yardstick_cpu_ms_per_gb,
                )?;
            }
        }
        writeln!(
            text,
            "\nmemory: memcpy of as many threads; device: the fastest of fio on one file and the \
             plain loops, O_DIRECT"
        )?;
        for fio in &self.fio {
            let (kind, direct) = (
                fio.direction,
                if fio.direct { "O_DIRECT" } else { "buffered" },
            );
            let (kib, workers, gbps) = (fio.block_bytes >> 10, fio.workers, fio.gbps);
            writeln!(
                text,
                "fio    {kind:?} {kib:>5} KiB  {workers} threads  {direct:<8}  {gbps:>6.2}"
            )?;
        }
        writeln!(
            text,
            "\nlookup            ids    of   us/call  us/id  stat us/id  goal (us/id)"
        )?;
        for row in &self.lookups {
            let goal = verdict(row.us_per_id <= row.goal_us, &row.goal_us.to_string());
            writeln!(
                text,
                "{:<16}  {:<5}  {:>4}  {:>7.0}  {:>5.2}  {:>10.2}  {goal}",
                row.call, row.ids_are, row.ids, row.call_us, row.us_per_id, row.stat_us_per_id
            )?;
        }
        let idle = &self.idle;
        let goal = verdict(
            idle.cpu_percent < IDLE_GOAL,
            &format!("below {IDLE_GOAL} %"),
        );
        writeln!(
            text,
            "\nidle   {:.3} % of a core over {} s (goal {goal}), {} threads, {} descriptors, {:.1} \
             MB touched",
            idle.cpu_percent,
            idle.seconds,
            idle.threads,
            idle.descriptors,
            idle.memory_bytes as f64 / 1e6
        )?;
        writeln!(
            text,
            "memory of the process for each published block: {:.0} bytes",
            self.bytes_per_block
        )
    }
}

fn verdict(met: bool, goal: &str) -> String {
    format!("{goal} {}", if met { "met" } else { "missed" })
}
