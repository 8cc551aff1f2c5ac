//! The tiers of a store, made from the description of each.

use serde::Deserialize;
use serde_json::{Map, Value};
use ucm_core::{Error, ErrorKind, Result};
use ucm_media::registry::{self, BuildContext, BuiltLevel};

use crate::tiers::WritePolicy;

/// Makes the media of a store, top first, each with its policy. `Config` for options that make no
/// sense.
pub(super) fn make_all(
    tiers: Vec<TierSpec>,
    context: &BuildContext,
) -> Result<Vec<(BuiltLevel, WritePolicy)>> {
    let mut made = Vec::new();
    for tier in tiers {
        let policy = tier.policy()?;
        let built = registry::find(&tier.kind)?.build(context, tier.options)?;
        for (number, level) in built.into_iter().enumerate() {
            // Nothing evicts records to a level below the first of several: it is written through.
            let policy = match policy {
                WritePolicy::Back if number > 0 => WritePolicy::Through,
                policy => policy,
            };
            made.push((level, policy));
        }
    }
    Ok(made)
}

/// One tier as it is described: its kind, when it is written to, and the options of its kind.
#[derive(Debug, Clone, Deserialize)]
pub struct TierSpec {
    /// Name of the kind.
    pub kind: String,
    /// Name of the [`WritePolicy`]; through by default.
    #[serde(default)]
    pub write_policy: Option<String>,
    /// The options of the kind.
    #[serde(flatten)]
    pub options: Map<String, Value>,
}

impl TierSpec {
    /// When the tier is written to.
    fn policy(&self) -> Result<WritePolicy> {
        let Some(name) = &self.write_policy else {
            return Ok(WritePolicy::Through);
        };
        let unknown = || Error::new(ErrorKind::Config, "write_policy is through, back or never");
        WritePolicy::of_name(name).ok_or_else(|| unknown().with("write_policy", name))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;
    use ucm_core::{Geometry, Identity, Part};
    use ucm_infra::SystemClock;

    use ucm_media::scope::Scope;
    use ucm_record::RecordLayout;

    use super::*;

    fn tier(written: Value) -> TierSpec {
        serde_json::from_value(written).unwrap()
    }

    fn posix(layout: &str, codec: &str) -> TierSpec {
        tier(
            json!({"kind": "posix", "storage_backends": ["/nowhere"], "layout": layout, "codec": codec}),
        )
    }

    /// Why these tiers make no store; nothing where they do.
    fn refusal(tiers: Vec<TierSpec>) -> Option<String> {
        let identity = Identity::parse(concat!(
            r#"{"format_version":1,"architecture":"A","world_size":1,"dtype":"f32","weights":"w","model_config":{},"#,
            r#""position":{},"kv_dtype":"f32","attention_backend":"a","kv_packing":{},"kv_layout":"l","kv_groups":[],"#,
            r#""block_tokens":16,"tensor_parallel":1,"pipeline_parallel":1,"decode_context_parallel":1}"#
        ));
        let geometry = Geometry::new(vec![4096], 4, 4).unwrap();
        let scope = Scope {
            identity: identity.unwrap(),
            labels: BTreeMap::new(),
            part: Part::default(),
            record: RecordLayout::new(&geometry),
            other_parts: Vec::new(),
            shorter: false,
            lookup_only: false,
            writer: 1,
        };
        let context = BuildContext {
            scope,
            slots: 4,
            processes: 1,
            scheduler_elsewhere: false,
            clock: SystemClock::shared(),
        };
        make_all(tiers, &context)
            .err()
            .map(|error| error.to_string())
    }

    #[test]
    fn a_codec_is_for_segments_and_nothing_else() {
        for codec in ["off", "zstd"] {
            assert_eq!(refusal(vec![posix("segment", codec)]), None);
        }
        assert_eq!(refusal(vec![posix("file", "off")]), None);
        for (tiers, words) in [
            (vec![posix("file", "zstd")], "segments only"),
            (vec![posix("segment", "zip")], "unknown variant `zip`"),
            (
                vec![tier(json!({"kind": "cache", "codec": "zstd"}))],
                "unknown field `codec`",
            ),
            (vec![tier(json!({"kind": "compress"}))], "keeps nothing"),
            (vec![tier(json!({"kind": "zip"}))], "no such kind"),
            (vec![tier(json!({"kind": "fake"}))], "store of Python"),
            (
                vec![tier(json!({"kind": "cache", "cach_size": 1}))],
                "unknown field `cach_size`",
            ),
            (vec![tier(json!({"kind": "posix"}))], "one directory"),
        ] {
            let why = refusal(tiers).unwrap_or_default();
            assert!(why.contains(words), "{why}");
        }
    }
}
