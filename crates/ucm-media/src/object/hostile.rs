//! Servers that lie, and what the client of a bucket takes from them: bytes are counted where they
//! are sent.

use std::fs::Permissions;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;

use object_store::path::Path;
use tempfile::TempDir;
use ucm_core::{ErrorKind, Result};
use ucm_infra::{MonotonicTime, Runtime, SystemClock};

use super::bucket::{Bucket, BucketConfig};

/// Bytes that lie in the buffers of a connection's two ends, at most.
const BUFFERS: u64 = 16 << 20;
/// Bytes after which a server that never ends gives up.
const ENDLESS: u64 = 160 << 20;
/// A word that goes to the configured server alone.
const SECRET: &str = "geheim";

/// Answers one request, whose head it is given.
type Answer = Box<dyn Fn(&str, &mut Sink) -> io::Result<()> + Send + Sync>;

/// A server of one answer a connection.
pub(super) struct Server {
    pub(super) port: u16,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    sent: AtomicU64,
    heads: Mutex<Vec<String>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Counts what it sends.
pub(super) struct Sink<'a> {
    client: TcpStream,
    sent: &'a AtomicU64,
}

impl Write for Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = self.client.write(bytes)?;
        self.sent.fetch_add(len as u64, Ordering::AcqRel);
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Server {
    pub(super) fn start(answer: Answer) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (state, answer) = (Arc::new(State::default()), Arc::new(answer));
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (state, answer) = (Arc::clone(&shared), Arc::clone(&answer));
                let answering = std::thread::spawn(move || {
                    let _ = answer_one(&state, client, &answer); // the client may have ended it
                });
                shared.threads.lock().unwrap().push(answering);
            }
        });
        Self { port, state }
    }

    /// The heads of its requests, once every one of them was answered.
    fn heads(&self) -> Vec<String> {
        loop {
            let Some(thread) = self.state.threads.lock().unwrap().pop() else {
                return self.state.heads.lock().unwrap().clone();
            };
            thread.join().unwrap();
        }
    }

    /// Bytes that it has sent, once every request was answered.
    pub(super) fn sent(&self) -> u64 {
        self.heads();
        self.state.sent.load(Ordering::Acquire)
    }
}

fn answer_one(state: &State, mut client: TcpStream, answer: &Answer) -> io::Result<()> {
    let (mut request, mut buffer) = (Vec::new(), [0; 1 << 14]);
    let end = loop {
        let len = client.read(&mut buffer)?;
        request.extend_from_slice(&buffer[..len]);
        if let Some(end) = request.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break end;
        }
        if len == 0 {
            return Ok(());
        }
    };
    let head = String::from_utf8_lossy(&request[..end]).to_lowercase();
    let lines = head.lines();
    let body = lines
        .filter_map(|line| line.strip_prefix("content-length:"))
        .next();
    let body: usize = body.map_or(0, |len| len.trim().parse().unwrap());
    while request.len() < end + 4 + body {
        let len = client.read(&mut buffer)?;
        request.extend_from_slice(&buffer[..len]);
    }
    state.heads.lock().unwrap().push(head.clone());
    let sent = &state.sent;
    answer(&head, &mut Sink { client, sent })
}

/// An answer of this status, with these lines in its head, that is as long as it says.
pub(super) fn whole(status: &str, lines: &str, body: &str) -> Answer {
    let len = body.len();
    let text = format!(
        "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len}\r\n{lines}\r\n{body}"
    );
    Box::new(move |_, sink| sink.write_all(text.as_bytes()))
}

/// An answer that goes on and on.
pub(super) fn endless(status: &'static str, lines: &'static str, begins: &'static str) -> Answer {
    Box::new(move |_, sink| {
        write!(
            sink,
            "HTTP/1.1 {status}\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n{lines}\r\n"
        )?;
        if !begins.is_empty() {
            write!(sink, "{:x}\r\n{begins}\r\n", begins.len())?;
        }
        let piece = [b"10000\r\n".to_vec(), vec![b' '; 1 << 16], b"\r\n".to_vec()].concat();
        for _ in 0..ENDLESS >> 16 {
            sink.write_all(&piece)?;
        }
        sink.write_all(b"0\r\n\r\n")
    })
}

/// A page of a listing.
fn page(names: &[String], token: Option<&str>) -> String {
    let one = |name: &String| {
        format!(
            "<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>\
             <ETag>\"x\"</ETag><Size>1</Size></Contents>"
        )
    };
    let names: String = names.iter().map(one).collect();
    let token =
        token.map(|token| format!("<NextContinuationToken>{token}</NextContinuationToken>"));
    let (more, token) = (token.is_some(), token.unwrap_or_default());
    format!("<ListBucketResult><IsTruncated>{more}</IsTruncated>{names}{token}</ListBucketResult>")
}

