//! Sparse attention on a CPU: how much each block of a prompt matters to a query, the best of them,
//! and attention over those alone.
//!
//! * [`dot_scores`]: block representations against queries: mean keys, several representatives,
//!   Quest's bounds;
//! * [`encode`](encode()) and [`hamming_scores`]: hash codes of keys and queries, and how many bits
//!   they differ in;
//! * [`select`](select()): the best blocks of every row, exactly, as a shorter block table;
//! * [`attention`](attention()): decode attention over such a table, for pages as vLLM's CPU
//!   backend packs them.
//!
//! Everything works on rows of a batch ([`Rows`]) whose blocks lie anywhere ([`Blocks`], indexed by
//! physical id), and is written for several instruction sets ([`Isa`]), of which the plain one is
//! the oracle of the others. A call shares its work among the threads of a [`Team`] and keeps
//! nothing. A block's score, and a row's choice, are computed by one thread from that block and
//! that row alone, in one order: they do not depend on the batch, on the number of threads or on
//! where the blocks lie.
//!
//! Formulas and their sources are in `docs/sparse.md`.

mod attention;
mod dot;
mod element;
mod encode;
mod hamming;
mod isa;
mod lanes;
mod rows;
mod select;
mod team;
mod vectors;

pub use attention::{Output, Pages, attention};
pub use dot::{DotScores, Heads, Metric, Representations, Reps, dot_scores, quest_queries};
pub use element::Element;
pub use encode::{Codes, Encoder, encode};
pub use hamming::{HammingScores, hamming_scores};
pub use isa::Isa;
pub use rows::{Blocks, Ints, Rows, Windows};
pub use select::{Scores, Selected, select};
pub use team::{MAX_THREADS, Team, has_openmp};
pub use vectors::{Vectors, group_mean};
