//! Several roots side by side: records are spread over them and found in whichever has them, each
//! root is well or not by itself, and roots one below the other hold what the upper one evicts.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ucm_core::{BlockId, Part};
use ucm_infra::{Clock, LANE_LOAD};
use ucm_media::spread::StoragePolicy;
use ucm_store::breaker::BreakerConfig;
use ucm_store::tiers::WritePolicy;
use ucm_testkit::{Fault, OpKind, Rule};

use crate::common::beside::{Beside, Leaping, Several, roots};
use crate::common::shared::{RECORD, stored};
use crate::common::sides::{CODES, MEAN, sided, sides_in};
use crate::common::{Fixture, Layout, directory, eventually, id, ids};

/// Both layouts, whatever the run.
fn layouts() -> [Layout; 2] {
    [Layout::File, Layout::segments()]
}

fn over(layout: Layout, several: Several) -> Several {
    let fixture = Fixture {
        layout,
        ..several.fixture
    };
    Several { fixture, ..several }
}

#[test]
fn records_are_spread_and_found_by_all() {
    for policy in [StoragePolicy::RoundRobin, StoragePolicy::Random] {
        for layout in layouts() {
            let (dir, several) = (directory(), over(layout, Several::new(policy, 3)));
            let store = Beside::open(dir.path(), &several);
            assert!(store.dump(&ids(60)).is_empty());
            let shares: Vec<u64> = (0..3)
                .map(|tier| store.tier(tier, "blocks_written"))
                .collect();
            assert_eq!(shares.iter().sum::<u64>(), 60, "one copy of each");
            assert!(shares.iter().all(|&share| share > 5), "{shares:?}");
            store.await_all(&ids(60));
            drop(store);
            let other = Beside::open(dir.path(), &several);
            other.await_all(&ids(60));
        }
    }
}

#[test]
fn a_root_that_is_added_takes_its_share_of_what_is_new() {
    for layout in layouts() {
        let (dir, three) = (
            directory(),
            over(layout, Several::new(StoragePolicy::RoundRobin, 3)),
        );
        let store = Beside::open(dir.path(), &three);
        assert!(store.dump(&ids(80)).is_empty());
        drop(store);
        let four = over(layout, Several::new(StoragePolicy::RoundRobin, 4));
        let store = Beside::open(dir.path(), &four);
        let found = |store: &Beside| store.hits(&ids(80)).iter().filter(|&&hit| hit).count();
        if layout != Layout::File {
            eventually("segments are found wherever they are", || {
                found(&store) == 80
            });
            continue;
        }
        // A layout without an index reads the root that a record belongs to: records of other roots
        // are stored again.
        let hits = found(&store);
        // Three of four stay: sixty, give or take four, for the names of the roots differ each
        // time.
        assert!((40..78).contains(&hits), "{hits}");
        let missing: Vec<BlockId> = ids(80)
            .into_iter()
            .filter(|&id| !store.hits(&[id])[0])
            .collect();
        assert!(store.dump(&missing).is_empty());
        assert_eq!(
            store.tier(3, "blocks_written"),
            missing.len() as u64,
            "and nowhere else"
        );
        store.await_all(&ids(80));
    }
}

/// How long a root that does not answer is not used.
const OFF: Duration = Duration::from_secs(600);

#[test]
fn a_lost_root_costs_its_own_blocks_and_is_taken_back() {
    for layout in layouts() {
        let (dir, mut several) = (
            directory(),
            over(layout, Several::new(StoragePolicy::RoundRobin, 3)),
        );
        several.fixture.breaker = BreakerConfig {
            threshold: 2,
            cool_down: OFF,
            ..BreakerConfig::default()
        };
        let clock = Arc::new(Leaping::default());
        let store = Beside::over(
            roots(dir.path(), 3),
            &several,
            Arc::clone(&clock) as Arc<dyn Clock>,
        );
        assert!(store.dump(&ids(60)).is_empty());
        let before = store.places(&ids(60));
        let (theirs, others): (Vec<BlockId>, Vec<BlockId>) = ids(60)
            .into_iter()
            .partition(|id| before[ids(60).iter().position(|other| other == id).unwrap()] == 1);
        store.faults[1].add(Rule::always(Fault::Errno(5)));
        eventually("its breaker opened", || {
            store.load(&theirs);
            store.tier(1, "healthy") == 0
        });
        assert_eq!((store.tier(0, "healthy"), store.tier(2, "healthy")), (1, 1));
        assert_eq!(store.stat("healthy"), 1, "the store goes on");
        assert!(store.load(&others).is_empty(), "the others' are hits");
        assert!(
            store.hits(&theirs).iter().all(|&hit| !hit),
            "its own are misses"
        );
        // What was its own is stored again beside it, whether or not it is time to try it again.
        clock.leap(OFF);
        assert!(store.dump(&theirs).is_empty());
        store.await_all(&ids(60));
        store.faults[1].clear();
        clock.leap(OFF);
        eventually("it is taken back", || {
            store.hits(&ids(60));
            store.load(&theirs[..1]);
            store.tier(1, "healthy") == 1
        });
        store.await_all(&ids(60));
        let fresh: Vec<BlockId> = (100..160).map(id).collect();
        assert!(store.dump(&fresh).is_empty());
        assert!(
            store.places(&fresh).contains(&1),
            "and gets its share again"
        );
    }
}

