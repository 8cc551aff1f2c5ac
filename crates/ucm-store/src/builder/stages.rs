//! The tiers of a store, put together from what is described of each.

use serde::Deserialize;
use serde_json::{Map, Value};
use ucm_core::{Error, ErrorKind, Result};
use ucm_tier::registry::{self, BuildContext, BuiltTier};

use crate::tiers::WritePolicy;

/// Makes the media of a store, top first, each with its policy. `Config` for stages that make no sense together.
pub(super) fn make_all(
    stages: Vec<TierSpec>,
    context: &BuildContext<'_>,
) -> Result<Vec<(BuiltTier, WritePolicy)>> {
    let mut media = Vec::with_capacity(stages.len());
    let mut layer: Option<TierSpec> = None;
    for stage in stages {
        let kind = registry::find(&stage.kind)?;
        if kind.is_layer() {
            if let Some(above) = layer.replace(stage) {
                let text = "a stage that compresses stands before a medium, and one is enough; leave one of the two out";
                return Err(Error::new(ErrorKind::Config, text).with("stage", above.kind));
            }
            continue;
        }
        let context = BuildContext {
            compressed: layer.is_some(),
            ..context.clone()
        };
        let policy = stage.policy()?;
        let built = kind.build(&context, stage.options)?;
        let built = match layer.take() {
            Some(above) => above.build_before(&context, built)?,
            None => built,
        };
        media.push((built, policy));
    }
    match layer {
        Some(above) => {
            let text = "a stage that compresses is the last one; write below it the stage it compresses for";
            Err(Error::new(ErrorKind::Config, text).with("stage", above.kind))
        }
        None => Ok(media),
    }
}

/// One stage as it is asked for: its kind, when it is written to, and the options of its kind.
#[derive(Debug, Clone, Deserialize)]
pub struct TierSpec {
    /// Word of the kind.
    pub kind: String,
    /// Name of the [`WritePolicy`]; through if nothing is said.
    #[serde(default)]
    pub write_policy: Option<String>,
    /// The options of the kind.
    #[serde(flatten)]
    pub options: Map<String, Value>,
}

impl TierSpec {
    /// Puts this layer before a medium.
    fn build_before(self, context: &BuildContext<'_>, below: BuiltTier) -> Result<BuiltTier> {
        if self.write_policy.is_some() {
            let text =
                "write_policy belongs to the stage that keeps the records, not to the one that compresses";
            return Err(Error::new(ErrorKind::Config, text).with("stage", self.kind));
        }
        registry::find(&self.kind)?.build_before(context, self.options, below)
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

#[cfg(feature = "compress")]
#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;
    use ucm_core::{Geometry, Identity, Part};
    use ucm_infra::SystemClock;

    use ucm_record::RecordLayout;

    use super::*;

    fn stage(written: Value) -> TierSpec {
        serde_json::from_value(written).unwrap()
    }

    fn compress() -> TierSpec {
        stage(json!({"kind": "compress"}))
    }

    fn posix(layout: &str) -> TierSpec {
        stage(json!({"kind": "posix", "storage_backends": ["/nowhere"], "layout": layout}))
    }

    /// Why these stages make no store; nothing where they do.
    fn refusal(stages: Vec<TierSpec>) -> Option<String> {
        let identity = Identity::parse(concat!(
            r#"{"format_version":1,"architecture":"A","world_size":1,"dtype":"f32","weights":"w","model_config":{},"#,
            r#""position":{},"kv_dtype":"f32","attention_backend":"a","kv_packing":{},"kv_layout":"l","kv_groups":[],"#,
            r#""block_tokens":16,"tensor_parallel":1,"pipeline_parallel":1,"decode_context_parallel":1}"#
        ));
        let (identity, geometry) = (identity.unwrap(), Geometry::new(vec![4096], 4, 4).unwrap());
        let context = BuildContext {
            identity: &identity,
            part: Part::default(),
            geometry: &geometry,
            record: &RecordLayout::new(&geometry),
            labels: &BTreeMap::new(),
            lookup_only: false,
            writer: 1,
            slots: 4,
            processes: 1,
            scheduler_elsewhere: false,
            clock: SystemClock::shared(),
            compressed: false,
        };
        make_all(stages, &context).err().map(|error| error.to_string())
    }

    #[test]
    fn a_stage_that_compresses_stands_before_segments_and_nothing_else() {
        assert_eq!(refusal(vec![compress(), posix("segment")]), None);
        let cache = || stage(json!({"kind": "cache", "cache_size": 1 << 20}));
        for (stages, words) in [
            (vec![compress(), posix("file")], "segments only"),
            (vec![compress(), cache()], "below Cache"),
            (vec![posix("segment"), compress()], "the last one"),
            (vec![compress()], "the last one"),
            (vec![compress(), compress(), posix("segment")], "one is enough"),
            (vec![stage(json!({"kind": "zip"}))], "no such kind"),
            (vec![stage(json!({"kind": "redis"}))], "not built yet"),
            (vec![stage(json!({"kind": "fake"}))], "store of Python"),
            (
                vec![stage(json!({"kind": "cache", "cach_size": 1}))],
                "unknown field `cach_size`",
            ),
            (vec![stage(json!({"kind": "posix"}))], "one directory"),
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
