//! Random numbers that differ between processes.

use std::hash::{BuildHasher, Hasher, RandomState};

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// Sixty-four random bits, read from the operating system each time. State in the process (such as
/// the hasher keys of the standard library) is copied by a fork, so a parent and its child would
/// draw the same numbers.
pub fn random_u64() -> u64 {
    let mut bytes = [0; 8];
    loop {
        match getrandom(&mut bytes, GetRandomFlags::empty()) {
            Ok(8) => return u64::from_ne_bytes(bytes),
            Ok(_) | Err(Errno::INTR) => {}
            // A system without the call. The process id distinguishes forked processes.
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
