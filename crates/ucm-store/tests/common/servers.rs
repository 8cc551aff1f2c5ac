//! Servers that tests talk to: real ones, started by the process of the test that first wants one
//! and ended with it.

#![allow(clippy::print_stderr, reason = "a test says why it is skipped")]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// A server and where it listens.
pub(crate) struct Server {
    pub(crate) port: u16,
    /// Its process.
    pid: String,
    /// A shell that ends the server when this process does, however that ends: its standard input
    /// is closed then.
    keeper: Child,
}

impl Server {
    /// Runs a program until this process ends, or the server is dropped.
    fn start(port: u16, dir: &Path, command: &str) -> Self {
        let script = format!(
            "{command} >/dev/null 2>&1 & pid=$!; echo $pid; read -r _; kill -9 $pid; wait $pid"
        );
        let mut keeper = Command::new("sh")
            .args(["-c", &script])
            .current_dir(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut pid = String::new();
        let said = keeper.stdout.take().unwrap();
        BufReader::new(said).read_line(&mut pid).unwrap();
        let pid = pid.trim().to_owned();
        let start = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(keeper.try_wait().unwrap().is_none(), "{command} ended");
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{command} does not listen"
            );
            std::thread::yield_now();
        }
        Self { port, pid, keeper }
    }

    /// From now on it answers nothing, and its connections stay open.
    pub(crate) fn freeze(&self) {
        self.signal("-STOP");
    }

    /// It goes on.
    pub(crate) fn thaw(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        assert!(
            Command::new("kill")
                .args([signal, &self.pid])
                .status()
                .unwrap()
                .success()
        );
    }
}

impl Drop for Server {
    /// Kills it, as a crash would.
    fn drop(&mut self) {
        if let Some(mut stdin) = self.keeper.stdin.take() {
            let _ = stdin.write_all(b"\n");
        }
        let _ = self.keeper.wait();
    }
}

/// A port without a listener. The system gives it to no connection before a server listens there,
/// or while one is started again: those have higher numbers.
pub(crate) fn free_port() -> u16 {
    const EACH: u16 = 20;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 10_000 + EACH * (std::process::id() % 1000) as u16;
    loop {
        let port = first + NEXT.fetch_add(1, Ordering::Relaxed) % EACH;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A Redis server that keeps nothing on disk, with these further arguments; none where the machine
/// has no `redis-server`.
pub(crate) fn redis(dir: &Path, more: &str) -> Option<Server> {
    redis_at(free_port(), dir, more)
}

/// The same on this port.
pub(crate) fn redis_at(port: u16, dir: &Path, more: &str) -> Option<Server> {
    has_program("redis-server").then(|| {
        let command =
            format!("redis-server --port {port} --bind 127.0.0.1 --save '' --appendonly no {more}");
        Server::start(port, dir, &command)
    })
}

/// The server of the tests of this process that leave it as it is: its address. `UCM_TEST_REDIS`
/// names another.
pub(crate) fn shared_redis() -> Option<&'static str> {
    static SERVER: OnceLock<Option<(String, Option<Server>)>> = OnceLock::new();
    let made = SERVER.get_or_init(|| match std::env::var("UCM_TEST_REDIS") {
        Ok(address) => Some((address, None)),
        Err(_) => {
            let server = redis(&std::env::temp_dir(), "")?;
            Some((format!("redis://127.0.0.1:{}", server.port), Some(server)))
        }
    });
    made.as_ref().map(|(address, _)| address.as_str())
}

/// An S3 server that keeps its objects in files, as they are.
pub(crate) struct S3 {
    pub(crate) server: Server,
    dir: PathBuf,
}

/// Where it keeps its bucket, beside the file with its keys.
pub(crate) const BUCKET: &str = "data/bucket";
const KEYS: [&str; 2] = ["ucm-tests", "ucm-tests-secret"];

impl S3 {
    /// Its settings in a store.
    pub(crate) fn options(&self) -> Vec<(&'static str, Value)> {
        vec![
            (
                "object_endpoint",
                json!(format!("http://127.0.0.1:{}", self.server.port)),
            ),
            ("object_credentials", json!(self.dir.join("keys"))),
        ]
    }

    /// Where the objects of its bucket are.
    pub(crate) fn bucket(&self) -> PathBuf {
        self.dir.join(BUCKET)
    }
}

/// An S3 server; none where it was not built.
pub(crate) fn s3(dir: &Path) -> Option<S3> {
    s3_at(free_port(), dir)
}

/// The same on this port, with what one had there that ended.
pub(crate) fn s3_at(port: u16, dir: &Path) -> Option<S3> {
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/../../.tools/bin/s3s-fs");
    // Only `make test-long` builds it.
    has(program, "make servers-long", is_set("UCM_TEST_LONG")).then(|| {
        let dir = dir.to_owned();
        std::fs::create_dir_all(dir.join(BUCKET)).unwrap();
        let [id, secret] = KEYS;
        let text =
            format!("[default]\naws_access_key_id = {id}\naws_secret_access_key = {secret}\n");
        write_secret(&dir.join("keys"), &text);
        let keys = format!("--access-key {id} --secret-key {secret}");
        let command = format!("{program} --host 127.0.0.1 --port {port} {keys} data");
        let server = Server::start(port, &dir, &command);
        S3 { server, dir }
    })
}

/// The S3 server of the tests of this process that leave it as it is.
pub(crate) fn shared_s3() -> Option<&'static S3> {
    static SERVER: OnceLock<Option<(S3, TempDir)>> = OnceLock::new();
    let made = SERVER.get_or_init(|| {
        let dir = TempDir::new().unwrap();
        s3(dir.path()).map(|server| (server, dir))
    });
    made.as_ref().map(|(server, _)| server)
}

/// Whether the machine has this program. A test that needs it is skipped where not, and says so; it
/// fails where `UCM_REQUIRE_SERVERS` is set.
pub(crate) fn has_program(name: &str) -> bool {
    has(name, "make servers", is_set("UCM_REQUIRE_SERVERS"))
}

fn is_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some()
}

/// The same of a program that comes by this command.
pub(crate) fn has(name: &str, made_by: &str, required: bool) -> bool {
    let found = Command::new("sh")
        .args(["-c", &format!("command -v {name}")])
        .output()
        .unwrap();
    if !found.status.success() {
        assert!(!required, "{name} is not there ({made_by})");
        eprintln!("skipped: {name} is not there ({made_by})");
    }
    found.status.success()
}

/// Writes a file that holds a secret, for its owner alone.
pub(crate) fn write_secret(path: &Path, text: &str) {
    use std::os::unix::fs::OpenOptionsExt;

    let mut options = std::fs::File::options();
    let file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path);
    file.unwrap().write_all(text.as_bytes()).unwrap();
}
