//! The kinds of stages a store can be put together from, by name. A new one is a file that makes it, and a line here.

mod compress;
mod memory;
mod posix;

use std::sync::Arc;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use ucm_core::{Error, ErrorKind, Geometry, Identity, Part, Result};
use ucm_infra::Clock;
use ucm_io::IoPool;

use crate::backend::Backend;
use crate::record::RecordLayout;
use crate::space::Capacity;
use crate::tiers::WritePolicy;

/// Every kind: its name, and what makes it.
const KINDS: &[(&str, Kind)] = &[
    ("posix", Kind::Medium(posix::make)),
    ("cache", Kind::Medium(memory::make)),
    ("compress", Kind::Before(compress::make)),
];

/// What a stage is.
#[derive(Clone, Copy)]
enum Kind {
    /// A medium of its own, from the keys of its stage.
    Medium(fn(&Common<'_>, Map<String, Value>) -> Result<Made>),
    /// Something before the medium below it, which becomes one with it.
    Before(fn(&Common<'_>, Map<String, Value>, Made) -> Result<Made>),
}

/// What holds for every stage of a store.
#[derive(Clone)]
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
    /// The stage above compresses for this one.
    pub(crate) compressed: bool,
}

/// A medium with the threads it is asked on, and how many of these may hang before it is switched off.
pub(crate) struct Made {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) pool: Arc<IoPool>,
    pub(crate) max_stuck: usize,
}

/// Makes the media of a store, top first, each with its policy. `Config` for stages that make no sense together.
pub(crate) fn make_all(stages: Vec<StageSetup>, common: &Common<'_>) -> Result<Vec<(Made, WritePolicy)>> {
    let mut media = Vec::with_capacity(stages.len());
    let mut before: Option<StageSetup> = None;
    for stage in stages {
        if matches!(stage.kind()?, Kind::Before(_)) {
            if let Some(above) = before.replace(stage) {
                let text = "a stage that compresses stands before a medium, and one is enough; leave one of the two out";
                return Err(Error::new(ErrorKind::Config, text).with("stage", above.kind));
            }
            continue;
        }
        let common = Common {
            compressed: before.is_some(),
            ..common.clone()
        };
        let policy = stage.policy()?;
        let made = stage.make(&common)?;
        let made = match before.take() {
            Some(above) => above.make_before(&common, made)?,
            None => made,
        };
        media.push((made, policy));
    }
    match before {
        Some(above) => {
            let text = "a stage that compresses is the last one; write below it the stage it compresses for";
            Err(Error::new(ErrorKind::Config, text).with("stage", above.kind))
        }
        None => Ok(media),
    }
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
    /// What it is. `Config` for a kind that does not exist.
    fn kind(&self) -> Result<Kind> {
        if let Some((_, kind)) = KINDS.iter().find(|(name, _)| *name == self.kind) {
            return Ok(*kind);
        }
        let known: Vec<&str> = KINDS.iter().map(|(name, _)| *name).collect();
        let unknown = Error::new(ErrorKind::Config, "there is no such kind of stage");
        Err(unknown.with("kind", &self.kind).with("known", known.join(", ")))
    }

    /// Makes the medium. `Config` for a kind or key that does not exist.
    fn make(self, common: &Common<'_>) -> Result<Made> {
        match self.kind()? {
            Kind::Medium(make) => make(common, self.keys),
            Kind::Before(_) => Err(Error::internal("this stage is no medium")),
        }
    }

    /// Puts this stage before a medium.
    fn make_before(self, common: &Common<'_>, below: Made) -> Result<Made> {
        if self.write_policy.is_some() {
            let text =
                "write_policy belongs to the stage that keeps the records, not to the one that compresses";
            return Err(Error::new(ErrorKind::Config, text).with("stage", self.kind));
        }
        match self.kind()? {
            Kind::Before(make) => make(common, self.keys, below),
            Kind::Medium(_) => Err(Error::internal("this stage is a medium")),
        }
    }

    /// When the stage is written to.
    fn policy(&self) -> Result<WritePolicy> {
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

#[cfg(feature = "compress")]
#[cfg(test)]
mod tests {
    use serde_json::json;
    use ucm_infra::SystemClock;

    use super::*;

    fn stage(written: Value) -> StageSetup {
        serde_json::from_value(written).unwrap()
    }

    fn compress() -> StageSetup {
        stage(json!({"kind": "compress"}))
    }

    fn posix(layout: &str) -> StageSetup {
        stage(json!({
            "kind": "posix", "root": "/nowhere", "labels": {}, "io_direct": false, "io_threads": 1,
            "layout": layout, "segment_size": 1 << 20, "segment_age_s": 1.0, "segment_merge_rate": 0, "capacity_bytes": 1 << 30,
            "capacity_percent": null, "floor_bytes": null, "floor_percent": null, "quota_bytes": null,
            "quota_percent": null, "expire_after_s": null, "file_mode": 0o600, "dir_mode": 0o700,
            "quarantine_enabled": true, "quarantine_max_per_minute": 1, "quarantine_max_records": 1,
            "quarantine_max_bytes": 1, "quarantine_keep_s": 1.0,
        }))
    }

    /// Why these stages make no store; nothing where they do.
    fn refusal(stages: Vec<StageSetup>) -> Option<String> {
        let identity = Identity::parse(concat!(
            r#"{"format_version":1,"architecture":"A","world_size":1,"dtype":"f32","weights":"w","model_config":{},"#,
            r#""position":{},"kv_dtype":"f32","attention_backend":"a","kv_packing":{},"kv_layout":"l","kv_groups":[],"#,
            r#""block_tokens":16,"tensor_parallel":1,"pipeline_parallel":1,"decode_context_parallel":1}"#
        ));
        let (identity, geometry) = (identity.unwrap(), Geometry::new(vec![4096], 4, 4).unwrap());
        let common = Common {
            identity: &identity,
            part: Part::default(),
            geometry: &geometry,
            record: &RecordLayout::new(&geometry),
            lookup_only: false,
            writer: 1,
            slots: 4,
            clock: SystemClock::shared(),
            compressed: false,
        };
        make_all(stages, &common).err().map(|error| error.to_string())
    }

    #[test]
    fn a_stage_that_compresses_stands_before_segments_and_nothing_else() {
        assert_eq!(refusal(vec![compress(), posix("segment")]), None);
        let cache = || {
            stage(
                json!({"kind": "cache", "capacity_bytes": 1 << 20, "capacity_percent": null, "policy": "lru",
                         "processes": 1}),
            )
        };
        for (stages, words) in [
            (vec![compress(), posix("file")], "segments only"),
            (vec![compress(), cache()], "below Cache"),
            (vec![posix("segment"), compress()], "the last one"),
            (vec![compress()], "the last one"),
            (vec![compress(), compress(), posix("segment")], "one is enough"),
            (vec![stage(json!({"kind": "zip"}))], "no such kind"),
        ] {
            let why = refusal(stages).unwrap_or_default();
            assert!(why.contains(words), "{why}");
        }
        let mut told = compress();
        told.write_policy = Some("through".into());
        let why = refusal(vec![told, posix("segment")]).unwrap();
        assert!(why.contains("write_policy"), "{why}");
    }
}
