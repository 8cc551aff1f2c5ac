//! The way of one block through the code, from the job of a pool to the system call, by function.
//! The table of ARCHITECTURE.md names these functions.

#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use ucm_testkit::OpKind;

use crate::common::{Device, Fixture, Layout, Store, directory, ids};

/// Most functions of ours on the way out and on the way back, closures counted.
const MOST: [usize; 2] = [14, 14];
/// Functions on the way, from the job to the operation.
const OUT: [&str; 9] = [
    "dump_blocks",
    "dump_block",
    "write",
    "write_here",
    "write",
    "write",
    "append",
    "append",
    "write_at",
];
/// The last two have `read_neighbours` between them, or `read_alone` for records in two segments.
const BACK: [&str; 4] = ["read", "read", "read", "read_into"];

/// The functions of ours in a backtrace, from the operation up to the job of a pool. Whose a
/// function is, its file says.
fn way(trace: &str) -> Vec<String> {
    let lines: Vec<&str> = trace.lines().map(str::trim_start).collect();
    let frames = lines.windows(2).filter_map(|pair| {
        let (number, name) = pair[0].split_once(": ")?;
        number.parse::<usize>().ok()?;
        Some((name, pair[1].strip_prefix("at ")?))
    });
    let ours = |file: &str| !["/rustc/", "/registry/"].iter().any(|of| file.contains(of));
    frames
        .skip_while(|(_, file)| !file.contains("fault"))
        .skip_while(|(_, file)| file.contains("fault"))
        .filter(|(_, file)| ours(file))
        .take_while(|(_, file)| !file.contains("ucm-infra/src/pool"))
        .map(|(name, file)| format!("{} ({file})", name.split('<').next().unwrap_or(name)))
        .collect()
}

#[test]
fn the_way_of_a_block() {
    let (dir, fixture) = (
        directory(),
        Fixture {
            layout: Layout::segments(),
            copy_threads: 2, // of which one writes what it copied, as on a machine with cores
            ..Fixture::default()
        },
    );
    let blocks = ids(2);
    let device = Device::filled(&fixture, &blocks);
    let store = Store::open(dir.path(), fixture.clone());
    for (number, kind) in [OpKind::WriteAt, OpKind::Read].into_iter().enumerate() {
        store.faults.trace(kind);
        if kind == OpKind::WriteAt {
            store.dump(&device, &blocks).unwrap();
        } else {
            let target = Device::blank(&fixture, &blocks);
            store.load(&target, &blocks).unwrap();
        }
        let traces = store.faults.traces();
        let way = way(&traces[0]);
        eprintln!("{kind:?}: {} functions\n  {}", way.len(), way.join("\n  "));
        let mut named = way.iter().rev();
        for name in [&OUT[..], &BACK[..]][number] {
            let name = format!("{name} (");
            assert!(
                named.any(|step| step
                    .rsplit("::")
                    .next()
                    .is_some_and(|s| s.starts_with(&name))),
                "{name} is missing, or not where ARCHITECTURE.md says: {way:#?}"
            );
        }
        assert!(
            way.len() <= MOST[number],
            "the way is longer than before: {way:#?}"
        );
    }
}
