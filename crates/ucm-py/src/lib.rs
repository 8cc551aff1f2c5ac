//! ucm._core: conversions between Python and the Rust core, no logic.
