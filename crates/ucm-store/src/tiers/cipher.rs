//! Encryption at rest: what is written to a tier below memory is encrypted, and no one above sees
//! it in that form.
//!
//! A record is encrypted in its slot by the thread that is about to write it, after the tier's
//! codec, and decrypted in its slot by the thread that has read it, before the codec and before it
//! is verified. So the engine verifies the same bytes by the same checksums as without. A tier that
//! encrypts takes nothing that is not: a process that can write to a medium could otherwise put
//! there what he likes. What another key has encrypted is left as it is, and refused for that.
//! A dump that finds a record present reads its header first, unless this process has written or
//! read that record before: a block counts as stored only where one of our keys has encrypted it.

use std::sync::Arc;

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::Slot;
use ucm_infra::{LANE_DUMP, MonotonicTime};
use ucm_io::IoJob;
use ucm_record::{Opened, RecordHeader, Refusal, SideSpec};
use ucm_tier::backend::{BlockRead, Done, Outcome, ReadDone, WriteOptions, Written, either};

use super::Tiers;

impl Tiers {
    /// Called with a record in the form in which a tier stores it: encrypts it, where that tier
    /// does. What could not be encrypted must not be written.
    pub(super) fn encrypt(
        &self,
        number: usize,
        slot: &mut Slot,
        options: &WriteOptions,
    ) -> Result<()> {
        match &self.tiers[number].keys {
            Some(keys) => keys.encrypt(&mut slot.as_mut_slice()[..options.len]),
            None => Ok(()),
        }
    }

    /// A record that was read from a tier, decrypted where that tier encrypts. `Foreign`, with its
    /// reason, for one that is not encrypted and for one whose header is not authentic.
    pub(super) fn decrypt(
        &self,
        number: usize,
        id: BlockId,
        mut read: ReadDone,
    ) -> Result<ReadDone> {
        if let Some(keys) = &self.tiers[number].keys {
            let len = read.read;
            let opened = keys.decrypt(read.slot.as_mut_slice(), len);
            if matches!(opened, Ok(Opened::Decrypted)) {
                self.tiers[number].note_key_fits(id);
            }
            taken(id, opened)?;
        }
        Ok(read)
    }

    /// Called with the outcome of a dump's write to a tier, and passes it on: of a record that is
    /// present and may be of another key, once its header was read on a thread of the tier.
    pub(super) fn check_present(
        self: &Arc<Self>,
        number: usize,
        id: BlockId,
        deadline: MonotonicTime,
        result: Result<Written>,
        done: Done<Written>,
    ) {
        let tier = &self.tiers[number];
        if !matches!(result, Ok(Written::Present)) || !tier.may_be_of_another_key(id) {
            return done(result);
        }
        let (tiers, (done, ended)) = (Arc::clone(self), either(done));
        let work = move |io: &IoJob| {
            done(tiers.present(number, io, id));
            Ok(())
        };
        tier.pool.job(LANE_DUMP, deadline, work, ended);
    }

    /// What a dump comes to that found a record present in a tier that encrypts: `InTheWay` where
    /// none of the keys has encrypted it. What cannot be read as a record is found by its load.
    fn present(&self, number: usize, io: &IoJob, id: BlockId) -> Result<Written> {
        let tier = &self.tiers[number];
        let slot = self
            .headers
            .as_ref()
            .and_then(|headers| headers.try_acquire());
        let (Some(keys), Some(slot)) = (&tier.keys, slot) else {
            let text = "too many stored blocks are compared with dumps at once";
            return Err(Error::new(ErrorKind::Busy, text));
        };
        let read = BlockRead {
            looked: true,
            ..BlockRead::whole(id, slot, io.deadline())
        };
        let header = match tier.backend.read(io, vec![read]).pop() {
            Some(Outcome::Came(Ok(read))) => RecordHeader::decode(read.bytes()).ok(),
            Some(Outcome::Came(Err(error)))
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
                tier.note_key_fits(id);
                Written::Present
            }
            None => Written::Present,
        })
    }

    /// The same of one side shard, which was read with the header of its record and without the
    /// rest.
    pub(crate) fn decrypt_side(
        &self,
        number: usize,
        id: BlockId,
        wanted: &SideSpec,
        read: &mut ReadDone,
    ) -> Result<()> {
        match &self.tiers[number].keys {
            Some(keys) => taken(id, keys.decrypt_side(read.slot.as_mut_slice(), wanted)),
            None => Ok(()),
        }
    }
}

fn taken(id: BlockId, opened: std::result::Result<Opened, Refusal>) -> Result<()> {
    let refused = |reason: MissReason, text| {
        Error::new(ErrorKind::Foreign, text)
            .with("block", id)
            .with("reason", reason.name())
    };
    match opened {
        Ok(Opened::Decrypted | Opened::Left) => Ok(()),
        Ok(Opened::Plain) => {
            let text = "the stored record is not encrypted, and this store takes only what is";
            Err(refused(MissReason::NotEncrypted, text))
        }
        Err(refusal) => {
            let error = refused(refusal.reason, "the stored record is not authentic");
            Err(error.caused_by(Error::from(refusal)))
        }
    }
}
