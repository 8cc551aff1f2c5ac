//! Every kind of tier, once: its names, its options and what makes it.
//!
//! A kind is one file that ends in a function returning a [`TierKind`], and one line in the list of
//! built-in kinds (`builtin/mod.rs`); another crate adds its own with [`register`] before a
//! configuration is read. Python reads all of it ([`describe`]) and makes from it the keys of the
//! configuration with their checks, the store classes and the tables of `docs/configuration*.md`;
//! the behaviour suite runs over every medium that is listed here.
//!
//! ```
//! use schemars::JsonSchema;
//! use serde::{Deserialize, Serialize};
//! use ucm_media::registry::{self, StoreName, TierKind};
//!
//! /// What a configuration may say about this kind.
//! #[derive(Default, Serialize, Deserialize, JsonSchema)]
//! #[serde(default, deny_unknown_fields)]
//! struct TapeOptions {
//!     /// how many drives there are
//!     #[schemars(range(min = 1), extend("unit" = "drives"))]
//!     tape_drives: u32,
//! }
//!
//! let name = StoreName::new("tape", "UcmTapeStore", "not built yet");
//! registry::register(TierKind::declared::<TapeOptions>(name, "use UcmPosixStore")).unwrap();
//! assert!(registry::describe().contains("tape_drives"));
//! assert!(registry::find("tape").is_ok());
//! ```

use std::sync::{Arc, LazyLock};

use ucm_core::sync::RwLock;
use ucm_core::{Error, ErrorKind, Result};

use crate::builtin;
pub use crate::kind::{
    Addresses, Age, Amount, BuildContext, BuiltLevel, BuiltTier, CodecName, Directories, Heat,
    Heats, Mode, Size, StoreName, TierKind, TierOptions, seconds,
};
use crate::place::Place;

/// All kinds in order; the first is that of the store that is used where none is named.
static KINDS: LazyLock<RwLock<Vec<Arc<TierKind>>>> = LazyLock::new(|| {
    let built_in = builtin::built_in().into_iter().map(Arc::new);
    RwLock::new(built_in.collect())
});

/// Adds a kind of another crate. `Config` where one of its names is taken.
pub fn register(kind: TierKind) -> Result<()> {
    let mut kinds = KINDS.write();
    for name in kind.names() {
        let taken = |other: &StoreName| other.word == name.word || other.class == name.class;
        if kinds.iter().any(|other| other.names().iter().any(taken)) {
            let text = "a kind of tier of that name is registered already";
            let error = Error::new(ErrorKind::Config, text);
            return Err(error.with("word", name.word).with("class", name.class));
        }
    }
    kinds.push(Arc::new(kind));
    Ok(())
}

/// Every kind, built in ones first.
pub fn kinds() -> Vec<Arc<TierKind>> {
    KINDS.read().clone()
}

/// The kind that goes by this word. `Config` where there is none.
pub fn find(word: &str) -> Result<Arc<TierKind>> {
    let kinds = kinds();
    if let Some(found) = kinds.iter().find(|kind| kind.word() == word) {
        return Ok(Arc::clone(found));
    }
    let known: Vec<&str> = kinds.iter().map(|kind| kind.word()).collect();
    let unknown = Error::new(ErrorKind::Config, "there is no such kind of tier");
    Err(unknown.with("kind", word).with("known", known.join(", ")))
}

/// All kinds as a JSON text: a list of names, role, state, schema of the options and their defaults
/// in order.
pub fn describe() -> String {
    let kinds = kinds();
    let described: Vec<&TierKind> = kinds.iter().map(|kind| &**kind).collect();
    serde_json::to_string(&described).unwrap_or_default() // nothing in it can be refused
}

/// The place, for tools, of a kind that keeps nothing in directories; its options as a JSON text.
pub fn place(word: &str, options: &str) -> Result<Box<dyn Place>> {
    let options = serde_json::from_str(options).map_err(|error| {
        let text = "the options of a tier are no JSON object";
        Error::new(ErrorKind::Config, text).caused_by(error)
    })?;
    find(word)?.place(options)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use serde_json::Value;

    use super::*;

    #[test]
    fn no_two_kinds_share_a_name() {
        let mut seen = BTreeSet::new();
        for kind in kinds() {
            for name in kind.names() {
                assert!(seen.insert(name.word.to_owned()), "{}", name.word);
                assert!(seen.insert(name.class.to_owned()), "{}", name.class);
            }
        }
        let again = register(builtin::built_in().remove(0)).unwrap_err();
        assert!(again.to_string().contains("registered already"));
    }

    #[test]
    fn every_option_is_described_and_its_default_is_read_back() {
        let all: Vec<Value> = serde_json::from_str(&describe()).unwrap();
        assert_eq!(all.len(), kinds().len());
        let mut other_spellings = BTreeMap::new();
        for kind in &all {
            let properties = kind["options"]["properties"].as_object();
            let keys: BTreeSet<&String> = properties.iter().flat_map(|all| all.keys()).collect();
            let defaults: BTreeSet<&String> =
                kind["defaults"].as_object().unwrap().keys().collect();
            assert_eq!(keys, defaults, "{}", kind["names"][0]["word"]);
            for (key, option) in properties.into_iter().flatten() {
                assert!(
                    option["description"].is_string(),
                    "{key} has no doc comment"
                );
                assert!(
                    option.get("$ref").is_none(),
                    "{key} is not described where it stands"
                );
                let spellings =
                    ["aliases", "aliases_gib", "env"].map(|list| option[list].as_array().cloned());
                for other in spellings.into_iter().flatten().flatten() {
                    let before = other_spellings.insert(other.to_string(), key.clone());
                    assert!(before.is_none_or(|before| before == *key), "{other}");
                }
            }
        }
    }
}
