//! Regions: records, the index, copies under way; [`finding`] has the registry.

mod finding;

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tempfile::TempDir;
use ucm_core::BlockId;
use ucm_infra::seqlock;

use super::table::{Field, MOST_PROBES, Table, describe};
use super::*;

const LEN: usize = 5000;
const NAMESPACE: [u8; 32] = [5; 32];

fn options(slots: u64) -> RegionOptions {
    RegionOptions {
        capacity: slots * (8192 + 64) + 3 * 4096,
        record_len: LEN,
        namespace: NAMESPACE,
        huge_pages: false,
    }
}

fn region(slots: u64) -> Arc<SharedRegion> {
    let region = SharedRegion::create(options(slots)).unwrap();
    assert_eq!(region.capacity() as u64, slots);
    region
}

fn id(n: u64) -> BlockId {
    let mut bytes = [0xa5; 16];
    bytes[4..12].copy_from_slice(&n.to_le_bytes());
    BlockId(bytes)
}

/// The record of id `n` in its `version`-th write.
fn content(n: u64, version: u64) -> Vec<u8> {
    let byte =
        |at: usize| (n as u8).wrapping_mul(31) ^ (version as u8).wrapping_mul(17) ^ (at / 8) as u8;
    (0..LEN).map(byte).collect()
}

/// Copies a whole record to the start of `out`.
fn copy_out(view: &RegionView, id: BlockId, out: &mut [u8]) -> Option<usize> {
    let whole = 0..out.len();
    let copied = view.copy_parts(id, &[whole], out);
    copied.filter(|&len| len <= out.len())
}

fn put(region: &Arc<SharedRegion>, n: u64, version: u64) -> (u32, Option<u32>) {
    let mut blank = region.reserve().unwrap();
    blank.fill(&content(n, version)).unwrap();
    blank.publish(id(n), n as u32)
}

/// A registry of the test's own, and a reader of it.
struct Place {
    registry: Registry,
    dir: TempDir,
    known: Vec<Arc<RegionView>>,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self {
            registry: Registry::new(dir.path().join("ucm")),
            dir,
            known: Vec::new(),
        }
    }

    fn look(&mut self) -> Scan {
        self.look_for(NAMESPACE, LEN)
    }

    fn look_for(&mut self, namespace: [u8; 32], record_len: usize) -> Scan {
        let wanted = Wanted {
            namespace,
            record_len: (record_len, record_len),
            own: None,
        };
        let scan = self.registry.scan(&wanted, &self.known).unwrap();
        self.known.clone_from(&scan.views);
        scan
    }

    fn view(&mut self, region: &SharedRegion) -> Arc<RegionView> {
        region.announce(&self.registry).unwrap();
        let views = self.look().views;
        let found = views
            .into_iter()
            .find(|view| view.nonce() == region.nonce());
        found.unwrap()
    }

    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.registry.dir()).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }
}

fn table<'a>(region: &'a SharedRegion, words: &'a [seqlock::AtomicU64]) -> Table<'a> {
    Table {
        words,
        shape: &region.shape,
        probes: region.shape.buckets,
    }
}

#[test]
fn a_reader_looks_at_few_buckets_of_an_index_that_is_full() {
    let (mut place, region) = (Place::new(), region(1024));
    let view = place.view(&region);
    put(&region, 1, 0);
    let (shape, words) = (&region.shape, region.mapping.words());
    let (home, mask) = (shape.place(id(1)).0, shape.buckets - 1);
    let bucket = |steps: usize| &words[shape.index() + ((home + steps) & mask)];
    let name = bucket(0).load(Ordering::Relaxed);
    assert!(shape.buckets > MOST_PROBES && view.contains(id(1)));
    // Another process fills the index with names of other records.
    (0..shape.buckets).for_each(|steps| bucket(steps).store(1, Ordering::Relaxed));
    assert!(!view.contains(id(1)) && !view.contains(id(2)));
    bucket(MOST_PROBES - 1).store(name, Ordering::Relaxed);
    assert!(view.contains(id(1)), "within reach");
    bucket(MOST_PROBES - 1).store(1, Ordering::Relaxed);
    bucket(MOST_PROBES).store(name, Ordering::Relaxed);
    assert!(!view.contains(id(1)), "the search has ended before");
    let mut out = vec![0; 8192];
    assert!(copy_out(&view, id(1), &mut out).is_none() && !view.contains(id(2)));
    assert!(region.contains(id(1)), "the writer trusts its own index");
}

