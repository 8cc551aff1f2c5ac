//! The same sizes and numbers of threads by fio: the speed of one large file, without names.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::FallocateFlags;
use serde_json::Value;

use super::Result;
use super::contest::Spent;

/// How often fio reads the file in one turn, because it counts in milliseconds.
const LOOPS: usize = 4;
/// Alignment of fio's buffers: a huge page, like slots.
const ALIGN: usize = 2 << 20;
/// Makes the C library use huge pages. fio's memory begins 16 bytes behind the start of a page,
/// which makes a copy from the page cache five times slower on some processors; and a direct
/// operation of a MiB on pages of 4 KiB has more pieces than a virtual disk accepts at once.
const HUGE_PAGES: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");

pub(super) fn is_installed() -> bool {
    let mut version = Command::new("fio");
    version
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    version.status().is_ok_and(|status| status.success())
}

/// All records contiguous in one file, with a part for each thread.
pub(super) struct Pass<'a> {
    pub(super) file: &'a Path,
    /// Bytes of one operation.
    pub(super) record: usize,
    /// Operations in all, a multiple of the threads.
    pub(super) count: usize,
    pub(super) threads: usize,
    pub(super) direct: bool,
}

impl Pass<'_> {
    /// Writes a file that was just allocated and never written, like a segment.
    pub(super) fn write_new(&self) -> Result<Spent> {
        let file = std::fs::File::create(self.file)?;
        let bytes = (self.count * self.record) as u64;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
        drop(file);
        self.run("write", 1)
    }

    /// Reads the file, and writes it first if it does not exist.
    pub(super) fn read(&self) -> Result<Spent> {
        if !self.file.exists() {
            self.write_new()?;
        }
        self.run("read", LOOPS)
    }

    /// Cost of one pass over the file.
    fn run(&self, kind: &str, loops: usize) -> Result<Spent> {
        let each = self.count / self.threads * self.record;
        let output = Command::new("fio")
            .args([
                "--name=ucm",
                "--thread",
                "--group_reporting",
                "--output-format=json",
            ])
            .args([
                "--invalidate=0",
                "--fallocate=none",
                "--overwrite=0",
                "--ioengine=psync",
            ])
            .args(["--scramble_buffers=0", &format!("--iomem_align={ALIGN}")])
            .arg(format!("--filename={}", self.file.display()))
            .args([
                format!("--rw={kind}"),
                format!("--numjobs={}", self.threads),
            ])
            .args([format!("--bs={}", self.record), format!("--loops={loops}")])
            .args([
                format!("--direct={}", u8::from(self.direct)),
                format!("--size={each}"),
            ])
            .arg(format!("--offset_increment={each}"))
            .arg(format!("--filesize={}", each * self.threads))
            .env(HUGE_PAGES.0, HUGE_PAGES.1)
            .output()?;
        if !output.status.success() {
            return Err(format!("fio failed: {}", String::from_utf8_lossy(&output.stderr)).into());
        }
        let json: Value = serde_json::from_slice(&output.stdout)?;
        let report = &json["jobs"][0][kind];
        let figure = |name: &str| {
            report[name]
                .as_f64()
                .ok_or_else(|| format!("fio's report has no {name}"))
        };
        let (moved, wanted) = (figure("io_bytes")? as usize, each * self.threads * loops);
        if moved != wanted {
            return Err(format!("fio moved {moved} bytes of {wanted}").into());
        }
        let latency = report["lat_ns"]["mean"].as_f64().unwrap_or(0.0);
        let operations = latency * figure("total_ios")? / self.threads as f64;
        let wall = took(figure("runtime")?, operations) / loops as u32;
        Ok(Spent {
            wall,
            cpu: Duration::ZERO,
        })
    }
}

/// fio reports whole milliseconds, rounded up, and the latencies of its operations in ns. Their
/// sum, divided by the threads, gives the end within the last of these milliseconds, in favour of
/// fio if it is not exact.
fn took(runtime_ms: f64, operations_ns: f64) -> Duration {
    let end = runtime_ms * 1e6;
    let ns = operations_ns.clamp((end - 1e6).max(0.0), end);
    Duration::from_nanos((ns as u64).max(1))
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
