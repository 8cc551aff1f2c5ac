//! A CUDA driver in software, over which the device code is tested on machines without a GPU.
//!
//! [`ptx`] executes the kernels that are shipped, instruction by instruction.

pub mod ptx;
