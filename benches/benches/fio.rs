//! Segments beside fio on one preallocated file: see [`ucm_benches::store::one_file`].
//!
//! `cargo bench -p ucm-benches -- fio`, with the options of [`Arguments`].
#![allow(clippy::print_stdout, reason = "a bench prints its table")]

use std::path::PathBuf;
use std::process::ExitCode;

use ucm_benches::cli::{Arguments, program, say};
use ucm_benches::store::{Options, Result, one_file, one_file_table};

const NAME: &str = "fio";
/// MiB of a turn: the records of a turn fit one segment.
const MIB: usize = 96;
/// Most MiB of a turn: with nine rounds, 22 times as much lies on disk.
const MOST_MIB: usize = 512;

fn main() -> ExitCode {
    program(NAME, bench)
}

fn bench() -> Result<()> {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let full = Options {
        turn_bytes: MIB << 20,
        rounds: 7,
        ..Options::full(dir.clone())
    };
    let quick = Options {
        fio: true,
        ..Options::quick(dir)
    };
    let asked = Arguments::parse(std::env::args().skip(1), full, quick, MOST_MIB)?;
    let (machine, rows) = one_file(&asked.options, &|text| say(NAME, text))?;
    println!("{}", one_file_table(&machine, &rows));
    if let Some(path) = asked.json {
        let document = serde_json::json!({ "machine": machine, "rows": rows });
        std::fs::write(path, serde_json::to_vec_pretty(&document)?)?;
    }
    Ok(())
}
