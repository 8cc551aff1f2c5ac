//! The promises of the record: a sealed record is verified, anything else is refused with its
//! reason.

use proptest::collection::vec;
use proptest::prelude::*;
use ucm_core::{BlockId, DType, Geometry, MissReason, Part, crc32c};

use super::*;

const NAMESPACE: [u8; 32] = [0x5a; 32];
const PART: Part = Part {
    group: 1,
    pipeline_rank: 2,
    tensor_rank: 3,
};

fn meta() -> RecordMeta {
    RecordMeta {
        id: BlockId(*b"0123456789abcdef"),
        namespace: NAMESPACE,
        part: PART,
        parent: BlockId([9; 16]),
        ordinal: 41,
        tokens: 16,
        time_ns: 1_800_000_000_000_000_000,
        writer: 0x0102_0304_0506_0708,
        tenant: [0x7e; 32],
    }
}

fn side(name: &str, len: u64) -> SideSpec {
    SideSpec {
        name: name.to_owned(),
        version: 7,
        len,
    }
}

fn layout(tensors: &[u64], layers: u32, sides: Vec<SideSpec>) -> RecordLayout {
    let geometry = Geometry::new(tensors.to_vec(), layers, 1).unwrap();
    RecordLayout::new(&geometry)
        .describing(16, DType::Bf16)
        .with_sides(sides)
        .unwrap()
}

/// A sealed record whose buffer held `stale` bytes before.
fn record(layout: &RecordLayout, meta: &RecordMeta, stale: u8) -> Vec<u8> {
    let mut record = vec![stale; layout.record_len()];
    let data = (0..layout.layers()).map(|layer| layout.layer_data(layer));
    for range in data.chain((0..layout.sides().len()).filter_map(|i| layout.side_data(i))) {
        for at in range {
            record[at] = (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0];
        }
    }
    layout.seal(meta, &mut record).unwrap();
    record
}

fn expect(layout: &RecordLayout) -> Expect<'_> {
    Expect {
        id: meta().id,
        namespace: NAMESPACE,
        part: PART,
        layout,
    }
}

fn check(bytes: &[u8], layout: &RecordLayout) -> Result<RecordHeader, MissReason> {
    Ok(verify(bytes, bytes.len() as u64, &expect(layout))?)
}

/// Overwrites parts of a header and corrects its checksums.
fn forge(record: &mut [u8], offset: usize, bytes: &[u8]) {
    record[offset..offset + bytes.len()].copy_from_slice(bytes);
    let preamble = crc32c(&record[..at::PREAMBLE_CRC]);
    record[at::PREAMBLE_CRC..PREAMBLE_LEN].copy_from_slice(&preamble.to_le_bytes());
    let mut len = [0; 4];
    len.copy_from_slice(&record[at::HEADER_LEN..][..4]);
    let end = u32::from_le_bytes(len) as usize - at::CRC_LEN;
    let whole = crc32c(&record[..end]);
    record[end..end + at::CRC_LEN].copy_from_slice(&whole.to_le_bytes());
}

#[test]
fn offsets_are_those_of_the_format() {
    let plain = layout(&[100, 28], 3, vec![]);
    assert_eq!(
        (plain.header_len(), plain.payload_len(), plain.kv_len()),
        (4096, 4096, 8192)
    );
    assert_eq!(plain.layer_data(2), 4096 + 256..4096 + 256 + 128);
    assert_eq!(at::SHARD_TABLE, 576);
    // 146 layers fit the first page, one more needs a second.
    assert_eq!(layout(&[1], 146, vec![]).header_len(), 4096);
    assert_eq!(layout(&[1], 147, vec![]).header_len(), 8192);
    let more = layout(&[100, 28], 3, vec![side("mean-k", 5000), side("q", 1)]);
    assert_eq!(more.layer_data(2), plain.layer_data(2));
    assert_eq!(more.side_data(0), Some(8192..13192));
    assert_eq!(more.side_data(1), Some(16384..16385));
    assert_eq!(more.side_data(2), None);
    assert_eq!(more.record_len(), 20480);
}

