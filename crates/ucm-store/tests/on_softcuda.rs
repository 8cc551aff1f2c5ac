//! Tests that make the software driver the device of their process: a program of their own.

mod common;
mod device_faults;
mod memory_lent;
