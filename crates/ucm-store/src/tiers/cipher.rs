//! Encryption at rest: what is written to a tier below memory is encrypted, and no one above sees
//! it in that form.
//!
//! A record is encrypted in its slot by the thread that is about to write it, after the tier's
//! codec, and decrypted in its slot by the thread that has read it, before the codec and before it
//! is verified. So the engine verifies the same bytes by the same checksums as without. A tier that
//! encrypts takes nothing that is not: a process that can write to a medium could otherwise put
//! there what he likes. What another key has encrypted is left as it is, and refused for that.

use ucm_core::{BlockId, Error, ErrorKind, MissReason, Result};
use ucm_device::Slot;
use ucm_record::{Opened, Refusal, SideSpec};
use ucm_tier::backend::{ReadDone, WriteOptions};

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
            taken(id, keys.decrypt(read.slot.as_mut_slice(), len))?;
        }
        Ok(read)
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