/// Fills the hot root again and again, until this is so.
fn fill_until(store: &Beside, first: u8, mut so: impl FnMut() -> bool) -> Vec<BlockId> {
    let mut all = Vec::new();
    for n in first..=255 {
        if so() {
            return all;
        }
        if store.dump(&[id(n)]).is_empty() {
            all.push(id(n));
        }
        let capacity = store.tier(0, "capacity_bytes");
        eventually("there is room again", || {
            store.tier(0, "used_bytes") <= capacity / 100 * 95
        });
    }
    eventually("it happened", so);
    all
}

#[test]
fn what_a_hot_root_evicts_is_a_hit_below() {
    for layout in layouts() {
        let (dir, several) = (directory(), over(layout, Several::tiered(&[24, 2000])));
        let store = Beside::open(dir.path(), &several);
        let mut dumped = 0;
        let all = fill_until(&store, 0, || {
            dumped += 1;
            dumped > 80 && store.tier(0, "blocks_written") > 0
        });
        assert!(
            stored(&store.roots[0]) <= 24 * RECORD,
            "its own limit holds"
        );
        store.await_all(&all); // not one is lost
        assert!(store.tier(0, "blocks_written") > 0 && store.tier(1, "blocks_read") > 0);
        assert_eq!(store.tier(1, "blocks_written"), all.len() as u64);
        drop(store);
        let other = Beside::open(dir.path(), &several);
        other.await_all(&all);
        drop(other);
        std::fs::remove_dir_all(&roots(dir.path(), 2)[0]).unwrap();
        let without = Beside::open(dir.path(), &several);
        without.await_all(&all);
    }
}

/// Hosts that share the cold root and have a hot one each: a published block is a hit on the other,
/// which has read nothing yet.
#[test]
fn hosts_that_share_the_cold_root_find_what_is_published() {
    for layout in layouts() {
        let (dir, several) = (directory(), over(layout, Several::tiered(&[200, 200])));
        let several = Several {
            fixture: several.fixture.clone().unhurried(),
            ..several
        };
        let host = |hot: &str| {
            let roots = vec![dir.path().join(hot), dir.path().join("cold")];
            Beside::over(roots, &several, ucm_infra::SystemClock::shared())
        };
        let (one, other) = (host("hot"), host("hot of the other host"));
        assert!(one.dump(&ids(6)).is_empty());
        other.await_all(&ids(6));
        assert_eq!(other.tier(1, "blocks_read"), 6, "from the shared root");
    }
}

/// The collector of a root removes the oldest records of all processes: here one that has ended, of
/// another model and another part.
#[test]
fn what_another_model_evicts_from_a_hot_root_is_a_hit_below() {
    for layout in layouts() {
        let (dir, several) = (directory(), over(layout, Several::tiered(&[24, 2000])));
        let hot = roots(dir.path(), 2).remove(0);
        let store = Beside::open(dir.path(), &several);
        assert!(store.dump(&ids(8)).is_empty());
        eventually("the hot root has them too", || {
            store.load(&ids(8)); // which copies up what it has not
            store.places(&ids(8)) == [0; 8]
        });
        drop(store);
        let theirs = records_below(&hot);
        for path in &theirs {
            let file = std::fs::File::options().write(true).open(path).unwrap();
            let long_ago = SystemTime::now() - Duration::from_secs(7200);
            file.set_modified(long_ago).unwrap();
        }
        let mut another = several.clone();
        another.fixture.weights = "of another model";
        another.fixture.part = Part {
            tensor_rank: 1,
            ..Part::default()
        };
        let store = Beside::open(dir.path(), &another);
        let mut blocks = (100..=255).map(id).cycle();
        eventually("theirs are evicted", || {
            let block = [blocks.next().unwrap()];
            store.dump(&block);
            store.load(&block); // a copy that was dropped is made after a load
            theirs.iter().all(|path| !path.exists())
        });
        drop(store);
        let store = Beside::open(dir.path(), &several);
        store.await_all(&ids(8));
        assert_eq!(store.tier(1, "blocks_read"), 8);
    }
}