#[test]
fn direct_and_layerwise_callers_write_the_same_bytes() {
    let of = |layers_per_shard| {
        RecordLayout::new(&Geometry::new(vec![640, 640], 4, layers_per_shard).unwrap())
    };
    assert_eq!(of(1), of(4));
}

#[test]
fn every_flipped_bit_is_refused_with_its_reason() {
    let layout = layout(&[300], 2, vec![side("mean-k", 40)]);
    let mut record = record(&layout, &meta(), 0xff);
    for at in 0..record.len() {
        let reason = match at {
            0..4 => MissReason::NotARecord,
            4..4096 => MissReason::BadHeader,
            _ => MissReason::BadChecksum,
        };
        for bit in 0..8 {
            record[at] ^= 1 << bit;
            let (kv, side) = (
                check(&record, &layout).map(|_| ()),
                check_first_side(&record, &layout),
            );
            let expected = match at {
                0..4096 => (Err(reason), Err(reason)),
                _ if at < layout.kv_len() => (Err(reason), Ok(())),
                _ => (Ok(()), Err(reason)),
            };
            assert_eq!((kv, side), expected, "byte {at}, bit {bit}");
            record[at] ^= 1 << bit;
        }
    }
    assert!(check(&record, &layout).is_ok() && check_first_side(&record, &layout).is_ok());
}

/// The first side shard of the layout, from only the parts of the record that it needs.
fn check_first_side(record: &[u8], layout: &RecordLayout) -> Result<(), MissReason> {
    let mut parts = vec![0xee; record.len()];
    let pages = layout.side_data(0).unwrap().start..record.len();
    for part in [0..layout.header_len().min(record.len()), pages] {
        let part = part.start.min(record.len())..part.end;
        parts[part.clone()].copy_from_slice(&record[part]);
    }
    let expect = expect(layout);
    verify_side(&parts, record.len() as u64, &expect, &layout.sides()[0])?;
    Ok(())
}

/// Data followed by its own checksum always has the same remainder, so the header's checksum cannot
/// detect a preamble of another record.
#[test]
fn what_a_slot_held_before_is_no_part_of_a_record_that_ends_early() {
    let layout = layout(&[300], 2, vec![side("mean-k", 40)]);
    let before = RecordMeta {
        id: BlockId([9; 16]),
        ..meta()
    };
    let (ours, mut slot) = (record(&layout, &meta(), 0), record(&layout, &before, 0));
    let end = layout.side_data(0).unwrap().start;
    for (len, reason) in [
        (64, MissReason::Truncated),
        (134, MissReason::Truncated),
        (4095, MissReason::Truncated),
        (4096, MissReason::Absent),
        (end + 4095, MissReason::Absent),
    ] {
        slot[..len].copy_from_slice(&ours[..len]);
        let checked = verify_side(&slot, len as u64, &expect(&layout), &layout.sides()[0]);
        assert_eq!(checked.unwrap_err().reason, reason, "{len} bytes");
    }
}

#[test]
fn a_record_without_its_side_shards_is_that_of_a_layout_without_any() {
    let (plain, sided) = (
        layout(&[300], 2, vec![]),
        layout(&[300], 2, vec![side("mean-k", 40)]),
    );
    let mut bytes = record(&sided, &meta(), 0xff);
    let checksums: Vec<u32> = (0..2)
        .map(|layer| sided.seal_layer(&mut bytes, layer))
        .collect();
    encode_header(&sided, &meta(), &checksums, &mut bytes).unwrap();
    assert_eq!(bytes[..sided.kv_len()], record(&plain, &meta(), 0)[..]);
    let absent = check_first_side(&bytes[..sided.kv_len()], &sided);
    assert_eq!(absent, Err(MissReason::Absent));
    assert!(encode_header(&sided, &meta(), &checksums[..1], &mut bytes).is_err());
}

