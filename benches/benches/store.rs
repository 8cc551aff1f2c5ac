//! Loads and dumps of a store compared with plain system calls: see [`ucm_benches::store`].
//!
//! `cargo bench -p ucm-benches -- store`, with the options of [`ucm_benches::store::Options`].

use std::process::ExitCode;

use ucm_benches::store::{Yardstick, program};

fn main() -> ExitCode {
    program("store", Yardstick::Loop)
}
