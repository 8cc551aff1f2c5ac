//! Symbolic links below a root: no operation follows one, at any position of a path, with `openat2`
//! and without it. The target of a link is neither read nor changed, and the error names the link.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::*;
use ucm_core::{Error, ErrorKind, Result};
use ucm_io::{Finish, IoEngine, IoJob, PsyncEngine, ReadMode};
use ucm_testkit::FaultyEngine;

/// A root with `ns/blocks/file` and `ns/tmp`, and a directory outside with the same below it.
struct Roots {
    base: tempfile::TempDir,
}

impl Roots {
    fn new() -> Self {
        let roots = Self {
            base: tempfile::tempdir().unwrap(),
        };
        for root in ["root", "outside"] {
            let ns = roots.base.path().join(root).join("ns");
            std::fs::create_dir_all(ns.join("blocks")).unwrap();
            std::fs::create_dir_all(ns.join("tmp")).unwrap();
            std::fs::write(ns.join("blocks/file"), vec![7; 8192]).unwrap();
            std::fs::write(ns.join("tmp/private"), vec![8; 4096]).unwrap();
        }
        roots
    }

    fn root(&self) -> PathBuf {
        self.base.path().join("root")
    }

    fn outside(&self) -> PathBuf {
        self.base.path().join("outside")
    }

    /// Replaces a name by a link to the same name outside.
    fn link(&self, below: &str) -> PathBuf {
        let at = self.root().join(below);
        std::fs::rename(&at, self.base.path().join("was")).unwrap();
        symlink(self.outside().join(below), &at).unwrap();
        at
    }
}

/// Everything below a directory: path, bytes, time of change, length.
fn all_below(dir: &Path) -> Vec<(PathBuf, Vec<u8>, i64, i64)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let meta = std::fs::symlink_metadata(&path).unwrap();
        let bytes = if meta.is_dir() {
            Vec::new()
        } else {
            std::fs::read(&path).unwrap()
        };
        if meta.is_dir() {
            found.extend(all_below(&path));
        }
        found.push((path, bytes, meta.mtime(), meta.mtime_nsec()));
    }
    found.sort();
    found
}

/// Jobs over the engine and its twin, with `openat2` and without, that keep below this root.
fn jobs(root: &Path) -> Vec<(&'static str, IoJob)> {
    let twin = |engine: Arc<PsyncEngine>| FaultyEngine::new(engine, 1) as Arc<dyn IoEngine>;
    let engines: [(&str, Arc<dyn IoEngine>); 4] = [
        ("openat2", PsyncEngine::new(false)),
        ("openat2, direct", PsyncEngine::new(true)),
        ("openat", PsyncEngine::without_openat2(false)),
        (
            "the twin over openat",
            twin(PsyncEngine::without_openat2(false)),
        ),
    ];
    let keep = |(name, engine): (_, Arc<dyn IoEngine>)| {
        engine.keep_below(root);
        (name, IoJob::alone(engine))
    };
    engines.into_iter().map(keep).collect()
}

/// Every operation on names that lie below a link: its name, and the error that it ended with.
fn every_operation(io: &IoJob, root: &Path) -> Vec<(&'static str, Option<Error>)> {
    let (file, private) = (root.join("ns/blocks/file"), root.join("ns/tmp/private"));
    let (fresh, target) = (root.join("ns/tmp/fresh"), root.join("ns/blocks/target"));
    let ino = std::fs::metadata(&file).unwrap().ino(); // of the file outside
    let err = |result: Result<()>| result.err();
    let one = |result: Result<Vec<Result<bool>>>| result.unwrap().remove(0).err();
    let read = |mode| {
        let mut buf = vec![0; 8192];
        let read = io.read(&file, 0, 8192, &mut buf, mode);
        assert!(read.is_ok() || buf.iter().all(|&byte| byte == 0));
        err(read.map(drop))
    };
    let finish = Finish {
        private: &private,
        target: &root.join("ns/blocks/finished"),
        footer: b"foot",
        offset: 4096,
        mtime_ns: 5,
    };
    let mut buf = vec![0; 8192];
    let (mut into, mut parts) = (vec![0; 4096], vec![0; 4096]);
    vec![
        ("read", read(ReadMode::Default)),
        ("read past the cache", read(ReadMode::FreshDirect)),
        (
            "read_piece",
            err(io.read_piece(&file, 0, 10, ReadMode::Default).map(drop)),
        ),
        (
            "read_into",
            err(io
                .read_into(&file, 0, vec![(&mut into, 4096)], false)
                .map(drop)),
        ),
        (
            "read_into, kept",
            err(io
                .read_into(&file, 0, vec![(&mut buf, 4096)], true)
                .map(drop)),
        ),
        (
            "read_parts",
            err(io
                .read_parts(&file, 0, &[0..2048, 2048..4096], &mut parts, true)
                .map(drop)),
        ),
        (
            "publish",
            err(io.publish(to_publish(&fresh, &target, b"bytes")).map(drop)),
        ),
        (
            "publish over",
            err(io.publish(to_publish(&fresh, &file, b"bytes")).map(drop)),
        ),
        (
            "create",
            err(io.create(&root.join("ns/tmp/created"), b"head", 0, 0o600)),
        ),
        ("write_at", err(io.write_at(&private, 0, b"data", false))),
        (
            "write_at, kept",
            err(io.write_at(&private, 0, b"data", true)),
        ),
        ("finish", err(io.finish(finish).map(drop))),
        (
            "stat",
            err(io.stat(std::slice::from_ref(&file), false).map(drop)),
        ),
        ("touch", one(io.touch(&[(file.clone(), 5)]))),
        ("remove", one(io.remove(std::slice::from_ref(&file)))),
        ("rename", err(io.rename(&file, &target, ino).map(drop))),
        ("list", err(io.list(&root.join("ns/blocks")).map(drop))),
        (
            "make_dir",
            err(io.make_dir(&root.join("ns/blocks/ab"), 0o700).map(drop)),
        ),
        ("space", err(io.space(&root.join("ns/blocks")).map(drop))),
        ("probe", err(io.probe(&root.join("ns/tmp")).map(drop))),
    ]
}

