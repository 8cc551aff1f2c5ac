//! Loads and dumps of a store compared with fio on one preallocated file: see
//! [`ucm_benches::store`].
//!
//! `cargo bench -p ucm-benches -- fio`, with the options of [`ucm_benches::store::Options`].

use std::process::ExitCode;

use ucm_benches::store::{Yardstick, program};

fn main() -> ExitCode {
    program("fio", Yardstick::Fio)
}
