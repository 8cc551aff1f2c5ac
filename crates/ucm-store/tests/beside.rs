//! Several roots side by side: records are spread over them and found in whichever has them, each
//! root is well or not by itself, and a tiered level moves what is used and what is not.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ucm_core::BlockId;
use ucm_infra::{Clock, LANE_LOAD, LANE_SPACE};
use ucm_io::{Fault, OpKind, Rule};
use ucm_store::breaker::BreakerConfig;
use ucm_store::tiers::WritePolicy;
use ucm_tier::spread::{Heat, StoragePolicy};

use crate::common::beside::{Beside, Leaping, Several, roots};
use crate::common::shared::{RECORD, stored};
use crate::common::sides::{CODES, MEAN, sided, sides_in};
use crate::common::{Layout, Setup, directory, eventually, id, ids};

/// Both layouts, whatever the run.
fn layouts() -> [Layout; 2] {
    [Layout::File, Layout::segments()]
}

fn over(layout: Layout, several: Several) -> Several {
    let setup = Setup {
        layout,
        ..several.setup
    };
    Several { setup, ..several }
}

/// Files of records below a root, and their times of use.
fn files(dir: &Path) -> Vec<(String, SystemTime)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if path
            .extension()
            .is_some_and(|end| end == "bin" || end == "seg")
        {
            let time = entry.metadata().unwrap().modified().unwrap();
            found.push((entry.file_name().into_string().unwrap(), time));
        }
    }
    found
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
        // Who has to ask asks the root that a record belongs to: those that moved are stored again.
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

/// How long a root is left alone that does not answer.
const OFF: Duration = Duration::from_secs(600);

