//! Parts for tests only: an I/O engine that fails by script, two simple media, and the tests of
//! every medium of the shape `Values`.
//!
//! The crates above use this one as a dev-dependency. A core built with the feature `test-utils`
//! links it for its toy (`make test-kinds`).
#![forbid(unsafe_code)]

mod fault;
mod nothing;
mod toy;
mod values;

pub use fault::{Fault, FaultyEngine, Gate, OpKind, Rule, RuleId, Seen, Tail, errno};
pub use nothing::Nothing;
pub use toy::{ToyMap, ToyValues, register_toy};
pub use values::check_values;
