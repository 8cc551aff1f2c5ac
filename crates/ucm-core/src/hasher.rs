//! Block keys: a hash chain over the full blocks of a token list.
//!
//! `key(i) = first 16 bytes of H(key(i - 1) | tokens of block i as u32 LE | frames of block i)`,
//! and the key before the first block is the *seed*, `first 16 bytes of H("UCMHASHSEED" |
//! identity)`. A frame carries an input other than the tokens that changes the KV bytes (adapter,
//! salt, media): `u8 tag | u32 LE length | bytes`.
//!
//! The message of a block without frames has the same length for every block, so its padding is
//! written once and the compression function runs over one buffer. The cost is that of the raw
//! compressions.

use md5::Md5;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::id::BlockId;
use crate::limits;

/// First bytes of the seed's message.
const SEED_PREFIX: &[u8] = b"UCMHASHSEED";
/// Bytes of tag and length before a frame's bytes.
const FRAME_HEAD: usize = 5;

crate::named! {
    /// Hash function of the chain. All three give 16-byte keys.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub enum HashMethod {
        /// SHA-256, cut to 16 bytes. Most processors have instructions for it; no collisions can be
        /// constructed.
        #[default]
        Sha256 = "sha256",
        /// BLAKE3, cut to 16 bytes: for machines without SHA instructions.
        Blake3 = "blake3",
        /// MD5: the seed's chain, byte for byte. Collisions can be constructed, so do not use it
        /// where tenants must not affect each other.
        Md5 = "md5",
    }
}

impl HashMethod {
    /// First 16 bytes of the hash of `message`.
    fn digest(self, message: &[u8]) -> BlockId {
        let mut id = [0; BlockId::LEN];
        match self {
            Self::Sha256 => id.copy_from_slice(&Sha256::digest(message)[..BlockId::LEN]),
            Self::Blake3 => id.copy_from_slice(&blake3::hash(message).as_bytes()[..BlockId::LEN]),
            Self::Md5 => id.copy_from_slice(&Md5::digest(message)[..BlockId::LEN]),
        }
        BlockId(id)
    }
}

/// An input other than the tokens that changes the KV bytes of one block. It is framed into that
/// block's message.
///
/// Frames of a block are sorted by tag, then by bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExtraKey<'a> {
    /// Index of the block in the whole token list.
    pub block: usize,
    /// Kind of the bytes: 1 the digest of an adapter's content, 2 that of a multimodal item and its
    /// offset, 3 the caller's cache salt, 4 the digest of prompt embeddings.
    pub tag: u8,
    /// The bytes, at most [`limits::MAX_EXTRA_KEY_BYTES`].
    pub bytes: &'a [u8],
}

/// Computes block keys for one identity, block size and method. Cheap to share; holds no buffer.
#[derive(Debug, Clone)]
pub struct BlockHasher {
    seed: BlockId,
    block_size: usize,
    method: HashMethod,
}

impl BlockHasher {
    /// A hasher for blocks of `block_size` tokens. The bytes of an identity seed the chain. Fails
    /// when the block size is not between 1 and [`limits::MAX_BLOCK_TOKENS`] or the identity is
    /// longer than [`limits::MAX_IDENTITY_BYTES`].
    pub fn new(identity: &[u8], block_size: usize, method: HashMethod) -> Result<Self> {
        if block_size == 0 || block_size > limits::MAX_BLOCK_TOKENS {
            return Err(Error::invalid("block_size is between 1 and 65536 tokens")
                .with("block_size", block_size));
        }
        if identity.len() > limits::MAX_IDENTITY_BYTES {
            return Err(
                Error::invalid("an identity has at most 1 MiB").with("bytes", identity.len())
            );
        }
        let seed = method.digest(&[SEED_PREFIX, identity].concat());
        Ok(Self {
            seed,
            block_size,
            method,
        })
    }

