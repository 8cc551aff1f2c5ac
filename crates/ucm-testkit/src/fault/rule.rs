//! Faults and the conditions under which they apply: the script of the fault-injecting engine.

use std::path::Path;

use super::gate::Gate;

/// Kind of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OpKind {
    /// A read of any kind.
    Read,
    /// [`IoEngine::publish`](ucm_io::IoEngine::publish).
    Publish,
    /// [`IoEngine::stat`](ucm_io::IoEngine::stat).
    Stat,
    /// [`IoEngine::touch`](ucm_io::IoEngine::touch).
    Touch,
    /// [`IoEngine::remove`](ucm_io::IoEngine::remove).
    Remove,
    /// [`IoEngine::rename`](ucm_io::IoEngine::rename).
    Rename,
    /// [`IoEngine::list`](ucm_io::IoEngine::list).
    List,
    /// [`IoEngine::make_dir`](ucm_io::IoEngine::make_dir).
    MakeDir,
    /// [`IoEngine::space`](ucm_io::IoEngine::space).
    Space,
    /// [`IoEngine::probe`](ucm_io::IoEngine::probe).
    Probe,
    /// [`IoEngine::create`](ucm_io::IoEngine::create).
    Create,
    /// [`IoEngine::write_at`](ucm_io::IoEngine::write_at).
    WriteAt,
    /// [`IoEngine::finish`](ucm_io::IoEngine::finish).
    Finish,
}

impl OpKind {
    /// Every kind, in order.
    pub const ALL: [Self; 13] = [
        Self::Read,
        Self::Publish,
        Self::Stat,
        Self::Touch,
        Self::Remove,
        Self::Rename,
        Self::List,
        Self::MakeDir,
        Self::Space,
        Self::Probe,
        Self::Create,
        Self::WriteAt,
        Self::Finish,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Publish => "publish",
            Self::Stat => "stat",
            Self::Touch => "touch",
            Self::Remove => "remove",
            Self::Rename => "rename",
            Self::List => "list",
            Self::MakeDir => "make_dir",
            Self::Space => "space",
            Self::Probe => "probe",
            Self::Create => "create",
            Self::WriteAt => "write_at",
            Self::Finish => "finish",
        }
    }
}

/// The error numbers that scripts use most (Linux values).
pub mod errno {
    /// No such file.
    pub const ENOENT: i32 = libc::ENOENT;
    /// Input/output error.
    pub const EIO: i32 = libc::EIO;
    /// Permission denied.
    pub const EACCES: i32 = libc::EACCES;
    /// No space left on the medium.
    pub const ENOSPC: i32 = libc::ENOSPC;
    /// Quota exceeded.
    pub const EDQUOT: i32 = libc::EDQUOT;
    /// Read-only file system.
    pub const EROFS: i32 = libc::EROFS;
    /// Too many open files.
    pub const EMFILE: i32 = libc::EMFILE;
    /// Stale file handle.
    pub const ESTALE: i32 = libc::ESTALE;
    /// The server did not reply (a soft mount).
    pub const ETIMEDOUT: i32 = libc::ETIMEDOUT;
}

/// The rest of a torn write, behind the part that reached the medium.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tail {
    /// Zeros up to the full length: the length was written, the data was not.
    Zeros,
    /// Nothing: the file is short.
    Cut,
}

/// One fault. A fault that does not fit an operation (a short read of a publish) has no effect.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Not executed; fails with this error number.
    Errno(i32),
    /// Executed, but the result is lost: fails with this error number.
    LostReply(i32),
    /// Refused with `Busy`, not executed.
    Busy,
    /// Read: at most this many bytes arrive, although the file is longer.
    ShortRead(usize),
    /// Publish, write and finish: succeeds, but only the first `keep` bytes are in the file (a
    /// power cut without fsync).
    Torn {
        /// Bytes that reached the medium.
        keep: usize,
        /// What follows them.
        tail: Tail,
    },
    /// Publish, write and finish: the writer dies with `keep` bytes written; the private file
    /// stays, the target does not appear, and the operation fails with EIO.
    Killed {
        /// Bytes in the private file.
        keep: usize,
    },
    /// Read, publish, write and finish: inverts the bytes at these positions of the operation's
    /// data (on the way in, or on the medium); those past its end are skipped.
    Flip(Vec<usize>),
    /// As `Flip`, at this many positions chosen by the seed.
    FlipRandom(usize),
    /// Nothing starts until the gate is opened. An operation that was written off by then never
    /// starts.
    HangBefore(Gate),
    /// Executed, but does not return until the gate is opened.
    HangAfter(Gate),
    /// Publish and finish: executed, but the target seems not to exist for this many accesses
    /// (read, stat, list), or until [`FaultyEngine::reveal`](super::FaultyEngine::reveal)
    /// (`u64::MAX`: only that).
    LateVisible(u64),
    /// Executed twice, as by a client that repeats a call after a lost reply. The second result is
    /// returned.
    Replay,
}

impl Fault {
    /// The file handle is stale (another host removed or replaced the file).
    pub fn stale() -> Self {
        Self::Errno(errno::ESTALE)
    }

    /// Name in the log.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Errno(_) => "errno",
            Self::LostReply(_) => "lost_reply",
            Self::Busy => "busy",
            Self::ShortRead(_) => "short_read",
            Self::Torn { .. } => "torn",
            Self::Killed { .. } => "killed",
            Self::Flip(_) => "flip",
            Self::FlipRandom(_) => "flip_random",
            Self::HangBefore(_) => "hang_before",
            Self::HangAfter(_) => "hang_after",
            Self::LateVisible(_) => "late_visible",
            Self::Replay => "replay",
        }
    }
}