#[test]
fn a_lost_root_costs_its_own_blocks_and_is_taken_back() {
    for layout in layouts() {
        let (dir, mut several) = (
            directory(),
            over(layout, Several::new(StoragePolicy::RoundRobin, 3)),
        );
        several.setup.breaker = BreakerConfig {
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

#[test]
fn new_blocks_go_to_the_hottest_with_room() {
    for layout in layouts() {
        // One grant is for a 16th: all of the blocks below fit into the first of a colder root.
        let (dir, several) = (
            directory(),
            over(layout, Several::tiered(&[24, 4000, 4000])),
        );
        let store = Beside::open(dir.path(), &several);
        assert!(store.dump(&ids(4)).is_empty());
        assert_eq!(store.places(&ids(4)), [0; 4]);
        for path in ["/blocks/", "/segments/"] {
            let rule = Rule::on(OpKind::Remove, Fault::Errno(5));
            store.faults[0].add(rule.path(path)); // it stays full
        }
        let more: Vec<BlockId> = (4..100).map(id).collect();
        let refused = store.dump(&more).len();
        assert!(refused <= 1, "one has to find out that nobody makes room");
        assert!(store.tier(1, "blocks_written") > 50);
        let colder = store.tier(2, "blocks_written");
        assert_eq!(colder, 0, "there was room in a hotter one");
        assert!(
            stored(&store.roots[0]) <= 24 * RECORD,
            "its own limit holds"
        );
        store.faults[0].clear();
        let before = store.tier(0, "blocks_written");
        fill_until(&store, 100, || store.tier(0, "blocks_written") > before); // there is room again
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

/// Whether this process has a descriptor open on a root or below it.
fn is_open(root: &Path) -> bool {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let mut targets = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
    targets.any(|target| target.starts_with(root))
}

#[test]
fn what_a_root_has_to_remove_it_copies_to_the_next_one() {
    for layout in layouts() {
        let (dir, several) = (directory(), over(layout, Several::tiered(&[24, 2000])));
        let store = Beside::open(dir.path(), &several);
        let mut written = files(&store.roots[0]);
        let all = fill_until(&store, 0, || {
            written.extend(files(&store.roots[0]));
            store.tier(1, "demotions") >= 10
        });
        assert!(stored(&store.roots[0]) <= 24 * RECORD);
        store.await_all(&all); // not one is lost
        if layout == Layout::File {
            // Segments have a kept one closed later; files never use it again.
            eventually("the colder root can be unmounted", || {
                !is_open(&store.roots[1])
            });
        }
        let colder = files(&store.roots[1]);
        let moved = colder
            .iter()
            .filter(|file| written.iter().any(|(name, _)| *name == file.0));
        let as_old = moved
            .map(|(name, time)| written.iter().any(|file| file == &(name.clone(), *time)))
            .collect::<Vec<_>>();
        assert!(!as_old.is_empty(), "files came as they were");
        assert!(as_old.iter().all(|&old| old), "as old as they were");
        let private = |root: &Path| {
            let namespaces = std::fs::read_dir(root).unwrap().flatten();
            let tmp =
                namespaces.filter_map(|entry| std::fs::read_dir(entry.path().join("tmp")).ok());
            tmp.flatten().count()
        };
        drop(store);
        assert_eq!(private(&roots(dir.path(), 2)[1]), 0, "nothing is left over");
        let other = Beside::open(dir.path(), &several);
        other.await_all(&all);
    }
}

/// The name of a model's namespace.
fn namespace(weights: &str) -> String {
    crate::common::identity(weights).namespace()
}

#[test]
fn another_models_blocks_are_moved_too() {
    let (dir, several) = (
        directory(),
        over(Layout::segments(), Several::tiered(&[24, 2000])),
    );
    let mut theirs = several.clone();
    theirs.setup.weights = "theirs";
    let other = Beside::over(
        roots(dir.path(), 1),
        &Several {
            heats: vec![None],
            ..theirs.clone()
        },
        ucm_infra::SystemClock::shared(),
    );
    assert!(other.dump(&ids(8)).is_empty());
    drop(other);
    let theirs_at = roots(dir.path(), 1)[0]
        .join(namespace("theirs"))
        .join("segments");
    for segment in std::fs::read_dir(theirs_at).unwrap().flatten() {
        let file = std::fs::File::options()
            .write(true)
            .open(segment.path())
            .unwrap();
        let old = SystemTime::now() - Duration::from_secs(3600);
        file.set_modified(old).unwrap();
    }
    let store = Beside::open(dir.path(), &several);
    fill_until(&store, 0, || {
        let segments = store.roots[1].join(namespace("theirs")).join("segments");
        std::fs::read_dir(segments).is_ok_and(|mut found| found.next().is_some())
    });
    drop(store);
    assert!(
        roots(dir.path(), 2)[1]
            .join(namespace("theirs"))
            .join("manifest.json")
            .exists()
    );
    let other = Beside::open(dir.path(), &theirs);
    eventually("some of them are there still", || {
        other.hits(&ids(8)).contains(&true)
    });
    let there: Vec<BlockId> = ids(8)
        .into_iter()
        .filter(|&id| other.hits(&[id])[0])
        .collect();
    assert!(other.load(&there).is_empty());
}

#[test]
fn a_move_that_fails_leaves_nothing_and_the_limit_holds() {
    let harms = [
        (OpKind::Create, Fault::Errno(28)),
        (OpKind::WriteAt, Fault::Errno(5)),
        (OpKind::WriteAt, Fault::FlipRandom(1)),
        (OpKind::Read, Fault::ShortRead(100)),
        (OpKind::Finish, Fault::Errno(5)),
    ];
    for layout in layouts() {
        for (kind, fault) in &harms {
            let what = format!("{layout:?} {kind:?} {fault:?}");
            let (dir, several) = (directory(), over(layout, Several::tiered(&[24, 2000])));
            let store = Beside::open(dir.path(), &several);
            for path in ["/tmp/", "/blocks/", "/segments/"] {
                store.faults[1].add(Rule::on(*kind, fault.clone()).lane(LANE_SPACE).path(path));
            }
            let all = fill_until(&store, 0, || store.tier(1, "copies_dropped") >= 3);
            assert!(stored(&store.roots[0]) <= 24 * RECORD, "{what}");
            assert_eq!(store.tier(1, "demotions"), 0, "{what}");
            assert!(store.tier(0, "healthy") == 1, "{what}");
            let hits: Vec<BlockId> = all.into_iter().filter(|&id| store.hits(&[id])[0]).collect();
            store.faults[1].clear();
            store.load(&hits); // right, or gone meanwhile
        }
    }
}

#[test]
fn a_cold_root_that_hangs_holds_no_one_up() {
    let (dir, mut several) = (
        directory(),
        over(Layout::segments(), Several::tiered(&[24, 2000])),
    );
    several.setup.breaker = BreakerConfig::default();
    let store = Beside::open(dir.path(), &several);
    let gate = ucm_io::Gate::new();
    store.faults[1].add(Rule::always(Fault::HangBefore(gate.clone())).lane(LANE_SPACE));
    for block in ids(60) {
        eventually("it is stored", || store.dump(&[block]).is_empty());
    }
    assert!(stored(&store.roots[0]) <= 24 * RECORD);
    gate.open();
}

#[test]
fn what_is_read_often_in_a_colder_root_is_brought_up() {
    for layout in layouts() {
        let (dir, mut several) = (directory(), over(layout, Several::tiered(&[200, 200])));
        let cold_only = Several {
            heats: vec![Some(Heat::Cold)],
            capacities: vec![200 * RECORD],
            ..several.clone()
        };
        let below = roots(dir.path(), 2).pop().unwrap();
        let store = Beside::over(vec![below], &cold_only, ucm_infra::SystemClock::shared());
        assert!(store.dump(&ids(6)).is_empty());
        drop(store);
        several.promotion.hits = 3;
        let store = Beside::open(dir.path(), &several);
        eventually("they are found", || store.hits(&ids(6)) == [true; 6]);
        assert_eq!(store.places(&ids(6)), [1; 6]);
        for _ in 0..2 {
            assert!(store.load(&ids(3)).is_empty());
        }
        assert_eq!(store.tier(0, "promotions"), 0);
        assert!(store.load(&ids(2)).is_empty()); // two of them for the third time
        eventually("two are up", || store.tier(0, "promotions") == 2);
        eventually("and read there", || {
            store.places(&ids(6)) == [0, 0, 1, 1, 1, 1]
        });
        assert_eq!(store.tier(1, "blocks_read"), 8);
        assert!(store.load(&ids(6)).is_empty());
        assert_eq!(
            (store.tier(0, "blocks_read"), store.tier(1, "blocks_read")),
            (2, 12)
        );
        // Its copy below stays: it is as good, and goes by its age.
        let seen = store.faults[1].log();
        assert!(
            !seen
                .iter()
                .any(|seen| seen.kind == OpKind::Remove && seen.lane != LANE_SPACE)
        );
    }
}

#[test]
fn a_copy_that_is_not_sound_when_it_is_read_back_is_no_copy() {
    for layout in layouts() {
        let (dir, mut several) = (directory(), over(layout, Several::tiered(&[200, 200])));
        let below = roots(dir.path(), 2).pop().unwrap();
        let cold_only = Several {
            heats: vec![Some(Heat::Cold)],
            capacities: vec![200 * RECORD],
            ..several.clone()
        };
        let store = Beside::over(vec![below], &cold_only, ucm_infra::SystemClock::shared());
        assert!(store.dump(&ids(1)).is_empty());
        drop(store);
        several.promotion.hits = 1;
        let store = Beside::open(dir.path(), &several);
        eventually("it is found", || store.hits(&ids(1)) == [true]);
        let writes = layout.writing();
        store.faults[0].add(Rule::on(writes, Fault::Flip(vec![5000])).lane(LANE_SPACE));
        assert!(store.load(&ids(1)).is_empty());
        eventually("a copy was made, read back and refused", || {
            store.tier(0, "copies_dropped") == 1
        });
        assert_eq!(store.places(&ids(1)), [1]);
        assert_eq!(store.tier(0, "promotions"), 0);
        assert!(store.load(&ids(1)).is_empty(), "it is read where it was");
        assert_eq!(store.tier(0, "blocks_read"), 0);
    }
}

#[test]
fn moves_wait_for_their_rate() {
    let (dir, mut several) = (
        directory(),
        over(Layout::File, Several::tiered(&[200, 200])),
    );
    let below = roots(dir.path(), 2).pop().unwrap();
    let cold_only = Several {
        heats: vec![Some(Heat::Cold)],
        capacities: vec![200 * RECORD],
        ..several.clone()
    };
    let store = Beside::over(vec![below], &cold_only, ucm_infra::SystemClock::shared());
    assert!(store.dump(&ids(40)).is_empty());
    drop(store);
    (several.promotion.hits, several.rate) = (1, 1); // a byte in a second
    let store = Beside::open(dir.path(), &several);
    assert!(store.load(&ids(40)).is_empty());
    eventually("the first one passes", || store.tier(0, "promotions") == 1);
    assert!(store.load(&ids(40)).is_empty());
    assert_eq!(store.tier(0, "promotions"), 1);
}

#[test]
fn the_measured_speed_orders_roots_and_stays_in_their_markers() {
    let (dir, several) = (
        directory(),
        over(Layout::segments(), Several::new(StoragePolicy::Tiered, 2)),
    );
    drop(Beside::open(dir.path(), &several));
    let marker = |number: usize| roots(dir.path(), 2)[number].join("ucm-root.json");
    let read = |number| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(marker(number)).unwrap()).unwrap()
    };
    assert!(read(0)["read_ns"].as_u64().unwrap() > 0 && read(1)["read_ns"].as_u64().unwrap() > 0);
    for (slow, fast) in [(0, 1), (1, 0)] {
        for (number, ns) in [(slow, 9_000_000u64), (fast, 100_000)] {
            let mut changed = read(number);
            changed["read_ns"] = ns.into();
            std::fs::write(marker(number), changed.to_string()).unwrap();
        }
        let store = Beside::open(dir.path(), &several);
        let block = id(slow as u8);
        assert!(store.dump(&[block]).is_empty());
        assert_eq!(store.places(&[block]), [fast as u8]);
        assert_eq!(
            read(slow)["read_ns"],
            9_000_000u64,
            "it is not measured again"
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
        setup: sided(several.setup.clone()),
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
    for policy in [
        StoragePolicy::RoundRobin,
        StoragePolicy::Random,
        StoragePolicy::Tiered,
    ] {
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
fn side_shards_go_down_and_up_with_their_blocks() {
    for layout in layouts() {
        // Of whole records: header, KV, and a page and two of side shards.
        let (dir, mut several) = (
            directory(),
            sided_over(layout, Several::tiered(&[96, 8000])),
        );
        several.promotion.hits = 1;
        let store = Beside::open(dir.path(), &several);
        store.dump_alone(&[id(200)], &[MEAN, CODES]); // the oldest, which go first
        let all = fill_until(&store, 0, || store.tier(1, "demotions") >= 10);
        // One that goes down while it is looked for is missing for the moment.
        eventually("those that went down took theirs along", || {
            have_sides(&store, &all)
        });
        eventually("those that lie alone went down too", || {
            have_sides(&store, &[id(200)])
        });
        let below: Vec<BlockId> = all
            .iter()
            .copied()
            .filter(|&id| store.places(&[id]) == [1])
            .collect();
        drop(store);
        // With room above: what is read comes up, as it is.
        several.capacities[0] *= 20;
        let store = Beside::open(dir.path(), &several);
        store.await_all(&below[..2]);
        eventually("two are up", || store.places(&below[..2]) == [0, 0]);
        assert!(have_sides(&store, &below[..2]));
        assert!(
            store.tier(0, "sides_read") >= 4,
            "and theirs are read there"
        );
    }
}
