//! Tests of every medium that keeps segments, for its author to run: [`check_blobs`].

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::mpsc;
use std::time::Duration;

use ucm_core::{ErrorKind, Geometry, Identity, PAGE, Part};
use ucm_device::{ArenaOptions, HostArena, SlotPool};
use ucm_infra::{LANE_SPACE, SystemClock};
use ucm_io::{IoOptions, IoPool};
use ucm_record::RecordLayout;

use super::*;
use crate::scope::Scope;

const PAGE_LEN: usize = PAGE as usize;
/// Room of a blob.
const ROOM: u64 = 64 * PAGE;
/// How long one call may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Panics where an implementation is wrong. `make` returns another writer of the same place each
/// time, in a namespace of the test's own; `reads_parts`: it reads parts of a record by themselves.
pub(crate) fn check_blobs<B: AppendBlobs>(make: &dyn Fn() -> Arc<B>, reads_parts: bool) {
    let suite = Suite {
        blobs: make(),
        other: make(),
        io: IoPool::psync(false, &IoOptions::with_workers(2)).unwrap(),
    };
    suite.names_are_used_once();
    suite.what_is_absent();
    suite.a_blob_grows_and_is_sealed();
    suite.parts_and_pieces_of_a_blob(reads_parts);
    suite.several_threads_write_to_one();
    suite.what_is_sealed_is_never_changed();
    suite.what_is_discarded_is_gone();
    suite.what_is_late_has_no_effect();
    suite.io.shutdown(PATIENCE);
}

/// Whose records a test keeps.
pub(crate) fn scope(writer: u64) -> Scope {
    let geometry = Geometry::new(vec![4096], 1, 1).unwrap();
    let text = r#"{"format_version":1,"architecture":"A","world_size":1,"dtype":"f32",
        "weights":"w","model_config":{},"position":{},"kv_dtype":"f32","attention_backend":"a",
        "kv_packing":{},"kv_layout":"l","kv_groups":[],"block_tokens":16,"tensor_parallel":1,
        "pipeline_parallel":1,"decode_context_parallel":1}"#;
    Scope {
        identity: Identity::parse(&text.replace(char::is_whitespace, "")).unwrap(),
        labels: BTreeMap::new(),
        part: Part::default(),
        record: RecordLayout::new(&geometry),
        other_parts: Vec::new(),
        shorter: false,
        lookup_only: false,
        writer,
    }
}

struct Suite<B> {
    blobs: Arc<B>,
    /// Another writer.
    other: Arc<B>,
    io: Arc<IoPool>,
}

/// A stretch of what a test writes into a blob: other bytes at each place.
fn content(range: Range<usize>) -> Vec<u8> {
    range.map(|n| (n % 251) as u8 | 1).collect()
}

/// Names the first byte that differs.
fn assert_same(found: &[u8], expected: &[u8]) {
    assert_eq!(found.len(), expected.len());
    let differs = found
        .iter()
        .zip(expected)
        .position(|(one, other)| one != other);
    assert_eq!(differs, None, "the first byte that differs");
}

/// Where a read of a blob begins.
fn at(blob: BlobName, open: bool, offset: usize) -> ReadAt {
    let offset = offset as u64;
    ReadAt { blob, open, offset }
}

/// As the index names a blob that is not sealed.
fn growing(name: SegmentName) -> BlobName {
    let sealed_ns = u64::MAX;
    BlobName { sealed_ns, name }
}

impl<B: AppendBlobs> Suite<B> {
    fn job(&self, time: Duration) -> IoJob {
        let deadline = SystemClock::shared().now().after(time);
        self.io.here(LANE_SPACE, deadline)
    }

    fn job_now(&self) -> IoJob {
        self.job(PATIENCE)
    }

    fn reserved(&self) -> B::Room {
        let job = self.job_now();
        loop {
            match self.blobs.reserve(&job, ROOM, true) {
                Ok(Some(room)) => return room,
                Ok(None) => {}
                Err(error) => assert!(job.still_wanted().is_ok(), "no room in time: {error}"),
            }
        }
    }

