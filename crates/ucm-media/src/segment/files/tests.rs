//! The suite of every medium, over a directory.

use std::path::Path;
use std::sync::atomic::AtomicU64;

use tempfile::TempDir;
use ucm_infra::SystemClock;
use ucm_io::{IoOptions, IoPool, Process};

use super::*;
use crate::blobs::conformance::{check_blobs, scope};
use crate::layout::Modes;
use crate::layout_kind::LayoutKind;
use crate::quota::{Capacity, Rules};
use crate::shared::{PosixConfig, RootSlot};

fn files(root: &Path, writer: u64) -> Arc<SegmentFiles> {
    let config = PosixConfig {
        root: root.to_owned(),
        scope: scope(writer),
        direct: false,
        capacity: std::num::NonZeroU64::new(1 << 30).map(Capacity::Bytes),
        rules: Rules::default(),
        process: Process::this(),
        modes: Modes::default(),
        place: RootSlot::default(),
    };
    let (io, clock) = (IoOptions::with_workers(2), SystemClock::shared());
    let io = IoPool::psync(false, &io).unwrap();
    let deadline = clock.now().after(Duration::from_secs(60));
    let shared = Shared::new(config, Some(LayoutKind::Segment), io, clock).unwrap();
    let shared = Arc::new(shared);
    shared.open_root(deadline).unwrap();
    Arc::new(SegmentFiles { shared })
}

#[test]
fn a_directory_is_a_medium_of_segments() {
    let dir = TempDir::new().unwrap();
    let writers = AtomicU64::new(1);
    let make = || files(dir.path(), writers.fetch_add(1, Ordering::Relaxed));
    check_blobs(&make, true);
}