    /// The key before the first block.
    pub fn seed(&self) -> BlockId {
        self.seed
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The hash function.
    pub fn method(&self) -> HashMethod {
        self.method
    }

    /// Keys of the full blocks of a token list from block `start` on, at which `tail` begins.
    /// `parent` is the key of block `start - 1` and must be given exactly when `start > 0`. Block
    /// indices of extra keys count from the start of the whole list. Those of blocks before `start`
    /// or of the partial tail are ignored, so a caller can pass those of the whole request each
    /// time. Fails if the parent is missing or not expected, or if a limit is exceeded.
    pub fn hash_tail(
        &self,
        tail: &[u32],
        parent: Option<BlockId>,
        start: usize,
        extra: &[ExtraKey<'_>],
    ) -> Result<Vec<BlockId>> {
        let parent = match (start, parent) {
            (0, None) => self.seed,
            (1.., Some(parent)) => parent,
            (0, Some(_)) => {
                return Err(Error::invalid(
                    "block 0 has no parent: leave it out or pass start",
                ));
            }
            (1.., None) => {
                return Err(
                    Error::invalid("the key of block start - 1 is missing").with("start", start)
                );
            }
        };
        if tail.len() > limits::MAX_TOKENS_PER_CALL {
            return Err(Error::invalid("too many tokens in one call")
                .with("tokens", tail.len())
                .with("most", limits::MAX_TOKENS_PER_CALL));
        }
        let blocks = tail.len() / self.block_size;
        let extra = self.frames(extra, start, start.saturating_add(blocks))?;
        let (size, tail) = (self.block_size, (start, tail));
        Ok(match self.method {
            HashMethod::Sha256 => self.chain(Padded::<Sha256Core>::new(size), parent, tail, &extra),
            HashMethod::Blake3 => self.chain(Blake3::new(size), parent, tail, &extra),
            HashMethod::Md5 => self.chain(Padded::<Md5Core>::new(size), parent, tail, &extra),
        })
    }

    /// The frames of the blocks in `first..end`, checked, in the order in which they are hashed.
    fn frames<'a>(
        &self,
        extra: &[ExtraKey<'a>],
        first: usize,
        end: usize,
    ) -> Result<Vec<ExtraKey<'a>>> {
        if extra.len() > limits::MAX_EXTRA_KEYS {
            return Err(Error::invalid("too many extra keys in one call")
                .with("extra", extra.len())
                .with("most", limits::MAX_EXTRA_KEYS));
        }
        let long = |key: &&ExtraKey<'_>| key.bytes.len() > limits::MAX_EXTRA_KEY_BYTES;
        if let Some(key) = extra.iter().find(long) {
            return Err(
                Error::invalid("an extra key has at most 64 KiB: pass a digest of it")
                    .with("block", key.block)
                    .with("bytes", key.bytes.len()),
            );
        }
        let mut frames: Vec<_> = extra
            .iter()
            .filter(|key| (first..end).contains(&key.block))
            .copied()
            .collect();
        frames.sort_unstable();
        Ok(frames)
    }

    /// Runs the chain over the full blocks of `tail`, from block `start` on; `frames` are sorted by
    /// block.
    fn chain(
        &self,
        mut plain: impl PlainBlock,
        mut parent: BlockId,
        (start, tail): (usize, &[u32]),
        mut frames: &[ExtraKey<'_>],
    ) -> Vec<BlockId> {
        let mut keys = Vec::with_capacity(tail.len() / self.block_size);
        let mut framed = Vec::new();
        for (i, tokens) in tail.chunks_exact(self.block_size).enumerate() {
            let mine = frames
                .iter()
                .take_while(|frame| frame.block == start + i)
                .count();
            parent = if mine == 0 {
                plain.key(parent, tokens)
            } else {
                let (now, later) = frames.split_at(mine);
                frames = later;
                framed.clear();
                message(&mut framed, parent, tokens, now);
                self.method.digest(&framed)
            };
            keys.push(parent);
        }
        keys
    }
}

/// Writes a block's message with its frames.
fn message(out: &mut Vec<u8>, parent: BlockId, tokens: &[u32], frames: &[ExtraKey<'_>]) {
    let framed: usize = frames
        .iter()
        .map(|frame| FRAME_HEAD + frame.bytes.len())
        .sum();
    out.reserve(BlockId::LEN + 4 * tokens.len() + framed);
    out.extend_from_slice(&parent.0);
    out.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    for frame in frames {
        out.push(frame.tag);
        // The length fits: it is at most MAX_EXTRA_KEY_BYTES.
        out.extend_from_slice(&(frame.bytes.len() as u32).to_le_bytes());
        out.extend_from_slice(frame.bytes);
    }
}

/// Writes parent and tokens at the start of a block's buffer.
#[inline(always)]
fn fill(buffer: &mut [u8], parent: BlockId, tokens: &[u32]) {
    let (head, body) = buffer.split_at_mut(BlockId::LEN);
    head.copy_from_slice(&parent.0);
    let (words, _) = body.as_chunks_mut::<4>();
    for (word, token) in words.iter_mut().zip(tokens) {
        *word = token.to_le_bytes();
    }
}

/// Hashes messages without frames, all of one length.
trait PlainBlock {
    fn key(&mut self, parent: BlockId, tokens: &[u32]) -> BlockId;
}

/// BLAKE3 over one contiguous buffer; it pads itself.
struct Blake3(Vec<u8>);

impl Blake3 {
    fn new(block_size: usize) -> Self {
        Self(vec![0; BlockId::LEN + 4 * block_size])
    }
}

impl PlainBlock for Blake3 {
    fn key(&mut self, parent: BlockId, tokens: &[u32]) -> BlockId {
        fill(&mut self.0, parent, tokens);
        HashMethod::Blake3.digest(&self.0)
    }
}

/// A compression function over 64-byte pieces, padded with 0x80, zeros and the length in bits.
trait Core {
    type State;
    const INIT: Self::State;
    fn length(bits: u64) -> [u8; 8];
    fn compress(state: &mut Self::State, pieces: &[[u8; 64]]);
    fn key(state: &Self::State) -> BlockId;
}

/// A message buffer whose padding never changes.
struct Padded<C> {
    pieces: Vec<[u8; 64]>,
    core: std::marker::PhantomData<C>,
}

impl<C: Core> Padded<C> {
    fn new(block_size: usize) -> Self {
        let len = BlockId::LEN + 4 * block_size;
        let mut pieces = vec![[0; 64]; (len + 9).div_ceil(64)];
        let bytes = pieces.as_flattened_mut();
        bytes[len] = 0x80;
        let end = bytes.len();
        bytes[end - 8..].copy_from_slice(&C::length(len as u64 * 8));
        Self {
            pieces,
            core: std::marker::PhantomData,
        }
    }
}

impl<C: Core> PlainBlock for Padded<C> {
    #[inline(always)]
    fn key(&mut self, parent: BlockId, tokens: &[u32]) -> BlockId {
        fill(self.pieces.as_flattened_mut(), parent, tokens);
        let mut state = C::INIT;
        C::compress(&mut state, &self.pieces);
        C::key(&state)
    }
}

struct Sha256Core;

impl Core for Sha256Core {
    type State = [u32; 8];
    const INIT: [u32; 8] = [
        0x6a09_e667,
        0xbb67_ae85,
        0x3c6e_f372,
        0xa54f_f53a,
        0x510e_527f,
        0x9b05_688c,
        0x1f83_d9ab,
        0x5be0_cd19,
    ];

    fn length(bits: u64) -> [u8; 8] {
        bits.to_be_bytes()
    }

    fn compress(state: &mut [u32; 8], pieces: &[[u8; 64]]) {
        sha2::block_api::compress256(state, pieces);
    }

    fn key(state: &[u32; 8]) -> BlockId {
        let mut id = [0; BlockId::LEN];
        for (bytes, word) in id.as_chunks_mut().0.iter_mut().zip(state) {
            *bytes = word.to_be_bytes();
        }
        BlockId(id)
    }
}

struct Md5Core;

impl Core for Md5Core {
    type State = [u32; 4];
    const INIT: [u32; 4] = [0x6745_2301, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476];

    fn length(bits: u64) -> [u8; 8] {
        bits.to_le_bytes()
    }

    fn compress(state: &mut [u32; 4], pieces: &[[u8; 64]]) {
        md5::block_api::compress(state, pieces);
    }

    fn key(state: &[u32; 4]) -> BlockId {
        let mut id = [0; BlockId::LEN];
        for (bytes, word) in id.as_chunks_mut().0.iter_mut().zip(state) {
            *bytes = word.to_le_bytes();
        }
        BlockId(id)
    }
}

#[cfg(test)]
mod tests;