    /// A blob of one page.
    fn begun(&self) -> (SegmentName, B::Room) {
        let (name, room) = (self.blobs.next_name(), self.reserved());
        let created = self
            .blobs
            .create(&self.job_now(), name, &content(0..PAGE_LEN), ROOM);
        created.unwrap();
        (name, room)
    }

    fn append(&self, name: SegmentName, range: Range<usize>) -> Result<()> {
        let (offset, bytes) = (range.start as u64, content(range));
        self.blobs.append(&self.job_now(), name, offset, &bytes)
    }

    /// Seals a blob at this time with a page behind `end`.
    fn seal(&self, name: SegmentName, end: usize, deadline: MonotonicTime) -> Result<BlobMeta> {
        let (send, sealed) = mpsc::channel();
        let (blobs, io) = (Arc::clone(&self.blobs), self.job_now());
        let done = move |result: Result<BlobMeta>| {
            // Between its name and the index every read finds it.
            let mut byte = [0];
            let read = at(growing(name), true, end);
            let filled = blobs.read(&io, read, vec![(&mut byte, 1)], ReadMode::Default);
            let found = filled.bytes == 1 && byte[0] == content(end..end + 1)[0];
            send.send((result, found)).unwrap();
        };
        let seal = Seal {
            name,
            sealed_ns: SystemClock::shared().wall_ns(),
            offset: end as u64,
            footer: content(end..end + PAGE_LEN),
            first_ordinal: 0,
            deadline,
        };
        self.blobs.seal(seal, Box::new(done));
        let (result, found) = sealed.recv().unwrap();
        assert!(found || result.is_err());
        assert!(sealed.recv().is_err(), "it is called once");
        result
    }

    /// A sealed blob of `pages` pages.
    fn sealed(&self, pages: usize) -> BlobMeta {
        let (name, room) = self.begun();
        let end = (pages - 1) * PAGE_LEN;
        self.append(name, PAGE_LEN..end).unwrap();
        let meta = self.seal(name, end, self.job_now().deadline()).unwrap();
        self.blobs.commit(room, meta.len, None);
        assert_eq!(meta.blob.name, name);
        assert_eq!(meta.len, (pages * PAGE_LEN) as u64);
        meta
    }

    /// Reads into buffers of these lengths, one behind the other: all that arrived.
    fn read(
        blobs: &B,
        io: &IoJob,
        at: ReadAt,
        lens: &[usize],
    ) -> std::result::Result<Vec<u8>, ErrorKind> {
        let mut buffers: Vec<_> = lens.iter().map(|len| vec![0; len + 10]).collect();
        let into = buffers.iter_mut().zip(lens);
        let into = into.map(|(buffer, len)| (&mut buffer[..], *len)).collect();
        let Filled { bytes, failed } = blobs.read(io, at, into, ReadMode::Default);
        if let Some(error) = failed {
            return Err(error.kind());
        }
        let mut all = Vec::new();
        for (buffer, len) in buffers.iter().zip(lens) {
            assert_eq!(buffer[*len..], [0; 10], "behind what was wanted");
            all.extend_from_slice(&buffer[..*len]);
        }
        all.truncate(bytes);
        Ok(all)
    }

    /// The whole blob, and nothing behind it, as each writer reads it.
    fn assert_whole(&self, meta: &BlobMeta) {
        let len = meta.len as usize;
        for (blobs, open) in [(&self.blobs, false), (&self.other, false)] {
            for lens in [
                vec![len],
                vec![10, PAGE_LEN, len - PAGE_LEN - 10],
                vec![len + 10],
            ] {
                let found = Self::read(blobs, &self.job_now(), at(meta.blob, open, 0), &lens);
                assert_same(&found.unwrap(), &content(0..len));
            }
        }
    }

    fn assert_absent(&self, blob: BlobName, open: bool) {
        for blobs in [&self.blobs, &self.other] {
            let found = Self::read(blobs, &self.job_now(), at(blob, open, 0), &[10]);
            assert_eq!(found, Err(ErrorKind::NotFound));
        }
    }

