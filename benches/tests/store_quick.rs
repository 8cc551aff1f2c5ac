//! The store's bench runs and has every figure; what the figures are is no matter here.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::path::PathBuf;

use ucm_benches::store::{Mode, Options, run};

#[test]
fn the_quick_run_has_every_row() {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("store-quick");
    let figures = run(&Options::quick(dir.clone()), &|_| {}).unwrap();
    let modes = Mode::ALL.iter().filter(|&&mode| {
        let rows: Vec<_> = figures.rows.iter().filter(|row| row.mode == mode).collect();
        // Three to load and three to dump for each size and number of workers; none of one mode if
        // it is not there.
        assert!(rows.len() == 24 || (rows.is_empty() && mode == Mode::Direct));
        assert!(rows.iter().all(|row| row.gbps > 0.0 && row.ratio > 0.0));
        !rows.is_empty()
    });
    assert!(modes.count() >= 2);
    assert_eq!(figures.lookups.len(), 6);
    assert!(figures.idle.threads > 0);
    let json = serde_json::to_value(&figures).unwrap();
    assert_eq!(json["rows"].as_array().unwrap().len(), figures.rows.len());
    assert!(figures.table().lines().count() > figures.rows.len());
    assert_eq!(
        std::fs::read_dir(dir).unwrap().count(),
        0,
        "it cleans up after itself"
    );
}
