//! What holds on a Redis server besides what holds everywhere: lengths, times, a server that is
//! full, down, silent, that wants a password or speaks TLS, and a cluster.

#![allow(clippy::unwrap_used, reason = "tests may fail")]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::json;
use tempfile::TempDir;
use ucm_core::{BlockId, ErrorKind};
use ucm_infra::{Clock, LANE_SPACE, ManualClock, MonotonicTime, SystemClock};
use ucm_io::{IoOptions, IoPool};
use ucm_media::redis::{Login, RedisConfig, RedisValues, TlsFiles};
use ucm_store::breaker::BreakerConfig;
use ucm_store::engine::Deadlines;

use crate::common::servers::{Server, free_port, has, has_program, redis, redis_at};
use crate::common::stored::{Reply, ask};
use crate::common::tiers::with_memory;
use crate::common::{Device, Fixture, Medium, Store, directory, eventually, id, ids};

/// A store on this server alone.
fn on_server(server: &Server) -> Fixture {
    at(&format!("redis://127.0.0.1:{}", server.port))
}

/// A store on a server at this address.
fn at(address: &str) -> Fixture {
    Fixture {
        medium: Medium::Kind("redis"),
        options: vec![("storage_backends", json!([address]))],
        ..Fixture::default()
    }
}

/// A server of this test with these arguments, and a store on it; none where the machine has no
/// server.
fn started(more: &str) -> Option<(TempDir, Server, Store)> {
    let dir = directory();
    let server = redis(dir.path(), more)?;
    let store = Store::open(dir.path(), on_server(&server));
    Some((dir, server, store))
}

fn dumped(store: &Store, ids: &[BlockId]) {
    for ids in ids.chunks(2) {
        store
            .dump(&Device::filled(&store.fixture, ids), ids)
            .unwrap();
    }
}

/// Whether these blocks come back as they were.
fn loads(store: &Store, ids: &[BlockId]) -> bool {
    let device = Device::blank(&store.fixture, ids);
    let loaded = store.load(&device, ids).is_ok();
    assert!(!loaded || ids.iter().all(|&id| device.is_right(id)));
    loaded
}

/// Why the first of these blocks is not dumped now.
fn refusal(store: &Store, ids: &[BlockId]) -> ErrorKind {
    let failed = store
        .dump(&Device::filled(&store.fixture, ids), ids)
        .unwrap_err();
    failed[0].1.kind()
}

fn job() -> ucm_io::IoJob {
    let pool = IoPool::psync(false, &IoOptions::with_workers(2)).unwrap();
    pool.here(LANE_SPACE, MonotonicTime::NEVER)
}

#[test]
fn it_does_what_every_medium_of_its_shape_does() {
    let dir = directory();
    let Some(server) = redis(dir.path(), "") else {
        return;
    };
    let config = RedisConfig {
        addresses: vec![format!("redis://127.0.0.1:{}", server.port)],
        login: Login::default(),
        tls: TlsFiles::default(),
        prefix: "ucm".to_owned(),
        namespace: "0123456789abcdef".repeat(2),
        expire_after: Duration::from_secs(100),
        connections: 2,
        writer: None,
    };
    let clock = SystemClock::shared();
    ucm_testkit::check_values(&|| {
        let values = RedisValues::new(config.clone(), Arc::clone(&clock))?;
        Ok(Box::new(values))
    });
}