/// The files with records below a root.
fn records_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(records_below(&path));
        } else if path
            .extension()
            .is_some_and(|end| end == "bin" || end == "seg")
        {
            found.push(path);
        }
    }
    found
}

/// Such a block is not written down later: it is a hit as long as the hot root keeps it.
#[test]
fn a_block_stored_while_the_cold_root_is_off_lies_in_the_hot_one() {
    for layout in layouts() {
        let (dir, mut several) = (directory(), over(layout, Several::tiered(&[200, 200])));
        several.fixture.breaker = BreakerConfig {
            threshold: 2,
            cool_down: OFF,
            ..BreakerConfig::default()
        };
        let clock = Arc::new(Leaping::default());
        let store = Beside::over(
            roots(dir.path(), 2),
            &several,
            Arc::clone(&clock) as Arc<dyn Clock>,
        );
        store.faults[1].add(Rule::always(Fault::Errno(5)));
        eventually("its breaker opened", || {
            store.dump(&[id(100)]);
            store.tier(1, "healthy") == 0
        });
        assert!(store.dump(&ids(6)).is_empty(), "published by the hot one");
        assert_eq!(store.places(&ids(6)), [0; 6]);
        store.faults[1].clear();
        clock.leap(OFF);
        eventually("the cold one is used again", || {
            store.dump(&[id(101)]);
            store.tier(1, "healthy") == 1
        });
        assert!(store.load(&ids(6)).is_empty());
        drop(store);
        std::fs::remove_dir_all(&roots(dir.path(), 2)[0]).unwrap();
        let store = Beside::open(dir.path(), &several);
        store.await_all(&[id(101)]);
        assert_eq!(store.hits(&ids(6)), [false; 6]);
    }
}

#[test]
fn what_is_read_in_a_colder_root_is_brought_up() {
    for layout in layouts() {
        let (dir, several) = (directory(), over(layout, Several::tiered(&[200, 200])));
        let cold_only = Several {
            roots: 1,
            capacities: vec![200 * RECORD],
            ..several.clone()
        };
        let below = roots(dir.path(), 2).pop().unwrap();
        let store = Beside::over(vec![below], &cold_only, ucm_infra::SystemClock::shared());
        assert!(store.dump(&ids(6)).is_empty());
        drop(store);
        let store = Beside::open(dir.path(), &several);
        eventually("they are found", || store.hits(&ids(6)) == [true; 6]);
        assert_eq!(store.places(&ids(6)), [1; 6]);
        assert!(store.load(&ids(2)).is_empty());
        eventually("two are up", || store.tier(0, "promotions") == 2);
        eventually("and read there", || {
            store.places(&ids(6)) == [0, 0, 1, 1, 1, 1]
        });
        assert!(store.load(&ids(2)).is_empty());
        assert_eq!(
            (store.tier(0, "blocks_read"), store.tier(1, "blocks_read")),
            (2, 2)
        );
    }
}

#[test]
fn memory_above_several_gives_up_to_them() {
    for layout in layouts() {
        let (dir, mut several) = (
            directory(),
            over(layout, Several::new(StoragePolicy::RoundRobin, 3)),
        );
        several.memory = Some((16, WritePolicy::Back));
        let store = Beside::open(dir.path(), &several);
        let sum = |name: &str| -> u64 { (1..4).map(|tier| store.tier(tier, name)).sum() };
        for n in 0..80 {
            assert!(store.dump(&[id(n)]).is_empty());
            eventually("what is given up goes down", || {
                sum("demotions") + sum("copies_dropped") + 24 >= u64::from(n)
            });
        }
        assert!((1..4).all(|tier| store.tier(tier, "demotions") > 1));
        store.engine.close();
        drop(store);
        several.memory = Some((16, WritePolicy::Through));
        let store = Beside::open(dir.path(), &several);
        let count = || store.hits(&ids(80)).iter().filter(|&&hit| hit).count() as u64;
        eventually("they are found", || count() >= 50);
        let there: Vec<BlockId> = ids(80)
            .into_iter()
            .filter(|&id| store.hits(&[id])[0])
            .collect();
        assert!(store.load(&there[..5]).is_empty());
        eventually("they are brought up", || store.tier(0, "promotions") == 5);
    }
}

