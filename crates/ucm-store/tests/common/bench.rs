//! A store whose records a test damages, and its quarantine.

use std::path::PathBuf;
use std::sync::Arc;

use ucm_core::BlockId;
use ucm_infra::{Clock, ManualClock};
use ucm_quota::evidence::{QuarantineConfig, evidence_time};

use super::{Device, Layout, Setup, Store, directory, eventually, id, identity, ids};

/// A store on a manual clock, with a device that holds what its blocks stand for.
pub(crate) struct Bench {
    pub(crate) store: Store,
    pub(crate) device: Device,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) dir: Arc<tempfile::TempDir>,
}

impl Bench {
    pub(crate) fn new(bounds: QuarantineConfig) -> Self {
        Self::on(Arc::new(directory()), ManualClock::new(), bounds)
    }

    pub(crate) fn on(
        dir: Arc<tempfile::TempDir>,
        clock: Arc<ManualClock>,
        bounds: QuarantineConfig,
    ) -> Self {
        let setup = Setup {
            quarantine: bounds,
            ..Setup::default()
        };
        let device = Device::filled(&setup, &ids(40));
        let store = Store::with_clock(dir.path(), setup, Arc::clone(&clock) as Arc<dyn Clock>);
        Self {
            store,
            device,
            clock,
            dir,
        }
    }

    pub(crate) fn dump(&self, blocks: &[BlockId]) {
        self.store.dump(&self.device, blocks).unwrap();
    }

    /// Changes a stored record in place; its time of use stays.
    pub(crate) fn damage(&self, block: BlockId, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        self.store.edit(block, change)
    }

    /// Stores a block of this writer, damages its payload and lets a load refuse it.
    pub(crate) fn refuse_own(&self, block: BlockId) {
        self.dump(&[block]);
        self.damage(block, |bytes| bytes[5000] ^= 1);
        self.refuse(block);
    }

    pub(crate) fn refuse(&self, block: BlockId) {
        let target = Device::blank(&self.store.setup, &[block]);
        self.store.load(&target, &[block]).unwrap_err();
        assert!(target.is_blank(block));
    }

    pub(crate) fn kept(&self, records: u64) {
        eventually("records are in quarantine", || {
            self.store.stat("records_quarantined") == records
        });
    }

    /// Waits until everything refused so far was looked at: they are, one after the other.
    pub(crate) fn looked_at(&self) {
        let before = self.store.stat("records_quarantined");
        self.refuse_own(id(39));
        self.kept(before + 1);
    }

    /// A record was taken away, or it was not: its file, or its place in the index of segments.
    pub(crate) fn assert_gone(&self, block: BlockId, gone: bool) {
        match self.store.setup.layout {
            Layout::File => assert_ne!(self.store.file(block).exists(), gone),
            Layout::Segment(_) => {
                assert_ne!(self.store.backend.features().is_published(block), gone)
            }
        }
    }

    pub(crate) fn quarantine(&self) -> PathBuf {
        self.dir
            .path()
            .join(identity("w").namespace())
            .join("quarantine")
    }

    /// What is in quarantine: (id, reason), by name.
    pub(crate) fn evidence(&self) -> Vec<(String, String)> {
        let entries = std::fs::read_dir(self.quarantine())
            .into_iter()
            .flatten()
            .flatten();
        let mut names: Vec<String> = entries
            .map(|entry| entry.file_name().into_string().unwrap())
            .collect();
        names.sort();
        let parts = |name: &String| {
            assert!(evidence_time(name.as_ref()).is_some(), "{name}");
            let mut parts = name.split('.').map(str::to_owned);
            (parts.next().unwrap(), parts.next().unwrap())
        };
        names.iter().map(parts).collect()
    }

    pub(crate) fn heals(&self, block: BlockId) {
        self.dump(&[block]);
        let target = Device::blank(&self.store.setup, &[block]);
        self.store.load(&target, &[block]).unwrap();
        assert!(target.is_right(block));
    }
}
