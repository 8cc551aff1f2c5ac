//! The I/O engines beside one plain loop of system calls: see [`ucm_benches::store::engines`].
//!
//! `cargo bench -p ucm-benches -- engines`, with the options of [`Arguments`].
#![allow(clippy::print_stdout, reason = "a bench prints its table")]

use std::path::PathBuf;
use std::process::ExitCode;

use ucm_benches::cli::{Arguments, program, say};
use ucm_benches::store::{Options, Result, engines, engines_table};

const NAME: &str = "engines";
/// Most MiB of a turn.
const MOST_MIB: usize = 512;

fn main() -> ExitCode {
    program(NAME, bench)
}

fn bench() -> Result<()> {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (full, quick) = (Options::full(dir.clone()), Options::quick(dir));
    let asked = Arguments::parse(std::env::args().skip(1), full, quick, MOST_MIB)?;
    let rows = engines(&asked.options, &|text| say(NAME, text))?;
    println!("{}", engines_table(&rows));
    if let Some(path) = asked.json {
        std::fs::write(path, serde_json::to_vec_pretty(&rows)?)?;
    }
    Ok(())
}
