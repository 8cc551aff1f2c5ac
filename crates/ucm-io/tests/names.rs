//! The engines' operations on names: stat, touch, remove, list, directories, space, probe.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

use common::*;
use ucm_core::ErrorKind;
use ucm_io::{IoDone, IoOp};

#[test]
fn stat_tells_what_is_there_and_stops_where_asked() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let engine = pool();
    std::fs::write(dir.join("a"), vec![0; 11]).unwrap();
    std::fs::create_dir(dir.join("d")).unwrap();
    std::os::unix::fs::symlink(dir.join("a"), dir.join("link")).unwrap();
    let paths: Vec<PathBuf> = ["a", "absent", "a/below", "d", "link"]
        .map(|name| dir.join(name))
        .into();
    let found = stat(&*engine, &paths, false);
    let seen: Vec<_> = found.iter().map(|meta| meta.map(|m| (m.len, m.is_dir))).collect();
    assert_eq!(seen[..3], [Some((11, false)), None, None]);
    assert!(seen[3].unwrap().1);
    assert_eq!(seen[4], Some((11, false)));
    assert_eq!(stat(&*engine, &paths, true).len(), 2);
    assert!(stat(&*engine, &[], true).is_empty());
    let long = dir.join("x".repeat(300));
    assert_eq!(fails(&*engine, stat_op(&[long], false)), ErrorKind::Io);
}

#[test]
fn touch_and_remove_answer_for_each_name() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let engine = pool();
    std::fs::write(dir.join("a"), b"x").unwrap();
    std::fs::create_dir(dir.join("d")).unwrap();
    let accessed = std::fs::metadata(dir.join("a")).unwrap().atime_nsec();
    let files = vec![
        (dir.join("a"), 1_600_000_000_123_456_789),
        (dir.join("absent"), 5),
        (dir.join("x".repeat(300)), 5),
    ];
    let IoDone::Touched(done) = call(&*engine, IoOp::Touch { files }).unwrap() else {
        unreachable!();
    };
    assert!(*done[0].as_ref().unwrap() && !*done[1].as_ref().unwrap() && done[2].is_err());
    let meta = std::fs::metadata(dir.join("a")).unwrap();
    assert_eq!((meta.mtime(), meta.mtime_nsec()), (1_600_000_000, 123_456_789));
    assert_eq!(meta.atime_nsec(), accessed);
    // Never a directory; and an error stops none of the others.
    let paths = vec![dir.join("d"), dir.join("absent"), dir.join("a")];
    let IoDone::Removed(done) = call(&*engine, IoOp::Remove { paths }).unwrap() else {
        unreachable!();
    };
    assert!(done[0].is_err() && !*done[1].as_ref().unwrap() && *done[2].as_ref().unwrap());
    assert_eq!(names(dir), ["d"]);
}

#[test]
fn directories_are_made_and_listed() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let engine = pool();
    let make = |name: &str| {
        call(
            &*engine,
            IoOp::MakeDir {
                path: dir.join(name),
                mode: 0o700,
            },
        )
    };
    assert!(matches!(make("d").unwrap(), IoDone::MadeDir(true)));
    assert!(matches!(make("d").unwrap(), IoDone::MadeDir(false)));
    let mode = std::fs::metadata(dir.join("d")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    assert_eq!(make("no/d").unwrap_err().kind(), ErrorKind::NotFound);
    std::fs::write(dir.join("f"), b"four").unwrap();
    assert_eq!(make("f").unwrap_err().kind(), ErrorKind::Io);
    std::os::unix::fs::symlink(dir.join("d"), dir.join("link")).unwrap();
    let IoDone::List(mut found) = call(
        &*engine,
        IoOp::List {
            dir: dir.to_path_buf(),
        },
    )
    .unwrap() else {
        unreachable!();
    };
    found.sort_by(|a, b| a.0.cmp(&b.0));
    let seen: Vec<_> = found
        .iter()
        .map(|(name, meta)| (name.to_str().unwrap(), meta.is_dir))
        .collect();
    // Links are not followed here: a link to a directory is none.
    assert_eq!(seen, [("d", true), ("f", false), ("link", false)]);
    assert_eq!(found[1].1.len, 4);
    for (dir, kind) in [("absent", ErrorKind::NotFound), ("f", ErrorKind::Io)] {
        assert_eq!(
            fails(
                &*engine,
                IoOp::List {
                    dir: place.path().join(dir)
                }
            ),
            kind
        );
    }
}

#[test]
fn space_and_probe_describe_the_file_system() {
    for place in places() {
        let dir = place.path().to_path_buf();
        let engine = pool();
        let IoDone::Space(space) = call(&*engine, IoOp::Space { path: dir.clone() }).unwrap() else {
            unreachable!();
        };
        let dev = std::fs::metadata(&dir).unwrap().dev();
        assert!(space.free <= space.total && space.total > 0 && space.dev == dev);
        let IoDone::Probe(found) = call(&*engine, IoOp::Probe { dir: dir.clone() }).unwrap() else {
            unreachable!();
        };
        assert_eq!(found.dev, dev);
        if dir.starts_with("/dev/shm") {
            assert_eq!((found.fs.name(), found.fs.maybe_shared()), ("tmpfs", false));
        }
        if let Some(align) = found.direct {
            assert!(align.memory.is_power_of_two() && align.offset.is_power_of_two());
        }
        assert!(names(&dir).is_empty());
        assert_eq!(
            fails(&*engine, IoOp::Probe { dir: dir.join("no") }),
            ErrorKind::NotFound
        );
        assert_eq!(
            fails(&*engine, IoOp::Space { path: dir.join("no") }),
            ErrorKind::NotFound
        );
    }
}
