//! Encryption at rest: turns a sealed record into one whose layers and side shards are AES-256-GCM
//! ciphertext, and back, in place.
//!
//! All offsets stay the same: ciphertext is as long as its plaintext. Encryption adds tags to the
//! header, behind the table of shards ([`at::seals`]): one of the header, one of each shard, one of
//! each side shard. So with the header each can be checked alone. The header stays readable; its
//! tag covers every byte of it except its two checksums, including the tags of the shards. The
//! checksums in the header's tables are those of the ciphertext, so that a reader without the key
//! can detect damage. The checksums of the plaintext are encrypted together with the header's tag,
//! because they would confirm guesses of the content.
//!
//! Each record has a key of its own: HMAC-SHA256, under the configured key, of 16 random bytes in
//! the header and the record's id. Under that key every message has its own nonce, a plain number.
//! So a nonce repeats for a key only if two records draw the same 16 bytes.

#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use ucm_core::{Error, ErrorKind, MissReason, Result, from_hex, hex};
use ucm_device::crc32c;

use super::header::{RecordHeader, seal_header};
use super::layout::SideSpec;
use super::refusal::Refusal;
use super::{ENCRYPTED, PREAMBLE_LEN, at};
use crate::bytes::{array, put, u32_at};

/// Bytes of a configured key.
const KEY: usize = 32;
/// Most keys.
const MOST: usize = 16;
/// Nonce of the header; shard `i` has `1 + i`, side shard `i` has `SIDES + i`.
const HEADER: u32 = 0;
const SIDES: u32 = 1 << 31;

/// The keys of a store: the first one encrypts; each decrypts records that it has encrypted.
///
/// ```
/// use ucm_record::Keys;
///
/// let keys = Keys::parse("# made with: openssl rand -hex 32\n\
///     000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f").unwrap();
/// assert_eq!(format!("{keys:?}"), "Keys(a6985c748e29523b)");
/// assert!(Keys::parse("00").is_err());
/// ```
pub struct Keys(Vec<Key>);

struct Key {
    id: [u8; 8],
    mac: hmac::Key,
}

/// Result of a decryption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opened {
    /// The record is plaintext again, if its checksums agree.
    Decrypted,
    /// It is not encrypted.
    Plain,
    /// It is unchanged: no record, incomplete, or encrypted with an unknown key. Verification finds
    /// the reason.
    Left,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keys(")?;
        for (i, key) in self.0.iter().enumerate() {
            f.write_str(if i == 0 { "" } else { ", " })?;
            f.write_str(&hex(&key.id))?;
        }
        f.write_str(")")
    }
}