#[test]
fn another_name_version_or_length_is_another_side_shard() {
    let sided = layout(&[300], 2, vec![side("mean-k", 40), side("codes", 4096)]);
    let record = record(&sided, &meta(), 0);
    let check = |wanted: &SideSpec| {
        let checked = verify_side(&record, record.len() as u64, &expect(&sided), wanted);
        checked.map(<[u8]>::len).map_err(MissReason::from)
    };
    assert_eq!(check(&side("codes", 4096)), Ok(4096));
    let newer = SideSpec {
        version: 8,
        ..side("codes", 4096)
    };
    for wanted in [side("code", 4096), side("codes", 4095), newer] {
        assert_eq!(check(&wanted), Err(MissReason::Absent), "{wanted:?}");
    }
}

#[test]
fn a_side_shard_may_lie_alone() {
    let layout = layout(&[300], 2, vec![side("mean-k", 40), side("codes", 5000)]);
    assert_eq!(layout.record_lengths(), [8192, 12288, 20480]);
    let mut record = vec![0xff; layout.record_len()];
    let data = layout.side_alone(1).unwrap();
    assert_eq!(data, 4096..9096);
    record[data.clone()].fill(7);
    let len = seal_side_alone(&layout, 1, &meta(), &mut record).unwrap();
    record.truncate(len);
    assert_eq!(len, 12288);
    assert!(
        record[data.end..].iter().all(|&byte| byte == 0),
        "no old bytes leave the process"
    );
    let stored = |record: &[u8]| {
        let checked = verify_stored(record, record.len() as u64, &expect(&layout));
        checked.map_err(MissReason::from)
    };
    let header = stored(&record).unwrap();
    assert_eq!(
        (header.without_kv, header.record_len, header.sides_len()),
        (true, 12288, 8192)
    );
    let one = |wanted| verify_side(&record, record.len() as u64, &expect(&layout), wanted);
    assert_eq!(one(&layout.sides()[1]), Ok(&[7; 5000][..]));
    assert_eq!(
        one(&layout.sides()[0]).unwrap_err().reason,
        MissReason::Absent
    );
    assert_eq!(
        check(&record, &layout),
        Err(MissReason::ForeignShape),
        "it is no KV"
    );
    assert_eq!(
        verify_layers(&record, 12288, &expect(&layout), 0..1)
            .unwrap_err()
            .reason,
        MissReason::ForeignShape
    );
    for at in (0..record.len()).step_by(7) {
        record[at] ^= 0x10;
        assert!(stored(&record).is_err(), "byte {at}");
        record[at] ^= 0x10;
    }
    for len in (0..record.len()).step_by(101) {
        assert!(stored(&record[..len]).is_err(), "{len} bytes");
    }
    assert!(seal_side_alone(&layout, 2, &meta(), &mut record).is_err());
    assert!(seal_side_alone(&layout, 1, &meta(), &mut record[..12287]).is_err());
}

#[test]
fn a_record_without_kv_says_so_soundly() {
    let layout = layout(&[300], 2, vec![side("mean-k", 40)]);
    let mut alone = vec![0; 8192];
    seal_side_alone(&layout, 0, &meta(), &mut alone).unwrap();
    let forged = |offset, bytes: &[u8]| {
        let mut record = alone.clone();
        forge(&mut record, offset, bytes);
        let checked = verify_stored(&record, 8192, &expect(&layout));
        checked.map(|_| ()).map_err(MissReason::from)
    };
    assert_eq!(forged(at::FLAGS, &[1]), Ok(()));
    for (offset, bytes, reason) in [
        (at::FLAGS, &[5][..], MissReason::NewerVersion),
        (at::CODEC, &[1, 1], MissReason::NewerVersion),
        (at::FLAGS, &[0], MissReason::BadHeader),
        (at::SHARDS, &[1], MissReason::BadHeader),
        (at::SIDES, &[0], MissReason::BadHeader),
        (at::STORED_LEN, &[0, 16], MissReason::BadHeader),
        (at::RAW_LEN, &[1], MissReason::BadHeader),
        (at::LAYER_LEN, &[1], MissReason::ForeignShape),
        (at::DTYPE, &[7], MissReason::ForeignShape),
    ] {
        assert_eq!(forged(offset, bytes), Err(reason), "{bytes:?} at {offset}");
    }
}

