//! 3FS's client library for tests: the C interface of `hf3fs_usrbio.h` over the files of a
//! directory.
//!
//! A directory with a `3fs-virt` in it counts as a mount of 3FS with everything below it. The
//! important rules are those of the real library and its daemon:
//!
//! * a ring is for reads or for writes, and accepts no more operations than it has entries
//!   (`-EAGAIN`),
//! * operations run on a thread of the ring, may begin before they are submitted, and end in an
//!   undefined order,
//! * a positive depth waits for batches of exactly that size; a negative one takes at most that
//!   number together; 0 takes all,
//! * files are registered by their numbers, once each until they are removed; an operation needs a
//!   registered file with the right open mode; a registration stays valid after the file is closed,
//! * buffers must lie in registered memory; a wait ends at a time of the real-time clock,
//! * errors that would corrupt data end the process with a line on standard error: two threads at
//!   one ring, memory or a ring destroyed under an operation.
//!
//! # Controls
//! Exported beside the functions of the library:
//!
//! | function | what it does |
//! |---|---|
//! | [`soft3fs_calls`]`(name)` | how often a function was called |
//! | [`soft3fs_fail`]`(name, nth, errno)` | the nth call of it from now fails; of `read` and `write`: the nth operation |
//! | [`soft3fs_hold`]`(on)` | operations begin when that is over |
//! | [`soft3fs_live`]`(kind)` | what exists: 0 memory, 1 rings, 2 registered files, 3 operations under way |
//! | [`soft3fs_together`]`()` | the most operations that were taken together |

mod files;
mod ring;
mod state;

pub use files::{hf3fs_dereg_fd, hf3fs_extract_mount_point, hf3fs_is_hf3fs, hf3fs_reg_fd};
pub use ring::{
    Cqe, Ior, Iov, hf3fs_io_entries, hf3fs_iorcreate4, hf3fs_iordestroy, hf3fs_iovcreate,
    hf3fs_iovdestroy, hf3fs_prep_io, hf3fs_submit_ios, hf3fs_wait_for_ios,
};
pub use state::{soft3fs_calls, soft3fs_fail, soft3fs_hold, soft3fs_live, soft3fs_together};
