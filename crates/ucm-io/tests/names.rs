//! The engines' operations on names: stat, touch, remove, list, directories, space, probe.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

use crate::common::*;
use ucm_core::ErrorKind;

#[test]
fn stat_tells_what_is_there_and_stops_where_asked() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let io = plain();
    std::fs::write(dir.join("a"), vec![0; 11]).unwrap();
    std::fs::create_dir(dir.join("d")).unwrap();
    std::os::unix::fs::symlink(dir.join("a"), dir.join("link")).unwrap();
    let paths: Vec<PathBuf> = ["a", "absent", "a/below", "d", "link"]
        .map(|name| dir.join(name))
        .into();
    let found = io.stat(&paths, false).unwrap();
    let seen: Vec<_> = found
        .iter()
        .map(|meta| meta.map(|m| (m.len, m.is_dir)))
        .collect();
    assert_eq!(seen[..3], [Some((11, false)), None, None]);
    assert!(seen[3].unwrap().1);
    assert_eq!(seen[4], Some((11, false)));
    assert_eq!(io.stat(&paths, true).unwrap().len(), 2);
    assert!(io.stat(&[], true).unwrap().is_empty());
    assert_eq!(io.look(dir.join("a")).unwrap(), found[0]);
    assert_eq!(io.look(dir.join("absent")).unwrap(), None);
    assert_eq!(fails(io.look(dir.join("x".repeat(300)))), ErrorKind::Io);
}

#[test]
fn touch_and_remove_answer_for_each_name() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let io = plain();
    std::fs::write(dir.join("a"), b"x").unwrap();
    std::fs::create_dir(dir.join("d")).unwrap();
    let accessed = std::fs::metadata(dir.join("a")).unwrap().atime_nsec();
    let files = [
        (dir.join("a"), 1_600_000_000_123_456_789),
        (dir.join("absent"), 5),
        (dir.join("x".repeat(300)), 5),
    ];
    let done = io.touch(&files).unwrap();
    assert!(*done[0].as_ref().unwrap() && !*done[1].as_ref().unwrap() && done[2].is_err());
    let meta = std::fs::metadata(dir.join("a")).unwrap();
    assert_eq!(
        (meta.mtime(), meta.mtime_nsec()),
        (1_600_000_000, 123_456_789)
    );
    assert_eq!(meta.atime_nsec(), accessed);
    // Never a directory; and an error does not stop the others.
    let paths = [dir.join("d"), dir.join("absent"), dir.join("a")];
    let done = io.remove(&paths).unwrap();
    assert!(done[0].is_err() && !*done[1].as_ref().unwrap() && *done[2].as_ref().unwrap());
    assert_eq!(names(dir), ["d"]);
}

#[test]
fn directories_are_made_and_listed() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let io = plain();
    let make = |name: &str| io.make_dir(&dir.join(name), 0o700);
    assert!(make("d").unwrap());
    assert!(!make("d").unwrap());
    let mode = std::fs::metadata(dir.join("d"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o700);
    assert_eq!(fails(make("no/d")), ErrorKind::NotFound);
    std::fs::write(dir.join("f"), b"four").unwrap();
    assert_eq!(fails(make("f")), ErrorKind::Io);
    std::os::unix::fs::symlink(dir.join("d"), dir.join("link")).unwrap();
    let mut found = io.list(dir).unwrap();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    let seen: Vec<_> = found
        .iter()
        .map(|(name, meta)| (name.to_str().unwrap(), meta.is_dir))
        .collect();
    // Links are not followed here: a link to a directory is none.
    assert_eq!(seen, [("d", true), ("f", false), ("link", false)]);
    assert_eq!(found[1].1.len, 4);
    for (name, kind) in [("absent", ErrorKind::NotFound), ("f", ErrorKind::Io)] {
        assert_eq!(fails(io.list(&dir.join(name))), kind);
    }
}

#[test]
fn space_and_probe_describe_the_file_system() {
    for place in places() {
        let dir = place.path();
        let io = plain();
        let space = io.space(dir).unwrap();
        let dev = std::fs::metadata(dir).unwrap().dev();
        assert!(space.free <= space.total && space.total > 0 && space.dev == dev);
        let found = io.probe(dir).unwrap();
        assert_eq!(found.dev, dev);
        if dir.starts_with("/dev/shm") {
            assert_eq!((found.fs.name(), found.fs.maybe_shared()), ("tmpfs", false));
        }
        if let Some(align) = found.direct {
            assert!(align.memory.is_power_of_two() && align.offset.is_power_of_two());
        }
        assert!(names(dir).is_empty());
        assert_eq!(fails(io.probe(&dir.join("no"))), ErrorKind::NotFound);
        assert_eq!(fails(io.space(&dir.join("no"))), ErrorKind::NotFound);
    }
}
