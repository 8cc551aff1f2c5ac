//! Encodes and decodes one layer: byte planes, each compressed or, if that gains nothing, raw.
//!
//! The stored layer begins with four bytes for each plane, the lowest first: its stored length,
//! with the highest bit set if it is raw. The planes follow in order. Lengths that are read are not
//! trusted: the decoder never writes beyond the layer.

use ucm_core::Result;

use super::packer::Packer;
use super::planes::{join, split};
use crate::codec::Codec;

/// Most bytes of an element.
const MAX_WIDTH: usize = 4;
/// Flag in a plane's length: it is raw.
const AS_IS: u32 = 1 << 31;
/// A plane must lose at least this share to be worth decoding.
const LEAST_GAIN: usize = 32;
/// After this number of consecutive incompressible planes of one position ...
const HOPELESS: u32 = 4;
/// ... this number is stored without an attempt.
const SKIPPED: u32 = 60;

/// State of one thread, for one layer at a time.
pub(crate) struct LayerCoder {
    planes: Vec<u8>,
    packer: Packer,
    hopes: [Hope; MAX_WIDTH],
}

/// Recent success of compression for the planes of one position.
#[derive(Clone, Copy, Default)]
struct Hope {
    failed: u32,
    skip: u32,
}

impl Hope {
    fn worth_trying(&mut self) -> bool {
        if self.skip == 0 {
            return true;
        }
        self.skip -= 1;
        false
    }

    fn tried(&mut self, shrank: bool) {
        self.failed = if shrank { 0 } else { self.failed + 1 };
        if self.failed >= HOPELESS {
            self.skip = SKIPPED;
        }
    }
}

impl LayerCoder {
    /// Allocates memory for layers of this length in bytes. `Internal` without memory,
    /// `Unsupported` in a build without codecs.
    pub(crate) fn new(layer_len: usize) -> Result<Self> {
        Ok(Self {
            planes: vec![0; layer_len],
            packer: Packer::new()?,
            hopes: [Hope::default(); MAX_WIDTH],
        })
    }

    /// Writes the stored form of a layer to the start of `out`. Returns its length, or `None` if it
    /// does not fit.
    pub(super) fn encode(&mut self, codec: Codec, layer: &[u8], out: &mut [u8]) -> Option<usize> {
        let width = codec.width();
        if width == 0 {
            return None;
        }
        split(width, layer, self.planes.get_mut(..layer.len())?);
        let count = layer.len() / width;
        let mut end = 4 * width;
        for (place, plane) in self.planes[..layer.len()]
            .chunks_exact(count.max(1))
            .enumerate()
        {
            let hope = &mut self.hopes[place];
            let room = out.get_mut(end..)?;
            let most = room.len().min(count - count / LEAST_GAIN);
            let packed = if hope.worth_trying() {
                let packed = self.packer.pack(plane, &mut room[..most]);
                hope.tried(packed.is_some());
                packed
            } else {
                None
            };
            let (len, mark) = match packed {
                Some(len) => (len, 0),
                None => {
                    room.get_mut(..count)?.copy_from_slice(plane);
                    (count, AS_IS)
                }
            };
            let word = u32::try_from(len).ok()? | mark;
            out[4 * place..4 * place + 4].copy_from_slice(&word.to_le_bytes());
            end += len;
        }
        Some(end)
    }