#[test]
fn reads_begin_where_a_record_belongs() {
    let (dir, several) = (
        directory(),
        over(Layout::File, Several::new(StoragePolicy::RoundRobin, 3)),
    );
    let store = Beside::open(dir.path(), &several);
    assert!(store.dump(&ids(40)).is_empty());
    store.faults.iter().for_each(|faults| faults.forget());
    assert!(store.load(&ids(40)).is_empty());
    assert_eq!(store.hits(&ids(40)), [true; 40]);
    let reads = |kind, lane| -> usize {
        let logs = store.faults.iter().map(|faults| faults.log());
        logs.flatten()
            .filter(|seen| seen.kind == kind && seen.lane == lane)
            .map(|seen| {
                seen.paths
                    .iter()
                    .filter(|path| path.to_string_lossy().contains("/blocks/"))
                    .count()
            })
            .sum()
    };
    assert_eq!(reads(OpKind::Read, LANE_LOAD), 40, "each file once");
    assert_eq!(
        reads(OpKind::Stat, ucm_infra::LANE_LOOKUP),
        40,
        "each asked for once"
    );
}

/// As [`over`], with blocks that have side shards.
fn sided_over(layout: Layout, several: Several) -> Several {
    let several = over(layout, several);
    Several {
        fixture: sided(several.fixture.clone()),
        ..several
    }
}

/// Whether both side shards of each of these blocks are there, and right.
fn have_sides(store: &Beside, blocks: &[BlockId]) -> bool {
    let there = |name| {
        sides_in(&store.engine, blocks, name)
            .iter()
            .all(|&found| found)
    };
    there(MEAN) && there(CODES)
}

#[test]
fn side_shards_lie_with_their_blocks_or_in_the_root_that_their_own_record_belongs_to() {
    for policy in [StoragePolicy::RoundRobin, StoragePolicy::Random] {
        for layout in layouts() {
            let (dir, several) = (directory(), sided_over(layout, Several::new(policy, 3)));
            let store = Beside::open(dir.path(), &several);
            let (with, without): (Vec<BlockId>, Vec<BlockId>) =
                (ids(30), (100..130).map(id).collect());
            assert!(store.dump(&with).is_empty());
            without
                .chunks(4)
                .for_each(|some| store.dump_alone(some, &[MEAN, CODES]));
            let written = |number| store.tier(number, "blocks_written");
            assert_eq!(
                (0..3).map(written).sum::<u64>(),
                90,
                "one copy of each record"
            );
            if policy == StoragePolicy::RoundRobin {
                assert!(
                    (0..3).all(|number| written(number) > 10),
                    "spread by their own ids"
                );
            }
            assert!(
                have_sides(&store, &with) && have_sides(&store, &without),
                "{policy:?} {layout:?}"
            );
            assert!(
                store.hits(&without).iter().all(|&hit| !hit),
                "they are no blocks"
            );
            drop(store);
            let other = Beside::open(dir.path(), &several);
            eventually("another process finds them", || {
                have_sides(&other, &with) && have_sides(&other, &without)
            });
            other.await_all(&with);
        }
    }
}

#[test]
fn side_shards_of_evicted_blocks_are_read_below() {
    for layout in layouts() {
        let (dir, several) = (
            directory(),
            sided_over(layout, Several::tiered(&[96, 8000])),
        );
        let store = Beside::open(dir.path(), &several);
        store.dump_alone(&[id(200)], &[MEAN, CODES]);
        let mut dumped = 0;
        let all = fill_until(&store, 0, || {
            dumped += 1;
            dumped > 60
        });
        assert!(stored(&store.roots[0]) <= 96 * RECORD);
        assert!(have_sides(&store, &all) && have_sides(&store, &[id(200)]));
        assert!(store.tier(1, "sides_read") > 0);
        drop(store);
        let other = Beside::open(dir.path(), &several);
        eventually("another process finds them", || {
            have_sides(&other, &all) && have_sides(&other, &[id(200)])
        });
    }
}
