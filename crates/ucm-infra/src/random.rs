//! Random numbers that no other process has.

use std::hash::{BuildHasher, Hasher, RandomState};

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// Sixty-four random bits from the operating system, asked for each time. What a process keeps of
/// its own to draw from (as the standard library keeps the keys of its hashers) its forked children
/// have too: they would draw the same.
pub fn random_u64() -> u64 {
    let mut bytes = [0; 8];
    loop {
        match getrandom(&mut bytes, GetRandomFlags::empty()) {
            Ok(8) => return u64::from_ne_bytes(bytes),
            Ok(_) | Err(Errno::INTR) => {}
            // A system without the call. The process's number tells it from its siblings.
            Err(_) => {
                let mut hasher = RandomState::new().build_hasher();
                hasher.write_u32(std::process::id());
                return hasher.finish();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_number_comes_twice() {
        let numbers: std::collections::BTreeSet<u64> = (0..1000).map(|_| random_u64()).collect();
        assert_eq!(numbers.len(), 1000);
    }
}