    /// Decodes a layer from its stored form. Returns false, with undefined bytes in `layer`, if the
    /// form is invalid.
    pub(crate) fn decode(&mut self, codec: Codec, stored: &[u8], layer: &mut [u8]) -> bool {
        let width = codec.width();
        if width == 0 {
            return false;
        }
        let count = layer.len() / width;
        let (Some(planes), Some((heads, mut rest))) = (
            self.planes.get_mut(..layer.len()),
            stored.split_at_checked(4 * width),
        ) else {
            return false;
        };
        for (head, plane) in heads
            .chunks_exact(4)
            .zip(planes.chunks_exact_mut(count.max(1)))
        {
            let word = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
            let Some((packed, more)) = rest.split_at_checked((word & !AS_IS) as usize) else {
                return false;
            };
            rest = more;
            let whole = if word & AS_IS == 0 {
                self.packer.unpack(packed, plane)
            } else {
                packed.len() == count && {
                    plane.copy_from_slice(packed);
                    true
                }
            };
            if !whole {
                return false;
            }
        }
        join(width, planes, layer);
        rest.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// Numbers like those of a model: bytes of bfloat16, small exponents, random mantissas.
    fn numbers(count: usize) -> Vec<u8> {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let bytes = (0..count).flat_map(|_| {
            let random = next();
            let exponent = 127 - (random >> 32).trailing_ones() as u16;
            ((random as u16 & 0x807f) | exponent << 7).to_le_bytes()
        });
        bytes.collect()
    }

    fn coder(len: usize) -> LayerCoder {
        LayerCoder::new(len).unwrap()
    }

    fn zstd(width: usize) -> Codec {
        Codec::planes(width).unwrap()
    }

    fn any_codec() -> impl Strategy<Value = Codec> {
        (0usize..3).prop_map(|at| zstd([1, 2, 4][at]))
    }

    #[test]
    fn the_numbers_of_a_model_shrink_and_come_back() {
        let layer = numbers(8192);
        let mut coder = coder(layer.len());
        let mut out = vec![0; layer.len()];
        let len = coder.encode(zstd(2), &layer, &mut out).unwrap();
        assert!(len * 10 < layer.len() * 8, "{len} of {}", layer.len());
        let mut back = vec![0; layer.len()];
        assert!(coder.decode(zstd(2), &out[..len], &mut back));
        assert_eq!(back, layer);
        assert!(!coder.decode(Codec::AS_IS, &out[..len], &mut back));
    }

    #[test]
    fn what_does_not_shrink_is_stored_as_it_is_and_not_tried_for_ever() {
        let noise: Vec<u8> = (0..4096u64)
            .flat_map(|i| {
                i.wrapping_mul(0x9e37_79b9_7f4a_7c15)
                    .wrapping_mul(i | 1)
                    .to_be_bytes()[..2]
                    .to_vec()
            })
            .collect();
        let mut coder = coder(noise.len());
        let mut out = vec![0; noise.len() + 16];
        for _ in 0..2 * SKIPPED {
            let len = coder.encode(zstd(1), &noise, &mut out).unwrap();
            assert_eq!(len, noise.len() + 4);
            let mut back = vec![0; noise.len()];
            assert!(coder.decode(zstd(1), &out[..len], &mut back));
            assert_eq!(back, noise);
        }
        let zeros = vec![0; noise.len()];
        let shrank = |coder: &mut LayerCoder, out: &mut Vec<u8>| {
            coder.encode(zstd(1), &zeros, out).unwrap() < 100
        };
        assert!(
            (0..=SKIPPED).any(|_| shrank(&mut coder, &mut out)),
            "it is tried again"
        );
        assert!(shrank(&mut coder, &mut out));
    }

    #[test]
    fn without_room_there_is_no_stored_form() {
        let layer = numbers(2048);
        let mut coder = coder(layer.len());
        let mut out = vec![0; layer.len()];
        let len = coder.encode(zstd(2), &layer, &mut out).unwrap();
        for room in [0, 3, 8, len / 2, len - 1] {
            assert_eq!(
                coder.encode(zstd(2), &layer, &mut out[..room]),
                None,
                "{room}"
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_layer_comes_back(quads in vec(any::<[u8; 4]>(), 1..2000), codec in any_codec()) {
            let layer = quads.concat();
            let mut coder = coder(layer.len());
            let mut out = vec![0; layer.len() + 16];
            let len = coder.encode(codec, &layer, &mut out).unwrap();
            let mut back = vec![0xee; layer.len()];
            prop_assert!(coder.decode(codec, &out[..len], &mut back));
            prop_assert_eq!(back, layer);
        }

        /// Changed bytes decode to some bytes or fail: never beyond the layer, never with a panic.
        #[test]
        fn changed_bytes_are_no_danger(
            changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..40),
            cut in any::<prop::sample::Index>(),
            cuts in any::<bool>(),
            codec in any_codec(),
        ) {
            let layer = numbers(1024);
            let mut coder = coder(layer.len());
            let mut out = vec![0; layer.len() + 16];
            let len = coder.encode(codec, &layer, &mut out).unwrap();
            out.truncate(len);
            for (at, byte) in changes {
                out[at.index(len)] = byte;
            }
            if cuts {
                out.truncate(cut.index(len));
            }
            let mut back = vec![0; layer.len()];
            coder.decode(codec, &out, &mut back);
            // The coder still works.
            let mut again = vec![0; layer.len() + 16];
            let len = coder.encode(codec, &layer, &mut again).unwrap();
            prop_assert!(coder.decode(codec, &again[..len], &mut back));
            prop_assert_eq!(back, layer);
        }

        #[test]
        fn anything_at_all_is_no_danger(stored in vec(any::<u8>(), 0..300), codec in any_codec()) {
            let mut back = vec![0; 1024];
            coder(1024).decode(codec, &stored, &mut back);
        }
    }
}