#[test]
fn no_operation_goes_through_a_link() {
    for linked in ["ns", "ns/blocks", "ns/tmp"] {
        for number in 0..4 {
            let roots = Roots::new();
            let link = roots.link(linked);
            let before = all_below(&roots.outside());
            let (engine, io) = jobs(&roots.root()).remove(number);
            let mut refused = 0;
            for (operation, error) in every_operation(&io, &roots.root()) {
                let Some(error) = error else { continue };
                refused += 1;
                let (kind, text) = (error.kind(), error.to_string());
                assert_eq!(
                    kind,
                    ErrorKind::Foreign,
                    "{engine}, {linked}, {operation}: {text}"
                );
                let names = format!("{} is a symbolic link", link.display());
                assert!(
                    text.contains(&names),
                    "{engine}, {linked}, {operation}: {text}"
                );
                assert!(
                    text.contains("remove the link"),
                    "{engine}, {linked}, {operation}: {text}"
                );
            }
            // All except those whose names lie elsewhere.
            let least = match linked {
                "ns" => 20,
                "ns/blocks" => 14,
                _ => 7,
            };
            assert!(
                refused >= least,
                "{engine}, {linked}: {refused} were refused"
            );
            assert_eq!(all_below(&roots.outside()), before, "{engine}, {linked}");
        }
    }
}

#[test]
fn a_link_in_the_place_of_a_file_is_no_file_and_makes_way() {
    for number in 0..4 {
        let roots = Roots::new();
        let link = roots.link("ns/blocks/file");
        let before = all_below(&roots.outside());
        let (engine, io) = jobs(&roots.root()).remove(number);
        let file = std::slice::from_ref(&link);
        assert_eq!(io.stat(file, false).unwrap(), [None], "{engine}: absent");
        let error = read(&io, &link, 0, 10).unwrap_err();
        assert!(
            error.to_string().contains("symbolic link"),
            "{engine}: {error}"
        );
        assert_eq!(
            fails(io.write_at(&link, 0, b"data", false)),
            ErrorKind::Foreign,
            "{engine}"
        );
        assert_eq!(fails(io.list(&link)), ErrorKind::Foreign, "{engine}");
        assert_eq!(
            fails(io.make_dir(&link, 0o700)),
            ErrorKind::Foreign,
            "{engine}"
        );
        assert_eq!(fails(io.space(&link)), ErrorKind::Foreign, "{engine}");
        let target = std::fs::metadata(&link).unwrap().ino();
        assert!(
            !io.rename(&link, &roots.root().join("q"), target).unwrap(),
            "{engine}"
        );
        assert!(
            io.touch(&[(link.clone(), 5_000_000_000)]).unwrap()[0].is_ok(),
            "{engine}: the link's own"
        );
        // The next record takes its place.
        let private = roots.root().join("ns/tmp/fresh");
        io.publish(to_publish(&private, &link, b"bytes"))
            .unwrap()
            .unwrap();
        assert_eq!(
            std::fs::symlink_metadata(&link).unwrap().len(),
            5,
            "{engine}"
        );
        std::fs::remove_file(&link).unwrap();
        symlink(roots.outside().join("ns/blocks/file"), &link).unwrap();
        assert!(
            *io.remove(file).unwrap()[0].as_ref().unwrap(),
            "{engine}: the link itself"
        );
        assert_eq!(all_below(&roots.outside()), before, "{engine}");
    }
}

#[test]
fn a_root_may_be_reached_by_a_link_and_is_opened_anew_by_every_operation() {
    for number in 0..4 {
        let roots = Roots::new();
        let by_link = roots.base.path().join("link");
        symlink(roots.root(), &by_link).unwrap();
        let (engine, io) = jobs(&by_link).remove(number);
        for (operation, error) in every_operation(&io, &by_link) {
            assert!(error.is_none(), "{engine}, {operation}: {error:?}");
        }
        // Another directory takes its place, as a mount would.
        std::fs::write(roots.outside().join("ns/blocks/only here"), b"x").unwrap();
        let only_here = || {
            io.look(by_link.join("ns/blocks/only here"))
                .unwrap()
                .is_some()
        };
        assert!(!only_here(), "{engine}");
        std::fs::remove_file(&by_link).unwrap();
        symlink(roots.outside(), &by_link).unwrap();
        assert!(only_here(), "{engine}");
    }
}
