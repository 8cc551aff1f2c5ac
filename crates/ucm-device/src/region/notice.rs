//! The registry file by which others find a process's region.

use ucm_core::{Error, ErrorKind, Result, from_hex, hex};

/// First line of a registry file.
const FIRST: &str = "ucm region 1";

/// The content of a registry file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Notice {
    pub(crate) pid: u32,
    /// Start of that process in clock ticks since the boot; 0: unknown.
    pub(crate) started: u64,
    pub(crate) fd: i32,
    pub(crate) nonce: u64,
    pub(crate) namespace: [u8; 32],
    pub(crate) record_len: usize,
    pub(crate) bytes: usize,
}

/// The name of a region's memfd, by which readers recognise it.
pub(crate) fn memfd_name(nonce: u64) -> String {
    format!("ucm-region-{nonce:016x}")
}

/// Start of a process in clock ticks since the boot; 0 if that cannot be read.
pub(super) fn started(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may contain any character; the fields after its closing bracket do not.
    let fields = text.rfind(')').and_then(|end| text.get(end + 1..));
    let field = fields.and_then(|fields| fields.split_ascii_whitespace().nth(19)?.parse().ok());
    field.unwrap_or(0)
}

impl std::fmt::Display for Notice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{FIRST}")?;
        writeln!(
            f,
            "pid {}\nstarted {}\nfd {}",
            self.pid, self.started, self.fd
        )?;
        writeln!(f, "nonce {:016x}", self.nonce)?;
        writeln!(f, "namespace {}", hex(&self.namespace))?;
        writeln!(f, "record_len {}\nbytes {}", self.record_len, self.bytes)
    }
}

impl Notice {
    /// `Foreign` if no process has that number here, or another one than the writer.
    pub(super) fn is_of_its_process(&self) -> Result<()> {
        if self.started == 0 || self.started == started(self.pid) {
            return Ok(());
        }
        let text = "the writer of a memory region cannot be seen from here; processes of different \
                    containers share \
                    memory only if these share their process numbers (pid namespace)";
        Err(Error::new(ErrorKind::Foreign, text).with("pid", self.pid))
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        if lines.next() != Some(FIRST) {
            return None;
        }
        let mut field = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ');
        Some(Self {
            pid: field("pid")?.parse().ok()?,
            started: field("started")?.parse().ok()?,
            fd: field("fd")?.parse().ok().filter(|&fd| fd >= 0)?,
            nonce: u64::from_str_radix(field("nonce")?, 16).ok()?,
            namespace: from_hex(field("namespace")?)?,
            record_len: field("record_len")?.parse().ok()?,
            bytes: field("bytes")?
                .parse()
                .ok()
                .filter(|&bytes| bytes <= isize::MAX as usize)?,
        })
    }
}