#[test]
fn every_truncation_is_refused_and_the_kv_alone_is_enough() {
    let layout = layout(&[300], 2, vec![side("mean-k", 40)]);
    let mut record = record(&layout, &meta(), 0);
    for len in 0..record.len() {
        let checked = check(&record[..len], &layout);
        if len >= layout.kv_len() {
            assert_eq!(checked.unwrap().side("mean-k").unwrap().version, 7);
            let side = check_first_side(&record[..len], &layout);
            assert_eq!(side, Err(MissReason::Absent), "{len} bytes");
        } else {
            assert_eq!(checked, Err(MissReason::Truncated), "{len} bytes");
        }
    }
    record.push(0);
    assert_eq!(check(&record, &layout), Err(MissReason::WrongLength));
}

#[test]
fn some_layers_are_verified_by_themselves_from_their_parts_alone() {
    for layout in [
        layout(&[5000, 64], 5, vec![]),
        layout(&[100], 7, vec![side("s", 10)]),
    ] {
        let whole = record(&layout, &meta(), 0);
        let len = whole.len() as u64;
        for (first, end) in [(0, 1), (1, 3), (2, layout.layers()), (0, layout.layers())] {
            let mut bytes = vec![0xee; whole.len()];
            let parts = layout.parts(first..end);
            for part in &parts {
                assert!(part.start.is_multiple_of(4096) && part.end.is_multiple_of(4096));
                bytes[part.clone()].copy_from_slice(&whole[part.clone()]);
            }
            let check =
                |bytes: &[u8], stored| verify_layers(bytes, stored, &expect(&layout), first..end);
            assert_eq!(check(&bytes, len).unwrap().meta.ordinal, 41);
            for layer in first..end {
                let range = layout.layer_data(layer);
                assert_eq!(bytes[range.clone()], whole[range.clone()]);
                bytes[range.start] ^= 1;
                assert_eq!(
                    check(&bytes, len).unwrap_err().reason,
                    MissReason::BadChecksum
                );
                bytes[range.start] ^= 1;
            }
            for at in (0..layout.header_len()).step_by(97) {
                bytes[at] ^= 1;
                assert!(check(&bytes, len).is_err(), "byte {at} of the header");
                bytes[at] ^= 1;
            }
            assert_eq!(
                check(&bytes, len + 1).unwrap_err().reason,
                MissReason::WrongLength
            );
            let short = layout.kv_len() as u64 - 1;
            assert_eq!(
                check(&bytes, short).unwrap_err().reason,
                MissReason::Truncated
            );
            let cut = parts.last().map_or(0, |part| part.end) - 4096;
            assert!(check(&bytes[..cut], len).is_err());
        }
    }
}

#[test]
fn what_was_sealed_for_another_is_foreign() {
    let layout = layout(&[300], 2, vec![]);
    let of = |change: fn(&mut RecordMeta)| {
        let mut meta = meta();
        change(&mut meta);
        check(&record(&layout, &meta, 0), &layout)
    };
    assert_eq!(of(|m| m.id.0[15] ^= 1), Err(MissReason::ForeignId));
    assert_eq!(
        of(|m| m.namespace[31] ^= 1),
        Err(MissReason::ForeignIdentity)
    );
    assert_eq!(of(|m| m.part.group += 1), Err(MissReason::ForeignPart));
    assert_eq!(
        of(|m| m.part.pipeline_rank += 1),
        Err(MissReason::ForeignPart)
    );
    assert_eq!(
        of(|m| m.part.tensor_rank += 1),
        Err(MissReason::ForeignPart)
    );
    // Another rank's record of the same block: its id also differs, but the part is the better
    // reason.
    let other_rank = of(|m| {
        let key = m.id.xor(m.part.mask());
        m.part.tensor_rank = 0;
        m.id = key.xor(m.part.mask());
    });
    assert_eq!(other_rank, Err(MissReason::ForeignPart));
    assert!(
        of(|m| (m.ordinal, m.tokens, m.time_ns, m.writer, m.parent) = (0, 0, 0, 0, m.id)).is_ok()
    );
}

