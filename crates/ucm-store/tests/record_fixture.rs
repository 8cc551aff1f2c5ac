//! The frozen fixtures of record version 1: what is on disk today stays readable, or cleanly
//! refused, for ever.
//!
//! The same files are read by `tests/unit/test_format.py`, which shares no code with this. They
//! were written once by `cargo test -p ucm-store --test all -- --ignored record_fixture`, which
//! never replaces a file that is there.

#![allow(
    clippy::unwrap_used,
    reason = "a test file: the helpers beside the tests fail like the tests"
)]

use std::io::Write;
use std::path::PathBuf;

use ucm_core::{
    BlockHasher, BlockId, DType, ExtraKey, Geometry, HashMethod, IdMask, Identity, MissReason,
    Part, crc32c,
};
use ucm_record::{
    Expect, Keys, MAGIC, MARK, Opened, PREAMBLE_LEN, RecordHeader, RecordLayout, RecordMeta,
    SideSpec, seal_side_alone, verify, verify_side, verify_side_bytes, verify_stored,
};

const IDENTITY: &str = concat!(
    r#"{"format_version":1,"architecture":"LlamaForCausalLM","world_size":2,"dtype":"bfloat16","#,
    r#""weights":"sha256:00","model_config":{"head_dim":64,"name":"caf\u00e9","rope":{"base":1e-05,"type":"x y"}},"#,
    r#""position":"rope","kv_dtype":"bfloat16","attention_backend":"CPU_ATTN","kv_packing":"avx2","#,
    r#""kv_layout":"HND","kv_groups":[{"layers":2,"shape":[2,16,64]}],"block_tokens":16,"tensor_parallel":2,"#,
    r#""pipeline_parallel":1,"decode_context_parallel":1}"#
);
const PART: Part = Part {
    group: 0,
    pipeline_rank: 0,
    tensor_rank: 1,
};
const SIDE: &str = "mean-k";

fn path(name: &str) -> PathBuf {
    [
        env!("CARGO_MANIFEST_DIR"),
        "../../tests/fixtures/record-v1",
        name,
    ]
    .iter()
    .collect()
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(path(name)).unwrap()
}

fn layout() -> RecordLayout {
    let geometry = Geometry::new(vec![100, 60], 2, 2).unwrap();
    RecordLayout::new(&geometry).describing(16, DType::Bf16)
}

fn sided_layout() -> RecordLayout {
    let side = SideSpec {
        name: SIDE.to_owned(),
        version: 3,
        len: 50,
    };
    layout().with_sides(vec![side]).unwrap()
}

