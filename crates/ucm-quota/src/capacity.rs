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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_in_bytes_and_percent() {
        assert_eq!(Capacity::Percent(50.0).bytes(1000), 500);
        assert_eq!(Capacity::default_bytes(1000, 1000), 200);
        assert_eq!(Capacity::default_bytes(1000, 100), 80);
    }
}