#[test]
fn another_shape_is_foreign_even_with_the_same_length() {
    let ours = layout(&[300, 300], 2, vec![]);
    let record = record(&ours, &meta(), 0);
    for other in [
        layout(&[300, 300], 3, vec![]),
        layout(&[300, 301], 2, vec![]),
        layout(&[299, 301], 2, vec![]),
        layout(&[600], 2, vec![]),
        layout(&[3000, 3000], 2, vec![]),
        ours.clone().describing(32, DType::Bf16),
        ours.clone().describing(16, DType::F16),
    ] {
        assert_eq!(
            check(&record, &other),
            Err(MissReason::ForeignShape),
            "{other:?}"
        );
    }
}

#[test]
fn a_refusal_says_field_found_and_expected() {
    let ours = layout(&[300], 2, vec![]);
    let good = record(&ours, &meta(), 0);
    let said = |bytes: &[u8], layout: &RecordLayout| {
        let refused = verify(bytes, bytes.len() as u64, &expect(layout));
        refused.unwrap_err().to_string()
    };
    assert_eq!(
        said(&good, &layout(&[300], 3, vec![])),
        "layers is 2, expected 3"
    );
    assert_eq!(
        said(b"PK\x03\x04", &ours),
        "magic is PK\\x03\\x04, expected UCMB"
    );
    assert_eq!(said(&good[..8000], &ours), "length is 8000, expected 8192");
    let mut flipped = good;
    flipped[4096] ^= 1;
    let checksum = said(&flipped, &ours);
    assert!(
        checksum.starts_with("checksum is 0x") && checksum.contains(" from byte 4096 to "),
        "{checksum}"
    );
}

#[test]
fn side_shards_do_not_change_who_may_read_the_kv() {
    let plain = layout(&[300], 2, vec![]);
    let sided = layout(&[300], 2, vec![side("mean-k", 40), side("codes", 4096)]);
    let header = check(&record(&sided, &meta(), 0), &plain).unwrap();
    assert!(
        check(&record(&plain, &meta(), 0), &sided)
            .unwrap()
            .sides
            .is_empty()
    );
    let record = record(&sided, &meta(), 0);
    for (i, name) in ["mean-k", "codes"].into_iter().enumerate() {
        let entry = header.side(name).unwrap();
        let range = sided.side_data(i).unwrap();
        let pages = &record[range.start..][..4096];
        assert_eq!(verify_side_bytes(entry, pages), Ok(&record[range]));
        let refused = |bytes: &[u8]| verify_side_bytes(entry, bytes).unwrap_err().reason;
        assert_eq!(refused(&pages[..4095]), MissReason::Truncated);
        assert_eq!(refused(&[pages, &[0]].concat()), MissReason::WrongLength);
        let mut flipped = pages.to_vec();
        flipped[4095] ^= 1;
        assert_eq!(refused(&flipped), MissReason::BadChecksum);
    }
    assert_eq!(header.side("other"), None);
}

#[test]
fn side_shards_are_named_well_and_once() {
    let geometry = Geometry::new(vec![300], 2, 1).unwrap();
    let long = "x".repeat(MAX_SIDE_NAME + 1);
    for sides in [
        vec![side("", 1)],
        vec![side(&long, 1)],
        vec![side("A", 1)],
        vec![side("a", 0)],
        vec![side("a", u64::MAX)],
        vec![side("a", 1), side("a", 2)],
        (0..=MAX_SIDES).map(|i| side(&i.to_string(), 1)).collect(),
        vec![side("a", 16 << 20), side("b", 1)],
    ] {
        assert!(
            RecordLayout::new(&geometry)
                .with_sides(sides.clone())
                .is_err(),
            "{sides:?}"
        );
    }
}