/// Answers the n-th request for a page, counted from 0, and nothing any more after `most` of them.
fn pages(most: u64, of: impl Fn(u64) -> String + Send + Sync + 'static) -> Answer {
    let asked = AtomicU64::new(0);
    Box::new(move |head, sink| {
        let number = asked.fetch_add(1, Ordering::AcqRel);
        let answer = match number < most {
            true => whole("200 OK", "", &of(number)),
            false => whole("403 Forbidden", "", ""),
        };
        answer(head, sink)
    })
}

/// A client of the server at this port, with keys that are secret.
fn bucket(port: u16) -> (TempDir, Bucket) {
    bucket_of("bucket", port)
}

/// The same of a bucket of this name.
fn bucket_of(name: &str, port: u16) -> (TempDir, Bucket) {
    let dir = TempDir::new().unwrap();
    let keys = dir.path().join("keys");
    let text = format!(
        "[default]\naws_access_key_id = {SECRET}\naws_secret_access_key = {SECRET}\n\
         aws_session_token = {SECRET}\n"
    );
    std::fs::write(&keys, text).unwrap();
    std::fs::set_permissions(&keys, Permissions::from_mode(0o600)).unwrap();
    let place = BucketConfig {
        url: format!("s3://{name}/p"),
        endpoint: Some(format!("http://127.0.0.1:{port}")),
        region: Some("us-east-1".to_owned()),
        credentials: Some(keys),
        ca: None,
        retries: 1,
        connections: 4,
    };
    (dir, Bucket::new(&place).unwrap())
}

pub(super) fn wait<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    // One for all calls of a test: an answer may be read after the call that asked for it.
    static RUNTIME: OnceLock<Arc<Runtime>> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| Runtime::of_this_process().unwrap());
    runtime.wait(&SystemClock, MonotonicTime::NEVER, work)
}

/// What a caller does, and how that ends.
type Call = fn(&Bucket, &Path) -> Result<()>;

const DOCUMENT: u64 = 1 << 20;
const GET: Call = |bucket, path| wait(bucket.get(path, DOCUMENT)).map(|_| ());
const RANGE: Call = |bucket, path| wait(bucket.range(path, 0..4096)).map(|_| ());
const LIST: Call = |bucket, path| wait(bucket.list(path)).map(|_| ());
const DELETE: Call = |bucket, path| wait(bucket.delete(path));

#[test]
fn a_length_that_is_announced_reserves_nothing() {
    let announced = 1_u64 << 40;
    for call in [LIST, GET, DELETE] {
        let server = Server::start(Box::new(move |_, sink| {
            write!(
                sink,
                "HTTP/1.1 200 OK\r\nETag: \"x\"\r\nContent-Length: \
                 {announced}\r\n\r\n<ListBucketResult>"
            )?;
            // In many pieces, and not whole.
            (0..16).try_for_each(|_| sink.write_all(&[b' '; 1 << 14]))
        }));
        let (_keys, bucket) = bucket(server.port);
        let failed = call(&bucket, &Path::from("p/a")).unwrap_err().to_string();
        assert!(!failed.contains('\n') && failed.len() < 2000, "{failed}");
    }
}

#[test]
fn no_more_is_taken_of_an_answer_than_was_asked_for() {
    let object = "ETag: \"x\"\r\nContent-Length: 4096\r\nContent-Range: bytes 0-4095/9999\r\n";
    let cases = [
        (GET, endless("200 OK", object, ""), DOCUMENT),
        (RANGE, endless("206 Partial Content", object, ""), 4096),
        (LIST, endless("200 OK", "", "<ListBucketResult>"), 1 << 20),
        (GET, endless("404 Not Found", "", "no"), 64 << 10),
        (LIST, endless("403 Forbidden", "", "no"), 64 << 10),
        (DELETE, endless("200 OK", "", "<DeleteResult>"), 64 << 10),
    ];
    for (number, (call, answer, most)) in cases.into_iter().enumerate() {
        let server = Server::start(answer);
        let (_keys, bucket) = bucket(server.port);
        let ended = call(&bucket, &Path::from("p/a"));
        let sent = server.sent();
        assert!(
            sent < most + BUFFERS,
            "case {number}: {sent} bytes, {ended:?}"
        );
        assert_eq!(server.heads().len(), 1, "case {number} is asked once");
        let is_absent = number == 3; // a status says what it says, however long the rest is
        assert_eq!(ended.is_ok(), is_absent, "case {number}: {ended:?}");
    }
}

