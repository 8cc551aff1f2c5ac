//! The names under which things lie on a server: one key for each record, one for each part's
//! manifest.
//!
//! ```text
//! <prefix>:<namespace, 32 hex>:<record id, 32 hex>      one record, header and all
//! <prefix>:<namespace, 32 hex>:manifest:<part>          the identity as a text, and the sizes of that part
//! ```
//! Only keys of exactly these forms are read or removed. No braces: the records of a namespace go
//! to all nodes of a cluster.

use std::fmt::Write;

use ucm_core::{BlockId, Error, ErrorKind, Part, Result};

use crate::layout::is_namespace;
use crate::place::record_path;

/// Longest prefix.
const LONGEST: usize = 64;

/// The keys of one namespace.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    /// The prefix of every key of the namespace.
    start: String,
}

impl Keys {
    /// `Config` for a prefix with other characters than letters, digits, `_`, `-` and `.`.
    pub(super) fn new(prefix: &str, namespace: &str) -> Result<Self> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if prefix.is_empty() || prefix.len() > LONGEST || !prefix.chars().all(plain) {
            let text = "redis_key_prefix is 1 to 64 letters, digits, or one of _ - .";
            return Err(Error::new(ErrorKind::Config, text).with("redis_key_prefix", prefix));
        }
        Ok(Self {
            start: format!("{prefix}:{namespace}:"),
        })
    }

    /// The key of a record.
    pub(super) fn record(&self, id: BlockId) -> String {
        let mut key = String::with_capacity(self.start.len() + 2 * BlockId::LEN);
        key.push_str(&self.start);
        _ = write!(key, "{id}"); // a string takes everything
        key
    }

    /// The key of a part's manifest.
    pub(super) fn manifest(&self, part: Part) -> String {
        format!("{}manifest:{part}", self.start)
    }

    /// The pattern that the keys of this namespace have, for `SCAN`.
    pub(super) fn pattern(&self) -> String {
        format!("{}*", self.start)
    }

    /// The id of the record with this key.
    pub(super) fn id(&self, key: &[u8]) -> Option<BlockId> {
        let rest = key.strip_prefix(self.start.as_bytes())?;
        std::str::from_utf8(rest).ok()?.parse().ok()
    }
}

/// Where the value of a key with this prefix would lie below a root; none for a key that is not
/// ours.
pub(super) fn path_of(prefix: &str, key: &str) -> Option<String> {
    let rest = key.strip_prefix(prefix)?.strip_prefix(':')?;
    let (namespace, name) = rest.split_once(':')?;
    if let Some(part) = name.strip_prefix("manifest:") {
        let is_ours = is_namespace(namespace.as_ref()) && part.parse::<Part>().is_ok();
        return is_ours.then(|| format!("{namespace}/manifest-{part}.json"));
    }
    record_path(namespace, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_exact() {
        let keys = Keys::new("ucm", &"a".repeat(32)).unwrap();
        let id = BlockId([0xcd; 16]);
        let key = keys.record(id);
        assert_eq!(key, format!("ucm:{}:{}", "a".repeat(32), "cd".repeat(16)));
        assert_eq!(keys.id(key.as_bytes()), Some(id));
        let namespace = "a".repeat(32);
        let path = format!("{namespace}/blocks/cd/{}.bin", "cd".repeat(16));
        assert_eq!(path_of("ucm", &key), Some(path));
        let manifest = path_of("ucm", &keys.manifest(Part::default()));
        assert_eq!(manifest, Some(format!("{namespace}/manifest-g0p0t0.json")));
        for other in [
            format!("{key}0"),
            format!("x{key}"),
            format!("ucm:{namespace}:manifest:x"),
            "ucm:".to_owned(),
        ] {
            assert_eq!(path_of("ucm", &other), None, "{other}");
        }
        for other in [
            format!("{key}0"),
            key.to_uppercase(),
            keys.manifest(Part::default()),
            format!("ucm:{}:{id}", "b".repeat(32)),
        ] {
            assert_eq!(keys.id(other.as_bytes()), None, "{other}");
        }
        for prefix in ["", "a:b", "a*", "a b", &"x".repeat(65)] {
            assert!(Keys::new(prefix, "n").is_err(), "{prefix}");
        }
    }
}
