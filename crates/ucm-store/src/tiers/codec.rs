//! The codec of a tier: what is stored there takes less room, and no one above sees it in that
//! form.
//!
//! A record is encoded in its slot by the thread that is about to write it, and decoded in its slot
//! by the thread that has read it, before it is verified. What was damaged as it is stored is
//! handed on as it is, to be refused as such; what comes out of the rest is verified by the
//! checksums that were taken when it left the device. A tier may hold records of both kinds.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use serde::Serialize;
use tracing::warn;
use ucm_core::{BlockId, Result};
use ucm_device::Slot;
use ucm_infra::LANE_LOAD;
use ucm_io::{IoJob, IoPool};
use ucm_record::{Codec, Coder, RecordLayout, stored_form};
use ucm_tier::backend::{BlockRead, Outcome, ReadDone, WriteOptions};

use super::Tiers;
use super::tier::add;

/// Of so many records that are encoded one is decoded again before it is written, and compared.
const PROVEN: u64 = 64;

/// What the codec of a tier did; counters since the start, lengths of records with their headers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Compression {
    /// Records encoded.
    pub records_compressed: u64,
    /// Records written as they are: compressing does not make them shorter.
    pub records_as_is: u64,
    /// Records read that were compressed.
    pub records_decompressed: u64,
    /// Records that did not come back from their compressed form, though that was whole: read, or
    /// about to be written.
    pub records_undecodable: u64,
    /// Bytes of the records that were encoded.
    pub bytes_compressed: u64,
    /// Bytes that these take on the medium.
    pub bytes_stored: u64,
}

/// The codec of one tier, with what its threads work with.
pub(super) struct TierCodec {
    codec: Codec,
    layout: RecordLayout,
    /// Those that no thread works with, at most `most`.
    coders: Mutex<Vec<Coder>>,
    most: usize,
    encoded: AtomicU64,
    as_is: AtomicU64,
    decoded: AtomicU64,
    undecodable: AtomicU64,
    raw_bytes: AtomicU64,
    stored_bytes: AtomicU64,
}

impl TierCodec {
    /// `Unsupported` in a build without codecs.
    pub(super) fn new(layout: &RecordLayout, pool: &IoPool) -> Result<Self> {
        Ok(Self {
            codec: Codec::of(layout),
            layout: layout.clone(),
            coders: Mutex::new(vec![Coder::new(layout)?]),
            most: pool.width(LANE_LOAD),
            encoded: AtomicU64::default(),
            as_is: AtomicU64::default(),
            decoded: AtomicU64::default(),
            undecodable: AtomicU64::default(),
            raw_bytes: AtomicU64::default(),
            stored_bytes: AtomicU64::default(),
        })
    }

    /// What it does, for the log.
    pub(super) fn words(&self) -> String {
        format!(
            "compressed by zstd in {} byte planes, into ",
            self.codec.width()
        )
    }

    pub(super) fn stats(&self) -> Compression {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Compression {
            records_compressed: get(&self.encoded),
            records_as_is: get(&self.as_is),
            records_decompressed: get(&self.decoded),
            records_undecodable: get(&self.undecodable),
            bytes_compressed: get(&self.raw_bytes),
            bytes_stored: get(&self.stored_bytes),
        }
    }

    fn with_coder<T>(&self, work: impl FnOnce(&mut Coder) -> Result<T>) -> Result<T> {
        let kept = self.coders.lock().pop();
        let mut coder = kept.map_or_else(|| Coder::new(&self.layout), Ok)?;
        let result = work(&mut coder);
        let mut coders = self.coders.lock();
        if coders.len() < self.most {
            coders.push(coder);
        }
        result
    }