#[test]
fn a_listing_that_brings_nothing_new_ends() {
    let names = |numbers: std::ops::Range<u64>| {
        let name = |number: u64| format!("p/{number:04}");
        numbers.map(name).collect::<Vec<String>>()
    };
    let most = 60;
    let cases = [
        pages(most, move |_| page(&names(0..2), Some("same"))),
        pages(most, move |n| page(&names(n..n + 1), Some("same"))),
        pages(most, move |n| page(&names(0..2), Some(&format!("{n}")))),
        pages(most, move |n| page(&[], Some(&format!("{n}")))),
        pages(most, move |_| page(&names(0..2), Some(""))),
        pages(most, move |n| {
            page(&names(n..n + 1), Some(&"x".repeat(100_000 + n as usize)))
        }),
    ];
    for (number, answer) in cases.into_iter().enumerate() {
        let server = Server::start(answer);
        let (_keys, bucket) = bucket(server.port);
        let ended = wait(bucket.list(&Path::from("p")));
        let asked = server.heads().len();
        assert!(asked <= 12, "case {number}: {asked} pages");
        let failed = ended.map(|found| found.len()).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::Io, "case {number}: {failed}");
        assert!(
            failed.to_string().contains("nothing new"),
            "case {number}: {failed}"
        );
    }
    // Empty pages between others are no end.
    let honest = pages(most, move |n| match n {
        0..3 => page(&names(n..n + 1), Some(&format!("{n}"))),
        3..9 => page(&[], Some(&format!("{n}"))),
        _ => page(&names(9..12), None),
    });
    let server = Server::start(honest);
    let (_keys, bucket) = bucket(server.port);
    let found = wait(bucket.list(&Path::from("p"))).unwrap();
    assert_eq!(found.len(), 6);
}

#[test]
fn every_page_of_a_listing_has_a_limit() {
    let name = |number: u64| vec![format!("p/{number:04}")];
    let server = Server::start(pages(3, move |n| match n {
        0..2 => page(&name(n), Some(&format!("{n}"))),
        _ => page(&name(n), None),
    }));
    let (_keys, bucket) = bucket(server.port);
    wait(bucket.list(&Path::from("p"))).unwrap();
    let heads = server.heads();
    assert_eq!(heads.len(), 3);
    for head in heads {
        assert!(head.contains("max-keys=256 http"), "{head}");
    }
}

#[test]
fn a_bucket_without_an_order_is_listed_whole_and_ends_too() {
    let name = |number: u64| vec![format!("p/{number:04}")];
    let directory = |answer: Answer| {
        let server = Server::start(answer);
        let (keys, bucket) = bucket_of("bucket--x-s3", server.port);
        (server, keys, bucket)
    };
    let (_server, _keys, bucket) = directory(pages(5, move |n| match n {
        0..4 => page(&name(9 - n), Some(&format!("{n}"))),
        _ => page(&name(9 - n), None),
    }));
    let mut found = Vec::new();
    let behind = Path::from("p/0006");
    let all = wait(bucket.list_into(&Path::from("p"), Some(&behind), 100, &mut found)).unwrap();
    let names: Vec<&str> = found.iter().map(|meta| meta.location.as_ref()).collect();
    assert!(all && names == ["p/0009", "p/0008", "p/0007"], "{names:?}");
    let most = 60;
    let endless = [
        pages(most, move |n| page(&name(n), Some("same"))),
        pages(most, move |n| page(&[], Some(&format!("{n}")))),
        pages(most, move |n| page(&name(n), Some(""))),
    ];
    for (number, answer) in endless.into_iter().enumerate() {
        let (server, _keys, bucket) = directory(answer);
        let failed = wait(bucket.list(&Path::from("p"))).unwrap_err().to_string();
        assert!(failed.contains("nothing new"), "case {number}: {failed}");
        assert!(server.heads().len() <= 12, "case {number}");
    }
}