/// The second of two blocks of a salted prompt, on tensor rank 1.
fn meta() -> RecordMeta {
    let identity = Identity::parse(IDENTITY).unwrap();
    let hasher = BlockHasher::new(identity.digest(), 16, HashMethod::Sha256).unwrap();
    let tokens: Vec<u32> = (0..40u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let salt = ExtraKey {
        block: 0,
        tag: 3,
        bytes: b"salt",
    };
    let keys = hasher.hash_tail(&tokens, None, 0, &[salt]).unwrap();
    RecordMeta {
        id: keys[1].xor(PART.mask()),
        namespace: *identity.digest(),
        part: PART,
        parent: keys[0].xor(PART.mask()),
        ordinal: 1,
        tokens: 16,
        time_ns: 1_700_000_000_123_456_789,
        writer: 0x1122_3344_5566_7788,
        tenant: [0; 32],
    }
}

/// Byte `j` of layer (or side shard, counted on) `i`.
fn content(i: usize, j: usize) -> u8 {
    (i * 131 + j * 7 + 3) as u8
}

fn sealed(layout: &RecordLayout) -> Vec<u8> {
    let mut record = vec![0; layout.record_len()];
    let data = (0..layout.layers()).map(|layer| layout.layer_data(layer));
    let sides = (0..layout.sides().len()).filter_map(|index| layout.side_data(index));
    for (i, range) in data.chain(sides).enumerate() {
        for (j, byte) in record[range].iter_mut().enumerate() {
            *byte = content(i, j);
        }
    }
    layout.seal(&meta(), &mut record).unwrap();
    record
}

/// The record in which the side shard lies alone.
fn side_alone() -> Vec<u8> {
    let layout = sided_layout();
    let mut record = vec![0; layout.record_len()];
    for (j, byte) in record[layout.side_alone(0).unwrap()].iter_mut().enumerate() {
        *byte = content(2, j);
    }
    let len = seal_side_alone(&layout, 0, &side_meta(), &mut record).unwrap();
    record.truncate(len);
    record
}

fn side_meta() -> RecordMeta {
    RecordMeta {
        id: meta().id.xor(IdMask::of_side(SIDE, 3)),
        ..meta()
    }
}

/// A record of version 2: only its preamble follows a form that is known.
fn newer() -> Vec<u8> {
    let mut record = vec![0xee; 4096];
    record[..4].copy_from_slice(&MAGIC);
    record[4..8].copy_from_slice(&2u32.to_le_bytes());
    record[8..24].copy_from_slice(&meta().id.0);
    record[36..40].copy_from_slice(&MARK);
    let crc = crc32c(&record[..PREAMBLE_LEN - 4]);
    record[PREAMBLE_LEN - 4..PREAMBLE_LEN].copy_from_slice(&crc.to_le_bytes());
    record
}

/// A block file of the seed: its 64 bytes, K and V of two layers behind them.
fn seed() -> Vec<u8> {
    let mut file = vec![0; PREAMBLE_LEN];
    file[..4].copy_from_slice(&MAGIC);
    file[4..8].copy_from_slice(&1u32.to_le_bytes());
    file[8..24].copy_from_slice(&meta().id.0);
    for (offset, number) in [(24, 2u32), (28, 16), (32, 2)] {
        file[offset..offset + 4].copy_from_slice(&number.to_le_bytes());
    }
    file.extend((0..320).map(|j| content(0, j)));
    file
}

fn files() -> [(&'static str, Vec<u8>); 5] {
    [
        ("plain.bin", sealed(&layout())),
        ("sided.bin", sealed(&sided_layout())),
        ("side-alone.bin", side_alone()),
        ("newer.bin", newer()),
        ("seed.bin", seed()),
    ]
}

fn check(bytes: &[u8]) -> Result<RecordHeader, MissReason> {
    let meta = meta();
    let layout = layout();
    let expect = Expect {
        id: meta.id,
        namespace: meta.namespace,
        part: meta.part,
        layout: &layout,
    };
    Ok(verify(bytes, bytes.len() as u64, &expect)?)
}

#[test]
fn plain_and_sided_are_hits_byte_for_byte() {
    for name in ["plain.bin", "sided.bin"] {
        let bytes = read(name);
        let header = check(&bytes).unwrap();
        assert_eq!(header.meta, meta(), "{name}");
        for layer in 0..2 {
            let data = &bytes[layout().layer_data(layer)];
            assert!(
                data.iter()
                    .enumerate()
                    .all(|(j, &byte)| byte == content(layer as usize, j)),
                "{name}"
            );
        }
    }
    let bytes = read("sided.bin");
    let header = check(&bytes).unwrap();
    let side = header.side(SIDE).unwrap();
    let data = verify_side_bytes(side, &bytes[side.offset as usize..]).unwrap();
    assert_eq!((side.version, data.len()), (3, 50));
    assert!(
        data.iter()
            .enumerate()
            .all(|(j, &byte)| byte == content(2, j))
    );
}

#[test]
fn a_side_shard_that_lies_alone_is_a_hit_byte_for_byte() {
    let (bytes, layout, meta) = (read("side-alone.bin"), sided_layout(), side_meta());
    let expect = Expect {
        id: meta.id,
        namespace: meta.namespace,
        part: meta.part,
        layout: &layout,
    };
    let len = bytes.len() as u64;
    assert_eq!(verify_stored(&bytes, len, &expect).unwrap().meta, meta);
    let data = verify_side(&bytes, len, &expect, &layout.sides()[0]).unwrap();
    assert!(
        data.iter()
            .enumerate()
            .all(|(j, &byte)| byte == content(2, j))
    );
    assert_eq!(
        check(&bytes),
        Err(MissReason::ForeignId),
        "it has a name of its own"
    );
}

/// Made by `tests/unit/test_encrypted_format.py` by the words of the format's page, with another
/// library.
#[test]
fn an_encrypted_record_comes_back_byte_for_byte() {
    let keys = |first: u8| {
        let digits: String = (first..first + 32)
            .map(|byte| format!("{byte:02x}"))
            .collect();
        Keys::parse(&digits).unwrap()
    };
    let (stored, plain) = (read("encrypted.bin"), read("sided.bin"));
    let len = stored.len();
    assert_eq!(check(&stored), Err(MissReason::WrongKey));
    let mut bytes = stored.clone();
    assert_eq!(keys(1).decrypt(&mut bytes, len).unwrap(), Opened::Left);
    assert_eq!(check(&bytes), Err(MissReason::WrongKey));
    assert_eq!(keys(0).decrypt(&mut bytes, len).unwrap(), Opened::Decrypted);
    assert_eq!(bytes, plain);
    let mut one = stored;
    let layout = sided_layout();
    let wanted = &layout.sides()[0];
    assert_eq!(
        keys(0).decrypt_side(&mut one, wanted).unwrap(),
        Opened::Decrypted
    );
    assert_eq!(one[8192..], plain[8192..]);
}

#[test]
fn newer_and_seed_are_misses_that_say_so() {
    assert_eq!(check(&read("newer.bin")), Err(MissReason::NewerVersion));
    assert_eq!(check(&read("seed.bin")), Err(MissReason::SeedForm));
}

#[test]
fn this_version_still_writes_the_frozen_bytes() {
    for (name, bytes) in files() {
        assert_eq!(read(name), bytes, "{name}");
    }
    assert_eq!(
        meta().id,
        "222e7f2cb188546f7bd0db51838996eb"
            .parse::<BlockId>()
            .unwrap()
    );
}

#[test]
#[ignore = "writes the fixtures that are missing; only for a new version of the record"]
fn write_missing_fixtures() {
    for (name, bytes) in files() {
        match std::fs::File::create_new(path(name)) {
            Ok(mut file) => file.write_all(&bytes).unwrap(),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::AlreadyExists, "{name}"),
        }
    }
}