#[test]
fn a_record_lives_as_long_as_it_is_used() {
    let Some((_dir, _server, mut store)) = started("") else {
        return;
    };
    dumped(&store, &ids(1));
    let left = |store: &Store| match store.redis(&[b"TTL", store.key(id(0)).as_bytes()]) {
        Reply::Number(seconds) => seconds,
        other => unreachable!("{other:?}"),
    };
    assert!((86_000..=86_400).contains(&left(&store)), "a day");
    assert_eq!(
        store.redis(&[b"EXPIRE", store.key(id(0)).as_bytes(), b"100"]),
        Reply::Number(1)
    );
    let clock = ManualClock::new();
    store = Store::with_clock(
        &store.root.clone(),
        store.fixture.clone(),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    store.engine.touch(&[(id(0), 0)]).unwrap();
    eventually("its use is reported", || left(&store) > 86_000);
}

#[test]
fn what_has_not_the_length_of_a_record_is_a_miss_and_is_replaced() {
    let Some((_dir, _server, store)) = started("") else {
        return;
    };
    let key = store.key(id(0));
    store.store_as(id(0), b"something else");
    assert_eq!(store.engine.lookup(&ids(1)).unwrap(), [false]);
    dumped(&store, &ids(1));
    assert!(loads(&store, &ids(1)));
    store.remove_stored(id(0));
    assert_eq!(
        store.redis(&[b"RPUSH", key.as_bytes(), b"a list"]),
        Reply::Number(1)
    );
    assert!(!loads(&store, &ids(1)));
    dumped(&store, &ids(1));
    assert!(loads(&store, &ids(1)));
}

#[test]
fn a_record_of_a_newer_version_is_a_miss_and_stays() {
    let Some((_dir, _server, store)) = started("") else {
        return;
    };
    dumped(&store, &ids(1));
    let mut newer = store.stored(id(0)).unwrap();
    newer[4] = 2; // the version
    let crc = ucm_core::crc32c(&newer[..60]);
    newer[60..64].copy_from_slice(&crc.to_le_bytes());
    store.store_as(id(0), &newer);
    assert!(!loads(&store, &ids(1)));
    let dumped = store.dump(&Device::filled(&store.fixture, &ids(1)), &ids(1));
    assert_eq!(dumped.unwrap_err()[0].1.kind(), ErrorKind::Foreign);
    assert_eq!(store.stored(id(0)).unwrap(), newer);
}

#[test]
fn a_newer_record_that_was_not_met_yet_is_in_the_way_of_a_dump() {
    let Some((dir, _server, store)) = started("") else {
        return;
    };
    dumped(&store, &ids(1));
    let mut newer = store.stored(id(0)).unwrap();
    newer[4] = 2; // the version
    let crc = ucm_core::crc32c(&newer[..60]);
    newer[60..64].copy_from_slice(&crc.to_le_bytes());
    store.store_as(id(0), &newer);
    let other = Store::open(dir.path(), store.fixture.clone());
    let dumped = other.dump(&Device::filled(&other.fixture, &ids(1)), &ids(1));
    assert_eq!(dumped.unwrap_err()[0].1.kind(), ErrorKind::Foreign);
    assert_eq!(other.engine.lookup(&ids(1)).unwrap(), [false]);
    assert_eq!(store.stored(id(0)).unwrap(), newer);
}

#[test]
fn keys_of_others_are_neither_listed_nor_removed() {
    let Some((_dir, _server, store)) = started("") else {
        return;
    };
    dumped(&store, &ids(3));
    let (key, others) = (
        store.key(id(7)),
        [format!("{}x", store.key(id(7))), "ucm".to_owned()],
    );
    for other in &others {
        store.redis(&[b"SET", other.as_bytes(), b"theirs"]);
    }
    let mut listed: Vec<BlockId> = store
        .backend
        .list(&job())
        .unwrap()
        .iter()
        .map(|one| one.id)
        .collect();
    listed.sort_unstable();
    let mut expected = ids(3);
    expected.sort_unstable();
    assert_eq!(listed, expected);
    let used = store.backend.list(&job()).unwrap()[0].used_ns;
    assert!(used > 1_600_000_000_000_000_000, "Unix time");
    assert_eq!(store.backend.delete(&job(), &[id(0), id(7)]).unwrap(), 1);
    assert_eq!(store.engine.lookup(&ids(3)).unwrap(), [false, true, true]);
    for other in &others {
        assert_eq!(
            store.redis(&[b"GET", other.as_bytes()]),
            Reply::Bytes(b"theirs".to_vec()),
            "{key}"
        );
    }
}

#[test]
fn a_full_server_pauses_dumps_and_nothing_else() {
    let Some((_dir, _server, store)) = started("--maxmemory-policy noeviction") else {
        return;
    };
    dumped(&store, &ids(2));
    let limit = |bytes: &[u8]| store.redis(&[b"CONFIG", b"SET", b"maxmemory", bytes]);
    assert_eq!(
        limit(b"100kb"),
        Reply::Text("OK".into()),
        "less than it has"
    );
    assert_eq!(refusal(&store, &[id(5)]), ErrorKind::NoSpace);
    assert_eq!(
        refusal(&store, &[id(6)]),
        ErrorKind::NoSpace,
        "nothing is sent while that pauses"
    );
    assert!(loads(&store, &ids(2)));
    assert_eq!(store.stat("healthy"), 1);
    limit(b"0");
    eventually("there is room again", || {
        let device = Device::filled(&store.fixture, &[id(5)]);
        store.dump(&device, &[id(5)]).is_ok()
    });
    assert!(loads(&store, &[id(5)]));
}

#[test]
fn a_server_that_is_killed_costs_misses_and_comes_back() {
    let dir = directory();
    let Some(server) = redis(dir.path(), "") else {
        return;
    };
    let fixture = Fixture {
        breaker: BreakerConfig {
            cool_down: Duration::from_millis(50),
            ..BreakerConfig::default()
        },
        ..on_server(&server)
    };
    let store = Store::open(dir.path(), fixture);
    dumped(&store, &ids(2));
    let port = server.port;
    drop(server);
    assert!(!loads(&store, &ids(2)));
    let again = redis_at(port, dir.path(), "").unwrap();
    eventually("it is used again", || {
        let device = Device::filled(&store.fixture, &ids(2));
        store.dump(&device, &ids(2)).is_ok() && loads(&store, &ids(2))
    });
    drop(again);
}

#[test]
fn a_server_that_is_silent_costs_a_deadline_and_no_slot() {
    let dir = directory();
    let Some(server) = redis(dir.path(), "") else {
        return;
    };
    let clock = ManualClock::new();
    let fixture = Fixture {
        slots: 4,
        ..on_server(&server)
    };
    let store = Store::with_clock(
        dir.path(),
        fixture.clone(),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    dumped(&store, &ids(4));
    server.freeze();
    for _ in 0..3 {
        let device = Device::blank(&fixture, &ids(4));
        let load = store
            .engine
            .load(device.rows(&ids(4)), Some(Duration::from_secs(1)))
            .unwrap();
        clock.await_sleepers(1);
        eventually("the load ends", || {
            clock.advance(Duration::from_millis(100));
            load.check(store.engine.clock(), ucm_store::engine::Until::Published)
        });
        assert!(
            load.failures()
                .iter()
                .any(|(_, error)| error.kind() == ErrorKind::Timeout)
        );
        assert!(
            ids(4).iter().all(|&id| device.is_blank(id)),
            "no late write"
        );
        eventually("every slot and every thread comes back", || {
            store.stat("slots_free") == store.stat("slots") && store.stat("workers_stuck") == 0
        });
    }
    server.thaw();
    // What was not answered is not waited for any more: another connection is made.
    eventually("it is used again", || {
        clock.advance(Duration::from_secs(1));
        loads(&store, &ids(4))
    });
}

#[test]
fn lookups_of_known_records_send_no_request() {
    let dir = directory();
    let Some(server) = redis(dir.path(), "") else {
        return;
    };
    let clock = ManualClock::new();
    let store = Store::with_clock(
        dir.path(),
        on_server(&server),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    dumped(&store, &ids(4));
    server.freeze();
    assert_eq!(store.engine.lookup(&ids(4)).unwrap(), [true; 4]);
    server.thaw();
    (0..4).for_each(|n| store.remove_stored(id(n)));
    assert_eq!(
        store.engine.lookup(&ids(4)).unwrap(),
        [true; 4],
        "it may cost a miss"
    );
    assert!(!loads(&store, &ids(1)));
    assert_eq!(store.engine.lookup(&ids(2)).unwrap(), [false, true]);
    clock.advance(Duration::from_secs(31));
    assert_eq!(store.engine.lookup(&ids(2)).unwrap(), [false; 2]);
}

#[test]
fn a_lookup_over_a_silent_server_ends_at_its_deadline() {
    let dir = directory();
    let Some(server) = redis(dir.path(), "") else {
        return;
    };
    let clock = ManualClock::new();
    let lookup = Duration::from_millis(50);
    let fixture = Fixture {
        deadlines: Deadlines {
            lookup,
            ..Deadlines::default()
        },
        ..on_server(&server)
    };
    let writer = Store::open(dir.path(), on_server(&server));
    let store = Store::with_clock(dir.path(), fixture, Arc::clone(&clock) as Arc<dyn Clock>);
    dumped(&writer, &ids(4));
    server.freeze();
    let began = clock.now();
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| store.engine.lookup(&ids(4)).unwrap());
        eventually("it is late", || {
            clock.advance(Duration::from_millis(10));
            asking.is_finished()
        });
        assert_eq!(asking.join().unwrap(), [false; 4]);
    });
    assert!(
        clock.now().since(began) >= lookup,
        "it waited as long as it may"
    );
    assert_eq!(store.missed("lookup_late"), 4);
    server.thaw();
    eventually("they are found", || {
        clock.advance(Duration::from_secs(1));
        store.engine.lookup(&ids(4)).unwrap() == [true; 4]
    });
}

