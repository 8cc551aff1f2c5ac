//! What to measure, and how long.

use std::path::PathBuf;

use serde::Serialize;

use super::Result;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// The reference of the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Yardstick {
    /// Plain system calls, a file for each record.
    Loop,
    /// fio on one file.
    Fio,
}

/// Modes of reading and writing files.
#[derive(Serialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Through the page cache, which has the bytes of a load.
    Buffered,
    /// The same with the device in it: a load after syncfs and POSIX_FADV_DONTNEED, a dump up to
    /// the end of a syncfs.
    Synced,
    /// Past the page cache (O_DIRECT).
    Direct,
}

impl Mode {
    const ALL: [Self; 3] = [Self::Buffered, Self::Synced, Self::Direct];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Buffered => "buffered",
            Self::Synced => "synced",
            Self::Direct => "direct",
        }
    }
}

/// Settings of a measurement.
#[derive(Debug, Clone)]
pub struct Options {
    /// The reference of the comparison.
    pub yardstick: Yardstick,
    /// Parent of the temporary directory of the run.
    pub dir: PathBuf,
    /// Sizes of blocks, bytes of KV.
    pub block_bytes: Vec<usize>,
    /// Numbers of threads.
    pub workers: Vec<usize>,
    /// Ways of reading and writing.
    pub modes: Vec<Mode>,
    /// Bytes moved in one turn.
    pub turn_bytes: usize,
    /// Turns of each contender that count.
    pub rounds: usize,
    /// File for the rows as JSON.
    pub json: Option<PathBuf>,
}

impl Options {
    /// The sizes of a published table: some minutes.
    pub fn full(yardstick: Yardstick, dir: PathBuf) -> Self {
        let modes = match yardstick {
            Yardstick::Loop => Mode::ALL.to_vec(),
            Yardstick::Fio => vec![Mode::Buffered, Mode::Direct],
        };
        Self {
            yardstick,
            dir,
            block_bytes: vec![256 * KIB, MIB, 2 * MIB],
            workers: vec![1, 4],
            modes,
            turn_bytes: 64 * MIB,
            rounds: 9,
            json: None,
        }
    }

    /// Each kind of row once, in seconds: checks that it runs, not its speed.
    pub fn quick(self) -> Self {
        Self {
            block_bytes: vec![MIB],
            workers: vec![2],
            turn_bytes: 4 * MIB,
            rounds: 1,
            ..self
        }
    }

    /// Most bytes in `dir` at one time: the dumps of all turns of three contenders, and the records
    /// of loads.
    pub fn disk_bytes(&self) -> u64 {
        self.turn_bytes as u64 * 3 * (self.rounds as u64 + 3)
    }

    /// `[--quick] [--json FILE] [--dir DIR] [--mib N] [--rounds N] [--kib N] [--workers N] [--mode
    /// buffered|synced|direct]`. An option that is none of these, or has a wrong value, is an
    /// error.
    pub fn parse(words: impl IntoIterator<Item = String>, yardstick: Yardstick) -> Result<Self> {
        let words: Vec<String> = words.into_iter().collect();
        let mut options = Self::full(
            yardstick,
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/tmp"),
        );
        if words.iter().any(|word| word == "--quick") {
            options = options.quick();
        }
        let mut words = words.into_iter();
        while let Some(name) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{name} needs a value"));
            match name.as_str() {
                "--json" => options.json = Some(value()?.into()),
                "--dir" => options.dir = value()?.into(),
                "--mib" => options.turn_bytes = value()?.parse::<usize>()?.clamp(4, 512) * MIB,
                "--rounds" => options.rounds = value()?.parse::<usize>()?.clamp(1, 99),
                "--kib" => {
                    options.block_bytes = vec![value()?.parse::<usize>()?.clamp(4, 1 << 18) * KIB]
                }
                "--workers" => options.workers = vec![value()?.parse::<usize>()?.clamp(1, 64)],
                "--mode" => {
                    let (name, modes) = (value()?, Mode::ALL);
                    let mode = modes.into_iter().find(|mode| mode.name() == name);
                    options.modes = vec![mode.ok_or("--mode is buffered, synced or direct")?];
                }
                "--quick" | "--bench" => {}
                option if option.starts_with('-') => {
                    return Err(format!("unknown option {option}").into());
                }
                _ => {} // names of benches
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &str) -> Result<Options> {
        Options::parse(words.split_whitespace().map(str::to_owned), Yardstick::Loop)
    }

    #[test]
    fn options_change_what_is_measured_wherever_they_stand() {
        let options = parse("store --mib 1000 --quick --mode direct --bench").unwrap();
        assert_eq!((options.turn_bytes, options.rounds), (512 * MIB, 1));
        assert_eq!(options.modes, vec![Mode::Direct]);
    }

    #[test]
    fn a_wrong_option_is_an_error_that_names_it() {
        let error = |words| parse(words).unwrap_err().to_string();
        assert_eq!(error("--fast"), "unknown option --fast");
        assert_eq!(error("--dir"), "--dir needs a value");
        assert!(error("--mode raw").contains("buffered, synced or direct"));
        assert!(parse("--mib many").is_err());
    }
}
