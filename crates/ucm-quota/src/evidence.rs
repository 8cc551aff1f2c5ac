//! What is kept of damaged records: which reasons count as damage, how evidence is named, and what
//! of it has to go.
//!
//! Evidence lies below its namespace as `quarantine/<32 hex>.<reason>.<unix seconds>.bin`: the id
//! the record was stored under, why it was refused, and when it was moved.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use ucm_core::{BlockId, MissReason};
use ucm_io::FileMeta;

/// Name of the directory below a namespace.
pub const DIR: &str = "quarantine";
/// Share of the root's limit that evidence may take at most.
const SHARE: u64 = 16;

/// What is kept of damaged records.
#[derive(Debug, Clone, Copy)]
pub struct QuarantineConfig {
    /// Whether damaged records are kept at all. They are refused all the same.
    pub enabled: bool,
    /// Damaged records in a minute above which nothing is moved and the breaker opens.
    pub max_per_minute: u32,
    /// Most records kept below a root; the oldest go first.
    pub max_records: u32,
    /// Most bytes kept below a root, and never more than a sixteenth of its limit; the oldest go
    /// first.
    pub max_bytes: u64,
    /// How long a record is kept.
    pub keep: Duration,
}

impl Default for QuarantineConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            max_per_minute: 16,
            max_records: 64,
            max_bytes: 256 << 20,
            keep: Duration::from_secs(7 * 24 * 3600),
        }
    }
}

/// Whether a refusal for this reason is damage, of which evidence is kept. What is whole but
/// belongs elsewhere is not, and a newer version is never touched.
pub fn is_damage(reason: MissReason) -> bool {
    matches!(
        reason,
        MissReason::WrongLength
            | MissReason::Truncated
            | MissReason::NotARecord
            | MissReason::BadHeader
            | MissReason::BadChecksum
    )
}

/// The file name of a piece of evidence.
pub fn evidence_name(id: BlockId, reason: MissReason, unix_seconds: u64) -> String {
    format!("{id}.{}.{unix_seconds}.bin", reason.name())
}

/// When a record was quarantined (Unix seconds), if this is the name of one.
pub fn evidence_time(name: &OsStr) -> Option<u64> {
    let (id, rest) = name.to_str()?.strip_suffix(".bin")?.split_once('.')?;
    let (reason, seconds) = rest.split_once('.')?;
    id.parse::<BlockId>().ok()?;
    let known = MissReason::ALL
        .into_iter()
        .any(|known| known.name() == reason);
    let digits = !seconds.is_empty() && seconds.bytes().all(|c| c.is_ascii_digit());
    seconds.parse().ok().filter(|_| known && digits)
}

/// Bytes of the evidence in one listed directory.
pub fn evidence_bytes(entries: &[(OsString, FileMeta)]) -> u64 {
    let ours = |(name, meta): &&(OsString, FileMeta)| !meta.is_dir && evidence_time(name).is_some();
    entries.iter().filter(ours).map(|(_, meta)| meta.len).sum()
}

/// One piece of evidence found below the root.
pub struct Evidence {
    /// Its file.
    pub path: PathBuf,
    /// When it was moved, Unix time.
    pub seconds: u64,
    /// Its bytes.
    pub len: u64,
}

/// The evidence that has to go: what is too old, then the oldest of what is too much.
pub fn too_much(
    mut found: Vec<Evidence>,
    bounds: &QuarantineConfig,
    limit: u64,
    now: u64,
) -> Vec<Evidence> {
    let most = bounds.max_bytes.min(limit / SHARE);
    let (mut records, mut bytes) = (0, 0u64);
    // The newest first: the bounds are met from here on.
    found.sort_unstable_by(|a, b| (b.seconds, &b.path).cmp(&(a.seconds, &a.path)));
    let mut full = false;
    found.retain(|one| {
        records += 1;
        bytes = bytes.saturating_add(one.len);
        full |= records > bounds.max_records || bytes > most;
        full || now.saturating_sub(one.seconds) > bounds.keep.as_secs()
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_names_are_evidence() {
        let id = BlockId([0xab; 16]);
        let name = evidence_name(id, MissReason::BadChecksum, 1_700_000_000);
        assert_eq!(
            name,
            format!("{}.bad_checksum.1700000000.bin", "ab".repeat(16))
        );
        assert_eq!(evidence_time(OsStr::new(&name)), Some(1_700_000_000));
        for bad in [
            format!("{id}.bin"),
            format!("{id}.1700000000.bin"),
            format!("{id}.no_reason.1700000000.bin"),
            format!("{id}.bad_header.+170.bin"),
            format!("{id}.bad_header..bin"),
            format!("{id}.bad_header.1.2.bin"),
            "x.bad_header.1.bin".to_owned(),
            name.replace(".bin", ".tmp"),
        ] {
            assert_eq!(evidence_time(OsStr::new(&bad)), None, "{bad}");
        }
    }

    #[test]
    fn damage_is_what_is_broken_not_what_is_misplaced() {
        let damage: Vec<_> = MissReason::ALL
            .into_iter()
            .filter(|&r| is_damage(r))
            .collect();
        assert_eq!(
            damage
                .iter()
                .map(|reason| reason.name())
                .collect::<Vec<_>>(),
            [
                "wrong_length",
                "truncated",
                "not_a_record",
                "bad_header",
                "bad_checksum"
            ]
        );
    }

    #[test]
    fn the_newest_stay_within_every_bound() {
        let bounds = QuarantineConfig {
            max_records: 3,
            max_bytes: 100,
            keep: Duration::from_secs(50),
            ..QuarantineConfig::default()
        };
        let dead = |ages: &[(u64, u64)], limit| {
            let found = ages.iter().map(|&(age, len)| Evidence {
                path: PathBuf::from(age.to_string()),
                seconds: 1000 - age,
                len,
            });
            let dead = too_much(found.collect(), &bounds, limit, 1000);
            dead.iter()
                .map(|one| 1000 - one.seconds)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            dead(&[(10, 10), (51, 10), (50, 10)], 10_000),
            [51],
            "too old"
        );
        assert_eq!(
            dead(&[(4, 1), (1, 1), (3, 1), (2, 1)], 10_000),
            [4],
            "too many"
        );
        assert_eq!(
            dead(&[(1, 60), (2, 60), (3, 1)], 10_000),
            [2, 3],
            "too many bytes"
        );
        assert_eq!(
            dead(&[(1, 60), (2, 20)], 16 * 70),
            [2],
            "too much of the limit"
        );
        assert!(dead(&[], 0).is_empty());
    }
}
