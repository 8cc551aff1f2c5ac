//! The codec of a tier: its records take less room on the medium.
//!
//! A record is encoded in its slot by the thread that is about to write it, and decoded in its slot
//! by the thread that has read it, before it is verified. A tier may hold records of both kinds.

use serde::Serialize;
use ucm_core::sync::Mutex;
use ucm_core::{Error, Part, Result};
use ucm_infra::LANE_LOAD;
use ucm_io::IoPool;
use ucm_media::backend::WriteOptions;
use ucm_record::{Codec, Coder, RecordHeader, RecordLayout};

use crate::records::OwnParts;

/// One record in this many is decoded again before it is written, and compared.
const PROVEN: u64 = 64;

/// Counts of the codec of a tier; counters since the start, lengths of records with their headers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(super) struct Compression {
    /// Records encoded.
    records_compressed: u64,
    /// Records written as they are: compressing does not make them shorter.
    records_as_is: u64,
    /// Records read that were compressed.
    records_decompressed: u64,
    /// Records that did not come back from their compressed form, though that was whole: read, or
    /// about to be written.
    records_undecodable: u64,
    /// Bytes of the records that were encoded.
    bytes_compressed: u64,
    /// Bytes that these take on the medium.
    bytes_stored: u64,
}

/// The codec of one tier, with the memory that its threads need for it.
pub(super) struct TierCodec {
    /// One for each own part, the first one first.
    parts: Vec<PartCodec>,
    /// Most coders kept for a part.
    most: usize,
    stats: Mutex<Compression>,
}

/// The codec of the records of one part.
struct PartCodec {
    part: Part,
    codec: Codec,
    layout: RecordLayout,
    /// Coders not in use.
    coders: Mutex<Vec<Coder>>,
}

impl TierCodec {
    /// `Unsupported` in a build without codecs.
    pub(super) fn new(own: &OwnParts, pool: &IoPool) -> Result<Self> {
        let mut parts = Vec::new();
        for records in own.all() {
            parts.push(PartCodec {
                part: records.part,
                codec: Codec::of(&records.layout),
                layout: records.layout.clone(),
                coders: Mutex::new(vec![Coder::new(&records.layout)?]),
            });
        }
        Ok(Self {
            parts,
            most: pool.width(LANE_LOAD),
            stats: Mutex::default(),
        })
    }

    /// A description for the log.
    pub(super) fn describe(&self) -> String {
        let width = |part: &PartCodec| part.codec.width().to_string();
        let mut widths: Vec<_> = self.parts.iter().map(width).collect();
        widths.dedup();
        let widths = widths.join(" or ");
        format!("compressed by zstd in {widths} byte planes, into ")
    }

    pub(super) fn stats(&self) -> Compression {
        *self.stats.lock()
    }

    /// Works with a coder for records of a part, of the first one where it is none of the store's:
    /// what has another layout stays as it is.
    fn with_coder<T>(
        &self,
        part: Option<Part>,
        work: impl FnOnce(&mut Coder, Codec) -> T,
    ) -> Result<T> {
        let known = self.parts.iter().find(|known| Some(known.part) == part);
        let none = || Error::internal("the codec knows no part");
        let known = known.or(self.parts.first()).ok_or_else(none)?;
        let kept = known.coders.lock().pop();
        let mut coder = match kept {
            Some(coder) => coder,
            None => Coder::new(&known.layout)?,
        };
        let result = work(&mut coder, known.codec);
        let mut coders = known.coders.lock();
        if coders.len() < self.most {
            coders.push(coder);
        }
        Ok(result)
    }

    /// Encodes a record in its slot, if that makes it shorter; its length then.
    pub(super) fn encode(&self, slot: &mut [u8], options: &WriteOptions) -> Result<usize> {
        let count = self.stats.lock().records_compressed;
        let proven = count.is_multiple_of(PROVEN);
        let record = &mut slot[..options.len];
        let part = RecordHeader::part_of(record);
        let encoded = self.with_coder(part, |coder, codec| coder.encode(codec, record, proven));
        let mut stats = self.stats.lock();
        match encoded.flatten() {
            Ok(Some(len)) => {
                stats.records_compressed += 1;
                stats.bytes_compressed += options.len as u64;
                stats.bytes_stored += len as u64;
                Ok(len)
            }
            Ok(None) => {
                stats.records_as_is += 1;
                Ok(options.len)
            }
            Err(error) => {
                stats.records_as_is += 1;
                stats.records_undecodable += 1;
                Err(error)
            }
        }
    }

    /// Decodes a record of `stored` bytes in its slot: its length then, and whether all of it was
    /// restored. Layers that were not are zeros, which their checksums refuse.
    pub(super) fn decode(
        &self,
        header: &RecordHeader,
        slot: &mut [u8],
        stored: usize,
    ) -> Result<(usize, bool)> {
        let part = Some(header.meta.part);
        let (len, whole) = self.with_coder(part, |coder, _| coder.decode(header, slot, stored))?;
        let mut stats = self.stats.lock();
        stats.records_decompressed += u64::from(whole);
        stats.records_undecodable += u64::from(!whole);
        Ok((len, whole))
    }
}