impl Keys {
    /// Reads keys, each 64 hex digits on a line of its own, the one that encrypts first. Empty
    /// lines and text after a `#` are ignored. `Config` if there is no key or a line is malformed;
    /// the error does not contain the text.
    pub fn parse(text: &str) -> Result<Self> {
        let mut keys = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let digits = line.split('#').next().unwrap_or_default().trim();
            if digits.is_empty() {
                continue;
            }
            let wrong = "an encryption key is 64 hex digits, one key a line; make one with: \
                         openssl rand -hex 32";
            let wrong = || Error::new(ErrorKind::Config, wrong).with("line", number);
            let key = from_hex(digits).ok_or_else(wrong)?;
            keys.push(Key::new(&key));
        }
        if keys.is_empty() || keys.len() > MOST {
            let text = "there must be an encryption key, and at most 16; make one with: openssl \
                        rand -hex 32";
            return Err(Error::new(ErrorKind::Config, text).with("keys", keys.len()));
        }
        Ok(Self(keys))
    }

    /// Encrypts a sealed record, compressed or not; `record` is all of it, in a layout with space
    /// for the tags ([`RecordLayout::encrypted`](super::RecordLayout::encrypted)). After an error
    /// its bytes must not be stored.
    pub fn encrypt(&self, record: &mut [u8]) -> Result<()> {
        let cannot = |why| Error::internal("a record cannot be encrypted").with("why", why);
        let header = RecordHeader::decode(record)
            .map_err(|refusal| Error::from(refusal).with("while", "encrypting"))?;
        let shards = header.table.len();
        if header.key.is_some() || header.record_len != record.len() as u64 {
            return Err(cannot("it is not a complete plaintext record"));
        }
        if at::side_seal(shards, header.sides.len()) + at::CRC_LEN > header.header_len as usize {
            return Err(cannot("its header has no space for the tags"));
        }
        let key = self.0.first().ok_or_else(|| cannot("there is no key"))?;
        let mut salt = [0; 16];
        let random = SystemRandom::new().fill(&mut salt);
        random.map_err(|_| cannot("the system returned no random bytes"))?;
        let cipher = key
            .of_record(&salt, &header.meta.id.0)
            .ok_or_else(|| cannot("its key"))?;

        let (head, body) = record.split_at_mut(header.header_len as usize);
        let flags = u32_at(head, at::FLAGS) | ENCRYPTED;
        put(head, at::FLAGS, &flags.to_le_bytes());
        put(head, at::KEY_ID, &key.id);
        put(head, at::SALT, &salt);
        let mut secret = Vec::with_capacity(4 * (shards + header.sides.len()));
        for piece in pieces(&header) {
            secret.extend_from_slice(&piece.used_crc.to_le_bytes());
            let stretch = body
                .get_mut(piece.in_body(&header))
                .ok_or_else(|| cannot("its length"))?;
            let tag = cipher.seal_in_place_separate_tag(nonce(piece.nonce), Aad::empty(), stretch);
            let tag = tag.map_err(|_| cannot("its length"))?;
            put(head, piece.tag, tag.as_ref());
            put(head, piece.crc, &crc32c(stretch).to_le_bytes());
        }
        let aad = authenticated(&header, head);
        let tag = cipher.seal_in_place_separate_tag(nonce(HEADER), Aad::from(&aad), &mut secret);
        let tag = tag.map_err(|_| cannot("its header"))?;
        put(head, at::seals(shards), tag.as_ref());
        for (piece, used_crc) in pieces(&header).zip(secret.chunks_exact(4)) {
            put(head, piece.secret_crc, used_crc);
        }
        seal_header(head);
        Ok(())
    }

    /// Decrypts the record at the start of `record`, of which the first `read` bytes were read: its
    /// payload, and the side shards among them. A modified layer becomes zeros and the record stays
    /// marked as encrypted, so that its checksum fails. `BadChecksum` if the header was modified
    /// under correct checksums.
    pub fn decrypt(&self, record: &mut [u8], read: usize) -> std::result::Result<Opened, Refusal> {
        let Ok(header) = RecordHeader::decode(&record[..read.min(record.len())]) else {
            return Ok(Opened::Left);
        };
        if header.kv_len() > read as u64 {
            return Ok(Opened::Left);
        }
        let shards = header.table.len();
        self.open(&header, record, |number, piece| {
            number < shards || piece.end <= read
        })
    }

    /// True if one of these keys has encrypted the record with this header.
    pub fn fit(&self, header: &RecordHeader) -> bool {
        self.0.iter().any(|key| header.key == Some(key.id))
    }

    /// Decrypts one side shard in place; the rest of the record need not be present. Afterwards the
    /// header is that of a plaintext record, although no other part was checked.
    pub fn decrypt_side(
        &self,
        record: &mut [u8],
        wanted: &SideSpec,
    ) -> std::result::Result<Opened, Refusal> {
        let Ok(header) = RecordHeader::decode(record) else {
            return Ok(Opened::Left);
        };
        let pages = header.side_of(wanted).map(|side| side.pages());
        let here = pages.filter(|pages| pages.end <= record.len());
        self.open(&header, record, |_, piece| {
            here.as_ref()
                .is_some_and(|here| (piece.start, piece.end) == (here.start, here.end))
        })
    }

    /// Decrypts the `wanted` pieces of a record and turns its header into that of a plaintext
    /// record.
    fn open(
        &self,
        header: &RecordHeader,
        record: &mut [u8],
        wanted: impl Fn(usize, &Piece) -> bool,
    ) -> std::result::Result<Opened, Refusal> {
        let Some(id) = header.key else {
            return Ok(Opened::Plain);
        };
        let Some(key) = self.0.iter().find(|key| key.id == id) else {
            return Ok(Opened::Left);
        };
        let (head, body) = record.split_at_mut(header.header_len as usize);
        let shards = header.table.len();
        let forged = || {
            let (field, expected) = ("tag of the header", "that of its bytes under this key");
            Refusal::new(MissReason::BadChecksum, field, "another", expected)
        };
        let cipher = key
            .of_record(&array(head, at::SALT), &header.meta.id.0)
            .ok_or_else(forged)?;
        let mut secret: Vec<u8> = pieces(header)
            .flat_map(|piece| array::<4>(head, piece.secret_crc))
            .collect();
        let opens = |number, aad: &[u8], tag, bytes: &mut [u8]| {
            let (aad, tag) = (Aad::from(aad), Tag::from(array::<{ at::SEAL }>(head, tag)));
            let opened = cipher.open_in_place_separate_tag(nonce(number), aad, tag, bytes, 0..);
            opened.is_ok()
        };
        let aad = authenticated(header, head);
        if !opens(HEADER, &aad, at::seals(shards), &mut secret) {
            return Err(forged());
        }

        let (mut whole, mut used_head) = (true, head.to_vec());
        for (number, (piece, used)) in pieces(header).zip(secret.chunks_exact(4)).enumerate() {
            let (is_side, as_used) = (number >= shards, header.codec.is_as_is());
            let mut crc = u32_at(used, 0);
            if wanted(number, &piece) {
                let Some(stretch) = body.get_mut(piece.in_body(header)) else {
                    return Ok(Opened::Left);
                };
                if !opens(piece.nonce, &[], piece.tag, stretch) {
                    stretch.fill(0);
                    whole &= is_side; // a side shard has its own checksum
                }
                if !is_side && !as_used {
                    crc = crc32c(stretch); // of the compressed layer; the tag vouches for it
                }
            }
            put(&mut used_head, piece.crc, &crc.to_le_bytes());
            let kept = if is_side || as_used { &[0; 4] } else { used };
            put(&mut used_head, piece.secret_crc, kept);
        }
        if !whole {
            // with its old header, whose checksums no longer match
            return Ok(Opened::Left);
        }
        let flags = u32_at(head, at::FLAGS) & !ENCRYPTED;
        put(&mut used_head, at::FLAGS, &flags.to_le_bytes());
        put(&mut used_head, at::KEY_ID, &[0; 8]);
        put(&mut used_head, at::SALT, &[0; 16]);
        used_head[at::seals(shards)..at::side_seal(shards, header.sides.len())].fill(0);
        seal_header(&mut used_head);
        head.copy_from_slice(&used_head);
        Ok(Opened::Decrypted)
    }
}

