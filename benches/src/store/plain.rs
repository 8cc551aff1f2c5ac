//! The yardsticks: what a plain program does with plain system calls on the same number of threads.

use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use ucm_device::Slot;

use super::Result;
use super::contest::{Spent, Watch};
use super::memory::Stock;

/// Reads a whole file into the start of `into`.
pub(super) fn read(path: &Path, direct: bool, into: &mut [u8]) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, with(flags, direct), Mode::empty())?;
    let mut at = 0;
    while at < into.len() {
        match rustix::io::pread(&file, &mut into[at..], at as u64)? {
            0 => return Err(format!("{} is shorter than it was written", path.display()).into()),
            count => at += count,
        }
    }
    Ok(())
}

/// Writes a file under a private name, closes it and gives it its name.
pub(super) fn write(private: &Path, target: &Path, direct: bool, bytes: &[u8]) -> Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::open(private, with(flags, direct), Mode::from_raw_mode(0o600))?;
    let mut at = 0;
    while at < bytes.len() {
        at += rustix::io::pwrite(&file, &bytes[at..], at as u64)?;
    }
    drop(file);
    Ok(rustix::fs::rename(private, target)?)
}

fn with(flags: OFlags, direct: bool) -> OFlags {
    if direct {
        flags | OFlags::DIRECT
    } else {
        flags
    }
}

/// Does all jobs on `threads` threads, this one among them; each thread has its own state. The
/// clock starts when all threads are there and stops when all are done.
pub(super) fn share<J: Send, S: Send>(
    jobs: impl Iterator<Item = J> + Send,
    states: impl Iterator<Item = S>,
    threads: usize,
    work: impl Fn(J, &mut S) -> Result<()> + Sync,
) -> Result<Spent> {
    let mut states: Vec<S> = states.take(threads).collect();
    let (jobs, start) = (Mutex::new(jobs), Barrier::new(states.len()));
    let one = |mut state: S| -> Result<Watch> {
        start.wait();
        let began = Watch::start();
        loop {
            let Some(job) = jobs.lock().next() else {
                return Ok(began);
            };
            work(job, &mut state)?;
        }
    };
    std::thread::scope(|scope| {
        let own = states.pop().ok_or("no state for any thread")?;
        let others: Vec<_> = states
            .into_iter()
            .map(|state| scope.spawn(|| one(state)))
            .collect();
        let mut began = vec![one(own)?];
        for other in others {
            began.push(
                other
                    .join()
                    .map_err(|_| "a thread of the yardstick panicked")??,
            );
        }
        // Since the first one began.
        Ok(began
            .iter()
            .map(Watch::stop)
            .max_by_key(|spent| spent.wall)
            .unwrap_or_default())
    })
}

/// Reads files into slots, one each.
pub(super) fn read_to_slots(
    paths: &[PathBuf],
    slots: &mut [Slot],
    direct: bool,
    threads: usize,
) -> Result<Spent> {
    let jobs = paths.iter().zip(slots);
    share(jobs, std::iter::repeat(()), threads, |(path, slot), ()| {
        read(path, direct, slot.as_mut_slice())
    })
}

/// Reads files and copies their bytes behind the header to the caller's memory. Every thread has
/// one slot that it uses again and again, which is the best that such a loop can do.
pub(super) fn read_to_memory(
    paths: &[PathBuf],
    stock: &mut Stock,
    direct: bool,
    threads: usize,
) -> Result<Spent> {
    let slots = stock.slots();
    let header = slots
        .first()
        .map_or(0, |slot| slot.len() - stock.bytes() / stock.count());
    let jobs = paths.iter().zip(stock.caller());
    share(jobs, slots.into_iter(), threads, |(path, memory), slot| {
        read(path, direct, slot.as_mut_slice())?;
        memory.copy_from_slice(&slot.as_slice()[header..]);
        Ok(())
    })
}

/// Copies to and from the caller's memory: bytes per second of `threads` threads, in GB/s, the
/// fastest of the rounds.
pub(super) fn memcpy(stock: &mut Stock, threads: usize, rounds: usize) -> f64 {
    let bytes = stock.bytes();
    let mut slots = stock.slots();
    let mut once = || {
        let jobs = slots.iter_mut().zip(stock.caller());
        share(
            jobs,
            std::iter::repeat(()),
            threads,
            |(slot, memory), ()| {
                memory.copy_from_slice(&slot.as_slice()[..memory.len()]);
                Ok(())
            },
        )
    };
    let best = (0..=rounds)
        .filter_map(|_| Some(once().ok()?.wall))
        .min()
        .unwrap_or(Duration::MAX);
    bytes as f64 / best.as_secs_f64() / 1e9
}
