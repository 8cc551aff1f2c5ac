//! Sparse attention on a CPU: scores of a prompt's blocks for a query, selection of the best
//! blocks, and attention over those only.
//!
//! * [`dot_scores`]: block representations against queries: mean keys, several representatives,
//!   Quest's bounds;
//! * [`encode`](encode()) and [`hamming_scores`]: hash codes of keys and queries, and their Hamming
//!   distances;
//! * [`select`](select()): the best blocks of every row, exactly, as a shorter block table;
//! * [`attention`](attention()): decode attention over such a table, for pages as vLLM's CPU
//!   backend packs them.
//!
//! All functions work on rows of a batch ([`Rows`]) with scattered blocks ([`Blocks`], indexed by
//! physical id), for several instruction sets ([`Isa`]); tests compare the vector sets with the
//! scalar one. A call divides its work among the threads of a [`Team`] and keeps no state. One
//! thread computes a block's score, or a row's selection, from that block and that row only, in a
//! fixed order: the result does not depend on the batch, the number of threads or the positions of
//! the blocks.
//!
//! Formulas and their sources are in `docs/sparse-formulas.md`.

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

pub use attention::{Output, Pages, Rerope, attention, rerope_attention};
pub use dot::{DotScores, Heads, Metric, Representations, Reps, dot_scores, quest_queries};
pub use element::Element;
pub use encode::{Codes, Encoder, encode};
pub use hamming::{HammingScores, hamming_scores};
pub use isa::Isa;
pub use rows::{Blocks, Ints, Rows, Windows};
pub use select::{Scores, Selected, select};
pub use team::{MAX_THREADS, Team, has_openmp};
pub use vectors::{Vectors, group_mean};
