//! The bench beside fio runs and has every figure; what the figures are is no matter here.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::path::PathBuf;

use ucm_benches::store::{Direction, Mode, Options, one_file, one_file_table};

#[test]
fn the_quick_run_has_every_row_with_fio_and_without() {
    for (fio, name) in [(true, "with"), (false, "without")] {
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("fio-quick-{name}"));
        let options = Options {
            fio,
            block_bytes: vec![256 << 10],
            modes: vec![Mode::Buffered],
            workers: vec![2],
            ..Options::quick(dir.clone())
        };
        let (machine, rows) = one_file(&options, &|_| {}).unwrap();
        // A dump and a load by the pool, and by the ring where there is one.
        assert!(rows.len() == 4 || rows.len() == 2);
        for row in &rows {
            assert_eq!(row.record_bytes, (256 << 10) + 4096);
            assert!(row.plain > 0.0 && row.checked > 0.0);
            assert_eq!(
                row.engine_checked.is_some(),
                row.direction == Direction::Load
            );
            assert!(row.engine_checked.is_none_or(|gbps| gbps > 0.0));
            assert_eq!(row.fio.is_some(), machine.fio.is_some());
            assert_eq!(
                row.fio_again.is_some(),
                row.fio.is_some() && row.direction == Direction::Dump
            );
            assert!(row.fio.is_none_or(|gbps| gbps.is_finite() && gbps > 0.0));
            let ratios = row.ratios.into_iter().chain(row.median_ratios).flatten();
            assert!(
                ratios
                    .into_iter()
                    .all(|ratio| ratio.is_finite() && ratio > 0.0)
            );
        }
        assert!(fio || machine.fio.is_none());
        let lines = one_file_table(&machine, &rows).lines().count();
        assert_eq!(lines, rows.len() + 7, "a line for each row, and heads");
        assert_eq!(
            std::fs::read_dir(dir).unwrap().count(),
            0,
            "it cleans up after itself"
        );
    }
}
