//! The suite of every medium, over a directory.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicU64;

use tempfile::TempDir;
use ucm_core::{Geometry, Part};
use ucm_infra::SystemClock;
use ucm_io::{IoOptions, IoPool, Process};
use ucm_quota::layout::Modes;
use ucm_quota::{Capacity, Rules};
use ucm_record::RecordLayout;

use super::*;
use crate::blobs::conformance::{check_blobs, identity};
use crate::layout_kind::LayoutKind;
use crate::shared::{PosixConfig, RootSlot};

fn files(root: &Path, writer: u64) -> Arc<SegmentFiles> {
    let geometry = Geometry::new(vec![4096], 1, 1).unwrap();
    let config = PosixConfig {
        root: root.to_owned(),
        identity: identity(),
        labels: BTreeMap::new(),
        part: Part::default(),
        record: RecordLayout::new(&geometry),
        other_parts: Vec::new(),
        shorter: false,
        direct: false,
        lookup_only: false,
        capacity: std::num::NonZeroU64::new(1 << 30).map(Capacity::Bytes),
        rules: Rules::default(),
        process: Process::this(),
        writer,
        modes: Modes::default(),
        place: RootSlot::default(),
    };
    let (io, clock) = (IoOptions::with_workers(2), SystemClock::shared());
    let io = IoPool::psync(false, &io).unwrap();
    let deadline = clock.now().after(Duration::from_secs(60));
    let shared = Shared::new(config, Some(LayoutKind::Segment), io, clock).unwrap();
    let shared = Arc::new(shared);
    shared.open_root(deadline).unwrap();
    Arc::new(SegmentFiles::new(shared))
}

#[test]
fn a_directory_is_a_medium_of_segments() {
    let dir = TempDir::new().unwrap();
    let writers = AtomicU64::new(1);
    let make = || files(dir.path(), writers.fetch_add(1, Ordering::Relaxed));
    check_blobs(&make);
}
