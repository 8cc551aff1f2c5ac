//! Bytes of elements sorted by their position, so that similar bytes of many numbers (their
//! exponents) are adjacent.
//!
//! Every element, read as a little-endian number, is first rotated left by one bit, so that the
//! sign goes to the lowest bit and the exponent of bfloat16 and of single precision fills the
//! highest byte alone. Plane 0 has the lowest bytes.

/// Sorts whole elements of `width` bytes (1, 2 or 4) into consecutive planes. Both slices have the
/// same length.
pub(super) fn split(width: usize, elements: &[u8], planes: &mut [u8]) {
    let count = elements.len() / width.max(1);
    match width {
        2 => {
            let (low, high) = planes.split_at_mut(count);
            for ((pair, low), high) in elements.chunks_exact(2).zip(low).zip(high) {
                let number = u16::from_le_bytes([pair[0], pair[1]]).rotate_left(1);
                [*low, *high] = number.to_le_bytes();
            }
        }
        4 => {
            let (low, high) = planes.split_at_mut(2 * count);
            let ((a, b), (c, d)) = (low.split_at_mut(count), high.split_at_mut(count));
            let quads = elements.chunks_exact(4).zip(a).zip(b).zip(c).zip(d);
            for ((((quad, a), b), c), d) in quads {
                let number =
                    u32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]]).rotate_left(1);
                [*a, *b, *c, *d] = number.to_le_bytes();
            }
        }
        _ => planes.copy_from_slice(elements),
    }
}

/// Restores elements from planes. Both slices have the same length.
pub(super) fn join(width: usize, planes: &[u8], elements: &mut [u8]) {
    let count = planes.len() / width.max(1);
    match width {
        2 => {
            let (low, high) = planes.split_at(count);
            for ((pair, low), high) in elements.chunks_exact_mut(2).zip(low).zip(high) {
                let number = u16::from_le_bytes([*low, *high]).rotate_right(1);
                pair.copy_from_slice(&number.to_le_bytes());
            }
        }
        4 => {
            let (low, high) = planes.split_at(2 * count);
            let ((a, b), (c, d)) = (low.split_at(count), high.split_at(count));
            let quads = elements.chunks_exact_mut(4).zip(a).zip(b).zip(c).zip(d);
            for ((((quad, a), b), c), d) in quads {
                let number = u32::from_le_bytes([*a, *b, *c, *d]).rotate_right(1);
                quad.copy_from_slice(&number.to_le_bytes());
            }
        }
        _ => elements.copy_from_slice(planes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponent_comes_to_lie_alone() {
        // bfloat16 of -1.5 and 3.0: 0xBFC0 and 0x4040; exponents 127 and 128.
        let mut planes = [0; 4];
        split(2, &[0xc0, 0xbf, 0x40, 0x40], &mut planes);
        assert_eq!(
            planes,
            [0x81, 0x80, 127, 128],
            "mantissa and sign, then exponents"
        );
        let mut planes = [0; 4];
        split(4, &(-1.5f32).to_le_bytes(), &mut planes);
        assert_eq!(planes[3], 127);
    }

    #[test]
    fn what_was_sorted_comes_back() {
        let elements: Vec<u8> = (0..240u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect();
        for width in [1, 2, 4] {
            let (mut planes, mut back) = (vec![0; elements.len()], vec![0; elements.len()]);
            split(width, &elements, &mut planes);
            join(width, &planes, &mut back);
            assert_eq!(back, elements, "{width}");
        }
    }
}
