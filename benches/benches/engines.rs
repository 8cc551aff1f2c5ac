//! The I/O engines beside one plain loop of system calls: see [`ucm_benches::store::engines`].
//!
//! `cargo bench -p ucm-benches -- engines [--quick] [--dir DIR] [--mib N] [--rounds N]`
#![allow(clippy::print_stdout, reason = "a bench prints its table")]

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use ucm_benches::asked_for;
use ucm_benches::store::{Options, Result, engines, engines_table};

fn main() -> ExitCode {
    if !asked_for("engines") {
        return ExitCode::SUCCESS;
    }
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
            "--dir" => options.dir = PathBuf::from(value()?),
            "--mib" => options.turn_bytes = value()?.parse::<usize>()?.clamp(4, 512) << 20,
            "--rounds" => options.rounds = value()?.parse::<usize>()?.max(1),
            _ => {} // cargo's, and the names of benches
        }
    }
    println!("{}", engines_table(&engines(&options, &say)?));
    Ok(())
}

fn say(text: &str) {
    // Nobody to tell if standard error is closed.
    let _ = writeln!(std::io::stderr(), "engines bench: {text}");
}
