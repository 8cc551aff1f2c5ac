//! Known answers, computed with Python (hashlib; the blake3 package), and results that must not
//! depend on how the tokens are split over calls.

use super::*;

const IDENTITY: &[u8] = b"model:2:bfloat16:0";

struct Known {
    method: HashMethod,
    seed: &'static str,
    ones: [&'static str; 3],
    sixteens: [&'static str; 2],
    framed: [&'static str; 2],
}

const KNOWN: [Known; 3] = [
    Known {
        method: HashMethod::Sha256,
        seed: "dffaea45863aef920aa2b79e1f5b0e96",
        ones: [
            "b67cef95ce01a21e7909063d2634d4af",
            "5e015bb66771fedecf25839fb1cc9ac7",
            "11ee9a5c9c81a59c125bbf9a864c5740",
        ],
        sixteens: [
            "736641dbb5422bd38f6df6735d506ed2",
            "cc45e8be8ff873eaac1f76f371cc60da",
        ],
        framed: [
            "7d3d931fae6f888ef814d27392fd96b0",
            "fc6162193a5e09fff0f352d6859f50c6",
        ],
    },
    Known {
        method: HashMethod::Blake3,
        seed: "c4b064e4cecc0bb645da2edcd74109cc",
        ones: [
            "b625417346067a2af7ae5760a268c3d7",
            "a73cba79e087765a7bc19dded2513387",
            "bb41857a2585ed6c70af0a0aaccc83cd",
        ],
        sixteens: [
            "fd2ca73edd777f3a128fc057017083b5",
            "3c7887ab55830af7f88ecbd07de251f3",
        ],
        framed: [
            "952abff4cc56f773c188cef4b7b4ff47",
            "e14ea9e774f5ed5c65065ed1257aaed0",
        ],
    },
    Known {
        method: HashMethod::Md5,
        seed: "f7370f03cd674ce4190eb2e2e5bd872a",
        ones: [
            "0b6bc116467491a8b1601d026b2d0e86",
            "94614858ec8867e0b2957f0ceb02fc96",
            "ccc17d90e7bab2d393c050c7fbfa8714",
        ],
        sixteens: [
            "b13acf08ddae80016cb748a7a1c579be",
            "0ebd97c0034c18d52f59a4d148561192",
        ],
        framed: [
            "d3fb4095b31bcfa92733a6077f6c8b4a",
            "0ddc5d9b37da3e31a8668c29a06c7738",
        ],
    },
];

fn tokens(n: u32) -> Vec<u32> {
    (0..n).map(|i| i.wrapping_mul(2_654_435_761)).collect()
}

fn hasher(block_size: usize, method: HashMethod) -> BlockHasher {
    BlockHasher::new(IDENTITY, block_size, method).unwrap()
}

fn key(block: usize, tag: u8, bytes: &[u8]) -> ExtraKey<'_> {
    ExtraKey { block, tag, bytes }
}

#[test]
fn known_answers() {
    let extra = [key(1, 2, b""), key(0, 3, b"salt"), key(0, 1, b"adapter")];
    for known in KNOWN {
        let hex = |keys: Vec<BlockId>| keys.iter().map(BlockId::to_string).collect::<Vec<_>>();
        let ones = hasher(1, known.method);
        assert_eq!(ones.seed().to_hex(), known.seed);
        assert_eq!(
            hex(ones.hash_tail(&tokens(3), None, 0, &[]).unwrap()),
            known.ones
        );
        let sixteens = hasher(16, known.method);
        assert_eq!(
            hex(sixteens.hash_tail(&tokens(40), None, 0, &[]).unwrap()),
            known.sixteens
        );
        assert_eq!(
            hex(sixteens.hash_tail(&tokens(40), None, 0, &extra).unwrap()),
            known.framed
        );
    }
}

/// The hasher writes the padding of messages without frames itself, so every length around a
/// 64-byte boundary is compared with the library's own padding.
#[test]
fn every_block_size_agrees_with_the_library() {
    for method in HashMethod::ALL {
        for block_size in 1..=80 {
            let tokens = tokens(2 * block_size);
            let hasher = hasher(block_size as usize, method);
            let keys = hasher.hash_tail(&tokens, None, 0, &[]).unwrap();
            let mut parent = hasher.seed();
            for (key, block) in keys.iter().zip(tokens.chunks(block_size as usize)) {
                let mut text = parent.0.to_vec();
                text.extend(block.iter().flat_map(|token| token.to_le_bytes()));
                parent = method.digest(&text);
                assert_eq!(*key, parent, "{method:?} {block_size}");
            }
            assert_eq!(keys.len(), 2);
        }
    }
}

#[test]
fn growing_a_prompt_gives_the_keys_of_the_whole() {
    let tokens = tokens(100);
    let extra = [key(0, 3, b"salt"), key(4, 2, b"image"), key(12, 2, b"tail")];
    for method in HashMethod::ALL {
        let hasher = hasher(8, method);
        let whole = hasher.hash_tail(&tokens, None, 0, &extra).unwrap();
        assert_eq!(whole.len(), 12);
        for start in 1..=12 {
            let parent = Some(whole[start - 1]);
            assert_eq!(
                hasher
                    .hash_tail(&tokens[start * 8..], parent, start, &extra)
                    .unwrap(),
                whole[start..]
            );
        }
    }
}

#[test]
fn whatever_shapes_the_bytes_changes_every_key_from_there_on() {
    let base = tokens(64);
    for method in HashMethod::ALL {
        let hasher = hasher(16, method);
        let plain = hasher.hash_tail(&base, None, 0, &[]).unwrap();
        let differs_from = |keys: Vec<BlockId>, from: usize| {
            for (i, (a, b)) in plain.iter().zip(&keys).enumerate() {
                assert_eq!(a == b, i < from, "{method:?}: block {i}");
            }
        };
        let mut other = base.clone();
        other[40] ^= 1;
        differs_from(hasher.hash_tail(&other, None, 0, &[]).unwrap(), 2);
        differs_from(
            hasher.hash_tail(&base, None, 0, &[key(1, 1, b"")]).unwrap(),
            1,
        );
        let stranger = BlockHasher::new(b"another identity", 16, method).unwrap();
        differs_from(stranger.hash_tail(&base, None, 0, &[]).unwrap(), 0);
        // Frames cannot be re-cut into other frames with the same bytes.
        let cuts: [&[ExtraKey<'_>]; 4] = [
            &[key(0, 1, b"ab")],
            &[key(0, 1, b"a"), key(0, 1, b"b")],
            &[key(0, 2, b"ab")],
            &[key(0, 1, b"a\x01\x01\0\0\0b")],
        ];
        let mut firsts: Vec<_> = cuts
            .iter()
            .map(|extra| hasher.hash_tail(&base, None, 0, extra).unwrap()[0])
            .collect();
        firsts.sort_unstable();
        firsts.dedup();
        assert_eq!(firsts.len(), cuts.len());
    }
}

#[test]
fn wrong_arguments_are_named() {
    let says = |result: Result<Vec<BlockId>>, why: &str| {
        let error = result.unwrap_err();
        assert!(error.to_string().contains(why), "{error} should say: {why}");
    };
    for size in [0, limits::MAX_BLOCK_TOKENS + 1] {
        assert!(BlockHasher::new(b"", size, HashMethod::Sha256).is_err());
    }
    assert!(
        BlockHasher::new(
            &vec![0; limits::MAX_IDENTITY_BYTES + 1],
            16,
            HashMethod::Sha256
        )
        .is_err()
    );
    assert_eq!(HashMethod::of_name("sha1"), None);
    let hasher = hasher(16, HashMethod::default());
    let tokens = tokens(40);
    let parent = Some(BlockId::default());
    says(hasher.hash_tail(&tokens, None, 1, &[]), "is missing");
    says(hasher.hash_tail(&tokens, parent, 0, &[]), "no parent");
    let long = vec![0; limits::MAX_EXTRA_KEY_BYTES + 1];
    says(
        hasher.hash_tail(&tokens, None, 0, &[key(0, 1, &long)]),
        "64 KiB",
    );
    assert_eq!(hasher.hash_tail(&tokens[32..], parent, 2, &[]).unwrap(), []);
    assert_eq!(hasher.hash_tail(&[], None, 0, &[]).unwrap(), []);
}
