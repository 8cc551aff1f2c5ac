//! Types of options beyond those of Rust: what a configuration may write for them, and how they are
//! shown.
//!
//! The options of a kind are one struct that serde reads and schemars describes. By the `format`
//! of each type below Python knows how to read what a user wrote (`python/ucm/config/fields.py`);
//! plain booleans, integers, numbers, texts and enums of unit variants need none. A text that is
//! never shown has the format `secret`. A field may carry, with `#[schemars(extend(...))]`:
//!
//! | | |
//! |---|---|
//! | `"aliases"` | other spellings of the key |
//! | `"aliases_gib"` | other spellings, whose numbers count GiB |
//! | `"env"` | variables of the environment that set it |
//! | `"unit"` | unit of the value, or what may be written, for the documentation |
//! | `"unset"` | what holds where nothing is given, for the documentation |
//! | `"schemes"` | what addresses begin with |
//!
//! Bounds are `#[schemars(range(min = ..., max = ...))]`, the description is the field's doc
//! comment.

use std::borrow::Cow;
use std::path::PathBuf;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::layout_kind::LayoutKind;
use crate::memory::Policy;
use crate::quota::Capacity;
use crate::spread::StoragePolicy;

/// Directories, as absolute paths.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Directories(pub Vec<PathBuf>);

/// Addresses of servers, as written. The field's `"schemes"` are those that it takes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Addresses(pub Vec<String>);

/// How fast a directory is, as configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Heat {
    /// The fastest.
    Hot,
    /// The word of directories that are not named.
    Warm,
    /// The slowest.
    Cold,
}

/// How fast each directory is, as far as it is configured.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Heats(pub Vec<(PathBuf, Heat)>);

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Size(pub u64);

/// A number of whole seconds, written as a text like `12h` too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Age(pub u64);

impl Age {
    /// The same as a span of time.
    pub fn duration(self) -> Duration {
        Duration::from_secs(self.0)
    }
}

/// Permission bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Mode(pub u32);

/// How the records of a tier are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodecName {
    /// Nothing.
    Off,
    /// Byte planes, compressed by zstd.
    Zstd,
}

impl CodecName {
    /// True if records are compressed.
    pub fn is_on(self) -> bool {
        self == Self::Zstd
    }
}

/// A number of bytes, or a share of something that the option names, in percent: `1048576` or
/// `"20%"`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// A number of bytes.
    Bytes(u64),
    /// A share, in percent.
    Percent(f64),
}

impl Amount {
    /// The limit that it sets; none where it is 0 bytes.
    pub fn limit(self) -> Option<Capacity> {
        match self {
            Self::Bytes(bytes) => std::num::NonZeroU64::new(bytes).map(Capacity::Bytes),
            Self::Percent(percent) => Some(Capacity::Percent(percent)),
        }
    }
}

impl Serialize for Amount {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Bytes(bytes) => serializer.serialize_u64(*bytes),
            Self::Percent(percent) => serializer.collect_str(&format_args!("{percent}%")),
        }
    }
}

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written<'a> {
            Bytes(u64),
            #[serde(borrow)]
            Share(Cow<'a, str>),
        }
        match Written::deserialize(deserializer)? {
            Written::Bytes(bytes) => Ok(Self::Bytes(bytes)),
            Written::Share(text) => {
                let number = text.strip_suffix('%');
                let percent = number.and_then(|number| number.parse().ok());
                let wrong = format!("{text:?} is no share like \"20%\"");
                percent
                    .map(Self::Percent)
                    .ok_or_else(|| serde::de::Error::custom(wrong))
            }
        }
    }
}

/// The schema of a type of this file: its JSON type and its format.
macro_rules! described {
    ($($option:ident: $schema:tt,)*) => {$(
        impl JsonSchema for $option {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($option).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!($schema)
            }
        }
    )*};
}

described! {
    Directories: { "type": "array", "items": { "type": "string" }, "format": "directories" },
    Addresses: { "type": "array", "items": { "type": "string" }, "format": "addresses" },
    Heats: { "type": "array", "items": { "enum": ["hot", "warm", "cold"] }, "format": "heats" },
    CodecName: { "type": "string", "enum": ["off", "zstd"] },
    Policy: { "type": "string", "enum": ["lru", "s3fifo"] },
    LayoutKind: { "type": "string", "enum": ["file", "segment"] },
    StoragePolicy: { "type": "string", "enum": ["tiered", "round_robin", "random"] },
    Size: { "type": "integer", "minimum": 0, "format": "size" },
    Age: { "type": "integer", "minimum": 0, "format": "age" },
    Mode: { "type": "integer", "minimum": 0, "maximum": 511, "format": "mode" },
    Amount: { "type": ["integer", "string"], "format": "amount" },
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_amount_is_bytes_or_a_share() {
        for (written, amount) in [
            (json!(5), Amount::Bytes(5)),
            (json!("20%"), Amount::Percent(20.0)),
            (json!("0.5%"), Amount::Percent(0.5)),
        ] {
            assert_eq!(
                serde_json::from_value::<Amount>(written.clone()).unwrap(),
                amount
            );
            assert_eq!(serde_json::to_value(amount).unwrap(), written);
        }
        for wrong in [json!("20"), json!("x%"), json!(-1), json!(null)] {
            assert!(serde_json::from_value::<Amount>(wrong).is_err());
        }
        assert_eq!(Amount::Bytes(0).limit(), None);
    }
}
