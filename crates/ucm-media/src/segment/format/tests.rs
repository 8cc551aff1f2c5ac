//! What a head and a footer say, any damage to them, and the frozen segment.

use super::*;

fn owner() -> Owner {
    Owner {
        name: SegmentName {
            writer: 0xabc,
            sequence: 3,
        },
        namespace: [7; 32],
        part: Part {
            group: 1,
            pipeline_rank: 2,
            tensor_rank: 3,
        },
        time_ns: 99,
    }
}

fn entries(count: u8) -> Vec<Entry> {
    let entry = |n: u8| Entry {
        id: BlockId([n; 16]),
        offset: PAGE + u64::from(n) * 2 * PAGE,
        len: 2 * PAGE,
    };
    (0..count).map(entry).collect()
}

fn read(footer: &[u8], file_len: u64) -> Result<Vec<Entry>, MissReason> {
    Trailer::decode(footer, file_len)?.entries(footer, 16 * PAGE)
}

#[test]
fn a_footer_says_what_was_put_into_it() {
    for count in [0, 1, 5, 124, 125] {
        let (all, start) = (entries(count), PAGE * 300);
        let footer = encode_footer(&owner(), start, &all);
        let len = start + footer.len() as u64;
        assert_eq!(read(&footer, len), Ok(all));
        let trailer = Trailer::decode(&footer, len).unwrap();
        assert_eq!((trailer.owner, trailer.footer), (owner(), start..len));
        assert_eq!(read(&footer, len + PAGE), Err(MissReason::WrongLength));
    }
    // One that names more records than there is room for is not read at all.
    let footer = encode_footer(&owner(), PAGE * 5, &entries(5));
    let len = PAGE * 5 + footer.len() as u64;
    assert_eq!(Trailer::decode(&footer, len), Err(MissReason::BadHeader));
    assert_eq!(footer_len(124), PAGE);
    assert_eq!(footer_len(125), 2 * PAGE);
}

#[test]
fn any_flipped_bit_of_a_footer_is_seen() {
    let start = PAGE * 20;
    let footer = encode_footer(&owner(), start, &entries(3));
    let len = start + footer.len() as u64;
    for bit in 0..footer.len() * 8 {
        let mut bad = footer.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(read(&bad, len).is_err(), "bit {bit}");
    }
    assert_eq!(
        read(&footer[..TRAILER_LEN - 1], len),
        Err(MissReason::Truncated)
    );
}

#[test]
fn entries_outside_the_records_are_refused() {
    let start = PAGE * 4;
    for (offset, len) in [
        (0, PAGE),
        (PAGE + 64, PAGE),
        (PAGE, 0),
        (PAGE, 100),
        (PAGE, 4 * PAGE),
        (u64::MAX - PAGE + 1, PAGE),
    ] {
        let entry = Entry {
            id: BlockId([1; 16]),
            offset,
            len,
        };
        let footer = encode_footer(&owner(), start, &[entry]);
        assert_eq!(
            read(&footer, start + footer.len() as u64),
            Err(MissReason::BadHeader),
            "{offset} {len}"
        );
    }
}

#[test]
fn entries_that_overlap_or_are_longer_than_a_record_can_be_are_refused() {
    let start = PAGE * 64;
    let read_all = |places: &[(u64, u64)]| {
        let entry = |(n, &(offset, len)): (usize, &(u64, u64))| Entry {
            id: BlockId([n as u8; 16]),
            offset: offset * PAGE,
            len: len * PAGE,
        };
        let all: Vec<Entry> = places.iter().enumerate().map(entry).collect();
        let footer = encode_footer(&owner(), start, &all);
        read(&footer, start + footer.len() as u64)
    };
    for side_by_side in [
        &[(1, 2), (3, 1)][..],
        &[(9, 2), (1, 8)],
        &[(1, 16), (17, 16)],
    ] {
        assert!(read_all(side_by_side).is_ok(), "{side_by_side:?}");
    }
    for lying in [
        &[(1, 2), (2, 1)][..],
        &[(1, 2), (1, 2)],
        &[(9, 2), (1, 9)],
        &[(1, 12), (20, 1), (3, 4)],
        &[(1, 17)],
    ] {
        assert_eq!(read_all(lying), Err(MissReason::BadHeader), "{lying:?}");
    }
}