#[test]
fn two_stores_share_a_server_and_a_password_is_never_logged() {
    let dir = directory();
    let Some(server) = redis(dir.path(), "--requirepass geheim") else {
        return;
    };
    let address = |login: &str| format!("redis://{login}127.0.0.1:{}", server.port);
    let right = Store::open(dir.path(), at(&address(":geheim@")));
    dumped(&right, &ids(2));
    let apart = Fixture {
        options: vec![
            ("storage_backends", json!([address("")])),
            ("redis_password", json!("geheim")),
        ],
        ..at("")
    };
    let apart = Store::open(dir.path(), apart);
    assert!(loads(&apart, &ids(2)));
    let wrong = Store::try_open(dir.path(), at(&address(":falsch@"))).unwrap();
    assert_eq!(wrong.engine.lookup(&ids(2)).unwrap(), [false; 2]);
    let said = wrong.said().join("\n");
    assert!(said.contains("redis_password"), "{said}");
    for text in [said, right.said().join("\n"), apart.said().join("\n")] {
        assert!(
            !text.contains("geheim") && !text.contains("falsch"),
            "{text}"
        );
    }
}

/// Certificates of an authority of this test: of the authority, of a server here, and its key.
fn certificates(dir: &Path) -> bool {
    if !has_program("openssl") {
        return false;
    }
    let script = "set -e
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj \
        /CN=authority \
            -keyout ca.key -out ca.pem
        openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost -keyout \
        server.key -out server.csr
        printf 'subjectAltName=DNS:localhost,IP:127.0.0.1' > names
        openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile \
        names -out server.pem";
    let made = Command::new("sh")
        .args(["-c", script])
        .current_dir(dir)
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    true
}

