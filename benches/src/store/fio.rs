//! The same sizes and numbers of threads by fio, where it is installed: what one large file gives, without names.

use std::process::{Command, Stdio};

use serde_json::Value;

use super::files::Place;
use super::report::{Direction, Fio};
use super::{Options, Result};

/// Runs of which the fastest counts.
const RUNS: usize = 2;
/// Times each run goes over the file: fio counts in milliseconds.
const LOOPS: usize = 16;

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

/// Writes and reads one file, through and past the page cache.
pub(super) fn measure(place: &Place, block: usize, workers: usize, options: &Options) -> Result<Vec<Fio>> {
    let path = place.dir().join("fio.dat");
    let each = options.turn_bytes / workers / block * block;
    let run = |direction: Direction, direct: bool| -> Result<f64> {
        let kind = match direction {
            Direction::Load => "read",
            Direction::Dump => "write",
        };
        let output = Command::new("fio")
            .args([
                "--name=ucm",
                "--ioengine=psync",
                "--thread",
                "--group_reporting",
                "--output-format=json",
            ])
            .args(["--invalidate=0", "--fallocate=none", "--overwrite=1"])
            .arg(format!("--filename={}", path.display()))
            .arg(format!("--rw={kind}"))
            .arg(format!("--loops={LOOPS}"))
            .arg(format!("--bs={block}"))
            .arg(format!("--direct={}", u8::from(direct)))
            .arg(format!("--numjobs={workers}"))
            .arg(format!("--size={each}"))
            .arg(format!("--offset_increment={each}"))
            .arg(format!("--filesize={}", each * workers))
            .output()?;
        if !output.status.success() {
            return Err(format!("fio failed: {}", String::from_utf8_lossy(&output.stderr)).into());
        }
        let json: Value = serde_json::from_slice(&output.stdout)?;
        let speed = json["jobs"][0][kind]["bw_bytes"].as_f64();
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
