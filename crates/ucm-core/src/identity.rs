//! The identity of KV bytes: a JSON text with everything that determines them, and its SHA-256.
//!
//! Two engines share blocks if and only if their texts are equal byte for byte. So the text is
//! canonical: written by `json.dumps(obj, separators=(",", ":"), ensure_ascii=True)`, top-level
//! keys in the order of [`IDENTITY_KEYS`], nested objects sorted by key. Any other text is refused
//! here; otherwise it would be a silent miss.

use std::fmt;

use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor,
};
use sha2::{Digest, Sha256};

use crate::error::{Error, ErrorKind, Result};
use crate::limits;
use crate::units::hex;

/// Top-level keys of the identity, in order; all must be there.
pub const IDENTITY_KEYS: [&str; 16] = [
    "format_version",
    "architecture",
    "world_size",
    "dtype",
    "weights",
    "model_config",
    "position",
    "kv_dtype",
    "attention_backend",
    "kv_packing",
    "kv_layout",
    "kv_groups",
    "block_tokens",
    "tensor_parallel",
    "pipeline_parallel",
    "decode_context_parallel",
];

/// Keys whose value is a whole number above zero.
const COUNTS: [&str; 2] = ["world_size", "block_tokens"];

/// Version of the identity format that this code writes and reads.
const FORMAT_VERSION: u64 = 1;

/// A checked identity.
#[derive(Clone, PartialEq, Eq)]
pub struct Identity {
    json: String,
    digest: [u8; 32],
    block_tokens: u32,
}

impl Identity {
    /// Checks that `json` is canonical (see the module's first paragraph) and takes its digest.
    /// Fails with kind `Config` and the reason otherwise, or when it is longer than
    /// [`limits::MAX_IDENTITY_BYTES`].
    pub fn parse(json: &str) -> Result<Self> {
        let bad = |why: &str| Error::new(ErrorKind::Config, format!("identity: {why}"));
        if json.len() > limits::MAX_IDENTITY_BYTES {
            return Err(bad("the JSON has at most 1 MiB").with("bytes", json.len()));
        }
        check_spelling(json).map_err(bad)?;
        let mut parser = serde_json::Deserializer::from_str(json);
        let block_tokens = TopLevel::deserialize(&mut parser)
            .and_then(|top| parser.end().map(|()| top.block_tokens))
            .map_err(|error| bad(&error.to_string()))?;
        Ok(Self {
            json: json.to_owned(),
            digest: Sha256::digest(json).into(),
            block_tokens,
        })
    }

    /// The canonical text.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// SHA-256 of the text: the namespace digest of record headers and the identity bytes of the
    /// hasher.
    pub fn digest(&self) -> &[u8; 32] {
        &self.digest
    }

    /// Name of the namespace's directory; see [`namespace_of`].
    pub fn namespace(&self) -> String {
        namespace_of(&self.digest)
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.namespace())
    }
}

/// Name of a namespace's directory: the first 32 hex digits of the identity's digest.
pub fn namespace_of(digest: &[u8; 32]) -> String {
    hex(&digest[..16])
}

/// ASCII only, and no white space outside strings.
fn check_spelling(json: &str) -> Result<(), &'static str> {
    let (mut in_string, mut escaped) = (false, false);
    for byte in json.bytes() {
        match byte {
            _ if !byte.is_ascii() => {
                return Err("text beyond ASCII must be escaped (ensure_ascii=True)");
            }
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b' ' | b'\t' | b'\r' | b'\n' if !in_string => {
                return Err("no white space between tokens (separators=(\",\", \":\"))");
            }
            _ => {}
        }
    }
    Ok(())
}

/// The top level: every key, in order.
struct TopLevel {
    block_tokens: u32,
}

impl<'de> Deserialize<'de> for TopLevel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(TopVisitor)
    }
}

struct TopVisitor;

impl<'de> Visitor<'de> for TopVisitor {
    type Value = TopLevel;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object with the keys of an identity")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TopLevel, A::Error> {
        let mut block_tokens = 0;
        for expected in IDENTITY_KEYS {
            match map.next_key::<String>()? {
                Some(key) if key == expected => {}
                Some(key) => {
                    return Err(A::Error::custom(format!(
                        "key \"{key}\" where \"{expected}\" belongs"
                    )));
                }
                None => return Err(A::Error::custom(format!("key \"{expected}\" is missing"))),
            }
            if expected == "format_version" {
                let version = map.next_value::<u64>()?;
                if version != FORMAT_VERSION {
                    return Err(A::Error::custom(format!(
                        "format_version is {version}, this version writes {FORMAT_VERSION}"
                    )));
                }
            } else if COUNTS.contains(&expected) {
                let count = map.next_value::<u32>()?;
                if count == 0 {
                    return Err(A::Error::custom(format!(
                        "\"{expected}\" is a number above zero"
                    )));
                }
                if expected == "block_tokens" {
                    block_tokens = count;
                }
            } else {
                map.next_value_seed(Sorted(limits::MAX_IDENTITY_DEPTH))?;
            }
        }
        match map.next_key::<String>()? {
            None => Ok(TopLevel { block_tokens }),
            Some(key) => Err(A::Error::custom(format!(
                "key \"{key}\" does not belong to an identity"
            ))),
        }
    }
}