    /// The length of what is in the slot then.
    fn encode(&self, slot: &mut Slot, options: &WriteOptions) -> Result<usize> {
        let proven =
            options.read_back || self.encoded.load(Ordering::Relaxed).is_multiple_of(PROVEN);
        let record = &mut slot.as_mut_slice()[..options.len];
        let encoded = self.with_coder(|coder| coder.encode(self.codec, record, proven));
        if let Ok(Some(len)) = encoded {
            add(&self.encoded, 1);
            add(&self.raw_bytes, options.len as u64);
            add(&self.stored_bytes, len as u64);
        } else {
            add(&self.as_is, 1);
            add(&self.undecodable, u64::from(encoded.is_err()));
        }
        encoded.map(|len| len.unwrap_or(options.len))
    }
}

impl Tiers {
    /// Called with a record that is about to be written to a tier: puts it into the form in which
    /// it is stored there. Not where it would only be found there. An error where it has to be
    /// encrypted and was not.
    pub(super) fn encode(
        &self,
        number: usize,
        id: BlockId,
        slot: &mut Slot,
        options: WriteOptions,
    ) -> Result<WriteOptions> {
        let tier = &self.tiers[number];
        let present =
            || !options.replace && tier.codec.is_some() && tier.backend.features().is_published(id);
        let options = self.compress(number, id, slot, options, present());
        self.encrypt(number, slot, &options)?;
        Ok(options)
    }

    fn compress(
        &self,
        number: usize,
        id: BlockId,
        slot: &mut Slot,
        options: WriteOptions,
        present: bool,
    ) -> WriteOptions {
        let tier = &self.tiers[number];
        let Some(codec) = tier.codec.as_ref().filter(|_| !present) else {
            return options;
        };
        let len = codec.encode(slot, &options).unwrap_or_else(|error| {
            warn!(
                store = self.records.writer,
                block = %id,
                tier = tier.name,
                error = %error,
                "record {id} is stored as it is: {error}"
            );
            options.len
        });
        WriteOptions { len, ..options }
    }

    /// Reads records of a tier on this thread, in the form in which they are used.
    pub(super) fn read_here(&self, number: usize, io: &IoJob, run: Vec<BlockRead>) -> Vec<Outcome> {
        let tier = &self.tiers[number];
        if !tier.recodes() {
            return tier.backend.read(io, run);
        }
        let ids: Vec<_> = run.iter().map(|read| (read.id, read.sides)).collect();
        let read = tier.backend.read(io, run).into_iter().zip(ids);
        let decoded = read.map(|(outcome, (id, sides))| match outcome {
            Outcome::Came(Ok(read)) if !sides => {
                let decrypted = self.decrypt(number, id, read);
                Outcome::Came(decrypted.and_then(|read| self.decode(number, id, read)))
            }
            outcome => outcome, // side shards are not compressed, and decrypted by who wants one
        });
        decoded.collect()
    }

    /// A record that was read from a tier, as it is used. What is damaged or foreign stays as it
    /// is, to be refused for that; of what cannot be decoded the layers come to be zeros, which
    /// their checksums refuse.
    pub(super) fn decode(
        &self,
        number: usize,
        id: BlockId,
        mut read: ReadDone,
    ) -> Result<ReadDone> {
        let form = |read: &ReadDone| {
            let bytes = &read.slot.as_slice()[..read.read];
            stored_form(bytes, read.stored_len, &self.expect(id))
        };
        let codec = self.tiers[number].codec.as_ref();
        let Some((codec, header)) = codec.and_then(|codec| Some((codec, form(&read)?))) else {
            return Ok(read);
        };
        let (bytes, from) = (read.slot.as_mut_slice(), read.read);
        let (len, whole) = codec.with_coder(|coder| Ok(coder.decode(&header, bytes, from)))?;
        if whole {
            add(&codec.decoded, 1);
        } else {
            add(&codec.undecodable, 1);
            warn!(
                store = self.records.writer,
                block = %id,
                "record {id} does not come back from its compressed form, though that is whole; it \
                 will be recomputed"
            );
        }
        read.read = len;
        read.stored_len = read.read as u64;
        Ok(read)
    }
}