/// The operations to which a fault applies. Starts as "every one of this kind"; the methods narrow
/// it.
#[derive(Clone, Debug)]
pub struct Rule {
    kind: Option<OpKind>,
    path: Option<String>,
    lane: Option<usize>,
    skip: u64,
    times: u64,
    per_mille: u64,
    fault: Fault,
}

impl Rule {
    /// Every operation of this kind.
    pub fn on(kind: OpKind, fault: Fault) -> Self {
        Self {
            kind: Some(kind),
            ..Self::always(fault)
        }
    }

    /// Every operation.
    pub fn always(fault: Fault) -> Self {
        Self {
            kind: None,
            path: None,
            lane: None,
            skip: 0,
            times: u64::MAX,
            per_mille: 1000,
            fault,
        }
    }

    /// Only those with this text in a path.
    #[must_use]
    pub fn path(mut self, text: impl Into<String>) -> Self {
        self.path = Some(text.into());
        self
    }

    /// Only those of this lane.
    #[must_use]
    pub fn lane(mut self, lane: usize) -> Self {
        self.lane = Some(lane);
        self
    }

    /// Only the `n`th match, counted from 1.
    #[must_use]
    pub fn nth(mut self, n: u64) -> Self {
        self.skip = n.saturating_sub(1);
        self.times = 1;
        self
    }

    /// Not the first `n` matches.
    #[must_use]
    pub fn skip(mut self, n: u64) -> Self {
        self.skip = n;
        self
    }

    /// At most `n` times.
    #[must_use]
    pub fn times(mut self, n: u64) -> Self {
        self.times = n;
        self
    }

    /// Only with this probability, in thousandths. The seed and the number of the operation decide.
    #[must_use]
    pub fn chance(mut self, per_mille: u64) -> Self {
        self.per_mille = per_mille;
        self
    }

    fn matches(&self, lane: usize, kind: OpKind, paths: &[&Path]) -> bool {
        let named = |text: &String| {
            let has = |path: &&Path| path.to_string_lossy().contains(text.as_str());
            paths.iter().any(has)
        };
        self.kind.is_none_or(|wanted| wanted == kind)
            && self.lane.is_none_or(|wanted| wanted == lane)
            && self.path.as_ref().is_none_or(named)
    }
}

/// An active rule and its counts.
pub(super) struct Active {
    rule: Rule,
    seen: u64,
    pub(super) hits: u64,
}

impl Active {
    pub(super) fn new(rule: Rule) -> Self {
        Self {
            rule,
            seen: 0,
            hits: 0,
        }
    }

    /// The fault for this operation, if the rule applies. `draw` is a random number for this
    /// operation and rule.
    pub(super) fn strike(
        &mut self,
        lane: usize,
        kind: OpKind,
        paths: &[&Path],
        draw: u64,
    ) -> Option<Fault> {
        if !self.rule.matches(lane, kind, paths) || draw % 1000 >= self.rule.per_mille {
            return None;
        }
        self.seen += 1;
        if self.seen <= self.rule.skip || self.hits >= self.rule.times {
            return None;
        }
        self.hits += 1;
        Some(self.rule.fault.clone())
    }
}

/// A pseudo-random number, equal for equal arguments (the finish of SplitMix64).
pub(super) fn draw(seed: u64, op: u64, salt: u64) -> u64 {
    let mut x = seed
        .wrapping_add(op.wrapping_mul(0x9E37_79B9_7F4A_7C15))
        .wrapping_add(salt.wrapping_mul(0xD1B5_4A32_D192_ED03));
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// True if a rule applies to listings.
    fn strikes(rule: &mut Active, lane: usize, dir: &str, draw: u64) -> bool {
        rule.strike(lane, OpKind::List, &[Path::new(dir)], draw)
            .is_some()
    }

    #[test]
    fn the_nth_that_matches_is_struck_and_no_other() {
        let mut rule = Active::new(Rule::on(OpKind::List, Fault::Busy).path("x").nth(2));
        let struck: Vec<bool> = ["/x/1", "/y/1", "/x/2", "/x/3"]
            .iter()
            .map(|path| strikes(&mut rule, 0, path, 0))
            .collect();
        assert_eq!(struck, [false, false, true, false]);
        assert_eq!(rule.hits, 1);
    }

    #[test]
    fn kind_and_lane_narrow() {
        let mut rule = Active::new(Rule::on(OpKind::Stat, Fault::Busy));
        assert!(!strikes(&mut rule, 0, "/x", 0));
        let mut rule = Active::new(Rule::always(Fault::Busy).lane(2).skip(1).times(1));
        let struck: Vec<bool> = [2, 0, 2, 2]
            .iter()
            .map(|&lane| strikes(&mut rule, lane, "/x", 0))
            .collect();
        assert_eq!(struck, [false, false, true, false]);
    }

    #[test]
    fn chance_is_decided_by_the_seed() {
        let struck = |seed| -> Vec<bool> {
            let mut rule = Active::new(Rule::always(Fault::Busy).chance(300));
            (0..1000)
                .map(|op| strikes(&mut rule, 0, "/x", draw(seed, op, 0)))
                .collect()
        };
        assert_eq!(struck(1), struck(1));
        assert_ne!(struck(1), struck(2));
        let count = struck(3).iter().filter(|&&hit| hit).count();
        assert!((200..400).contains(&count), "{count}");
    }
}
