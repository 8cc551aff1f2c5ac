//! A limit as a user writes it: bytes, or a share of something.

use std::num::NonZeroU64;

/// A limit as configured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Capacity {
    /// A number of bytes.
    Bytes(NonZeroU64),
    /// A share of the file system, in percent.
    Percent(f64),
}

impl Capacity {
    /// The limit in bytes on a file system of `total` bytes.
    pub fn bytes(self, total: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.get(),
            Self::Percent(percent) => (total as f64 * percent.clamp(0.0, 100.0) / 100.0) as u64,
        }
    }

    /// The default: 20 % of the file system, at most 80 % of what is free at the first start.
    pub fn default_bytes(total: u64, free: u64) -> u64 {
        (total / 5).min(free / 5 * 4)
    }
}

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

    #[test]
    fn limits_in_bytes_and_percent() {
        assert_eq!(Capacity::Percent(50.0).bytes(1000), 500);
        assert_eq!(Capacity::default_bytes(1000, 1000), 200);
        assert_eq!(Capacity::default_bytes(1000, 100), 80);
    }
}
