//! What the benches that measure stores have in common as programs: their arguments, what they say,
//! how they end.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::asked_for;
use crate::store::{Mode, Options, Result};

/// Options that no value follows.
const FLAGS: [&str; 3] = ["--quick", "--bench", "--no-fio"];

/// Whether the words that are neither options nor their values are none, or one of them is in this
/// name.
pub(crate) fn is_named(name: &str, words: impl IntoIterator<Item = String>) -> bool {
    let (mut words, mut named) = (words.into_iter(), None);
    while let Some(word) = words.next() {
        if !word.starts_with('-') {
            named = Some(named == Some(true) || name.contains(&word));
        } else if !FLAGS.contains(&word.as_str()) {
            words.next();
        }
    }
    named.unwrap_or(true)
}

/// Runs a bench if the words of the command line are for it; an error is said, and ends the program
/// with 1.
pub fn program(name: &str, bench: impl FnOnce() -> Result<()>) -> ExitCode {
    if !asked_for(name) {
        return ExitCode::SUCCESS;
    }
    match bench() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(name, &format!("failed: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Says on standard error what a bench is doing.
pub fn say(name: &str, text: &str) {
    // Nobody to tell if standard error is closed.
    let _ = writeln!(std::io::stderr(), "{name} bench: {text}");
}

/// What the command line asks for.
#[derive(Debug)]
pub struct Arguments {
    /// What is measured.
    pub options: Options,
    /// Where the figures are written, as JSON.
    pub json: Option<PathBuf>,
}

impl Arguments {
    /// `[--quick] [--json FILE] [--dir DIR] [--mib N] [--rounds N] [--no-fio]`, and for one case
    /// alone `[--kib N] [--workers N] [--mode buffered|synced|direct]`, over `full` or, with
    /// `--quick`, over `quick`; at most `most_mib` MiB in a turn. An option that is none of these,
    /// or has no right value, is an error.
    pub fn parse(
        words: impl IntoIterator<Item = String>,
        full: Options,
        quick: Options,
        most_mib: usize,
    ) -> Result<Self> {
        let words: Vec<String> = words.into_iter().collect();
        let quickly = words.iter().any(|word| word == "--quick");
        let mut options = if quickly { quick } else { full };
        let mut json = None;
        let mut words = words.into_iter();
        while let Some(argument) = words.next() {
            let mut value = || {
                words
                    .next()
                    .ok_or_else(|| format!("{argument} needs a value"))
            };
            match argument.as_str() {
                "--json" => json = Some(PathBuf::from(value()?)),
                "--dir" => options.dir = PathBuf::from(value()?),
                "--mib" => options.turn_bytes = value()?.parse::<usize>()?.clamp(4, most_mib) << 20,
                "--rounds" => options.rounds = value()?.parse::<usize>()?.clamp(1, 99),
                "--kib" => {
                    options.block_bytes = vec![value()?.parse::<usize>()?.clamp(4, 1 << 18) << 10]
                }
                "--workers" => options.workers = vec![value()?.parse::<usize>()?.clamp(1, 64)],
                "--mode" => options.modes = vec![mode(&value()?)?],
                "--no-fio" => options.fio = false,
                flag if FLAGS.contains(&flag) => {} // seen above, or cargo's
                option if option.starts_with('-') => {
                    return Err(format!("unknown option {option}").into());
                }
                _ => {} // the names of benches
            }
        }
        Ok(Self { options, json })
    }
}

fn mode(name: &str) -> Result<Mode> {
    match name {
        "buffered" => Ok(Mode::Buffered),
        "synced" => Ok(Mode::Synced),
        "direct" => Ok(Mode::Direct),
        _ => Err("--mode is buffered, synced or direct".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &str) -> Result<Arguments> {
        let (full, quick) = (
            Options::full(PathBuf::from("/full")),
            Options::quick(PathBuf::from("/quick")),
        );
        Arguments::parse(words.split_whitespace().map(str::to_owned), full, quick, 64)
    }

    #[test]
    fn options_change_what_is_measured_wherever_they_stand() {
        let asked = parse("fio --mib 1000 --kib 4 --quick --json x --mode direct --no-fio --bench")
            .unwrap();
        assert_eq!(asked.options.dir, PathBuf::from("/quick"));
        assert_eq!(
            (asked.options.turn_bytes, asked.options.block_bytes),
            (64 << 20, vec![4096])
        );
        assert_eq!(
            (asked.options.modes, asked.options.fio),
            (vec![Mode::Direct], false)
        );
        assert_eq!(asked.json, Some(PathBuf::from("x")));
        assert_eq!(parse("").unwrap().options.dir, PathBuf::from("/full"));
    }

    #[test]
    fn a_value_of_an_option_is_no_name_of_a_bench() {
        let named = |words: &str| is_named("store", words.split_whitespace().map(str::to_owned));
        assert!(
            named("") && named("--quick") && named("--mib 8 --bench") && named("fio --quick store")
        );
        assert!(!named("fio") && !named("--quick fio --json store"));
    }

    #[test]
    fn what_cannot_be_meant_is_an_error_that_names_it() {
        let error = |words| parse(words).unwrap_err().to_string();
        assert_eq!(error("--fast"), "unknown option --fast");
        assert_eq!(error("--dir"), "--dir needs a value");
        assert!(error("--mode raw").contains("buffered, synced or direct"));
        assert!(parse("--mib many").is_err());
    }
}