    fn names_are_used_once(&self) {
        let all = [&self.blobs, &self.other, &self.blobs, &self.other];
        let mut names = all.map(|blobs| blobs.next_name());
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
        assert!(self.blobs.limit() >= ROOM && self.blobs.side_by_side(ROOM) > 0);
    }

    fn what_is_absent(&self) {
        let name = self.blobs.next_name();
        self.assert_absent(growing(name), true);
        self.assert_absent(growing(name), false);
        let kind = |result: Result<()>| result.unwrap_err().kind();
        assert_eq!(kind(self.append(name, 0..10)), ErrorKind::NotFound);
        let sealed = self.seal(name, PAGE_LEN, self.job_now().deadline());
        assert_eq!(kind(sealed.map(|_| ())), ErrorKind::NotFound);
        self.assert_absent(growing(name), false);
    }

    fn a_blob_grows_and_is_sealed(&self) {
        let (name, room) = self.begun();
        // The second record is there before the first; two do not fill their last page.
        let (first, second) = (PAGE_LEN..2 * PAGE_LEN + 100, 3 * PAGE_LEN..5 * PAGE_LEN);
        let (third, end) = (5 * PAGE_LEN..5 * PAGE_LEN + 100, 6 * PAGE_LEN);
        for range in [second.clone(), first.clone(), third.clone()] {
            self.append(name, range.clone()).unwrap();
            let read = at(growing(name), true, range.start);
            let lens = [50, range.len() - 50];
            let found = Self::read(&self.blobs, &self.job_now(), read, &lens);
            assert_same(&found.unwrap(), &content(range));
        }
        self.assert_absent(growing(name), false);
        let other = at(growing(name), false, 0);
        let other = Self::read(&self.other, &self.job_now(), other, &[10]);
        assert_eq!(other, Err(ErrorKind::NotFound), "no other process finds it");
        let meta = self.seal(name, end, self.job_now().deadline()).unwrap();
        self.blobs.commit(room, meta.len, None);
        assert_eq!(meta.len as usize, end + PAGE_LEN);
        let zeros = |range: Range<usize>| vec![0; range.len()];
        let expected = [
            content(0..first.end),
            zeros(first.end..second.start),
            content(second.start..third.end),
            zeros(third.end..end),
            content(end..end + PAGE_LEN),
        ];
        for blobs in [&self.blobs, &self.other] {
            let read = at(meta.blob, false, 0);
            let found = Self::read(blobs, &self.job_now(), read, &[end + PAGE_LEN]);
            assert_same(&found.unwrap(), &expected.concat());
        }
    }

    fn parts_and_pieces_of_a_blob(&self, reads_parts: bool) {
        let (one, two) = (self.sealed(4), self.sealed(6));
        self.assert_whole(&one);
        self.assert_whole(&two);
        // Past every cache, into a slot as a load has it.
        let arena = HostArena::with(2 * PAGE_LEN, ArenaOptions::default()).unwrap();
        let pool = SlotPool::new(arena, 2 * PAGE_LEN).unwrap();
        let mut slot = pool.try_acquire().unwrap();
        let (read, into) = (at(one.blob, false, PAGE_LEN), slot.as_mut_slice());
        let into = vec![(into, 2 * PAGE_LEN)];
        let filled = self
            .other
            .read(&self.job_now(), read, into, ReadMode::FreshDirect);
        assert_eq!(
            (filled.bytes, filled.failed.is_none()),
            (2 * PAGE_LEN, true)
        );
        assert_same(slot.as_slice(), &content(PAGE_LEN..3 * PAGE_LEN));
        let (parts, mut buf) = ([10..20, PAGE_LEN..2 * PAGE_LEN], vec![0; 2 * PAGE_LEN]);
        let read = self
            .other
            .read_parts(&self.job_now(), read, &parts, &mut buf);
        assert_eq!(read.is_some(), reads_parts);
        if let Some(read) = read {
            assert_eq!(read, 10 + PAGE_LEN);
            let mut expected = vec![0; 2 * PAGE_LEN];
            for part in parts {
                let there = PAGE_LEN + part.start..PAGE_LEN + part.end;
                expected[part].copy_from_slice(&content(there));
            }
            assert_same(&buf, &expected); // what lies between is as it was
        }
        let absent = growing(self.blobs.next_name());
        let wanted = [(two.blob, 0..10), (absent, 0..10), (one.blob, 100..one.len)];
        for mode in [ReadMode::Default, ReadMode::FreshDirect] {
            let deadline = self.job_now().deadline();
            let mut read = self.other.read_pieces(wanted.to_vec(), mode, deadline);
            assert_eq!(read.len(), 3);
            assert_eq!(read.remove(1).unwrap_err().kind(), ErrorKind::NotFound);
            for (piece, (meta, range)) in read.into_iter().zip([(two, 0..10), (one, 100..one.len)])
            {
                let (bytes, len) = piece.unwrap();
                assert_same(&bytes, &content(range.start as usize..range.end as usize));
                assert!(len == meta.len || len == range.end, "{len}");
            }
        }
    }

