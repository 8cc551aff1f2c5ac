//! Servers that tests talk to: real ones, started by the process of the test that first wants one and ended with it.

#![allow(clippy::print_stderr, reason = "a test says why it is skipped")]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A server and where it listens.
pub(crate) struct Server {
    pub(crate) port: u16,
    /// Its process.
    pid: String,
    /// A shell that ends the server when this process does, however that ends: its standard input is closed then.
    keeper: Child,
}

impl Server {
    /// Runs a program until this process ends, or the server is dropped.
    fn start(port: u16, dir: &Path, command: &str) -> Self {
        let script =
            format!("{command} >/dev/null 2>&1 & pid=$!; echo $pid; read -r _; kill -9 $pid; wait $pid");
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

/// A port that nobody listens on.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    listener.local_addr().unwrap().port()
}

/// A Redis server that keeps nothing on disk, with these further arguments; none where the machine has no `redis-server`.
pub(crate) fn redis(dir: &Path, more: &str) -> Option<Server> {
    redis_at(free_port(), dir, more)
}

/// The same on this port.
pub(crate) fn redis_at(port: u16, dir: &Path, more: &str) -> Option<Server> {
    has_program("redis-server").then(|| {
        let command = format!("redis-server --port {port} --bind 127.0.0.1 --save '' --appendonly no {more}");
        Server::start(port, dir, &command)
    })
}

/// The server of the tests of this process that leave it as it is: its address. `UCM_TEST_REDIS` names another.
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

/// Whether the machine has this program. A test that needs it is skipped where not, and says so; it fails where
/// `UCM_REQUIRE_ROOT_TESTS` is set, as it is for whoever could have installed it.
pub(crate) fn has_program(name: &str) -> bool {
    let found = Command::new("sh")
        .args(["-c", &format!("command -v {name}")])
        .output()
        .unwrap();
    if !found.status.success() {
        let required = std::env::var_os("UCM_REQUIRE_ROOT_TESTS").is_some();
        assert!(!required, "{name} is not installed (apt-get install {name})");
        eprintln!("skipped: {name} is not installed (apt-get install {name})");
    }
    found.status.success()
}
