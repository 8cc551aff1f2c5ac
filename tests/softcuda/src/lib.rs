//! A software CUDA driver for tests.
//!
//! A shared library that the code under test opens by its path, instead of the driver. It has the
//! driver's functions with their C ABI, two devices, and the important rules:
//!
//! * device memory faults when the host touches it, and is never at the same address twice;
//!   registered host memory has a device address of its own,
//! * each stream is a queue with a thread: work runs later than the call, in order, and is ordered
//!   with other streams by events only,
//! * contexts, handles and address ranges are checked; a kernel that accesses unmapped memory
//!   breaks its context for good,
//! * a copy without a stream, from unpinned memory to the device, returns before its bytes are
//!   written: the default stream can be waited for, and cannot be passed to another call,
//! * while a thread captures a graph, calls that disturb it are refused and invalidate it
//!   ([`capture`]),
//! * kernels are PTX, and run ([`ptx`]),
//! * errors that corrupt data or hang on real hardware end the process with a line on standard
//!   error: freeing memory that queued work uses, changing pinned memory that a queued copy needs
//!   ([`watch`]), the legacy stream, `cuCtxSynchronize`, a call of the driver from inside a
//!   callback,
//! * in a process forked after `cuInit`, calls return `CUDA_ERROR_NOT_INITIALIZED`.
//!
//! The same driver is the runtime of other vendors under their names ([`VENDOR_NAMES`]): `hip*`,
//! `musa*` and `mc*`, where a thread has device 0 before it sets one and the last error of a thread
//! is kept for its next query, and `aclrt*`, where a thread has no device at first, copies name the
//! space at their target, event queries return opposite values, copies on the device and registered
//! memory are aligned, and a device has additional contexts. A copy of the wrong kind is refused.
//! All these share contexts, memory and streams with the functions of CUDA.
//!
//! # Controls
//! Exported beside the driver's functions:
//!
//! | function | what it does |
//! |---|---|
//! | [`softcuda_fail`]`(name, nth, result)` | the nth call of a function from now fails |
//! | [`softcuda_corrupt`]`(name)` | copies of a function, or launches of a kernel, write a wrong byte (null: none) |
//! | [`softcuda_block`]`(name)` | calls of a function wait (null: none) |
//! | [`softcuda_break`]`(device, result)` | breaks the context of a device for good |
//! | [`softcuda_hold`]`(stream)`, [`softcuda_release`]`(stream)` | a stream (null: all) begins nothing until released |
//! | [`softcuda_jitter`]`(seed, max_us)` | random delays before operations |
//! | [`softcuda_accept`]`(start, len)`, [`softcuda_forget`]`(start)` | host memory that counts as device memory |
//! | [`softcuda_read`]`(address, into, len)`, [`softcuda_write`]`(address, from, len)` | device memory, at once |
//! | [`softcuda_calls`]`(name)` | how often a function was called |
//! | [`softcuda_bytes`]`(kind)` | bytes moved: 0 H2D, 1 D2H, 2 D2D, by kernels 3 of the host and 4 of the device |
//! | [`softcuda_live`]`(kind)` | live: 0 allocations, 1 registrations, 2 streams, 3 events, 4 modules, 5 contexts |
//! | [`softcuda_now_ns`]`()` | the host's time on the virtual clock |
//! | [`softcuda_model`]`(on)` | whether work in streams takes virtual time |
//!
//! # The virtual clock A call in a context takes the host 1.5 µs, a launch 4.7 µs. With the cost
//! model on, copies between host and device take a DMA engine (one for each direction) 1.6 µs and
//! their bytes at 54 GB/s, kernels read and write mapped host memory at 50 GB/s and device memory
//! at 3 TB/s. An operation begins when its stream has reached it, it was submitted, and its engine
//! is free for long enough. Events have the time at which they were reached; a wait for one, on the
//! host or in a stream, advances the waiter to that time.

mod call;
mod capture;
mod clock;
mod context;
mod control;
mod copy;
mod device;
mod error;
mod event;
mod exports;
mod map;
mod memory;
mod module;
pub mod ptx;
mod state;
mod stream;
mod vendors;
mod watch;

pub use control::*;
pub use error::*;
pub use exports::*;
pub use state::Handle;
pub use vendors::*;
