//! The kinds of media a store can be put together from, by name. A new one is a file that makes it, and a line here.

mod memory;
mod posix;

use std::sync::Arc;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use ucm_core::{Error, ErrorKind, Geometry, Identity, Part, Result};
use ucm_infra::Clock;

use crate::backend::Backend;
use crate::record::RecordLayout;
use crate::space::Capacity;
use crate::tiers::WritePolicy;

/// Every kind: its name, and what makes a medium of it.
const KINDS: &[(&str, Make)] = &[("posix", posix::make), ("cache", memory::make)];

/// Makes a medium of its kind from the keys of its stage.
type Make = fn(&Common<'_>, Map<String, Value>) -> Result<Made>;

/// What holds for every stage of a store.
pub(crate) struct Common<'a> {
    /// Whose KV it is.
    pub(crate) identity: &'a Identity,
    /// Which part of a block.
    pub(crate) part: Part,
    /// Sizes of that part.
    pub(crate) geometry: &'a Geometry,
    /// Where things lie in its records.
    pub(crate) record: &'a RecordLayout,
    /// Nothing is moved, only looked up.
    pub(crate) lookup_only: bool,
    /// Tells what this process writes from what others do.
    pub(crate) writer: u64,
    /// Staging slots: as many writes may be under way.
    pub(crate) slots: usize,
    /// The clock of every deadline.
    pub(crate) clock: Arc<dyn Clock>,
}

/// A medium, and how many of its operations may hang before it is switched off.
pub(crate) struct Made {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) max_stuck: usize,
}

/// One stage as it is asked for: its kind, when it is written to, and the keys of its kind.
#[derive(Debug, Clone, Deserialize)]
pub struct StageSetup {
    /// Name of the kind.
    pub kind: String,
    /// Name of the [`WritePolicy`]; through if nothing is said.
    #[serde(default)]
    pub write_policy: Option<String>,
    /// The keys of the kind.
    #[serde(flatten)]
    pub keys: Map<String, Value>,
}

impl StageSetup {
    /// Makes the medium. `Config` for a kind or key that does not exist.
    pub(crate) fn make(self, common: &Common<'_>) -> Result<Made> {
        let Some((_, make)) = KINDS.iter().find(|(name, _)| *name == self.kind) else {
            let known: Vec<&str> = KINDS.iter().map(|(name, _)| *name).collect();
            let unknown = Error::new(ErrorKind::Config, "there is no such kind of stage");
            return Err(unknown.with("kind", self.kind).with("known", known.join(", ")));
        };
        make(common, self.keys)
    }

    /// When the stage is written to.
    pub(crate) fn policy(&self) -> Result<WritePolicy> {
        let Some(name) = &self.write_policy else {
            return Ok(WritePolicy::Through);
        };
        let found = WritePolicy::ALL.into_iter().find(|policy| policy.name() == name);
        let unknown = || Error::new(ErrorKind::Config, "write_policy is through, back or never");
        found.ok_or_else(|| unknown().with("write_policy", name))
    }
}

/// Reads the keys of a kind.
fn keys<T: DeserializeOwned>(kind: &'static str, keys: Map<String, Value>) -> Result<T> {
    serde_json::from_value(Value::Object(keys)).map_err(|error| {
        Error::new(
            ErrorKind::Config,
            "the keys of a stage are not what they should be",
        )
        .with("stage", kind)
        .caused_by(error)
    })
}

/// A limit given in bytes or in percent; none when it is neither, or 0 bytes.
fn capacity(bytes: Option<u64>, percent: Option<f64>) -> Option<Capacity> {
    match (bytes, percent) {
        (Some(bytes), _) => std::num::NonZeroU64::new(bytes).map(Capacity::Bytes),
        (None, percent) => percent.map(Capacity::Percent),
    }
}
