//! What an open engine costs that has nothing to do.

use std::time::Duration;

use super::contest::cpu;
use super::files::Place;
use super::lookup::IO_THREADS;
use super::report::Idle;
use super::rig::{Rig, Shape};
use super::{Options, Result};

/// Staging memory of the configuration's default.
const STAGING: usize = 256 << 20;

/// Opens an engine as in production, leaves it alone and looks what the process used meanwhile.
pub(super) fn measure(place: &Place, options: &Options) -> Result<Idle> {
    let (threads, descriptors) = (entries("task")?, entries("fd")?);
    let memory = status_kib("RssAnon")?;
    let shape = Shape::of(1 << 20)?;
    let slots = STAGING / shape.layout.record_len();
    let rig = Rig::open(&place.make("idle")?, shape, IO_THREADS, false, slots)?;
    std::thread::sleep(Duration::from_millis(50)); // the first count of the root
    let before = cpu();
    std::thread::sleep(options.idle);
    let used = cpu().saturating_sub(before);
    let idle = Idle {
        cpu_percent: used.as_secs_f64() / options.idle.as_secs_f64() * 100.0,
        seconds: options.idle.as_secs_f64(),
        threads: entries("task")? - threads,
        descriptors: entries("fd")?.saturating_sub(descriptors),
        memory_bytes: status_kib("RssAnon")?.saturating_sub(memory) * 1024,
    };
    rig.engine.close();
    Ok(idle)
}

/// Number of entries of a directory below `/proc/self`.
fn entries(name: &str) -> Result<usize> {
    Ok(std::fs::read_dir(format!("/proc/self/{name}"))?.count())
}

/// A line of `/proc/self/status`, in KiB.
pub(super) fn status_kib(name: &str) -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok());
    number.ok_or_else(|| format!("/proc/self/status has no {name}").into())
}
