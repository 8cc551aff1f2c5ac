//! Discovery of regions, and rejection of anything else.

use std::sync::Arc;

use super::*;

#[test]
fn only_what_was_asked_for_is_mapped() {
    let (mut place, region) = (Place::new(), region(4));
    region.announce(&place.registry).unwrap();
    assert!(
        place.look_for([6; 32], LEN).views.is_empty(),
        "another namespace"
    );
    assert!(
        place.look_for(NAMESPACE, LEN + 1).views.is_empty(),
        "another length"
    );
    let wanted = Wanted {
        namespace: NAMESPACE,
        record_len: (LEN, LEN),
        own: Some(region.nonce()),
    };
    assert!(
        place.registry.scan(&wanted, &[]).unwrap().views.is_empty(),
        "our own"
    );
    let first = place.look().views;
    assert_eq!((first.len(), first[0].pid()), (1, std::process::id()));
    let second = place.look().views;
    assert!(Arc::ptr_eq(&first[0], &second[0]), "stays mapped");
    region.withdraw();
    assert!(place.look().views.is_empty() && place.files().is_empty());
}

#[test]
fn a_file_that_was_cleaned_away_is_made_again() {
    let (mut place, region) = (Place::new(), region(4));
    place.view(&region);
    let files = place.files();
    region.announce(&place.registry).unwrap();
    assert_eq!(place.files(), files, "it is there");
    std::fs::remove_dir_all(place.registry.dir()).unwrap();
    assert!(place.look().views.is_empty());
    place.view(&region);
    assert_eq!(place.files(), files);
}

#[test]
fn foreign_and_dead_files_are_left_alone_or_swept() {
    let (mut place, region) = (Place::new(), region(4));
    region.announce(&place.registry).unwrap();
    let dir = place.registry.dir().to_owned();
    let text = std::fs::read_to_string(dir.join(&place.files()[0])).unwrap();
    std::fs::write(dir.join("notes.txt"), "not ours").unwrap();
    std::fs::write(dir.join("00000000000000AB.region"), &text).unwrap();
    std::fs::create_dir(dir.join("00000000000000cd.region")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", dir.join("00000000000000ef.region")).unwrap();
    // No process holds these.
    std::fs::write(dir.join("0000000000000001.region"), &text).unwrap();
    std::fs::write(dir.join("0000000000000002.new"), "").unwrap();
    let scan = place.look();
    assert_eq!((scan.views.len(), scan.swept), (1, 2));
    assert_eq!(place.files().len(), 5);
    assert_eq!(place.look().swept, 0);
}

#[test]
fn a_lying_file_maps_nothing() {
    let (mut place, region) = (Place::new(), region(4));
    region.announce(&place.registry).unwrap();
    let dir = place.registry.dir().to_owned();
    let name = place.files().remove(0);
    let truth = std::fs::read_to_string(dir.join(&name)).unwrap();
    let nonce = format!("{:016x}", region.nonce());
    let other = std::fs::File::open("/dev/zero").unwrap();
    let lies = [
        (
            "fd ",
            format!("fd {}", std::os::fd::AsRawFd::as_raw_fd(&other)),
        ),
        ("bytes ", format!("bytes {}", region.bytes() + 4096)),
        ("bytes ", "bytes 99999999999999999999".into()),
        ("record_len ", "record_len x".into()),
        ("started ", "started 1".into()),
        ("nonce ", "nonce 00000000000000aa".into()),
        ("ucm ", "ucm region 2".into()),
        ("pid ", "pid 1".into()),
    ];
    region.withdraw();
    for (line, lie) in lies {
        let lying: Vec<&str> = truth
            .lines()
            .map(|old| if old.starts_with(line) { &lie } else { old })
            .collect();
        let mut text = lying.join("\n");
        let mut name = name.clone();
        if line == "nonce " {
            // The descriptor belongs to another region than the announced one.
            name = name.replace(&nonce, "00000000000000aa");
            text = text.replace(&nonce, "00000000000000aa");
        }
        let file = std::fs::File::create(dir.join(&name)).unwrap();
        std::io::Write::write_all(&mut &file, text.as_bytes()).unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        assert!(place.look().views.is_empty(), "{lie}");
        drop(file);
        assert_eq!(place.look().swept, 1);
    }
}

#[test]
fn a_writer_in_another_container_is_said_to_be_out_of_reach() {
    // The lock is held, so the writer is alive; but its process number denotes no process, or
    // another one, here.
    let (mut place, region) = (Place::new(), region(4));
    region.announce(&place.registry).unwrap();
    let name = place.registry.dir().join(&place.files()[0]);
    let truth = std::fs::read_to_string(&name).unwrap();
    let pid = format!("pid {}\n", std::process::id());
    for (pid_there, started) in [
        (pid.as_str(), "started 1\n"),
        ("pid 4194305\n", "started 7\n"),
    ] {
        let lines = truth.lines().map(|line| match line {
            line if line.starts_with("pid ") => pid_there.to_owned(),
            line if line.starts_with("started ") => started.to_owned(),
            line => format!("{line}\n"),
        });
        std::fs::write(&name, lines.collect::<String>()).unwrap();
        let scan = place.look();
        assert_eq!((scan.views.len(), scan.swept), (0, 0));
        let refused = scan.refused.unwrap().to_string();
        assert!(refused.contains("pid namespace"), "{refused}");
    }
    // A file of another model causes no message.
    assert!(place.look_for([6; 32], LEN).refused.is_none());
}

#[test]
fn a_directory_that_others_can_write_is_refused() {
    use std::os::unix::fs::PermissionsExt as _;
    let (place, region) = (Place::new(), region(4));
    std::fs::create_dir(place.registry.dir()).unwrap();
    std::fs::set_permissions(place.registry.dir(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let error = region.announce(&place.registry).unwrap_err();
    assert!(
        error.to_string().contains("others can write to it"),
        "{error}"
    );
    let link = place.dir.path().join("link");
    std::os::unix::fs::symlink("/tmp", &link).unwrap();
    assert!(region.announce(&Registry::new(link)).is_err());
}
