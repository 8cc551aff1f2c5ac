//! The kinds of tiers that are built in.
//!
//! A new kind is a file here that answers a [`TierKind`], and a line in [`built_in`].

mod compress;
mod ds3fs;
mod memory;
mod object;
mod posix;
mod python;
mod redis;

use crate::kind::TierKind;

/// Every kind that is built in. The first is that of the store that is used where none is named.
pub(crate) fn built_in() -> Vec<TierKind> {
    vec![
        posix::kind(),
        memory::kind(),
        compress::kind(),
        ds3fs::kind(),
        object::kind(),
        redis::kind(),
        python::empty(),
        python::fake(),
    ]
}
