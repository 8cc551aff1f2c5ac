//! The codec of a tier: its records take less room on the medium.
//!
//! A record is encoded in its slot by the thread that is about to write it, and decoded in its slot
//! by the thread that has read it, before it is verified. A tier may hold records of both kinds.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use serde::Serialize;
use ucm_core::Result;
use ucm_infra::LANE_LOAD;
use ucm_io::IoPool;
use ucm_record::{Codec, Coder, RecordHeader, RecordLayout};
use ucm_tier::backend::WriteOptions;

use crate::stats::add;

/// One record in this many is decoded again before it is written, and compared.
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

/// The codec of one tier, with the memory that its threads need for it.
pub(super) struct TierCodec {
    codec: Codec,
    layout: RecordLayout,
    /// Coders not in use, at most `most`.
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
    pub(super) fn describe(&self) -> String {
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

    fn with_coder<T>(&self, work: impl FnOnce(&mut Coder) -> T) -> Result<T> {
        let kept = self.coders.lock().pop();
        let mut coder = match kept {
            Some(coder) => coder,
            None => Coder::new(&self.layout)?,
        };
        let result = work(&mut coder);
        let mut coders = self.coders.lock();
        if coders.len() < self.most {
            coders.push(coder);
        }
        Ok(result)
    }

    /// Encodes a record in its slot, if that makes it shorter; its length then.
    pub(super) fn encode(&self, slot: &mut [u8], options: &WriteOptions) -> Result<usize> {
        let proven =
            options.read_back || self.encoded.load(Ordering::Relaxed).is_multiple_of(PROVEN);
        let record = &mut slot[..options.len];
        match self
            .with_coder(|coder| coder.encode(self.codec, record, proven))
            .flatten()
        {
            Ok(Some(len)) => {
                add(&self.encoded, 1);
                add(&self.raw_bytes, options.len as u64);
                add(&self.stored_bytes, len as u64);
                Ok(len)
            }
            Ok(None) => {
                add(&self.as_is, 1);
                Ok(options.len)
            }
            Err(error) => {
                add(&self.as_is, 1);
                add(&self.undecodable, 1);
                Err(error)
            }
        }
    }

    /// Decodes a record of `stored` bytes in its slot: its length then, and whether all of it came
    /// back. Layers that did not are zeros, which their checksums refuse.
    pub(super) fn decode(
        &self,
        header: &RecordHeader,
        slot: &mut [u8],
        stored: usize,
    ) -> Result<(usize, bool)> {
        let (len, whole) = self.with_coder(|coder| coder.decode(header, slot, stored))?;
        add(
            if whole {
                &self.decoded
            } else {
                &self.undecodable
            },
            1,
        );
        Ok((len, whole))
    }
}
