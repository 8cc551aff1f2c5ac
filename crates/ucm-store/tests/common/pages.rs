//! Damage to records in memory: a test writes into the mapping of its own process, by way of
//! /proc/self/mem.

use std::fs::File;
use std::os::unix::fs::FileExt;

use ucm_core::BlockId;
use ucm_record::MAGIC;

/// Where the page begins that holds the header of a record, in the one writable region of this
/// test.
fn find(id: BlockId, region: u64) -> Option<u64> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let name = format!("/memfd:ucm-region-{region:016x}");
    let memory = File::open("/proc/self/mem").unwrap();
    for line in maps
        .lines()
        .filter(|line| line.contains(&name) && line.contains(" rw-s "))
    {
        let (from, to) = line.split_whitespace().next()?.split_once('-')?;
        let parse = |hex| u64::from_str_radix(hex, 16).unwrap();
        let mut head = [0; 24];
        for page in (parse(from)..parse(to)).step_by(4096) {
            memory.read_exact_at(&mut head, page).unwrap();
            if head[..4] == MAGIC && head[8..] == id.0 {
                return Some(page);
            }
        }
    }
    None
}

/// Flips a bit of a record that this process keeps in memory; false if it is not there.
pub(crate) fn flip(id: BlockId, region: u64, at: usize) -> bool {
    let Some(start) = find(id, region) else {
        return false;
    };
    let memory = File::options()
        .read(true)
        .write(true)
        .open("/proc/self/mem")
        .unwrap();
    let (address, mut byte) = (start + at as u64, [0]);
    memory.read_exact_at(&mut byte, address).unwrap();
    byte[0] ^= 1 << (at % 8);
    memory.write_all_at(&byte, address).unwrap();
    true
}
