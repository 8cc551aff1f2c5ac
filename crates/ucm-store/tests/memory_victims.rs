//! What the memory tier sends away: handed out whole, readable until it is let go, and never
//! damaged.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::Arc;

use parking_lot::Mutex;
use ucm_core::BlockId;
use ucm_infra::MonotonicTime;
use ucm_media::backend::{Backend, Memory, Victim, Written};
use ucm_media::memory::{MemoryBackend, Policy};

use crate::common::memory::{fixture, keep, record, tier};
use crate::common::{Device, Store, directory, id, ids, pages};

#[test]
fn victims_are_handed_out_whole_and_can_be_found_until_they_are_let_go() {
    let dir = directory();
    let tier = tier(dir.path(), 16, |_| ());
    let taken: Arc<Mutex<Vec<Box<dyn Victim>>>> = Arc::default();
    let hands = Arc::clone(&taken);
    assert!(tier.on_evicted(Box::new(move |victim| hands.lock().push(victim))));
    assert!(!tier.on_evicted(Box::new(|_| ())), "there is one already");
    keep(&tier, ids(16));
    let first = taken.lock().remove(0);
    assert_eq!(first.record(), record(first.id()), "byte for byte");
    assert!(tier.contains(first.id()) && tier.pin(first.id()).is_some());
    let gone = first.id();
    drop(first);
    assert!(!tier.contains(gone));
    // More is stored than is taken away: at most two of sixteen are out, the others go all the
    // same.
    for n in 16..60 {
        keep(&tier, [id(n)]);
        assert!(taken.lock().len() <= 2);
        assert!(tier.contains(id(n)));
    }
    let counts = tier.counts();
    assert!(
        counts.handed >= 2 && counts.handed <= counts.evicted && counts.damaged == 0,
        "{counts:?}"
    );
    taken.lock().clear();
    assert!(tier.stats().usage.records <= 16);
}

#[test]
fn a_victim_that_was_damaged_goes_without_being_handed() {
    let dir = directory();
    let tier = tier(dir.path(), 8, |_| ());
    let taken: Arc<Mutex<Vec<BlockId>>> = Arc::default();
    let hands = Arc::clone(&taken);
    tier.on_evicted(Box::new(move |victim| hands.lock().push(victim.id())));
    keep(&tier, ids(7));
    assert!(pages::flip(id(0), tier.region().unwrap(), 5000));
    keep(&tier, (7..20).map(id));
    assert!(!taken.lock().contains(&id(0)) && taken.lock().contains(&id(1)));
    assert_eq!(tier.counts().damaged, 1);
    assert!(!tier.contains(id(0)));
}

#[test]
fn a_victim_that_is_stored_anew_stays() {
    let dir = directory();
    let store = Store::open(dir.path(), fixture(8));
    let tier = Arc::clone(store.memory.as_ref().unwrap());
    let taken: Arc<Mutex<Vec<Box<dyn Victim>>>> = Arc::default();
    let hands = Arc::clone(&taken);
    tier.on_evicted(Box::new(move |victim| hands.lock().push(victim)));
    let device = Device::filled(&store.fixture, &ids(20));
    store.dump(&device, &ids(8)).unwrap();
    let victim = taken.lock().remove(0);
    let block = victim.id();
    // Refused by a reader, it is replaced by the next dump.
    assert!(pages::flip(block, tier.region().unwrap(), 5000));
    store
        .load(&Device::blank(&store.fixture, &[block]), &[block])
        .unwrap_err();
    store.dump(&device, &[block]).unwrap();
    drop(victim);
    let target = Device::blank(&store.fixture, &[block]);
    store.load(&target, &[block]).unwrap();
    assert!(target.is_right(block));
}

#[test]
fn a_victim_that_is_used_stays_and_can_be_chosen_again() {
    let dir = directory();
    for policy in Policy::ALL {
        let tier = tier(dir.path(), 8, |config| config.policy = policy);
        let taken: Arc<Mutex<Vec<Box<dyn Victim>>>> = Arc::default();
        let hands = Arc::clone(&taken);
        tier.on_evicted(Box::new(move |victim| hands.lock().push(victim)));
        let uses: [fn(&MemoryBackend, BlockId); 3] = [
            |tier, block| {
                assert_eq!(
                    tier.insert(block, &record(block), 0).unwrap(),
                    Written::Present
                )
            },
            |tier, block| assert!(tier.copy_out(block, &mut vec![0; 1 << 16]).is_some()),
            |tier, block| tier.touch(&[(block, 0)], MonotonicTime::NEVER),
        ];
        let mut next = 0;
        let mut more = |tier: &MemoryBackend| {
            keep(tier, [id(next)]);
            next += 1;
        };
        for (returned, use_it) in (1..).zip(uses) {
            while taken.lock().is_empty() {
                more(&tier);
            }
            let victim = taken.lock().remove(0);
            let block = victim.id();
            use_it(&tier, block);
            drop(victim);
            assert!(tier.contains(block), "{policy:?}");
            assert_eq!(tier.counts().returned, returned);
        }
        // They delay no read, and there are no more than fit.
        for _ in 0..64 {
            more(&tier);
            taken.lock().clear();
        }
        let records = tier.stats().usage.records;
        assert!((6..=8).contains(&records), "{records}");
        let kept = (0..next - 32).filter(|&n| tier.contains(id(n))).count();
        let most = match policy {
            Policy::Lru => 0,
            Policy::S3Fifo => 3, // what is only stored once pushes nothing out that was used again
        };
        assert!(kept <= most, "{policy:?}: {kept}");
        let counts = tier.counts();
        assert_eq!(counts.returned, 3);
        assert_eq!(
            tier.stats().records_removed,
            u64::from(next) - records,
            "{counts:?}"
        );
    }
}
