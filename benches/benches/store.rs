//! Loads, dumps and lookups of the store beside plain system calls: see [`ucm_benches::store`].
//!
//! `cargo bench -p ucm-benches -- store [--quick] [--json FILE] [--dir DIR] [--mib N] [--rounds N] [--no-fio]`, and
//! for one case alone `[--kib N] [--workers N] [--mode buffered|synced|direct]`.
#![allow(clippy::print_stdout, reason = "a bench prints its table")]

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use ucm_benches::store::{Mode, Options, Result, run};

/// Most MiB of a turn: five times as much lies on disk, and 256 MiB more.
const MAX_MIB: usize = 768;

fn main() -> ExitCode {
    match bench() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("failed: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn bench() -> Result<()> {
    let mut options = Options::full(PathBuf::from(env!("CARGO_TARGET_TMPDIR")));
    let (mut json, mut words) = (None, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || {
            arguments
                .next()
                .ok_or_else(|| format!("{argument} needs a value"))
        };
        match argument.as_str() {
            "--quick" => {
                options = Options {
                    dir: options.dir,
                    ..Options::quick(PathBuf::new())
                }
            }
            "--json" => json = Some(PathBuf::from(value()?)),
            "--dir" => options.dir = PathBuf::from(value()?),
            "--mib" => options.turn_bytes = value()?.parse::<usize>()?.clamp(4, MAX_MIB) << 20,
            "--rounds" => options.rounds = value()?.parse::<usize>()?.max(1),
            "--kib" => options.block_bytes = vec![value()?.parse::<usize>()?.clamp(4, 1 << 18) << 10],
            "--workers" => options.workers = vec![value()?.parse::<usize>()?.clamp(1, 64)],
            "--mode" => options.modes = vec![mode(&value()?)?],
            "--no-fio" => options.fio = false,
            "--bench" => {} // cargo's
            option if option.starts_with('-') => return Err(format!("unknown option {option}").into()),
            word => words.push(word.to_owned()),
        }
    }
    if !words.is_empty() && !words.iter().any(|word| "store".contains(word.as_str())) {
        return Ok(());
    }
    let figures = run(&options, &say)?;
    println!("{}", figures.table());
    if let Some(path) = json {
        std::fs::write(path, serde_json::to_vec_pretty(&figures)?)?;
    }
    Ok(())
}

fn mode(name: &str) -> Result<Mode> {
    match name {
        "buffered" => Ok(Mode::Buffered),
        "synced" => Ok(Mode::Synced),
        "direct" => Ok(Mode::Direct),
        _ => Err("--mode is buffered, synced or direct".into()),
    }
}

fn say(text: &str) {
    // Nobody to tell if standard error is closed.
    let _ = writeln!(std::io::stderr(), "store bench: {text}");
}
