//! Damage to the record of a block, wherever it lies: in a file of its own, in a segment, below a
//! memory.

use std::sync::Arc;

use ucm_core::BlockId;
use ucm_io::{IoJob, PsyncEngine};
use ucm_media::backend::Backend;
use ucm_testkit::{Fault, Gate, OpKind};

use super::map::MapTier;
use super::segments::change;
use super::{Layout, Store, of_records};

impl Store {
    /// The file of a block's record, where it begins there, and its length.
    fn whereabouts(&self, id: BlockId) -> (std::path::PathBuf, usize, usize) {
        if self.fixture.layout == Layout::File {
            let file = self.file(id);
            let len = std::fs::metadata(&file).unwrap().len();
            return (file, 0, len as usize);
        }
        let place = self
            .places()
            .into_iter()
            .rfind(|place| place.id == id)
            .unwrap();
        (place.file, place.offset, place.len)
    }

    /// The bytes of a block's record.
    pub(crate) fn record(&self, id: BlockId) -> Vec<u8> {
        let (file, at, len) = self.whereabouts(id);
        std::fs::read(file).unwrap()[at..at + len].to_vec()
    }

    /// Changes the record of a block where it lies; its time of use stays. What a memory above has
    /// of it goes, so that the harm is met. A record in a segment keeps its length.
    pub(crate) fn edit(&self, id: BlockId, edit: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let (file, at, len) = self.whereabouts(id);
        let mut record = self.record(id);
        edit(&mut record);
        change(&file, |bytes| {
            drop(bytes.splice(at..at + len, record.clone()))
        });
        assert!(
            self.fixture.layout == Layout::File || record.len() == len,
            "what lies behind it would move"
        );
        self.forget(id);
        record
    }

    /// From now on the reads of loads in the file of a block's record hang before they begin, until
    /// the gate is opened.
    pub(crate) fn hang_record(&self, id: BlockId, gate: &Gate) {
        let (file, ..) = self.whereabouts(id);
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        self.fault(of_records(OpKind::Read, Fault::HangBefore(gate.clone())).path(name));
    }

    /// What memory above has of a block goes.
    pub(crate) fn forget(&self, id: BlockId) {
        let memory = self
            .memory
            .iter()
            .map(|memory| Arc::clone(memory) as Arc<dyn Backend>);
        let map = self
            .map
            .iter()
            .map(|map| Arc::new(MapTier(Arc::clone(map))) as Arc<dyn Backend>);
        for above in memory.chain(map) {
            let here = IoJob::alone(PsyncEngine::new(false));
            above.delete(&here, &[id]).unwrap();
        }
    }
}
