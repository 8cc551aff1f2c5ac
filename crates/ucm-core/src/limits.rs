//! Hard limits. No configuration can raise them.

/// Most layers in a block.
pub const MAX_LAYERS: u32 = 4096;
/// Most device pieces in a block.
pub const MAX_TENSORS: u64 = 65_536;
/// Most payload bytes in a block.
pub const MAX_BLOCK_BYTES: u64 = 1 << 30;
/// Most bytes of all side shards of a block together, each padded to a page.
pub const MAX_SIDES_BYTES: u64 = 16 << 20;
/// Most ids in one call of the store.
pub const MAX_IDS_PER_CALL: usize = 1 << 20;
/// Most tokens in one call of the hasher.
pub const MAX_TOKENS_PER_CALL: usize = 1 << 26;
/// Most bytes in one framed extra key of the hasher.
pub const MAX_EXTRA_KEY_BYTES: usize = 1 << 16;
/// Most bytes of an identity's JSON.
pub const MAX_IDENTITY_BYTES: usize = 1 << 20;
/// Most bytes of a root marker or manifest that we read.
pub const MAX_DOCUMENT_BYTES: usize = 4 << 20;
/// Most tokens in a block.
pub const MAX_BLOCK_TOKENS: usize = 1 << 16;
/// Most extra keys in one call of the hasher.
pub const MAX_EXTRA_KEYS: usize = 1 << 20;
/// Deepest nesting of an identity's JSON.
pub const MAX_IDENTITY_DEPTH: usize = 64;
