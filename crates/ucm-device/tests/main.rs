//! The tests of this crate as one program, which is built and linked once. Tests that change their
//! process for all others (`broken`, `policy`, `second_device`) are programs of their own.

mod accelerator;
mod beside;
mod common;
mod last_resort;
mod order;
mod over;
mod pinning;
mod properties;
mod region_processes;
mod trans;
mod vendors;
