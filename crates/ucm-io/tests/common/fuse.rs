//! A file system of the test's own over /dev/fuse: one directory of files in memory, with short
//! counts, failing closes and stalls on demand. It implements only the part of the protocol that
//! the engine needs. Needs root.
#![allow(
    unsafe_code,
    reason = "mount(2) of a FUSE descriptor has no safe form in the crates at hand"
)]

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

/// Requests by their number in the protocol.
pub mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const UNLINK: u32 = 10;
    pub const RENAME: u32 = 12;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const BATCH_FORGET: u32 = 42;
}

const ROOT: u64 = 1;
const IN_HEADER: usize = 40;
/// Open flag: no page cache, so that the caller's system call returns the file system's own result.
const DIRECT_IO: u32 = 1;

/// How the file system behaves.
#[derive(Default)]
pub struct Behaviour {
    /// Close (flush) fails with this.
    pub flush_error: i32,
    /// Most bytes that one read or write moves; 0: no bound.
    pub short: usize,
    /// Requests of this kind get no reply until [`Fuse::release`].
    pub stall: u32,
}

struct State {
    behaviour: Behaviour,
    files: BTreeMap<Vec<u8>, u64>,
    data: BTreeMap<u64, Vec<u8>>,
    next: u64,
    stalled: usize,
    requests: BTreeMap<u32, usize>,
}

struct Shared {
    state: Mutex<State>,
    news: Condvar,
}

/// The running file system; unmounted when dropped.
pub struct Fuse {
    dir: std::path::PathBuf,
    shared: Arc<Shared>,
    _base: tempfile::TempDir,
}

impl Fuse {
    /// Mounts it, or says why it cannot.
    pub fn mount(behaviour: Behaviour) -> Result<Self, String> {
        let base = tempfile::tempdir().map_err(|e| e.to_string())?;
        let dir = base.path().join("mnt");
        std::fs::create_dir(&dir).map_err(|e| e.to_string())?;
        let device = File::options()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .map_err(|e| format!("/dev/fuse: {e}"))?;
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other",
            device.as_raw_fd()
        );
        let text = |bytes: &[u8]| CString::new(bytes).map_err(|e| e.to_string());
        let (path, options) = (text(dir.as_os_str().as_bytes())?, text(options.as_bytes())?);
        // SAFETY: all pointers are to NUL-terminated strings that live until the call returns.
        let done = unsafe {
            libc::mount(
                c"ucm-test".as_ptr(),
                path.as_ptr(),
                c"fuse".as_ptr(),
                libc::MS_NOSUID | libc::MS_NODEV,
                options.as_ptr().cast(),
            )
        };
        if done != 0 {
            return Err(format!(
                "mount of FUSE: {}",
                std::io::Error::last_os_error()
            ));
        }
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                behaviour,
                files: BTreeMap::new(),
                data: BTreeMap::new(),
                next: ROOT + 1,
                stalled: 0,
                requests: BTreeMap::new(),
            }),
            news: Condvar::new(),
        });
        let served = Arc::clone(&shared);
        std::thread::spawn(move || serve(&Arc::new(device), &served));
        Ok(Self {
            dir,
            shared,
            _base: base,
        })
    }

    /// Where it is mounted.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Names and bytes of its files.
    pub fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let state = self.shared.state.lock();
        let whole = |(name, node): (&Vec<u8>, &u64)| {
            (
                String::from_utf8_lossy(name).into_owned(),
                state.data[node].clone(),
            )
        };
        state.files.iter().map(whole).collect()
    }

    /// Number of requests of a kind.
    pub fn requests(&self, kind: u32) -> usize {
        self.shared
            .state
            .lock()
            .requests
            .get(&kind)
            .copied()
            .unwrap_or(0)
    }

    /// Waits until a request is stalled.
    pub fn await_stalled(&self) {
        let mut state = self.shared.state.lock();
        while state.stalled == 0 {
            self.shared.news.wait(&mut state);
        }
    }

    /// Replies to stalled requests and stalls no more.
    pub fn release(&self) {
        self.shared.state.lock().behaviour.stall = 0;
        self.shared.news.notify_all();
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        self.release();
        if let Ok(path) = CString::new(self.dir.as_os_str().as_bytes()) {
            // SAFETY: a NUL-terminated string that lives until the call returns. Lazily, for a
            // failed test may have left files open; the server ends with the last of them.
            unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
        }
    }
}