#[test]
fn a_newer_version_is_told_from_damage() {
    let start = PAGE * 4;
    let mut footer = encode_footer(&owner(), start, &[]);
    let trailer = footer.len() - TRAILER_LEN;
    put(&mut footer[trailer..], at::VERSION, &2u32.to_le_bytes());
    let len = start + footer.len() as u64;
    assert_eq!(
        Trailer::decode(&footer, len),
        Err(MissReason::BadHeader),
        "its checksum is wrong"
    );
    let crc = crc32c(&footer[trailer..trailer + at::CRC]);
    put(&mut footer[trailer..], at::CRC, &crc.to_le_bytes());
    assert_eq!(Trailer::decode(&footer, len), Err(MissReason::NewerVersion));
}

#[test]
fn a_head_names_its_process() {
    let process = Process {
        host: "boot pid:[1]".into(),
        pid: 5,
        started: 6,
    };
    let head = encode_head(&owner(), &process);
    assert_eq!(head.len() as u64, HEAD_LEN);
    assert_eq!(decode_head(&head), Ok((owner(), process.clone())));
    for bit in 0..head.len() * 8 {
        let mut bad = head.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(decode_head(&bad).is_err(), "bit {bit}");
    }
    let long = Process {
        host: "x".repeat(HOST_LEN + 1),
        ..process
    };
    let (_, nameless) = decode_head(&encode_head(&owner(), &long)).unwrap();
    assert!(nameless.host.is_empty() && !nameless.is_gone());
}

fn fixture(name: &str) -> std::path::PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "../../tests/fixtures", name]
        .iter()
        .collect()
}

/// A segment of the frozen records; also read by `tests/unit/test_segment_format.py`, which shares
/// no code with this.
fn segment() -> Vec<u8> {
    let records = ["record-v1/plain.bin", "record-v1/sided.bin"]
        .map(|name| std::fs::read(fixture(name)).unwrap());
    let mut bytes = encode_head(
        &owner(),
        &Process {
            host: "boot pid:[1]".into(),
            pid: 5,
            started: 6,
        },
    );
    let mut entries = Vec::new();
    for record in &records {
        entries.push(Entry {
            id: BlockId(array(record, 8)),
            offset: bytes.len() as u64,
            len: record.len() as u64,
        });
        bytes.extend_from_slice(record);
        bytes.resize(bytes.len() + PAGE as usize, 0xee); // a hole
    }
    let footer = encode_footer(&owner(), bytes.len() as u64, &entries);
    bytes.extend_from_slice(&footer);
    bytes
}

fn newer() -> Vec<u8> {
    let mut bytes = segment();
    let trailer = bytes.len() - TRAILER_LEN;
    put(&mut bytes[trailer..], at::VERSION, &2u32.to_le_bytes());
    let crc = crc32c(&bytes[trailer..trailer + at::CRC]);
    put(&mut bytes[trailer..], at::CRC, &crc.to_le_bytes());
    bytes
}

#[test]
fn the_frozen_segment_is_read_and_would_be_written_again() {
    let bytes = std::fs::read(fixture("segment-v1/whole.seg")).unwrap();
    let len = bytes.len() as u64;
    assert_eq!(bytes, segment());
    assert_eq!(decode_head(&bytes).unwrap().0, owner());
    let trailer = Trailer::decode(&bytes, len).unwrap();
    let entries = trailer
        .entries(&bytes[trailer.footer.start as usize..], u64::MAX)
        .unwrap();
    assert_eq!(entries.len(), 2);
    assert_eq!(trailer.owner, owner());
    let newer = std::fs::read(fixture("segment-v1/newer.seg")).unwrap();
    assert_eq!(Trailer::decode(&newer, len), Err(MissReason::NewerVersion));
}

#[test]
#[ignore = "writes the frozen files once: cargo test -p ucm-store --lib frozen -- --ignored"]
fn write_the_frozen_files() {
    for (name, bytes) in [("whole.seg", segment()), ("newer.seg", newer())] {
        let path = fixture("segment-v1").join(name);
        std::fs::create_dir_all(fixture("segment-v1")).unwrap();
        if !path.exists() {
            std::fs::write(path, bytes).unwrap();
        }
    }
}
