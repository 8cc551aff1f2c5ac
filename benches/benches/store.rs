//! Loads, dumps and lookups of the store beside plain system calls: see [`ucm_benches::store`].
//!
//! `cargo bench -p ucm-benches -- store`, with the options of [`Arguments`].
#![allow(clippy::print_stdout, reason = "a bench prints its table")]

use std::path::PathBuf;
use std::process::ExitCode;

use ucm_benches::cli::{Arguments, program, say};
use ucm_benches::store::{Options, Result, run};

const NAME: &str = "store";
/// Most MiB of a turn: five times as much lies on disk, and 256 MiB more.
const MOST_MIB: usize = 768;

fn main() -> ExitCode {
    program(NAME, bench)
}

fn bench() -> Result<()> {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (full, quick) = (Options::full(dir.clone()), Options::quick(dir));
    let asked = Arguments::parse(std::env::args().skip(1), full, quick, MOST_MIB)?;
    let figures = run(&asked.options, &|text| say(NAME, text))?;
    println!("{}", figures.table());
    if let Some(path) = asked.json {
        std::fs::write(path, serde_json::to_vec_pretty(&figures)?)?;
    }
    Ok(())
}
