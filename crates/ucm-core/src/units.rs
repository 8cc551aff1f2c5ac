//! Sizes and bytes as text.

/// A number of bytes as a user reads it: `900 TiB`, `12.6 GiB`.
pub fn in_units(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let power = (bytes.max(1).ilog2() / 10).min(5);
    let value = bytes as f64 / (1u64 << (10 * power)) as f64;
    let text = format!("{value:.1}");
    let text = text.strip_suffix(".0").unwrap_or(&text);
    format!("{text} {}", UNITS[power as usize])
}

/// Bytes as lower-case hex digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The `N` bytes of as many pairs of hex digits; `None` for any other text.
pub fn from_hex<const N: usize>(digits: &str) -> Option<[u8; N]> {
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    if pairs.len() != N || !rest.is_empty() {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(pairs) {
        let [high, low] = pair.map(|digit| char::from(digit).to_digit(16));
        *byte = (high? << 4 | low?) as u8;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_shown_with_a_unit() {
        for (bytes, shown) in [
            (0, "0 bytes"),
            (512, "512 bytes"),
            (900 << 40, "900 TiB"),
            (252 << 30, "252 GiB"),
            (13_529_146_982, "12.6 GiB"),
            (u64::MAX, "16384 PiB"),
        ] {
            assert_eq!(in_units(bytes), shown);
        }
    }
}
