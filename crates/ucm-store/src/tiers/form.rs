//! The form in which a tier stores records: compressed by its codec, encrypted by the keys of the
//! store, or as they are. Nothing above a tier sees a record in that form.
//!
//! A record is encoded and then encrypted in its slot by the thread that is about to write it, and
//! decrypted and then decoded in its slot by the thread that has read it, before it is verified. So
//! the engine verifies the same bytes by the same checksums as without. A record that is damaged as
//! it is stored stays as it is, to be refused as damaged.
//!
//! A tier that encrypts takes no record that is not encrypted: a process that can write to a medium
//! could otherwise put any bytes there. A record that another key has encrypted is refused for that
//! reason and stays. A dump that finds a record present reads its header first, unless this process
//! has written or read that record before: a block counts as stored only where one of our keys has
//! encrypted it.

use std::sync::Arc;

use tracing::warn;
use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::{Slot, SlotPool};
use ucm_infra::IdSet;
use ucm_io::IoJob;
use ucm_media::backend::{Backend, BlockRead, Outcome, ReadDone, WriteOptions, Written};
use ucm_record::{Keys, Opened, RecordHeader, Refusal, SideSpec, stored_form};

use super::codec::{Compression, TierCodec};
use super::config::{TierConfig, TierSetup};
use crate::records::OwnParts;

/// Most records remembered whose key is known. Forgetting one costs one read of a header.
const REMEMBERED: usize = 1 << 16;

/// See the module.
pub(super) struct StoredForm {
    /// The tier, as log lines name it.
    tier: String,
    /// Number of the store in the log.
    store: u64,
    parts: Arc<OwnParts>,
    codec: Option<TierCodec>,
    keys: Option<Arc<Keys>>,
    headers: Option<Arc<SlotPool>>,
    /// Records that one of the keys is known to fit.
    key_fits: IdSet<BlockId>,
}

impl StoredForm {
    /// `Unsupported` if the tier has a codec that this build has not.
    pub(super) fn new(tier: &TierConfig, name: &str, setup: &TierSetup) -> Result<Self> {
        let memory = tier.backend.features().memory.is_some();
        Ok(Self {
            tier: name.to_owned(),
            codec: match tier.compressed {
                true => Some(TierCodec::new(&setup.parts, &tier.pool)?),
                false => None,
            },
            store: setup.store,
            parts: Arc::clone(&setup.parts),
            keys: setup.keys.clone().filter(|_| !memory),
            headers: setup.headers.clone(),
            key_fits: IdSet::default(),
        })
    }

    /// How records get to the medium that says this of itself, for the log.
    pub(super) fn describe(&self, medium: &str) -> String {
        let codec = match &self.codec {
            Some(codec) => codec.describe(),
            None => String::new(),
        };
        let cipher = match &self.keys {
            Some(_) => "encrypted by AES-256-GCM, into ",
            None => "",
        };
        format!("{codec}{cipher}{medium}")
    }

    /// Whether records are stored in another form than they are used in.
    pub(super) fn recodes(&self) -> bool {
        self.codec.is_some() || self.keys.is_some()
    }

    /// Counts of the codec, if there is one.
    pub(super) fn compression(&self) -> Option<Compression> {
        self.codec.as_ref().map(TierCodec::stats)
    }

    /// Puts a record that is about to be written into the stored form. It is not compressed where
    /// the write would only find it present. What could not be encrypted must not be written.
    pub(super) fn encode(
        &self,
        backend: &dyn Backend,
        id: BlockId,
        slot: &mut Slot,
        mut options: WriteOptions,
    ) -> Result<WriteOptions> {
        if let Some(codec) = &self.codec
            && (options.replace || !backend.features().is_published(id))
        {
            match codec.encode(slot.as_mut_slice(), &options) {
                Ok(len) => options.len = len,
                Err(error) => warn!(
                    store = self.store,
                    block = %id,
                    tier = self.tier,
                    error = %error,
                    "record {id} is stored as it is: {error}"
                ),
            }
        }
        if let Some(keys) = &self.keys {
            keys.encrypt(&mut slot.as_mut_slice()[..options.len])?;
        }
        Ok(options)
    }

    /// Reads records on this thread, in the form in which they are used. Side shards are not
    /// compressed, and [`StoredForm::decrypt_side`] decrypts them.
    pub(super) fn read(
        &self,
        backend: &dyn Backend,
        io: &IoJob,
        run: Vec<BlockRead>,
    ) -> Vec<Outcome> {
        if !self.recodes() {
            return backend.read(io, run);
        }
        let ids: Vec<_> = run.iter().map(|read| (read.id, read.sides)).collect();
        let mut outcomes = backend.read(io, run);
        for (outcome, (id, sides)) in outcomes.iter_mut().zip(ids) {
            if let Outcome::Read(Ok(read)) = outcome
                && !sides
                && let Err(error) = self.decode(id, read)
            {
                *outcome = Outcome::Read(Err(error));
            }
        }
        outcomes
    }

