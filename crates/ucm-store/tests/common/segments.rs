//! Stores in segments, and what lies in theirs, read by `docs/format-segment.md` and not by the
//! code under test.

use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use ucm_core::BlockId;
use ucm_media::backend::Flush;
use ucm_media::registry;
use ucm_media::segment::SegmentConfig;
use ucm_store::engine::{Task, Until};
use ucm_testkit::{Fault, OpKind, Rule};

use super::servers::{BUCKET, shared_s3};
use super::shared::LONG;
use super::{Above, Device, Fixture, Layout, Medium, Store, eventually, identity};

/// Where a record lies.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Place {
    pub(crate) file: PathBuf,
    pub(crate) id: BlockId,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

impl Store {
    /// The directory of a namespace.
    pub(crate) fn namespace(&self) -> PathBuf {
        self.root.join(identity(self.fixture.weights).namespace())
    }

    /// The segments that have a name, by name; of a store on the tests' own S3 server where that
    /// keeps them.
    pub(crate) fn segments(&self) -> Vec<PathBuf> {
        let namespace = match self.fixture.medium {
            Medium::Kind("object") => self
                .objects()
                .join(identity(self.fixture.weights).namespace()),
            _ => self.namespace(),
        };
        files(&namespace.join("segments"))
    }

    /// Where the tests' own S3 server keeps the objects of a store.
    pub(crate) fn objects(&self) -> PathBuf {
        let options = registry::find("object")
            .unwrap()
            .sample(&self.root)
            .unwrap();
        let url = options["storage_backends"][0].as_str().unwrap();
        let told = self
            .fixture
            .options
            .iter()
            .find(|(key, _)| *key == "object_credentials");
        let own = told.and_then(|(_, keys)| Some(Path::new(keys.as_str()?).parent()?.join(BUCKET)));
        let bucket = own.unwrap_or_else(|| shared_s3().unwrap().bucket());
        bucket.join(url.strip_prefix("s3://bucket/").unwrap())
    }

    /// The private files.
    pub(crate) fn privates(&self) -> Vec<PathBuf> {
        files(&self.namespace().join("tmp"))
    }

    /// Every record of a segment that can be read by its footer.
    pub(crate) fn places(&self) -> Vec<Place> {
        self.segments()
            .iter()
            .flat_map(|file| places(file))
            .collect()
    }
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries.map(|entry| entry.path()).collect();
    files.sort();
    files
}

/// The records that the footer of a segment names; none where there is no footer.
pub(crate) fn places(file: &Path) -> Vec<Place> {
    let bytes = std::fs::read(file).unwrap_or_default();
    let number = |at: usize, len: usize| {
        let mut out = [0; 8];
        out[..len].copy_from_slice(&bytes[at..at + len]);
        u64::from_le_bytes(out) as usize
    };
    let Some(trailer) = bytes
        .len()
        .checked_sub(128)
        .filter(|&at| bytes[at..at + 4] == *b"UCMF")
    else {
        return Vec::new();
    };
    let (start, count) = (number(trailer + 8, 8), number(trailer + 24, 4));
    let entry = |n: usize| {
        let at = start + n * 32;
        Some(Place {
            file: file.to_owned(),
            id: BlockId(bytes.get(at..at + 16)?.try_into().ok()?),
            offset: number(at + 16, 8),
            len: number(at + 24, 8),
        })
    };
    (0..count.min(bytes.len() / 32)).filter_map(entry).collect()
}

/// Puts blocks into one segment.
pub(crate) fn write(dir: &Path, fixture: &Fixture, blocks: &[BlockId]) {
    let store = Store::open(
        dir,
        Fixture {
            layout: patient().layout,
            above: Above::Nothing,
            slots: 64, // a quarter of them is never given to dumps
            ..fixture.clone()
        },
    );
    let device = Device::filled(fixture, blocks);
    let task = store.engine.dump(device.rows(blocks)).unwrap();
    eventually("the records are written", || {
        store
            .engine
            .lookup(blocks)
            .unwrap()
            .iter()
            .all(|&found| found)
    });
    store.backend.flush(Flush::Now);
    store.outcome(&task).unwrap();
    assert_eq!(store.segments().len(), 1);
}

/// Waits until nothing private of a dead writer is left: at opening that needs the first grant,
/// else it comes soon after.
pub(crate) fn await_taken_over(store: &Store) {
    eventually("what the dead left is taken over", || {
        store.privates().is_empty()
    });
}

/// Leaves the private segment of a writer that died at its seal, with these blocks of a device in
/// it.
pub(crate) fn die_at_seal(
    root: &Path,
    fixture: &Fixture,
    device: &Device,
    blocks: &[BlockId],
) -> PathBuf {
    let store = Store::open(root, fixture.clone());
    let task = begin(&store, device, blocks);
    store.fault(Rule::on(OpKind::Finish, Fault::Killed { keep: 50 }));
    store.backend.flush(Flush::Now);
    assert_eq!(store.outcome(&task).unwrap_err().len(), blocks.len());
    let privates = store.privates();
    assert_eq!((privates.len(), store.segments().len()), (1, 0));
    privates.into_iter().next().unwrap()
}

/// Changes a file in place; its time of use stays. One that was removed (a collector may be at
/// work) stays so.
pub(crate) fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let Ok(mut file) = std::fs::File::options().read(true).write(true).open(path) else {
        return;
    };
    let time = file.metadata().unwrap().modified().unwrap();
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    change(&mut bytes);
    file.set_len(bytes.len() as u64).unwrap();
    file.rewind().unwrap();
    file.write_all(&bytes).unwrap();
    file.set_modified(time).unwrap();
}

/// Sealed as soon as nothing is being written.
pub(crate) fn quick() -> Fixture {
    Fixture {
        layout: Layout::segments(),
        ..Fixture::default()
    }
}

/// Sealed after an hour, or at a flush.
pub(crate) fn patient() -> Fixture {
    Fixture {
        layout: Layout::Segment(SegmentConfig {
            age: LONG,
            ..SegmentConfig::default()
        }),
        ..Fixture::default()
    }
}

/// Loads blocks; whether that went well. Exact, or untouched.
pub(crate) fn loads(store: &Store, blocks: &[BlockId]) -> bool {
    let device = Device::blank(&store.fixture, blocks);
    let loaded = store.load(&device, blocks).is_ok();
    let right = |block: &BlockId| device.is_right(*block);
    assert!(
        blocks
            .iter()
            .all(|block| right(block) || device.is_blank(*block)),
        "wrong bytes on the device"
    );
    assert!(!loaded || blocks.iter().all(right));
    loaded
}

/// Which blocks are hits.
pub(crate) fn finds(store: &Store, blocks: &[BlockId]) -> Vec<bool> {
    store.engine.lookup(blocks).unwrap()
}

/// Whether a task has ended.
pub(crate) fn is_over(store: &Store, task: &Task) -> bool {
    task.check(store.engine.clock(), Until::Published)
}

/// Starts a dump and waits until its records can be read by their own writer.
pub(crate) fn begin(store: &Store, device: &Device, blocks: &[BlockId]) -> Task {
    let task = store.engine.dump(device.rows(blocks)).unwrap();
    eventually("the records are written", || {
        finds(store, blocks).iter().all(|&found| found)
    });
    task
}