/// Reads requests until the file system is unmounted. Each gets a thread of its own, because one
/// may stall.
fn serve(device: &Arc<File>, shared: &Arc<Shared>) {
    let mut buffer = vec![0; 1 << 20];
    loop {
        let len = match (&**device).read(&mut buffer) {
            Ok(0) => return,
            Ok(len) => len,
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => return,
            // Interrupted, or a withdrawn request.
            Err(_) => continue,
        };
        let request = buffer[..len].to_vec();
        let (device, shared) = (Arc::clone(device), Arc::clone(shared));
        std::thread::spawn(move || answer(&device, &shared, &request));
    }
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(number(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(number(bytes, at))
}

/// Small records of the protocol, field by field.
#[derive(Default)]
struct Out(Vec<u8>);

impl Out {
    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn zeros(mut self, count: usize) -> Self {
        self.0.resize(self.0.len() + count, 0);
        self
    }

    /// The 88 bytes of fuse_attr.
    fn attr(self, node: u64, size: u64) -> Self {
        let mode = if node == ROOT {
            libc::S_IFDIR | 0o700
        } else {
            libc::S_IFREG | 0o600
        };
        self.u64(node)
            .u64(size)
            .u64(size.div_ceil(512))
            .zeros(24 + 12)
            .u32(mode)
            .u32(1)
            .zeros(12)
            .u32(4096)
            .u32(0)
    }

    /// The 128 bytes of fuse_entry_out, never cached.
    fn entry(self, node: u64, size: u64) -> Self {
        self.u64(node).zeros(32).attr(node, size)
    }
}

fn answer(device: &File, shared: &Shared, request: &[u8]) {
    let kind = u32_at(request, 4);
    let unique = u64_at(request, 8);
    if matches!(kind, op::FORGET | op::BATCH_FORGET | op::INTERRUPT) {
        return;
    }
    let result = {
        let mut state = shared.state.lock();
        *state.requests.entry(kind).or_default() += 1;
        while state.behaviour.stall == kind {
            state.stalled += 1;
            shared.news.notify_all();
            shared.news.wait(&mut state);
            state.stalled -= 1;
        }
        reply(&mut state, kind, u64_at(request, 16), &request[IN_HEADER..])
    };
    let (error, body) = match result {
        Ok(out) => (0, out.0),
        Err(errno) => (-errno, Vec::new()),
    };
    let mut message = Out::default().u32(16 + body.len() as u32).0;
    message.extend(error.to_ne_bytes());
    message.extend(unique.to_ne_bytes());
    message.extend(body);
    // Fails if the caller was killed; then nothing waits for the reply.
    let _ = (&*device).write(&message);
}

/// A NUL-terminated name and the bytes behind it.
fn name(bytes: &[u8]) -> (Vec<u8>, &[u8]) {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    (bytes[..end].to_vec(), &bytes[(end + 1).min(bytes.len())..])
}

fn reply(state: &mut State, kind: u32, node: u64, body: &[u8]) -> Result<Out, i32> {
    let bound = match state.behaviour.short {
        0 => usize::MAX,
        short => short,
    };
    let size = |state: &State, node: u64| state.data.get(&node).map_or(0, |data| data.len() as u64);
    match kind {
        // Version 7.31, writes up to 128 KiB.
        op::INIT => Ok(Out::default()
            .u32(7)
            .u32(31)
            .u32(0)
            .u32(0)
            .u32(0)
            .u32(128 << 10)
            .u32(1)
            .zeros(36)),
        op::LOOKUP => {
            let node = *state.files.get(&name(body).0).ok_or(libc::ENOENT)?;
            Ok(Out::default().entry(node, size(state, node)))
        }
        op::GETATTR | op::SETATTR => Ok(Out::default().zeros(16).attr(node, size(state, node))),
        op::CREATE => {
            let created = state.next;
            state.next += 1;
            state.files.insert(name(&body[16..]).0, created);
            state.data.insert(created, Vec::new());
            Ok(Out::default()
                .entry(created, 0)
                .u64(created)
                .u32(DIRECT_IO)
                .u32(0))
        }
        op::OPEN => Ok(Out::default().u64(node).u32(DIRECT_IO).u32(0)),
        op::READ => {
            let (offset, len) = (u64_at(body, 8) as usize, u32_at(body, 16) as usize);
            let data = state.data.get(&node).ok_or(libc::EIO)?;
            let from = offset.min(data.len());
            let to = from.saturating_add(len.min(bound)).min(data.len());
            Ok(Out(data[from..to].to_vec()))
        }
        op::WRITE => {
            let offset = u64_at(body, 8) as usize;
            let len = (u32_at(body, 16) as usize).min(bound);
            let data = state.data.get_mut(&node).ok_or(libc::EIO)?;
            data.resize(data.len().max(offset + len), 0);
            data[offset..offset + len].copy_from_slice(&body[40..40 + len]);
            Ok(Out::default().u32(len as u32).u32(0))
        }
        op::FLUSH if state.behaviour.flush_error != 0 => Err(state.behaviour.flush_error),
        op::FLUSH | op::RELEASE => Ok(Out::default()),
        // fuse_kstatfs: an empty file system; the kernel reports its type.
        op::STATFS => Ok(Out::default().zeros(80)),
        op::UNLINK => state
            .files
            .remove(&name(body).0)
            .map(|_| Out::default())
            .ok_or(libc::ENOENT),
        op::RENAME => {
            let (from, rest) = name(&body[8..]);
            let moved = state.files.remove(&from).ok_or(libc::ENOENT)?;
            state.files.insert(name(rest).0, moved);
            Ok(Out::default())
        }
        _ => Err(libc::ENOSYS),
    }
}
