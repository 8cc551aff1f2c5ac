//! The same sizes and numbers of threads by fio, where it is installed: what one large file gives,
//! without names.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::files::Place;
use super::report::{Direction, Fio};
use super::{Options, Result};

/// Runs of which the fastest counts.
const RUNS: usize = 2;
/// Times each run goes over the file: fio counts in milliseconds.
const LOOPS: usize = 16;
/// Where fio's buffers begin: on a huge page, as slots do.
const ALIGN: usize = 2 << 20;
/// Makes the C library ask for huge pages. fio's memory is as malloc gives it, 16 bytes behind the
/// start of a page, which a copy from the page cache takes for five times as long on some
/// processors; and a direct operation of a MiB on pages of 4 KiB has more pieces than a virtual
/// disk takes at once.
const HUGE_PAGES: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");

/// The version of the fio that is installed, if there is one.
pub(super) fn version() -> Option<String> {
    let output = Command::new("fio")
        .arg("--version")
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn command(file: &Path, kind: &str) -> Command {
    let mut command = Command::new("fio");
    command
        .args([
            "--name=ucm",
            "--thread",
            "--group_reporting",
            "--output-format=json",
        ])
        .env(HUGE_PAGES.0, HUGE_PAGES.1)
        .args(["--invalidate=0", "--fallocate=none"])
        .arg(format!("--iomem_align={ALIGN}"))
        .arg(format!("--filename={}", file.display()))
        .arg(format!("--rw={kind}"));
    command
}

/// Runs fio and reads what it says of the job.
fn report(command: &mut Command) -> Result<Value> {
    let output = command.output()?;
    if !output.status.success() {
        return Err(format!("fio failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let mut json: Value = serde_json::from_slice(&output.stdout)?;
    Ok(json["jobs"][0].take())
}

/// Going over a file that exists once from its start, or several times.
pub(super) struct Pass<'a> {
    pub(super) file: &'a Path,
    /// Bytes of one operation.
    pub(super) block: usize,
    /// Operations in all, a multiple of those under way.
    pub(super) count: usize,
    /// Threads, each with a part of the file.
    pub(super) threads: usize,
    pub(super) direct: bool,
    pub(super) loops: usize,
}

impl Pass<'_> {
    /// Runs it; what one time over the file took.
    pub(super) fn run(&self, direction: Direction) -> Result<Duration> {
        let kind = match direction {
            Direction::Load => "read",
            Direction::Dump => "write",
        };
        let each = self.count / self.threads * self.block;
        let mut command = command(self.file, kind);
        command
            // Its buffers are written as they are; changing them a little each time is none of the
            // work compared.
            .args(["--overwrite=0", "--scramble_buffers=0"])
            .arg("--ioengine=psync")
            .arg(format!("--numjobs={}", self.threads))
            .arg(format!("--bs={}", self.block))
            .arg(format!("--direct={}", u8::from(self.direct)))
            .arg(format!("--loops={}", self.loops))
            .arg(format!("--size={each}"))
            .arg(format!("--offset_increment={each}"))
            .arg(format!("--filesize={}", each * self.threads));
        let said = report(&mut command)?;
        let said = &said[kind];
        let figure = |name: &str| {
            let value = said[name].as_f64();
            value.ok_or_else(|| format!("fio's report has no {name}"))
        };
        let moved = figure("io_bytes")? as usize;
        let wanted = each * self.threads * self.loops;
        if moved != wanted {
            return Err(format!("fio moved {moved} bytes of {wanted}").into());
        }
        let latency = said["lat_ns"]["mean"].as_f64().unwrap_or(0.0);
        let operations = latency * figure("total_ios")? / self.threads as f64;
        Ok(took(figure("runtime")?, operations) / self.loops as u32)
    }
}

/// fio tells whole milliseconds, rounded up, and the latencies of its operations in ns: their sum,
/// by as many as are under way, says where in the last of these milliseconds it ended, in favour of
/// fio where it is not exact.
fn took(runtime_ms: f64, operations_ns: f64) -> Duration {
    let end = runtime_ms * 1e6;
    let ns = operations_ns.clamp((end - 1e6).max(0.0), end);
    Duration::from_nanos((ns as u64).max(1))
}

/// Writes and reads one file, through and past the page cache.
pub(super) fn measure(
    place: &Place,
    block: usize,
    workers: usize,
    options: &Options,
) -> Result<Vec<Fio>> {
    let path = place.dir().join("fio.dat");
    let each = options.turn_bytes / workers / block * block;
    let run = |direction: Direction, direct: bool| -> Result<f64> {
        let kind = match direction {
            Direction::Load => "read",
            Direction::Dump => "write",
        };
        let mut command = command(&path, kind);
        command
            .args(["--ioengine=psync", "--overwrite=1"])
            .arg(format!("--loops={LOOPS}"))
            .arg(format!("--bs={block}"))
            .arg(format!("--direct={}", u8::from(direct)))
            .arg(format!("--numjobs={workers}"))
            .arg(format!("--size={each}"))
            .arg(format!("--offset_increment={each}"))
            .arg(format!("--filesize={}", each * workers));
        let speed = report(&mut command)?[kind]["bw_bytes"].as_f64();
        speed
            .map(|bytes| bytes / 1e9)
            .ok_or_else(|| "fio's report has no bw_bytes".into())
    };
    let mut figures = Vec::new();
    for direct in [false, true] {
        if direct && !place.direct() {
            continue;
        }
        for direction in [Direction::Dump, Direction::Load] {
            let mut gbps: f64 = 0.0;
            for _ in 0..RUNS {
                gbps = gbps.max(run(direction, direct)?);
            }
            figures.push(Fio {
                direction,
                block_bytes: block,
                workers,
                direct,
                gbps,
            });
        }
    }
    std::fs::remove_file(&path)?;
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_ends_in_its_last_millisecond() {
        let took = |ms, ns| took(ms, ns).as_nanos();
        assert_eq!(took(12.0, 11.25e6), 11_250_000);
        assert_eq!(took(12.0, 9.0e6), 11_000_000);
        assert_eq!(took(12.0, 13.0e6), 12_000_000);
        assert_eq!(took(1.0, 0.0), 1);
    }
}