#[test]
fn a_record_is_found_copied_replaced_and_removed() {
    let (mut place, region) = (Place::new(), region(4));
    let view = place.view(&region);
    let mut out = vec![0; 8192];
    assert!(!region.contains(id(1)) && copy_out(&view, id(1), &mut out).is_none());
    let (slot, before) = put(&region, 1, 0);
    assert_eq!((before, region.find(id(1))), (None, Some((slot, 1))));
    assert_eq!(copy_out(&view, id(1), &mut out), Some(LEN));
    assert_eq!(out[..LEN], content(1, 0));
    assert!(
        copy_out(&view, id(1), &mut out[..LEN - 1]).is_none(),
        "no room for it"
    );

    let pinned = region.pin(id(1)).unwrap();
    let (other, before) = put(&region, 1, 1);
    assert_eq!(before, Some(slot));
    assert_eq!(
        (region.len(), region.free()),
        (1, 2),
        "the old one is pinned"
    );
    assert_eq!(pinned[..], content(1, 0), "and stands still");
    assert_eq!(copy_out(&view, id(1), &mut out), Some(LEN));
    assert_eq!(out[..LEN], content(1, 1));
    drop(pinned);
    assert_eq!(region.free(), 3);

    assert!(
        region.remove(id(1), Some(slot)).is_none(),
        "it is elsewhere now"
    );
    let removed = region.remove(id(1), Some(other)).unwrap();
    assert!(!view.contains(id(1)) && region.is_empty());
    assert_eq!((&removed[..], region.free()), (&content(1, 1)[..], 3));
    drop(removed);
    assert_eq!(region.free(), 4);
}

#[test]
fn parts_of_a_record_come_alone_and_to_their_places() {
    let (mut place, region) = (Place::new(), region(4));
    let view = place.view(&region);
    put(&region, 1, 0);
    let mut out = vec![0xee; LEN + 8];
    let parts = [0..8, 16..LEN + 8];
    assert_eq!(view.copy_parts(id(1), &parts, &mut out), Some(LEN));
    assert_eq!(out[..8], content(1, 0)[..8]);
    assert_eq!(out[8..16], [0xee; 8], "not asked for");
    assert_eq!(out[16..LEN], content(1, 0)[16..]);
    assert_eq!(out[LEN..], [0xee; 8], "behind its end");
    assert!(
        view.copy_parts(id(2), &parts, &mut out).is_none(),
        "not there"
    );
    assert!(
        view.copy_parts(id(1), &parts, &mut out[..LEN - 1])
            .is_none(),
        "no room for it"
    );
}

#[test]
fn slots_are_bounded_and_come_back() {
    let region = region(5);
    let held: Vec<_> = (0..5).map(|_| region.reserve().unwrap()).collect();
    assert!(region.reserve().is_none());
    drop(held);
    for n in 0..5 {
        put(&region, n, 0);
    }
    assert!(region.reserve().is_none(), "nothing is removed by itself");
    let pins: Vec<_> = (0..5).map(|n| region.pin(id(n)).unwrap()).collect();
    for n in 0..5 {
        assert!(region.is_pinned(pins[n as usize].slot()));
        drop(region.remove(id(n), None).unwrap());
    }
    assert!(region.reserve().is_none(), "all are pinned");
    for (n, pin) in pins.iter().enumerate() {
        assert_eq!(pin[..], content(n as u64, 0));
    }
    drop(pins);
    assert_eq!((region.free(), region.len()), (5, 0));
}

#[test]
fn a_record_that_does_not_fit_is_refused() {
    let region = region(4);
    let mut blank = region.reserve().unwrap();
    assert!(blank.fill(&[]).is_err());
    assert!(blank.fill(&vec![0; LEN + 1]).is_err());
    drop(blank);
    assert_eq!(region.free(), 4);
}

#[test]
fn the_index_is_that_of_a_map_through_a_thousand_times_its_size_and_searches_stay_short() {
    let (mut place, region) = (Place::new(), region(64));
    let view = place.view(&region);
    let (mut truth, mut state) = (HashMap::new(), 1u64);
    let mut next = move |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut longest = 0;
    for round in 0..64_000u64 {
        let n = next(400);
        if truth.contains_key(&n) && round % 3 == 0 {
            drop(region.remove(id(n), None).unwrap());
            truth.remove(&n);
        } else if !truth.contains_key(&n) {
            while region.free() == 0 {
                let gone = *truth.keys().next().unwrap();
                drop(region.remove(id(gone), None).unwrap());
                truth.remove(&gone);
            }
            let mut blank = region.reserve().unwrap();
            blank.fill(&n.to_le_bytes()).unwrap();
            let (slot, before) = blank.publish(id(n), 0);
            assert_eq!(before, None);
            truth.insert(n, slot);
        }
        let asked = next(400);
        assert_eq!(
            region.find(id(asked)).map(|found| found.0),
            truth.get(&asked).copied()
        );
        if round % 64 == 0 {
            longest = longest.max(longest_search(&region));
        }
    }
    assert_eq!(view.records().len(), truth.len());
    assert!(truth.keys().all(|&n| view.contains(id(n))));
    assert_eq!(region.records().len(), region.len());
    assert!(
        longest <= 64,
        "a search met {longest} of {} words",
        region.shape.buckets
    );
}

/// Most words that any search can read: the longest run of names.
fn longest_search(region: &SharedRegion) -> usize {
    let table = table(region, region.mapping.words());
    let free = |bucket: usize| table.bucket(bucket).unwrap().load(Ordering::Relaxed) == 0;
    let (mut longest, mut run) = (0, 0);
    for bucket in (0..region.shape.buckets).chain(0..region.shape.buckets) {
        run = if free(bucket) { 0 } else { run + 1 };
        longest = longest.max(run);
    }
    longest
}