#[test]
fn a_newer_record_is_left_alone_and_only_if_it_says_so_soundly() {
    let layout = layout(&[300], 2, vec![]);
    let good = record(&layout, &meta(), 0);
    let forged = |offset: usize, bytes: &[u8]| {
        let mut record = good.clone();
        forge(&mut record, offset, bytes);
        record
    };
    let mut newer = forged(at::VERSION, &2u32.to_le_bytes());
    // A newer version may have any bytes behind its preamble.
    newer[PREAMBLE_LEN..].fill(0xee);
    assert_eq!(check(&newer, &layout), Err(MissReason::NewerVersion));
    assert_eq!(
        check(&newer[..PREAMBLE_LEN], &layout),
        Err(MissReason::NewerVersion)
    );
    assert_eq!(
        check(&forged(at::FLAGS, &4u32.to_le_bytes()), &layout),
        Err(MissReason::NewerVersion)
    );
    assert_eq!(
        check(&forged(at::CODEC, &1u32.to_le_bytes()), &layout),
        Err(MissReason::NewerVersion)
    );
    assert_eq!(
        check(&forged(at::VERSION, &[0; 4]), &layout),
        Err(MissReason::BadHeader)
    );
    let mut flipped = good.clone();
    flipped[at::VERSION] ^= 2;
    assert_eq!(check(&flipped, &layout), Err(MissReason::BadHeader));
}

#[test]
fn the_seeds_own_form_is_named() {
    let layout = layout(&[300], 2, vec![]);
    let mut seed = vec![0u8; PREAMBLE_LEN + 600];
    seed[..4].copy_from_slice(b"UCMB");
    seed[4] = 1;
    seed[8..24].copy_from_slice(&meta().id.0);
    seed[24] = 2;
    seed[28] = 16;
    seed[32] = 2;
    assert_eq!(check(&seed, &layout), Err(MissReason::SeedForm));
    assert_eq!(
        check(&seed[..PREAMBLE_LEN], &layout),
        Err(MissReason::SeedForm)
    );
    assert_eq!(
        check(&seed[..PREAMBLE_LEN - 1], &layout),
        Err(MissReason::Truncated)
    );
    assert_eq!(check(&[0; 8192], &layout), Err(MissReason::NotARecord));
}

#[test]
fn forged_tables_with_right_checksums_are_refused() {
    let layout = layout(&[300], 2, vec![side("mean-k", 40)]);
    let good = record(&layout, &meta(), 0);
    let entry = at::SHARD_TABLE + at::SHARD_ENTRY;
    let bad_header: &[(usize, u64)] = &[
        (at::RECORD_LEN, 8192),
        (at::RECORD_LEN, u64::MAX),
        (at::STORED_LEN, u64::MAX),
        (at::STORED_LEN, 5000),
        (entry, u64::MAX),
        (entry, 4096),
        (entry + 8, u64::MAX),
        (at::SHARD_TABLE, 4097),
        (at::SIDE_TABLE + 24, 8193),
        (at::SIDE_TABLE + 32, 0),
        (at::SIDE_TABLE + 32, u64::MAX),
        (at::SIDE_TABLE, u64::MAX),
    ];
    for &(offset, value) in bad_header {
        let mut record = good.clone();
        forge(&mut record, offset, &value.to_le_bytes());
        assert_eq!(
            check(&record, &layout),
            Err(MissReason::BadHeader),
            "{value} at {offset}"
        );
    }
    for (offset, value) in [
        (at::SHARDS, 0u32),
        (at::SHARDS, 147),
        (at::SIDES, 9),
        (at::SIDES, u32::MAX),
    ] {
        let mut record = good.clone();
        forge(&mut record, offset, &value.to_le_bytes());
        assert_eq!(
            check(&record, &layout),
            Err(MissReason::BadHeader),
            "{value} at {offset}"
        );
    }
    for header_len in [0u32, 64, 4095, 1 << 20] {
        let mut record = good.clone();
        record[at::HEADER_LEN..][..4].copy_from_slice(&header_len.to_le_bytes());
        let preamble = crc32c(&record[..at::PREAMBLE_CRC]);
        record[at::PREAMBLE_CRC..PREAMBLE_LEN].copy_from_slice(&preamble.to_le_bytes());
        assert_eq!(
            check(&record, &layout),
            Err(MissReason::BadHeader),
            "header of {header_len}"
        );
    }
    let mut moved = good.clone();
    forge(&mut moved, entry, &(4096u64 + 384).to_le_bytes());
    assert_eq!(check(&moved, &layout), Err(MissReason::ForeignShape));
}