    /// Puts a record that was read into the form in which it is used. `Foreign`, with its reason,
    /// for one that is not encrypted and for one whose header is not authentic.
    fn decode(&self, id: BlockId, read: &mut ReadDone) -> Result<()> {
        let len = read.read;
        if let Some(keys) = &self.keys {
            let opened = keys.decrypt(read.slot.as_mut_slice(), len);
            if matches!(opened, Ok(Opened::Decrypted)) {
                self.note_key_fits(id);
            }
            check_opened(id, opened)?;
        }
        let Some(codec) = &self.codec else {
            return Ok(());
        };
        let stored = &read.slot.as_slice()[..len];
        let expect = self.parts.of(stored).expect(id);
        let Some(header) = stored_form(stored, read.stored_len, &expect) else {
            return Ok(()); // as it is, or damaged
        };
        let (len, whole) = codec.decode(&header, read.slot.as_mut_slice(), len)?;
        if !whole {
            warn!(
                store = self.store,
                block = %id,
                "record {id} does not come back from its compressed form, though that is whole; it \
                 will be recomputed"
            );
        }
        (read.read, read.stored_len) = (len, len as u64);
        Ok(())
    }

    /// Decrypts one side shard, which was read with the header of its record and without the rest.
    pub(super) fn decrypt_side(
        &self,
        id: BlockId,
        wanted: &SideSpec,
        read: &mut ReadDone,
    ) -> Result<()> {
        match &self.keys {
            Some(keys) => check_opened(id, keys.decrypt_side(read.slot.as_mut_slice(), wanted)),
            None => Ok(()),
        }
    }

    /// One of the keys fits this record: it was written or decrypted here.
    pub(super) fn note_key_fits(&self, id: BlockId) {
        let key_fits = self.key_fits.pin();
        if self.keys.is_some() && key_fits.insert(id) && key_fits.len() > REMEMBERED {
            key_fits.clear();
        }
    }

    /// A record was refused: another may take its place, of any key.
    pub(super) fn forget_key(&self, id: BlockId) {
        self.key_fits.pin().remove(&id);
    }

    /// Whether a record that is present may be of a key that this store has not.
    pub(super) fn may_be_of_another_key(&self, id: BlockId) -> bool {
        self.keys.is_some() && !self.key_fits.pin().contains(&id)
    }

    /// The outcome of a dump that found a record present: `InTheWay` where none of the keys has
    /// encrypted it. A record that cannot be read is left to its load.
    pub(super) fn check_present(
        &self,
        backend: &dyn Backend,
        io: &IoJob,
        id: BlockId,
    ) -> Result<Written> {
        let slot = self
            .headers
            .as_ref()
            .and_then(|headers| headers.try_acquire());
        let (Some(keys), Some(slot)) = (&self.keys, slot) else {
            let text = "too many stored blocks are compared with dumps at once";
            return Err(Error::new(ErrorKind::Busy, text));
        };
        let read = BlockRead {
            looked: true,
            ..BlockRead::whole(id, slot, io.deadline())
        };
        let header = match backend.read(io, vec![read]).pop() {
            Some(Outcome::Read(Ok(read))) => RecordHeader::decode(read.bytes()).ok(),
            Some(Outcome::Read(Err(error)))
                if matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Io) =>
            {
                return Err(error);
            }
            _ => None,
        };
        Ok(match header {
            Some(header) if header.key.is_none() => Written::InTheWay(MissReason::NotEncrypted),
            Some(header) if !keys.fit(&header) => Written::InTheWay(MissReason::WrongKey),
            Some(_) => {
                self.note_key_fits(id);
                Written::Present
            }
            None => Written::Present,
        })
    }
}

fn check_opened(id: BlockId, opened: Result<Opened, Refusal>) -> Result<()> {
    let refused = |reason: MissReason, text| {
        let error = Error::new(ErrorKind::Foreign, text).with("block", id);
        error.with("reason", reason.name())
    };
    match opened {
        Ok(Opened::Decrypted | Opened::Left) => Ok(()),
        Ok(Opened::Plain) => {
            let text = "the stored record is not encrypted, and this store reads no such record";
            Err(refused(MissReason::NotEncrypted, text))
        }
        Err(refusal) => {
            let error = refused(refusal.reason, "the stored record is not authentic");
            Err(error.caused_by(Error::from(refusal)))
        }
    }
}
