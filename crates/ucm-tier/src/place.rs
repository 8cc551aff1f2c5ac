//! A place that is no directory, as tools see it: what lies there, and its removal. Engines have no
//! use for this.

use ucm_core::Result;

/// Something that lies at a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// Where it would lie below a root (`docs/format.md`): `<namespace>/blocks/<hh>/<id>.bin`,
    /// `<namespace>/segments/<name>`, `<namespace>/manifest-<part>.json`, `ucm-root.json`,
    /// `space/<name>`. Empty: it is not ours.
    pub path: String,
    /// What the server calls it.
    pub name: String,
    /// Bytes.
    pub len: u64,
    /// When it was last used, ns of Unix time, as far as the place tells; 0 where it never does.
    pub used_ns: u64,
    /// What changes when it is replaced; empty where nothing does.
    pub version: String,
}

/// What a place says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Room {
    /// Most bytes that it takes, and those it has; 0: it does not say.
    pub limit: u64,
    /// See `limit`.
    pub used: u64,
    /// What it is.
    pub words: String,
}

/// See the module. Every call waits for the server, for a minute at most.
pub trait Place: Send + Sync {
    /// What it says of itself.
    fn room(&self) -> Result<Room>;

    /// Everything that lies there, of every namespace.
    fn list(&self) -> Result<Vec<Item>>;

    /// Bytes of what has this name, fewer where it ends before; none where there is nothing.
    fn read(&self, name: &str, start: u64, len: u64) -> Result<Option<Vec<u8>>>;

    /// Removes something of ours; false where it is gone, or was used or replaced since it was
    /// listed.
    fn remove(&self, item: &Item) -> Result<bool>;
}
