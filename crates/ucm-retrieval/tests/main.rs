//! The tests of this crate as one program, which is built and linked once.

mod attention;
mod common;
mod dot;
mod encode;
mod hamming;
mod select;
