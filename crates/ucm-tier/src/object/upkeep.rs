//! The background threads: one keeps the time of writes and waits, one lists others' segments, one
//! counts and makes room, some put segments.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ucm_core::Result;
use ucm_infra::{Clock, Lane, MonotonicTime, Notify, WorkerPool};

use super::UPLOADS;

pub(super) const LANE_TIMER: usize = 0;
pub(super) const LANE_DISCOVERY: usize = 1;
pub(super) const LANE_SPACE: usize = 2;
/// Where segments are put.
pub(super) const LANE_UPLOAD: usize = 3;

/// What a thread waits for: a notification, how often it had been given, and until when.
pub(super) type Next = (Notify, u64, Option<MonotonicTime>);

/// See the module.
pub(super) struct Upkeep {
    pub(super) pool: Arc<WorkerPool>,
    started: AtomicBool,
}

impl Upkeep {
    pub(super) fn new(clock: &Arc<dyn Clock>) -> Result<Self> {
        let lane = |name, max_running| Lane {
            name,
            capacity: 8,
            max_running,
        };
        let pool = WorkerPool::builder("ucm-object")
            .on_demand()
            .size(3 + UPLOADS)
            .lanes(&[
                lane("timer", 1),
                lane("finder", 1),
                lane("space", 1),
                lane("upload", UPLOADS),
            ])
            .clock(Arc::clone(clock))
            .build()?;
        Ok(Self {
            pool,
            started: AtomicBool::new(false),
        })
    }

    /// Whether the threads have to be started: true once.
    pub(super) fn begins(&self) -> bool {
        !self.started.swap(true, Ordering::AcqRel)
    }
}