#[test]
fn a_redirect_is_not_followed_and_says_what_to_set() {
    let other = Server::start(whole("200 OK", "ETag: \"x\"\r\n", "{}"));
    let host = format!("127.0.0.1:{}", other.port);
    for status in [
        "301 Moved Permanently",
        "302 Found",
        "307 Temporary Redirect",
        "308 Permanent Redirect",
    ] {
        let lines = format!(
            "Location: http://user:{SECRET}@{host}/bucket/p/a?x={SECRET}\r\nx-amz-bucket-region: \
             eu-west-1\r\n"
        );
        let server = Server::start(whole(status, &lines, SECRET));
        let (_keys, bucket) = bucket(server.port);
        for call in [GET, RANGE, LIST, DELETE] {
            let failed = call(&bucket, &Path::from("p/a")).unwrap_err().to_string();
            let says = format!("answers with a redirect to {host}: set endpoint or region");
            assert!(
                failed.contains(&says) && failed.contains("eu-west-1"),
                "{status}: {failed}"
            );
            assert!(
                !failed.contains(SECRET) && !failed.contains('\n'),
                "{status}: {failed}"
            );
        }
    }
    let bare = Server::start(whole("301 Moved Permanently", "", SECRET));
    let (_keys, bucket) = bucket(bare.port);
    let failed = GET(&bucket, &Path::from("p/a")).unwrap_err().to_string();
    assert!(
        failed.contains("redirect") && failed.contains("set endpoint or region"),
        "{failed}"
    );
    assert!(other.heads().is_empty(), "no other server is asked");
}

#[test]
fn of_an_error_only_status_and_code_are_told() {
    let plain = format!("first line\nkey {SECRET}\r\n{}", "long ".repeat(5000));
    let xml = format!(
        "<?xml version=\"1.0\"?>\n<Error><Code>Slow\nDown</Code><Message>{SECRET}</Message></Error>"
    );
    let in_success = format!("InternalError\n{SECRET}");
    let cases = [
        (
            LIST,
            whole("400 Bad Request", "", &plain),
            "400 Bad Request",
        ),
        (GET, whole("403 Forbidden", "", &plain), "403 Forbidden"),
        (
            GET,
            whole("409 Conflict", "", &xml),
            "409 Conflict: SlowDown",
        ),
        (
            DELETE,
            whole("401 Unauthorized", "", &plain),
            "401 Unauthorized",
        ),
        (DELETE, whole("200 OK", "", &in_success), "error response"),
        (LIST, whole("200 OK", "", &plain), "invalid list response"),
    ];
    for (number, (call, answer, says)) in cases.into_iter().enumerate() {
        let server = Server::start(answer);
        let (_keys, bucket) = bucket(server.port);
        let failed = call(&bucket, &Path::from("p/a")).unwrap_err().to_string();
        assert!(failed.contains(says), "case {number}: {failed}");
        assert!(!failed.contains(SECRET), "case {number}: {failed}");
        assert!(!failed.contains(['\n', '\r']), "case {number}: {failed}");
        assert!(failed.len() < 1000, "case {number}: {} bytes", failed.len());
    }
}

#[test]
fn keys_do_not_go_into_an_endpoint() {
    let place = BucketConfig {
        url: "s3://bucket/p".to_owned(),
        endpoint: Some(format!("http://user:{SECRET}@127.0.0.1:1")),
        ..BucketConfig::default()
    };
    let refused = Bucket::new(&place).err().unwrap().to_string();
    assert!(
        refused.contains("object_endpoint") && !refused.contains(SECRET),
        "{refused}"
    );
}

#[test]
fn a_put_that_the_rights_do_not_allow_says_nothing_of_reads() {
    let put: Call = |bucket, path| wait(bucket.put(path, vec![7; 16].into()));
    let put_new: Call = |bucket, path| wait(bucket.put_new(path, vec![7; 16].into())).map(|_| ());
    let large: Call = |bucket, path| wait(bucket.put_large(path, vec![7; 17 << 20].into(), true));
    let full = "<Error><Code>QuotaExceeded</Code></Error>";
    let cases = [
        (put, "", ErrorKind::Unhealthy),
        (put_new, "", ErrorKind::Unhealthy),
        (large, "", ErrorKind::Unhealthy),
        (put, full, ErrorKind::NoSpace),
        (GET, "", ErrorKind::Io),
        (RANGE, "", ErrorKind::Io),
        (LIST, "", ErrorKind::Io),
    ];
    for (number, (call, body, kind)) in cases.into_iter().enumerate() {
        let server = Server::start(whole("403 Forbidden", "", body));
        let (_keys, bucket) = bucket(server.port);
        let failed = call(&bucket, &Path::from("p/a")).unwrap_err();
        assert_eq!(failed.kind(), kind, "case {number}: {failed}");
        assert_eq!(server.heads().len(), 1, "case {number} is asked once");
    }
}