/// Any JSON value with sorted keys in its objects, nested at most this many levels deep.
#[derive(Clone, Copy)]
struct Sorted(usize);

impl Sorted {
    fn deeper<E: serde::de::Error>(self) -> Result<Self, E> {
        let left = self.0.checked_sub(1);
        left.map(Self).ok_or_else(|| E::custom("nested too deep"))
    }
}

impl<'de> DeserializeSeed<'de> for Sorted {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Sorted {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let inner = self.deeper()?;
        let mut last: Option<String> = None;
        while let Some(key) = map.next_key::<String>()? {
            if last.as_ref().is_some_and(|last| *last >= key) {
                return Err(A::Error::custom(format!(
                    "nested keys must be sorted and unique, \"{key}\" is not"
                )));
            }
            map.next_value_seed(inner)?;
            last = Some(key);
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let inner = self.deeper()?;
        while seq.next_element_seed(inner)?.is_some() {}
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by Python's json, its SHA-256 by hashlib; the same text is in
    /// tests/unit/test_format.py.
    const TEXT: &str = concat!(
        r#"{"format_version":1,"architecture":"LlamaForCausalLM","world_size":2,"dtype":"bfloat16","#,
        r#""weights":"sha256:00","model_config":{"head_dim":64,"name":"caf\u00e9","rope":{"base":1e-05,"type":"x y"}},"#,
        r#""position":"rope","kv_dtype":"bfloat16","attention_backend":"CPU_ATTN","kv_packing":"avx2","#,
        r#""kv_layout":"HND","kv_groups":[{"layers":2,"shape":[2,16,64]}],"block_tokens":16,"tensor_parallel":2,"#,
        r#""pipeline_parallel":1,"decode_context_parallel":1}"#
    );

    #[test]
    fn the_digest_is_that_of_hashlib() {
        let identity = Identity::parse(TEXT).unwrap();
        let hex: String = identity
            .digest()
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        assert_eq!(
            hex,
            "345a51b41e3fd0f6ad66d55bddbb3600711c8850ca44734d1795c81ac8f0d860"
        );
        assert_eq!(identity.namespace(), hex[..32]);
        assert_eq!(identity.block_tokens(), 16);
        assert_eq!(identity.json(), TEXT);
    }

    #[test]
    fn what_is_not_canonical_is_refused_with_the_reason() {
        let cases = [
            (TEXT.replacen(',', ", ", 1), "white space"),
            (TEXT.replace(r"\u00e9", "é"), "ASCII"),
            (
                TEXT.replace("\"dtype\"", "\"Dtype\""),
                "where \"dtype\" belongs",
            ),
            (
                TEXT.replace("format_version\":1", "format_version\":2"),
                "format_version is 2",
            ),
            (
                TEXT.replace("\"block_tokens\":16", "\"block_tokens\":0"),
                "above zero",
            ),
            (
                TEXT.replace("\"block_tokens\":16", "\"block_tokens\":\"16\""),
                "invalid type",
            ),
            (TEXT.replace("\"head_dim\"", "\"zz\""), "sorted"),
            (TEXT.replace("\"type\"", "\"base\""), "sorted and unique"),
            (
                TEXT.replace(",\"decode_context_parallel\":1", ""),
                "is missing",
            ),
            (
                TEXT.replace("parallel\":1}", "parallel\":1,\"more\":1}"),
                "does not belong",
            ),
            (
                TEXT.replace(
                    "\"rope\",",
                    &format!("{}{},", "[".repeat(70), "]".repeat(70)),
                ),
                "too deep",
            ),
            (format!("{TEXT}1"), "trailing"),
            ("[]".to_owned(), "a JSON object"),
            (String::new(), "EOF"),
            (" ".repeat(limits::MAX_IDENTITY_BYTES + 1), "1 MiB"),
        ];
        for (text, why) in cases {
            let error = Identity::parse(&text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(why), "{error} should say: {why}");
        }
    }

    #[test]
    fn white_space_and_quotes_inside_strings_are_content() {
        let text = TEXT.replace("x y", "x \\\" , y\\\\");
        assert!(Identity::parse(&text).is_ok());
    }
}
