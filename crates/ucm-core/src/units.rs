//! Sizes as people read them, for the log and for errors.

/// A number of bytes as a user reads it: `900 TiB`, `12.6 GiB`.
pub fn in_units(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let power = (bytes.max(1).ilog2() / 10).min(5);
    let value = bytes as f64 / (1u64 << (10 * power)) as f64;
    let text = format!("{value:.1}");
    let text = text.strip_suffix(".0").unwrap_or(&text);
    format!("{text} {}", UNITS[power as usize])
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
