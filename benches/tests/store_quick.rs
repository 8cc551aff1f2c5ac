//! The store's benches run and have every row; the figures are not checked.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::path::PathBuf;

use ucm_benches::store::{Mode, Options, Result, Yardstick, run, table};

fn quick(yardstick: Yardstick, name: &str) -> Result<()> {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let options = Options::full(yardstick, dir.clone()).quick();
    let rows = run(&options, &|_| {})?;
    for &mode in &options.modes {
        let count = rows.iter().filter(|row| row.mode == mode).count();
        // A dump and two loads of each layout; no rows of a mode that the file system lacks.
        assert!(count == 6 || (count == 0 && mode == Mode::Direct));
    }
    assert!(rows.iter().all(|row| row.gbps > 0.0 && row.ratio > 0.0));
    assert_eq!(table(&rows).lines().count(), rows.len() + 2);
    let left = std::fs::read_dir(dir)?.count();
    assert_eq!(left, 0, "it removes its files");
    Ok(())
}

#[test]
fn the_quick_run_beside_the_loop_has_every_row() {
    quick(Yardstick::Loop, "loop").unwrap();
}

#[test]
fn the_quick_run_beside_fio_has_every_row_or_says_what_is_missing() {
    if let Err(error) = quick(Yardstick::Fio, "fio") {
        assert!(
            error.to_string().contains("fio is not installed"),
            "{error}"
        );
    }
}
