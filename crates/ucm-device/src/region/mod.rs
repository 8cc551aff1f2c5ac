//! Memory that one process writes and the others of its host read: [`SharedRegion`] and
//! [`RegionView`].
//!
//! A region is a memfd with exactly one writer, and holds neither lock nor pointer: a header, an
//! index of 64-bit words that readers probe while it is written, an entry for each slot
//! (generation, id, length, ordinal), and record slots on page borders. A record is written behind
//! an odd generation and named when it is whole; a reader copies it out and believes the copy only
//! if the generation did not move ([`ucm_infra::seqlock`]). So a writer may be killed at any
//! moment, and a reader be as slow as it likes. Readers find regions by files in a [`Registry`].
//!
//! What it costs: 32 bytes of entry and 16 to 32 of index for each slot, in the region; 4 to 8 in
//! the writer. Pages of slots are touched when first filled, and stay. The memory goes with the
//! last process that maps it.
//!
//! After a fork the child has no region: finds, pins and slots come out empty there, and nothing of
//! the parent's is kept open.

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
