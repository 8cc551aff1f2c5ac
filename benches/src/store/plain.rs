//! The loop: a plain program with plain system calls on the same number of threads, a file for each
//! record.

use std::path::{Path, PathBuf};
use std::sync::Barrier;

use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use ucm_core::BlockId;

use super::Result;
use super::contest::{Spent, Watch};
use super::rig::Stock;

fn path(dir: &Path, id: &BlockId) -> PathBuf {
    dir.join(format!("{:02x}", id.0[0])).join(id.to_string())
}

fn flags(flags: OFlags, direct: bool) -> OFlags {
    let direct = if direct {
        OFlags::DIRECT
    } else {
        OFlags::empty()
    };
    flags | OFlags::CLOEXEC | direct
}

fn read(path: &Path, direct: bool, into: &mut [u8]) -> Result<()> {
    let file = rustix::fs::open(path, flags(OFlags::RDONLY, direct), Mode::empty())?;
    let mut at = 0;
    while at < into.len() {
        match rustix::io::pread(&file, &mut into[at..], at as u64)? {
            0 => return Err(format!("{} is too short", path.display()).into()),
            count => at += count,
        }
    }
    Ok(())
}

/// Writes a file under a private name, closes it and renames it.
fn write(private: &Path, target: &Path, direct: bool, bytes: &[u8]) -> Result<()> {
    let flags = flags(OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, direct);
    let file = rustix::fs::open(private, flags, Mode::from_raw_mode(0o600))?;
    let mut at = 0;
    while at < bytes.len() {
        at += rustix::io::pwrite(&file, &bytes[at..], at as u64)?;
    }
    drop(file);
    Ok(rustix::fs::rename(private, target)?)
}

/// Copies each block from the caller's memory into a slot of its thread and writes the slot.
pub(super) fn dump(
    dir: &Path,
    ids: &[BlockId],
    stock: &mut Stock,
    direct: bool,
    threads: usize,
) -> Result<Spent> {
    for id in ids {
        std::fs::create_dir_all(dir.join(format!("{:02x}", id.0[0])))?;
    }
    let (memory, slots, header) = stock.parts();
    let jobs = ids.iter().zip(memory);
    share(
        jobs,
        slots.iter_mut().enumerate(),
        threads,
        |(id, memory), (thread, slot)| {
            slot.as_mut_slice()[header..].copy_from_slice(memory);
            let private = dir.join(format!("private-{thread}"));
            write(&private, &path(dir, id), direct, slot.as_slice())
        },
    )
}

/// Reads each file into a slot of its own, or into one slot of its thread and on to the caller's
/// memory.
pub(super) fn load(
    dir: &Path,
    ids: &[BlockId],
    stock: &mut Stock,
    direct: bool,
    threads: usize,
    to_memory: bool,
) -> Result<Spent> {
    let (memory, slots, header) = stock.parts();
    if to_memory {
        let jobs = ids.iter().zip(memory);
        share(jobs, slots.iter_mut(), threads, |(id, memory), slot| {
            read(&path(dir, id), direct, slot.as_mut_slice())?;
            memory.copy_from_slice(&slot.as_slice()[header..]);
            Ok(())
        })
    } else {
        let jobs = ids.iter().zip(slots);
        share(jobs, std::iter::repeat(()), threads, |(id, slot), ()| {
            read(&path(dir, id), direct, slot.as_mut_slice())
        })
    }
}

/// Runs all jobs on `threads` threads, including this one; each thread has its own state. The clock
/// starts when all threads are ready and stops when all are done.
fn share<J: Send, S: Send>(
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
                    .map_err(|_| "a thread of the loop panicked")??,
            );
        }
        // From the start of the first one.
        let spent = began.iter().map(Watch::stop).max_by_key(|spent| spent.wall);
        Ok(spent.unwrap_or_default())
    })
}
