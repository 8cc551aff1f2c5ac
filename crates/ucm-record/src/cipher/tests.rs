//! Encrypted records: with the key they are restored to the byte, without it they are refused, and
//! every changed byte is detected.

use proptest::prelude::*;
use ucm_core::{BlockId, DType, Geometry, MissReason, Part, crc32c};

use super::*;
use crate::codec::Codec;
use crate::coder::{Coder, stored_form};
use crate::header::{RecordMeta, seal_side_alone};
use crate::layout::{RecordLayout, SideSpec};
use crate::verify::{Expect, verify, verify_layers, verify_side, verify_sides, verify_stored};

const NAMESPACE: [u8; 32] = [0x5a; 32];
const ID: BlockId = BlockId(*b"0123456789abcdef");

fn keys(first: u8) -> Keys {
    Keys::parse(&format!("{first:02x}").repeat(KEY)).unwrap()
}

fn layout(layers: u32, sides: &[(&str, u64)]) -> RecordLayout {
    let sides = sides.iter().map(|&(name, len)| SideSpec {
        name: name.to_owned(),
        version: 7,
        len,
    });
    let geometry = Geometry::new(vec![300, 84], layers, 1).unwrap();
    let layout = RecordLayout::new(&geometry).describing(16, DType::Bf16);
    layout
        .with_sides(sides.collect())
        .unwrap()
        .encrypted()
        .unwrap()
}

fn meta() -> RecordMeta {
    RecordMeta {
        id: ID,
        namespace: NAMESPACE,
        tenant: [3; 32],
        ..RecordMeta::default()
    }
}

/// A sealed record of compressible numbers.
fn record(layout: &RecordLayout) -> Vec<u8> {
    let mut record = vec![0xee; layout.record_len()];
    for layer in 0..layout.layers() {
        for (at, byte) in record[layout.layer_data(layer)].iter_mut().enumerate() {
            *byte = if at % 2 == 1 {
                0x3f
            } else {
                (at as u32 * 37 + layer) as u8
            };
        }
    }
    for range in (0..layout.sides().len()).filter_map(|index| layout.side_data(index)) {
        record[range].fill(9);
    }
    layout.seal(&meta(), &mut record).unwrap();
    record
}

fn encrypted(keys: &Keys, record: &[u8]) -> Vec<u8> {
    let mut bytes = record.to_vec();
    keys.encrypt(&mut bytes).unwrap();
    bytes
}

fn expect(layout: &RecordLayout) -> Expect<'_> {
    Expect {
        id: ID,
        namespace: NAMESPACE,
        part: Part::default(),
        layout,
    }
}

fn check(bytes: &[u8], layout: &RecordLayout) -> std::result::Result<RecordHeader, MissReason> {
    Ok(verify(bytes, bytes.len() as u64, &expect(layout))?)
}

/// The record in stored bytes, or the reason of its refusal.
fn read(
    keys: &Keys,
    stored: &[u8],
    layout: &RecordLayout,
) -> std::result::Result<Vec<u8>, MissReason> {
    let (mut bytes, read) = (stored.to_vec(), stored.len());
    keys.decrypt(&mut bytes, read)?;
    let header = check(&bytes, layout)?;
    verify_sides(&bytes, &header)?;
    Ok(bytes)
}

/// Corrects the checksums of a header and of all its parts.
fn forge(record: &mut [u8]) {
    let header_len = u32_at(record, at::HEADER_LEN) as usize;
    seal_header(&mut record[..header_len]);
    let pieces: Vec<_> =
        RecordHeader::decode(record).map_or(Vec::new(), |header| pieces(&header).collect());
    for piece in pieces {
        let crc = crc32c(&record[piece.start..piece.end]);
        put(record, piece.crc, &crc.to_le_bytes());
    }
    seal_header(&mut record[..header_len]);
}

#[test]
fn what_was_encrypted_comes_back_to_the_byte() {
    for (layers, sides) in [
        (1, &[][..]),
        (2, &[("mean-k", 40), ("codes", 5000)]),
        (83, &[("q", 1)]),
        (147, &[]),
    ] {
        let layout = layout(layers, sides);
        let plain = record(&layout);
        let stored = encrypted(&keys(1), &plain);
        assert_eq!(stored.len(), plain.len());
        assert_eq!(read(&keys(1), &stored, &layout).unwrap(), plain);
        let header = verify_stored(&stored, stored.len() as u64, &expect(&layout)).unwrap();
        assert_eq!(header.meta, meta(), "the header can be read");
        for layer in 0..layers {
            let range = layout.layer_data(layer);
            assert_ne!(stored[range.clone()], plain[range]);
        }
    }
}