impl Key {
    fn new(key: &[u8; KEY]) -> Self {
        let mac = hmac::Key::new(hmac::HMAC_SHA256, key);
        let id = array(hmac::sign(&mac, b"UCMKEYID").as_ref(), 0);
        Self { id, mac }
    }

    /// The cipher of one record.
    fn of_record(&self, salt: &[u8; 16], id: &[u8; 16]) -> Option<LessSafeKey> {
        let mut context = hmac::Context::with_key(&self.mac);
        context.update(b"UCMRECORD");
        context.update(salt);
        context.update(id);
        let key = UnboundKey::new(&AES_256_GCM, context.sign().as_ref()).ok()?;
        Some(LessSafeKey::new(key))
    }
}

/// A separately encrypted piece: a layer with the padding behind it, or the pages of a side shard.
struct Piece {
    /// Its range in the record.
    start: usize,
    end: usize,
    nonce: u32,
    /// Its plaintext checksum.
    used_crc: u32,
    /// Offsets in the header of its tag, of the checksum of its stored bytes, and of its encrypted
    /// plaintext checksum.
    tag: usize,
    crc: usize,
    secret_crc: usize,
}

impl Piece {
    /// Its range behind the header.
    fn in_body(&self, header: &RecordHeader) -> Range<usize> {
        let header_len = header.header_len as usize;
        self.start.saturating_sub(header_len)..self.end.saturating_sub(header_len)
    }
}

/// The pieces of a record whose header is sound: its layers in order, then its side shards.
fn pieces(header: &RecordHeader) -> impl Iterator<Item = Piece> {
    let (shards, as_is) = (header.table.len(), header.codec.is_as_is());
    let ends = header.table.iter().skip(1).map(|next| next.offset);
    let ends = ends.chain([header.kv_len()]);
    let layers = header
        .table
        .iter()
        .zip(ends)
        .enumerate()
        .map(move |(i, (layer, end))| {
            let entry = at::SHARD_TABLE + i * at::SHARD_ENTRY;
            Piece {
                start: layer.offset as usize,
                end: end as usize,
                nonce: 1 + i as u32,
                used_crc: if as_is { layer.crc } else { layer.raw_crc },
                tag: at::shard_seal(shards, i),
                crc: entry + 16,
                secret_crc: entry + 20,
            }
        });
    let sides = header.sides.iter().enumerate().map(move |(i, side)| {
        let tag = at::side_seal(shards, i);
        Piece {
            start: side.pages().start,
            end: side.pages().end,
            nonce: SIDES + i as u32,
            used_crc: side.crc,
            tag,
            crc: at::SIDE_TABLE + i * at::SIDE_ENTRY + 20,
            secret_crc: tag + at::SEAL,
        }
    });
    layers.chain(sides)
}

/// The bytes that the header's tag covers: the whole header, with zeros for its checksums, for the
/// tag itself and for the bytes encrypted with it.
fn authenticated(header: &RecordHeader, head: &[u8]) -> Vec<u8> {
    let mut bytes = head.to_vec();
    bytes[at::PREAMBLE_CRC..PREAMBLE_LEN].fill(0);
    let end = bytes.len() - at::CRC_LEN;
    bytes[end..].fill(0);
    let tag = at::seals(header.table.len());
    bytes[tag..tag + at::SEAL].fill(0);
    for piece in pieces(header) {
        bytes[piece.secret_crc..piece.secret_crc + 4].fill(0);
    }
    bytes
}

fn nonce(number: u32) -> Nonce {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}