    fn several_threads_write_to_one(&self) {
        let (name, room) = self.begun();
        std::thread::scope(|threads| {
            for number in 1..9 {
                let range = number * 3 * PAGE_LEN..(number + 1) * 3 * PAGE_LEN;
                threads.spawn(move || self.append(name, range).unwrap());
            }
        });
        self.append(name, PAGE_LEN..3 * PAGE_LEN).unwrap();
        let meta = self.seal(name, 27 * PAGE_LEN, self.job_now().deadline());
        let meta = meta.unwrap();
        self.blobs.commit(room, meta.len, None);
        self.assert_whole(&meta);
    }

    fn what_is_sealed_is_never_changed(&self) {
        let meta = self.sealed(4);
        let name = meta.blob.name;
        let kind = |result: Result<()>| result.unwrap_err().kind();
        assert_eq!(kind(self.append(name, 0..10)), ErrorKind::NotFound);
        let sealed = self.seal(name, PAGE_LEN, self.job_now().deadline());
        assert_eq!(kind(sealed.map(|_| ())), ErrorKind::NotFound);
        self.discard(name);
        self.assert_whole(&meta);
    }

    fn discard(&self, name: SegmentName) {
        let (send, discarded) = mpsc::channel();
        let done = Box::new(move |result| send.send(result).unwrap());
        let deadline = self.job_now().deadline();
        self.blobs.discard(name, deadline, done);
        assert!(discarded.recv().unwrap().is_ok());
        assert!(discarded.recv().is_err(), "it is called once");
    }

    fn what_is_discarded_is_gone(&self) {
        let (name, room) = self.begun();
        self.append(name, PAGE_LEN..2 * PAGE_LEN).unwrap();
        self.discard(name);
        self.blobs.commit(room, 0, None);
        self.assert_absent(growing(name), true);
        let error = self.append(name, 2 * PAGE_LEN..3 * PAGE_LEN).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }

    fn what_is_late_has_no_effect(&self) {
        let (meta, late) = (self.sealed(3), self.job(Duration::ZERO));
        let found = Self::read(&self.other, &late, at(meta.blob, false, 0), &[10]);
        assert_eq!(found, Err(ErrorKind::Timeout));
        let pieces = vec![(meta.blob, 0..10)];
        let read = self
            .other
            .read_pieces(pieces, ReadMode::Default, late.deadline());
        match &read[..] {
            // It was there at once.
            [Ok((bytes, _))] => assert_eq!(*bytes, content(0..10)),
            [Err(error)] => assert_eq!(error.kind(), ErrorKind::Timeout),
            _ => panic!("an answer for each"),
        }
        let reserved = self.blobs.reserve(&late, ROOM, true);
        assert_eq!(
            reserved.err().map(|error| error.kind()),
            Some(ErrorKind::Timeout)
        );
        let (name, room) = self.begun();
        let sealed = self.seal(name, PAGE_LEN, late.deadline());
        assert_eq!(sealed.unwrap_err().kind(), ErrorKind::Timeout);
        self.blobs.commit(room, ROOM, None);
        self.assert_absent(growing(name), false);
    }
}
