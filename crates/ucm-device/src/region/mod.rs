//! Memory that one process writes and other processes of its host read: [`SharedRegion`] and
//! [`RegionView`].
//!
//! A region is a memfd with exactly one writer and without locks and pointers. It has a header, an
//! index of 64-bit words that readers probe while it is written, an entry for each slot
//! (generation, id, length, ordinal), and page-aligned record slots. A record is written behind an
//! odd generation and named when it is complete. A reader copies it out and accepts the copy only
//! if the generation did not change ([`ucm_infra::seqlock`]). So a writer may be killed at any
//! moment, and a reader may be arbitrarily slow. Readers find regions by files in a [`Registry`].
//!
//! Its cost for each slot: 32 bytes of entry and 16 to 32 of index in the region, 4 to 8 in the
//! writer. Pages of slots are touched at the first fill and stay. The memory is freed with the last
//! process that maps it.
//!
//! After a fork the child has no region: searches, pins and slots return `None` there, and the
//! child keeps none of its descriptors open.

mod mapping;
mod notice;
mod own;
mod registry;
mod shape;
mod table;
#[cfg(test)]
mod tests;
mod view;

pub use own::{Pinned, RegionOptions, SharedRegion, WriteLease};
pub use registry::{Registry, Scan, Wanted};
pub use view::RegionView;
