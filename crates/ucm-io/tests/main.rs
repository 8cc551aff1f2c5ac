//! The tests of this crate as one program, which is built and linked once.

mod common;
mod engines;
mod faulty;
mod fuse;
mod into;
mod links;
mod names;
mod real_fs;
mod usrbio;
