//! Parts for tests only: an I/O engine that fails by script, and two simple media.
//!
//! The crates above use this one as a dev-dependency. A core built with the feature `test-utils`
//! links it for its toy (`make test-kinds`).
#![forbid(unsafe_code)]

mod fault;
mod nothing;
mod toy;

pub use fault::{Fault, FaultyEngine, Gate, OpKind, Rule, RuleId, Seen, Tail, errno};
pub use nothing::Nothing;
pub use toy::register_toy;