#[test]
fn the_header_is_as_long_as_without_up_to_83_layers() {
    let lens = |layers| {
        (
            layout(layers, &[]).header_len(),
            layout(layers, &[]).record_lengths().len(),
        )
    };
    assert_eq!(
        (lens(83), lens(84), lens(146)),
        ((4096, 1), (8192, 1), (8192, 1))
    );
    let most = RecordLayout::new(&Geometry::new(vec![64], 4096, 1).unwrap());
    assert!(most.encrypted().is_err());
}

#[test]
fn a_compressed_record_is_encrypted_as_it_is_stored() {
    let geometry = Geometry::new(vec![6144, 2048], 4, 1).unwrap();
    let layout = RecordLayout::new(&geometry)
        .describing(16, DType::Bf16)
        .encrypted()
        .unwrap();
    let plain = record(&layout);
    let (mut coder, mut stored) = (Coder::new(&layout).unwrap(), plain.clone());
    let codec = Codec::of(&layout);
    let len = coder.encode(codec, &mut stored, true).unwrap();
    let Some(len) = len.filter(|&len| len < plain.len()) else {
        unreachable!("it gets shorter")
    };
    stored.truncate(len);
    let compressed = stored.clone();
    keys(1).encrypt(&mut stored).unwrap();
    assert!(stored_form(&stored, len as u64, &expect(&layout)).is_some());
    assert_eq!(
        keys(1).decrypt(&mut stored, len).unwrap(),
        Opened::Decrypted
    );
    assert_eq!(stored, compressed);
    let header = stored_form(&stored, len as u64, &expect(&layout)).unwrap();
    stored.resize(plain.len(), 0xee);
    assert_eq!(coder.decode(&header, &mut stored, len), (plain.len(), true));
    assert_eq!(stored, plain);
}

#[test]
fn without_the_key_it_is_a_wrong_key_and_stays_as_it_is() {
    for layers in [2, 100] {
        let layout = layout(layers, &[("mean-k", 40)]);
        let plain = record(&layout);
        let stored = encrypted(&keys(1), &plain);
        let mut bytes = stored.clone();
        assert_eq!(
            keys(2).decrypt(&mut bytes, stored.len()).unwrap(),
            Opened::Left
        );
        assert_eq!(bytes, stored);
        assert_eq!(check(&bytes, &layout), Err(MissReason::WrongKey));
        // A reader without a key has another layout, and still recognises such a record.
        let geometry = Geometry::new(vec![300, 84], layers, 1).unwrap();
        let keyless = RecordLayout::new(&geometry).describing(16, DType::Bf16);
        assert_eq!(check(&bytes, &keyless), Err(MissReason::WrongKey));
        let side = verify_side(
            &bytes,
            bytes.len() as u64,
            &expect(&layout),
            &layout.sides()[0],
        );
        assert_eq!(side.unwrap_err().reason, MissReason::WrongKey);
        let some = verify_layers(&bytes, bytes.len() as u64, &expect(&layout), 0..1);
        assert_eq!(some.unwrap_err().reason, MissReason::WrongKey);
        let mut plain_read = plain.clone();
        assert_eq!(
            keys(1).decrypt(&mut plain_read, plain.len()).unwrap(),
            Opened::Plain
        );
        assert_eq!(plain_read, plain);
        assert!(
            keys(1).encrypt(&mut bytes).is_err(),
            "it is encrypted already"
        );
    }
}

#[test]
fn keys_follow_one_another() {
    let layout = layout(2, &[]);
    let plain = record(&layout);
    let old = encrypted(&keys(1), &plain);
    let (one, two) = ("01".repeat(KEY), "02".repeat(KEY));
    let both = Keys::parse(&format!("{two} # new\n\n  # the one before\n{one}\n")).unwrap();
    assert_eq!(read(&both, &old, &layout).unwrap(), plain);
    assert_eq!(
        read(&keys(2), &encrypted(&both, &plain), &layout).unwrap(),
        plain
    );
    for wrong in [
        "",
        "# nothing",
        "01",
        &format!("{one}0"),
        &"zz".repeat(KEY),
        &format!("{one}\n").repeat(17),
    ] {
        let error = Keys::parse(wrong).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(
            wrong.len() < 8 || !error.to_string().contains(&wrong[..8]),
            "a key is not shown"
        );
    }
}

