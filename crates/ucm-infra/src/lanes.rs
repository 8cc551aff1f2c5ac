//! The lanes of every pool that works on a medium, most urgent first.

/// Lane of loads.
pub const LANE_LOAD: usize = 0;
/// Lane of lookups and prefetches.
pub const LANE_LOOKUP: usize = 1;
/// Lane of dumps.
pub const LANE_DUMP: usize = 2;
/// Lane of space and housekeeping.
pub const LANE_SPACE: usize = 3;