#[test]
fn a_server_is_believed_by_its_certificate() {
    let dir = directory();
    if !certificates(dir.path()) {
        return;
    }
    let port = free_port();
    let tls = format!(
        "--tls-port {port} --tls-cert-file server.pem --tls-key-file server.key --tls-ca-cert-file \
         ca.pem \
         --tls-auth-clients no"
    );
    let Some(_server) = redis(dir.path(), &tls) else {
        return;
    };
    eventually("it listens with TLS too", || {
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    let address = format!("rediss://localhost:{port}");
    let trusting = Fixture {
        options: vec![
            ("storage_backends", json!([address])),
            ("redis_tls_ca", json!(dir.path().join("ca.pem"))),
        ],
        ..at("")
    };
    let store = Store::open(dir.path(), trusting);
    dumped(&store, &ids(3));
    assert!(loads(&store, &ids(3)));
    let doubting = Store::try_open(dir.path(), at(&address)).unwrap();
    assert_eq!(
        doubting.stat("healthy"),
        0,
        "the authority of this test is not trusted"
    );
}

/// Three nodes with a third of the slots each.
fn cluster(dir: &Path) -> Option<Vec<Server>> {
    let node = |n: usize| {
        let own = dir.join(n.to_string());
        std::fs::create_dir(&own).unwrap();
        // The bus has its own port, and the usual one, 10000 above, may be out of range. On a busy
        // machine a node may say nothing for seconds; the others must not take it for lost.
        let bus = free_port();
        redis(
            &own,
            &format!(
                "--cluster-enabled yes --cluster-node-timeout 60000 \
                      --cluster-require-full-coverage no --cluster-port {bus}"
            ),
        )
        .map(|server| (server, bus))
    };
    let nodes: Vec<(Server, u16)> = (0..3).map(node).collect::<Option<_>>()?;
    let at = |n: usize| format!("127.0.0.1:{}", nodes[n].0.port);
    for (n, (first, last)) in [("0", "5460"), ("5461", "10922"), ("10923", "16383")]
        .into_iter()
        .enumerate()
    {
        let words = [
            &b"CLUSTER"[..],
            b"ADDSLOTSRANGE",
            first.as_bytes(),
            last.as_bytes(),
        ];
        assert_eq!(ask(&at(n), &words), Reply::Text("OK".into()));
        let epoch = (n + 1).to_string();
        ask(&at(n), &[b"CLUSTER", b"SET-CONFIG-EPOCH", epoch.as_bytes()]);
    }
    for (node, bus) in &nodes[1..] {
        let (port, bus) = (node.port.to_string(), bus.to_string());
        let words = [
            &b"CLUSTER"[..],
            b"MEET",
            b"127.0.0.1",
            port.as_bytes(),
            bus.as_bytes(),
        ];
        assert_eq!(ask(&at(0), &words), Reply::Text("OK".into()));
    }
    eventually("the cluster stands", || {
        (0..3).all(|n| match ask(&at(n), &[b"CLUSTER", b"INFO"]) {
            Reply::Bytes(info) => {
                let info = String::from_utf8(info).unwrap();
                // A node that is only being greeted is known too, and its slots are not.
                ["state:ok", "known_nodes:3", "slots_ok:16384"]
                    .iter()
                    .all(|so| info.contains(&format!("cluster_{so}\r\n")))
            }
            other => unreachable!("{other:?}"),
        })
    });
    Some(nodes.into_iter().map(|(server, _)| server).collect())
}

#[test]
fn the_nodes_of_a_cluster_are_one_store() {
    let dir = directory();
    let Some(nodes) = cluster(dir.path()) else {
        return;
    };
    let store = Store::open(dir.path(), on_server(&nodes[1]));
    let all = ids(40);
    dumped(&store, &all);
    assert!(loads(&store, &all));
    assert_eq!(store.engine.lookup(&all).unwrap(), vec![true; 40]);
    let keys = |node: &Server| match ask(&format!("127.0.0.1:{}", node.port), &[b"DBSIZE"]) {
        Reply::Number(keys) => keys,
        other => unreachable!("{other:?}"),
    };
    assert!(
        nodes.iter().all(|node| keys(node) > 0),
        "every node has its share"
    );
    assert_eq!(store.backend.list(&job()).unwrap().len(), 40);
    assert_eq!(store.backend.delete(&job(), &all[..3]).unwrap(), 3);
    let other = Store::open(dir.path(), on_server(&nodes[2]));
    assert_eq!(
        other.engine.lookup(&all[..4]).unwrap(),
        [false, false, false, true]
    );
}

#[test]
fn a_lost_node_loses_its_own_blocks_alone() {
    let dir = directory();
    let Some(mut nodes) = cluster(dir.path()) else {
        return;
    };
    let all = ids(40);
    let store = Store::open(dir.path(), on_server(&nodes[1]));
    dumped(&store, &all);
    drop(store);
    drop(nodes.remove(0));
    // One address takes connections and never answers.
    let silent = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let addresses = [
        silent.local_addr().unwrap().to_string(),
        format!("127.0.0.1:{}", nodes[0].port),
        format!("127.0.0.1:{}", nodes[1].port),
    ]
    .map(|address| format!("redis://{address}"));
    let fixture = Fixture {
        options: vec![("storage_backends", json!(addresses))],
        deadlines: Deadlines {
            // the others answer in it; for the lost one it waits to the end
            lookup: Duration::from_secs(4),
            ..Deadlines::default()
        },
        ..on_server(&nodes[0])
    };
    let anew = Store::open(dir.path(), fixture);
    assert_eq!(anew.stat("healthy"), 1, "{}", anew.said().join("\n"));
    let found = || -> Vec<BlockId> {
        let there = anew.engine.lookup(&all).unwrap();
        let found = all.iter().zip(there).filter(|(_, there)| *there);
        found.map(|(id, _)| *id).collect()
    };
    let mut those = Vec::new();
    eventually("the other nodes answer", || {
        those = found();
        those.len() >= 10
    });
    assert!(those.len() < 40, "{} of 40", those.len());
    eventually("and give what they have", || loads(&anew, &those));
}

/// A server that answers a question for a record with a value of 8 GiB, announced, and sends that
/// until the connection is closed or [`FLOOD`] bytes are sent.
struct Liar {
    address: String,
    is_cluster: bool,
    /// Questions for records.
    asked: AtomicU64,
    /// Bytes of such values that were sent.
    sent: AtomicU64,
    /// Connections that were closed.
    closed: AtomicU64,
    /// Connections that were closed after a question for a record.
    closed_asked: AtomicU64,
    /// It announces the value and then sends nothing.
    is_silent: AtomicBool,
    /// It says that it has no record.
    is_honest: AtomicBool,
    /// Its listings stay where they are.
    is_stuck: AtomicBool,
    /// Steps of listings.
    listed: AtomicU64,
    /// The nodes of its cluster.
    nodes: Mutex<Vec<String>>,
}

/// What a liar sends at most.
const FLOOD: u64 = 512 << 20;
/// What the system may hold of it, in the buffers of a socket, beside what a store takes.
const BUFFERS: u64 = 48 << 20;

impl Liar {
    fn start(is_cluster: bool) -> Arc<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let liar = Arc::new(Self {
            nodes: Mutex::new(vec![address.clone()]),
            address,
            is_cluster,
            asked: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            closed: AtomicU64::new(0),
            closed_asked: AtomicU64::new(0),
            is_silent: AtomicBool::new(false),
            is_honest: AtomicBool::new(false),
            is_stuck: AtomicBool::new(false),
            listed: AtomicU64::new(0),
        });
        let accepting = Arc::clone(&liar);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let liar = Arc::clone(&accepting);
                std::thread::spawn(move || {
                    let mut asked = false;
                    let _ = liar.serve(stream.unwrap(), &mut asked);
                    liar.closed_asked.fetch_add(asked.into(), Ordering::Relaxed);
                    liar.closed.fetch_add(1, Ordering::Relaxed);
                });
            }
        });
        liar
    }

    fn fixture(&self) -> Fixture {
        Fixture {
            breaker: BreakerConfig::default(),
            ..at(&format!("redis://{}", self.address))
        }
    }

    fn serve(&self, stream: TcpStream, asked: &mut bool) -> std::io::Result<()> {
        let mut questions = BufReader::new(stream.try_clone()?);
        let mut answers = stream;
        loop {
            let words = question_from(&mut questions)?;
            let name = words[0].to_ascii_uppercase();
            let of_record = words.get(1).is_some_and(|key| !key.contains(":manifest:"));
            let answer = match name.as_str() {
                "INFO" => {
                    let text = format!(
                        "redis_version:7.0.15\r\nrole:master\r\ncluster_enabled:{}\r\n",
                        u8::from(self.is_cluster)
                    );
                    format!("${}\r\n{text}\r\n", text.len())
                }
                "CLUSTER" => {
                    let nodes = self.nodes.lock();
                    let share = 16384 / nodes.len();
                    let range = |(n, node): (usize, &String)| {
                        let (host, port) = node.split_once(':').unwrap();
                        let (first, last) = (n * share, (n + 1) * share - 1);
                        format!(
                            "*3\r\n:{first}\r\n:{last}\r\n*3\r\n$9\r\n{host}\r\n:{port}\r\n$2\r\nid\r\n"
                        )
                    };
                    let ranges: String = nodes.iter().enumerate().map(range).collect();
                    format!("*{}\r\n{ranges}", nodes.len())
                }
                "SCAN" => {
                    let step = 1 + self.listed.fetch_add(1, Ordering::Relaxed);
                    let next = match self.is_stuck.load(Ordering::Relaxed) {
                        _ if step == 1000 => 0,
                        true => 1,
                        false => step,
                    };
                    let (next, key) = (next.to_string(), "k".repeat(1_000_000));
                    format!(
                        "*2\r\n${}\r\n{next}\r\n*1\r\n${}\r\n{key}\r\n",
                        next.len(),
                        key.len()
                    )
                }
                "GET" | "GETRANGE" if of_record => {
                    *asked = true;
                    if !self.is_honest.load(Ordering::Relaxed) {
                        self.flood(&mut answers)?;
                        continue;
                    }
                    self.asked.fetch_add(1, Ordering::Relaxed);
                    "$0\r\n\r\n".to_owned()
                }
                "GET" | "GETRANGE" => "$0\r\n\r\n".to_owned(),
                _ => "+OK\r\n".to_owned(),
            };
            answers.write_all(answer.as_bytes())?;
        }
    }

    fn flood(&self, answers: &mut TcpStream) -> std::io::Result<()> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        answers.write_all(b"$8589934592\r\n")?;
        if self.is_silent.load(Ordering::Relaxed) {
            return Ok(());
        }
        let piece = vec![0; 1 << 20];
        while self.sent.load(Ordering::Relaxed) < FLOOD {
            let sent = answers.write(&piece)?;
            self.sent.fetch_add(sent as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// The words of one question.
fn question_from(stream: &mut impl BufRead) -> std::io::Result<Vec<String>> {
    let number = |stream: &mut dyn BufRead| -> std::io::Result<usize> {
        let mut line = String::new();
        match stream.read_line(&mut line)? {
            0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line.trim_end()[1..].parse::<usize>().unwrap()),
        }
    };
    let words = number(stream)?;
    let mut question = Vec::new();
    for _ in 0..words {
        let mut word = vec![0; number(stream)? + 2];
        stream.read_exact(&mut word)?;
        word.truncate(word.len() - 2);
        question.push(String::from_utf8_lossy(&word).into_owned());
    }
    Ok(question)
}

#[test]
fn a_missing_server_is_a_skip_and_where_servers_are_required_a_failure() {
    let missing =
        |required| std::panic::catch_unwind(|| has("ucm-no-such-server", "make servers", required));
    assert!(!missing(false).unwrap());
    assert!(missing(true).is_err());
}

#[test]
fn a_length_that_a_server_announces_is_not_believed() {
    for is_cluster in [false, true] {
        let (dir, liar) = (directory(), Liar::start(is_cluster));
        let store = Store::open(dir.path(), liar.fixture());
        let device = Device::blank(&store.fixture, &ids(1));
        let load = store
            .engine
            .load(device.rows(&ids(1)), Some(Duration::from_secs(20)))
            .unwrap();
        eventually("the load ends", || {
            load.check(store.engine.clock(), ucm_store::engine::Until::Published)
        });
        assert!(device.is_blank(id(0)));
        let failures = load.failures();
        let said = failures[0].1.to_string();
        assert!(said.contains("more than was asked for"), "{said}");
        eventually("the connection is closed", || {
            liar.closed.load(Ordering::Relaxed) > 1 // one is from the first look
        });
        let sent = liar.sent.load(Ordering::Relaxed);
        assert!(sent < BUFFERS, "{sent} bytes, cluster: {is_cluster}");
        for n in 1..4 {
            assert!(!loads(&store, &[id(n)]));
        }
        assert_eq!(store.stat("healthy"), 0, "the store says that it is sick");
    }
}

#[test]
fn a_connection_is_closed_once_a_question_on_it_is_late() {
    let (dir, liar) = (directory(), Liar::start(false));
    liar.is_silent.store(true, Ordering::Relaxed);
    let clock = ManualClock::new();
    let store = Store::with_clock(
        dir.path(),
        liar.fixture(),
        Arc::clone(&clock) as Arc<dyn Clock>,
    );
    eventually("only connections of the store are open", || {
        liar.closed.load(Ordering::Relaxed) > 0
    });
    let closed = liar.closed.load(Ordering::Relaxed);
    let device = Device::blank(&store.fixture, &ids(1));
    let load = store
        .engine
        .load(device.rows(&ids(1)), Some(Duration::from_millis(100)))
        .unwrap();
    eventually("the server gets a request", || {
        liar.asked.load(Ordering::Relaxed) > 0
    });
    eventually("the load ends", || {
        clock.advance(Duration::from_millis(10));
        load.check(store.engine.clock(), ucm_store::engine::Until::Published)
    });
    assert_eq!(load.failures()[0].1.kind(), ErrorKind::Timeout);
    eventually("the connection is closed", || {
        liar.closed.load(Ordering::Relaxed) > closed
    });
}

#[test]
fn a_value_that_is_no_record_is_not_sent_whole() {
    let Some((_dir, _server, store)) = started("") else {
        return;
    };
    let key = store.key(id(0));
    let foreign = 64 << 20;
    let end = (foreign - 1).to_string();
    assert_eq!(
        store.redis(&[b"SETRANGE", key.as_bytes(), end.as_bytes(), b"x"]),
        Reply::Number(foreign)
    );
    let sent = || match store.redis(&[b"INFO", b"stats"]) {
        Reply::Bytes(info) => {
            let info = String::from_utf8(info).unwrap();
            let sent = info
                .lines()
                .find_map(|line| line.strip_prefix("total_net_output_bytes:"));
            sent.unwrap().parse::<i64>().unwrap()
        }
        other => unreachable!("{other:?}"),
    };
    let before = sent();
    assert!(!loads(&store, &ids(1)));
    assert!(sent() - before < 1 << 20, "{} bytes", sent() - before);
    dumped(&store, &ids(1));
    assert!(loads(&store, &ids(1)));
}

#[test]
fn a_primary_that_is_demoted_is_read_and_no_block_is_tried_there() {
    let dir = directory();
    let Some(server) = redis(dir.path(), "") else {
        return;
    };
    let clock = ManualClock::new();
    let fixture = Fixture {
        breaker: BreakerConfig::default(),
        ..on_server(&server)
    };
    let store = Store::with_clock(dir.path(), fixture, Arc::clone(&clock) as Arc<dyn Clock>);
    dumped(&store, &ids(2));
    store.said();
    let ok = Reply::Text("OK".into());
    assert_eq!(store.redis(&[b"REPLICAOF", b"127.0.0.1", b"1"]), ok);
    let writes = || match store.redis(&[b"INFO", b"commandstats"]) {
        Reply::Bytes(info) => {
            let info = String::from_utf8(info).unwrap();
            let line = info.lines().find(|line| line.starts_with("cmdstat_set:"));
            let rejected = line.and_then(|line| line.split("rejected_calls=").nth(1));
            rejected.map_or(0, |rest| {
                rest.split(',').next().unwrap().parse::<u64>().unwrap()
            })
        }
        other => unreachable!("{other:?}"),
    };
    for n in 10..20 {
        let device = Device::filled(&store.fixture, &[id(n)]);
        assert!(store.dump(&device, &[id(n)]).is_err());
        assert!(loads(&store, &ids(2)), "what it has is read");
    }
    assert_eq!(
        writes(),
        1,
        "the first write says it, and the others are not tried"
    );
    assert_eq!((store.stat("healthy"), store.tier(0, "writable")), (1, 0));
    let said = store.said();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(
        said[0].contains("redis takes no blocks for now") && said[0].contains("replica"),
        "{said:?}"
    );
    clock.advance(Duration::from_secs(10));
    let device = Device::filled(&store.fixture, &[id(20)]);
    assert!(store.dump(&device, &[id(20)]).is_err());
    assert_eq!(writes(), 2, "one is let through after a while");
    assert!(store.said().is_empty(), "it is logged once");
    assert_eq!(store.redis(&[b"REPLICAOF", b"NO", b"ONE"]), ok);
    clock.advance(Duration::from_secs(10));
    dumped(&store, &[id(20)]);
    assert!(loads(&store, &[id(20)]));
    assert!(store.said()[0].contains("redis takes blocks again"));
    assert_eq!(store.tier(0, "writable"), 1);
}

#[test]
fn below_memory_a_demoted_primary_refuses_dumps_before_they_are_copied() {
    let dir = directory();
    let Some(server) = redis(dir.path(), "") else {
        return;
    };
    let clock = ManualClock::new();
    let fixture = Fixture {
        breaker: BreakerConfig::default(),
        above: with_memory().above,
        ..on_server(&server)
    };
    let store = Store::with_clock(dir.path(), fixture, Arc::clone(&clock) as Arc<dyn Clock>);
    dumped(&store, &ids(2));
    let ok = Reply::Text("OK".into());
    assert_eq!(store.redis(&[b"REPLICAOF", b"127.0.0.1", b"1"]), ok);
    assert_eq!(refusal(&store, &[id(10)]), ErrorKind::Unhealthy);
    let refused_at_once = |n| {
        let device = Device::filled(&store.fixture, &[id(n)]);
        let refused = store.engine.dump(device.rows(&[id(n)])).err();
        refused.is_some_and(|error| error.kind() == ErrorKind::Unhealthy)
    };
    let kept = store.map().kept();
    for n in 11..20 {
        assert!(refused_at_once(n), "block {n}");
        assert!(loads(&store, &ids(2)), "what it has is read");
    }
    assert_eq!(store.map().kept(), kept, "nothing was copied into memory");
    // After the cool-down one dump is tried, and those behind it are refused again.
    clock.advance(Duration::from_secs(10));
    let device = Device::filled(&store.fixture, &[id(20)]);
    let tried = store.engine.dump(device.rows(&[id(20)])).unwrap();
    assert!(store.outcome(&tried).is_err(), "the server refuses it");
    assert_eq!(store.map().kept(), kept + 1);
    assert!(refused_at_once(21));
    assert_eq!(store.redis(&[b"REPLICAOF", b"NO", b"ONE"]), ok);
    clock.advance(Duration::from_secs(10));
    dumped(&store, &[id(22)]);
    assert_eq!(store.tier(1, "writable"), 1);
}

#[test]
fn a_server_that_comes_back_as_a_replica_is_said_to_take_no_blocks() {
    let dir = directory();
    let Some(server) = redis(dir.path(), "") else {
        return;
    };
    let clock = ManualClock::new();
    let fixture = Fixture {
        breaker: BreakerConfig::default(),
        ..on_server(&server)
    };
    let store = Store::with_clock(dir.path(), fixture, Arc::clone(&clock) as Arc<dyn Clock>);
    dumped(&store, &ids(1));
    let port = server.port;
    drop(server);
    let dump = |n| {
        let device = Device::filled(&store.fixture, &[id(n)]);
        store.dump(&device, &[id(n)])
    };
    eventually("it is switched off", || {
        dump(20).is_err() && store.stat("healthy") == 0
    });
    let _again = redis_at(port, dir.path(), "--replicaof 127.0.0.1 1").unwrap();
    eventually("it answers", || {
        clock.advance(Duration::from_secs(10));
        store.engine.lookup(&[id(9)]).is_ok() && store.stat("healthy") == 1
    });
    store.said();
    clock.advance(Duration::from_secs(10));
    assert!(dump(20).is_err());
    let said = store.said();
    assert!(
        said.iter()
            .any(|text| text.contains("redis takes no blocks for now")),
        "{said:?}"
    );
    clock.advance(Duration::from_secs(10));
    assert!(dump(20).is_err());
    assert!(store.said().is_empty(), "it is logged once");
}

#[test]
fn a_user_that_may_not_write_reads_what_is_there() {
    let Some((_dir, _server, store)) = started("") else {
        return;
    };
    dumped(&store, &ids(2));
    let ok = Reply::Text("OK".into());
    assert_eq!(store.redis(&[b"ACL", b"SETUSER", b"default", b"-set"]), ok);
    for n in 10..20 {
        assert_eq!(refusal(&store, &[id(n)]), ErrorKind::Unhealthy);
        assert!(loads(&store, &ids(2)), "what it has is read");
    }
    assert_eq!((store.stat("healthy"), store.tier(0, "writable")), (1, 0));
}

#[test]
fn a_node_that_does_not_end_its_answers_loses_its_connection_and_the_others_keep_theirs() {
    let (dir, liar, honest) = (directory(), Liar::start(true), Liar::start(true));
    liar.is_silent.store(true, Ordering::Relaxed);
    honest.is_honest.store(true, Ordering::Relaxed);
    for node in [&liar, &honest] {
        *node.nodes.lock() = vec![liar.address.clone(), honest.address.clone()];
    }
    let mut fixture = Fixture {
        tensors: vec![64 << 20], // of which four are on the way at once
        layers: 1,
        layers_per_shard: 1,
        slots: 4,
        ..at(&format!("redis://{}", liar.address))
    };
    fixture.breaker.threshold = u32::MAX;
    fixture.options.push(("redis_connections", json!(1)));
    let store = Store::open(dir.path(), fixture);
    let closed = |node: &Liar| node.closed_asked.load(Ordering::Relaxed);
    let load = |block: BlockId, within: Duration| {
        let device = Device::blank(&store.fixture, &[block]);
        let rows = device.rows(&[block]);
        let load = store.engine.load(rows, Some(within)).unwrap();
        store.outcome(&load).unwrap_err()[0].1.kind()
    };
    // A block of the honest node: it is answered, while one of the liar ends with its deadline.
    let mut blocks = (0..=u8::MAX).map(id);
    let answered = blocks
        .by_ref()
        .find(|&block| load(block, Duration::from_secs(2)) != ErrorKind::Timeout)
        .unwrap();
    eventually("the connection of the liar is closed", || {
        load(blocks.next().unwrap(), Duration::from_millis(100));
        // The other node answers, so the client of the cluster is not made anew.
        load(answered, Duration::from_secs(60));
        closed(&liar) > 0
    });
    assert!(honest.asked.load(Ordering::Relaxed) > 0);
    assert_eq!(closed(&honest), 0);
}

#[test]
fn a_listing_without_end_is_an_error() {
    for is_stuck in [false, true] {
        let (dir, liar) = (directory(), Liar::start(false));
        liar.is_stuck.store(is_stuck, Ordering::Relaxed);
        let store = Store::open(dir.path(), liar.fixture());
        let listed = store.backend.list(&job());
        assert_eq!(listed.err().unwrap().kind(), ErrorKind::Io);
        let steps = liar.listed.load(Ordering::Relaxed);
        assert!(steps < 300, "{steps} steps");
    }
}