#[test]
fn no_two_records_have_the_same_key_stream_and_no_checksum_tells_the_content() {
    let layout = layout(2, &[("mean-k", 40)]);
    let plain = record(&layout);
    let (one, two) = (encrypted(&keys(1), &plain), encrypted(&keys(1), &plain));
    let data = layout.layer_data(0);
    assert_ne!(one[at::SALT..at::SALT + 16], two[at::SALT..at::SALT + 16]);
    assert_ne!(one[data.clone()], two[data.clone()]);
    assert_ne!(one[data.clone()], one[layout.layer_data(1)]);
    let header = RecordHeader::decode(&plain).unwrap();
    for crc in pieces(&header).map(|piece| piece.used_crc.to_le_bytes()) {
        assert!(one[..4096].windows(4).all(|bytes| bytes != crc));
    }
}

#[test]
fn a_side_shard_is_decrypted_without_the_rest() {
    let layout = layout(2, &[("mean-k", 40), ("codes", 5000)]);
    let plain = record(&layout);
    let stored = encrypted(&keys(1), &plain);
    let wanted = &layout.sides()[1];
    let data = layout.side_data(1).unwrap();
    let pages = data.start..data.end.next_multiple_of(4096);
    let mut parts = vec![0xcc; stored.len()];
    parts[..4096].copy_from_slice(&stored[..4096]);
    parts[pages.clone()].copy_from_slice(&stored[pages.clone()]);
    let one = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        keys(1).decrypt_side(&mut bytes, wanted)?;
        let side = verify_side(&bytes, stored.len() as u64, &expect(&layout), wanted)?;
        Ok::<_, MissReason>(side.to_vec())
    };
    assert_eq!(one(&parts).unwrap(), plain[data]);
    for at in [pages.start, pages.end - 1] {
        parts[at] ^= 1;
        assert_eq!(one(&parts), Err(MissReason::BadChecksum));
        parts[at] ^= 1;
    }
    parts[at::seals(2)] ^= 1;
    seal_header(&mut parts[..4096]);
    assert_eq!(one(&parts), Err(MissReason::BadChecksum));

    let mut alone = vec![0; layout.record_len()];
    alone[layout.side_alone(0).unwrap()].fill(4);
    let len = seal_side_alone(&layout, 0, &meta(), &mut alone).unwrap();
    alone.truncate(len);
    let mut stored = encrypted(&keys(1), &alone);
    assert_eq!(
        keys(1)
            .decrypt_side(&mut stored, &layout.sides()[0])
            .unwrap(),
        Opened::Decrypted
    );
    assert_eq!(stored, alone);
}

#[test]
fn every_changed_byte_is_refused_even_under_right_checksums() {
    let layout = layout(2, &[("mean-k", 40)]);
    let stored = encrypted(&keys(1), &record(&layout));
    let used = at::side_seal(2, 1);
    for at in (0..used)
        .chain((used..stored.len()).step_by(61))
        .chain([4092, 4093])
    {
        let mut bytes = stored.clone();
        bytes[at] ^= 0x10;
        assert!(read(&keys(1), &bytes, &layout).is_err(), "byte {at}");
        let is_checksum = |field: usize| (field..field + 4).contains(&at);
        if at < 8 || (at::MARK..at::RECORD_LEN).contains(&at) {
            continue; // it determines the rest: no checksum can be corrected
        }
        forge(&mut bytes);
        let passes = read(&keys(1), &bytes, &layout).is_ok();
        // The change of a checksum was corrected.
        let header = RecordHeader::decode(&stored).unwrap();
        let of_piece = pieces(&header).any(|piece| is_checksum(piece.crc));
        let restored = is_checksum(at::PREAMBLE_CRC) || is_checksum(4092) || of_piece;
        assert_eq!(passes, restored, "byte {at}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn cut_anywhere_it_is_a_miss_and_no_panic(cut in 0usize..20480, at in any::<prop::sample::Index>(), mask: u8) {
        let layout = layout(3, &[("mean-k", 5000)]);
        let stored = encrypted(&keys(1), &record(&layout));
        let mut bytes = stored[..cut.min(stored.len())].to_vec();
        if !bytes.is_empty() {
            let at = at.index(bytes.len());
            bytes[at] ^= mask;
        }
        let len = bytes.len();
        let opened = keys(1).decrypt(&mut bytes, len);
        if let Ok(header) = verify(&bytes, len as u64, &expect(&layout)) {
            prop_assert!(len >= layout.kv_len() && header.key.is_none());
            prop_assert_eq!(opened.unwrap(), Opened::Decrypted);
            prop_assert_eq!(&bytes[4096..layout.kv_len()], &record(&layout)[4096..layout.kv_len()]);
        }
    }
}