#[test]
fn a_buffer_that_does_not_fit_is_an_error() {
    let layout = layout(&[300], 2, vec![]);
    let mut short = vec![0; layout.record_len() - 1];
    assert!(layout.seal(&meta(), &mut short).is_err());
    let mut record = vec![0; layout.record_len()];
    assert!(encode_header(&layout, &meta(), &[1], &mut record).is_err());
    assert!(encode_header(&layout, &meta(), &[1, 2, 3], &mut record).is_err());
}

prop_compose! {
    fn layouts()(
        tensors in vec(1u64..3000, 1..4),
        layers in 1u32..200,
        sides in vec(1u64..9000, 0..3),
    ) -> RecordLayout {
        let sides = sides.into_iter().enumerate().map(|(i, len)| side(&format!("s{i}"), len)).collect();
        layout(&tensors, layers, sides)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_sealed_comes_back(layout in layouts(), stale: u8) {
        let sealed = record(&layout, &meta(), stale);
        let header = check(&sealed, &layout).unwrap();
        prop_assert_eq!(header.meta, meta());
        prop_assert_eq!(header.record_len, sealed.len() as u64);
        prop_assert_eq!(header.kv_len(), layout.kv_len() as u64);
        for (layer, entry) in header.table.iter().enumerate() {
            let range = layout.layer_data(layer as u32);
            prop_assert!(range.start.is_multiple_of(64) && range.start >= layout.header_len());
            prop_assert_eq!((entry.offset, entry.len), (range.start as u64, range.len() as u64));
        }
        // No old bytes of the buffer are in the record.
        prop_assert_eq!(sealed, record(&layout, &meta(), !stale));
    }

    #[test]
    fn no_flip_no_cut_no_swap_passes(
        layout in layouts(),
        at in any::<proptest::sample::Index>(),
        mask in 1u8..,
        other in layouts(),
    ) {
        let good = record(&layout, &meta(), 0);
        let at = at.index(good.len());
        let mut flipped = good.clone();
        flipped[at] ^= mask;
        let reason = match at {
            0..4 => MissReason::NotARecord,
            _ if at < layout.header_len() => MissReason::BadHeader,
            _ => MissReason::BadChecksum,
        };
        if at < layout.kv_len() {
            prop_assert_eq!(check(&flipped, &layout), Err(reason));
            prop_assert_eq!(check(&good[..at], &layout), Err(MissReason::Truncated));
        } else {
            let header = check(&flipped, &layout).unwrap();
            prop_assert!(verify_sides(&flipped, &header).is_err() && verify_sides(&good, &header).is_ok());
        }
        if other.layer_data(1) != layout.layer_data(1) || other.layers() != layout.layers() {
            prop_assert_eq!(check(&good, &other), Err(MissReason::ForeignShape));
        }
    }

    /// For every forged header the reader returns a reason; a header that passes has exactly the
    /// expected fields.
    #[test]
    fn forged_headers_never_escape(
        layout in layouts(),
        offset in PREAMBLE_LEN..1000usize,
        bytes in vec(any::<u8>(), 1..24),
    ) {
        let mut forged = record(&layout, &meta(), 0);
        forge(&mut forged, offset, &bytes);
        if let Ok(header) = check(&forged, &layout) {
            prop_assert_eq!((header.meta.id, header.meta.namespace, header.meta.part), (meta().id, NAMESPACE, PART));
            prop_assert_eq!(header.table.len(), layout.layers() as usize);
        }
    }

    #[test]
    fn noise_is_not_a_record(mut bytes in vec(any::<u8>(), 0..9000), magic: bool) {
        if magic && bytes.len() >= 4 {
            bytes[..4].copy_from_slice(&MAGIC);
        }
        prop_assert!(RecordHeader::decode(&bytes).is_err());
    }
}