#[test]
fn a_write_under_way_is_a_miss_even_where_the_index_names_it() {
    let (mut place, region) = (Place::new(), region(4));
    let view = place.view(&region);
    let (slot, _) = put(&region, 1, 0);
    let table = table(&region, region.mapping.words());
    let generation = &table.entry(slot as usize).unwrap()[Field::Generation as usize];
    seqlock::begin(generation); // the state after the writer was killed
    assert!(!view.contains(id(1)) && copy_out(&view, id(1), &mut vec![0; LEN]).is_none());
    assert!(view.records().is_empty());
    seqlock::publish(generation);
    assert!(view.contains(id(1)));
}

#[test]
fn whatever_stands_in_the_words_no_reader_falls_over_it() {
    let (mut place, region) = (Place::new(), region(4));
    let view = place.view(&region);
    put(&region, 1, 0);
    let table = table(&region, region.mapping.words());
    let moves = &region.mapping.words()[super::shape::MOVES];
    for bucket in 0..region.shape.buckets {
        moves.store(bucket as u64, Ordering::Relaxed);
        for word in [
            1,
            2,
            u64::MAX,
            u64::MAX << 32,
            (u64::MAX << 32) | 5,
            1 << 63,
        ] {
            table.bucket(bucket).unwrap().store(word, Ordering::Relaxed);
            let _ = (
                view.contains(id(1)),
                copy_out(&view, id(7), &mut [0; 16]),
                view.records(),
            );
        }
        table
            .bucket(bucket)
            .unwrap()
            .store(u64::MAX, Ordering::Relaxed);
    }
    assert!(
        !view.contains(id(9)),
        "an index without a free word ends too"
    );
    // An impossible length.
    let entry = table.entry(0).unwrap();
    describe(entry, id(3), usize::MAX >> 1, 0);
    table.name(id(3), 0, None);
    assert!(copy_out(&view, id(3), &mut vec![0; 1 << 16]).is_none());
}

#[test]
fn a_copy_during_overwriting_is_exact_or_a_miss() {
    let (mut place, region) = (Place::new(), region(4));
    let view = place.view(&region);
    let (hits, torn) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let enough = || hits.load(Ordering::Relaxed) >= 3000 || torn.load(Ordering::Relaxed) > 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in (0..u64::MAX).take_while(|_| !enough()) {
                put(&region, round % 3, round);
                if round % 7 == 0 {
                    drop(region.remove(id(round % 3), None));
                }
            }
        });
        for _ in 0..2 {
            scope.spawn(|| {
                let mut out = vec![0; LEN];
                for n in (0..3).cycle().take_while(|_| !enough()) {
                    if copy_out(&view, id(n), &mut out) == Some(LEN) {
                        let wrong = |(at, &byte): (usize, &u8)| byte != out[0] ^ (at / 8) as u8;
                        torn.fetch_add(
                            usize::from(out.iter().enumerate().any(wrong)),
                            Ordering::Relaxed,
                        );
                        hits.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    assert_eq!(torn.into_inner(), 0);
}

#[test]
fn memory_is_touched_only_where_it_is_used() {
    let region = SharedRegion::create(RegionOptions {
        capacity: 1 << 30,
        ..options(4)
    });
    let region = region.unwrap();
    put(&region, 1, 0);
    let path = format!("/proc/self/fd/{}", region.fd.as_fd().as_raw_fd());
    let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap());
    assert!(blocks * 512 < 1 << 20, "{blocks} blocks for one record");
}

#[test]
fn where_memory_is_committed_strictly_every_page_is_taken_at_the_start() {
    let region = SharedRegion::make(options(64), true).unwrap();
    let path = format!("/proc/self/fd/{}", region.fd.as_fd().as_raw_fd());
    let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap());
    assert_eq!(blocks * 512, region.bytes() as u64, "no access can fault");
    put(&region, 1, 0);
    assert!(region.contains(id(1)));
}

#[test]
fn a_record_that_stays_is_found_at_every_moment_while_others_come_and_go() {
    let (mut place, region) = (Place::new(), region(64));
    let view = place.view(&region);
    for n in 0..16 {
        put(&region, n, 0);
    }
    let (searches, wrong) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in (16..u64::MAX).take_while(|_| searches.load(Ordering::Relaxed) < 20_000) {
                if round >= 16 + 40 {
                    drop(region.remove(id(round - 40), None).unwrap());
                }
                put(&region, round, 0);
            }
        });
        scope.spawn(|| {
            for n in (0..16).cycle().take(20_000) {
                wrong.fetch_add(usize::from(!view.contains(id(n))), Ordering::Relaxed);
                searches.fetch_add(1, Ordering::Relaxed);
            }
        });
    });
    // A search gives up after a few attempts: rare, and a miss.
    let wrong = wrong.into_inner();
    assert!(wrong < 100, "{wrong} of 20000 searches missed");
}
