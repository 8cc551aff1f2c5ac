//! A connection on which a server cannot send more than was requested.
//!
//! A length that a server announces is not trusted. Every command has a bound for its answer, which
//! follows from the command alone ([`answer_bound`]). A stream below the client's parser counts the
//! bytes received, and fails once they exceed the bounds of all pending commands and [`SLACK`]. A
//! connection with an abandoned command takes no more commands, and is closed as soon as the others
//! on it have ended. The client of a cluster abandons no command: it waits for the answer, or for
//! the connection to break, so its connections stay and are bounded all the same. If abandoned
//! commands leave no room for another one on a connection ([`IN_FLIGHT`]), it is closed at once.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::FutureExt;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster_async::Connect;
use redis::io::tcp::socket2::SockRef;
use redis::{
    Arg, AsyncConnectionConfig, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo,
    Pipeline, RedisError, RedisFuture, RedisResult, Value,
};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio_rustls::TlsConnector;
use ucm_core::sync::Mutex;

/// Bytes beside answers: what a server sends while a connection is made, and what it pushes.
const SLACK: u64 = 64 << 10;
/// The longest answer that is a number, a status or a refusal, and what stands around a value.
const STATUS: u64 = 512;
/// The longest answer that is a list: keys, nodes of a cluster, `INFO`.
const LISTING: u64 = 1 << 20;
/// How long making one connection may take.
pub(super) const CONNECT: Duration = Duration::from_secs(5);
/// How long one node of a cluster may take, so that the others are reached within [`CONNECT`].
pub(super) const CONNECT_NODE: Duration = Duration::from_millis(1500);
/// How long the system waits for what it sent to be acknowledged.
const UNACKNOWLEDGED: Duration = Duration::from_secs(10);
/// Bytes of records, sent or expected, that are on their way at once, on all connections of a
/// store. More wait for their turn.
pub(super) const IN_FLIGHT: usize = 256 << 20;
/// Commands that wait to be sent on one connection.
const QUEUE: usize = 256;

/// Most bytes of the answer to this command.
pub(super) fn answer_bound(command: &Cmd) -> u64 {
    let word = |n: usize| match command.args_iter().nth(n) {
        Some(Arg::Simple(word)) => word,
        _ => b"",
    };
    let number = |n: usize| std::str::from_utf8(word(n)).ok()?.parse::<u64>().ok();
    match word(0) {
        b"GETRANGE" => match (number(2), number(3)) {
            (Some(first), Some(last)) => last.saturating_sub(first).saturating_add(1 + STATUS),
            _ => STATUS,
        },
        b"SCAN" | b"CLUSTER" | b"INFO" => LISTING,
        _ => STATUS,
    }
}

/// Bytes that a server sent for this answer; 0 for a form that no command here is answered with.
fn answer_len(answer: &Value) -> u64 {
    let digits = |number: u64| u64::from(number.checked_ilog10().unwrap_or(0)) + 1;
    match answer {
        Value::Nil | Value::Okay => 5,
        Value::Int(number) => 3 + u64::from(*number < 0) + digits(number.unsigned_abs()),
        Value::BulkString(bytes) => 5 + digits(bytes.len() as u64) + bytes.len() as u64,
        Value::SimpleString(text) => 3 + text.len() as u64,
        Value::Array(values) => {
            3 + digits(values.len() as u64) + values.iter().map(answer_len).sum::<u64>()
        }
        Value::ServerError(error) => {
            let details = error.details().map_or(0, |details| 1 + details.len());
            (3 + error.code().len() + details) as u64
        }
        _ => 0,
    }
}

/// The bytes of one connection.
#[derive(Default)]
struct Count {
    /// Bytes received that belong to no answer returned so far.
    read: u64,
    /// Most bytes of the answers to all pending commands.
    due: u64,
    /// Pending commands.
    open: usize,
    /// It takes no more commands.
    retired: bool,
}

/// The stream below the parser.
struct BoundedStream<S> {
    stream: S,
    count: Arc<Mutex<Count>>,
}

impl<S: AsyncRead + Unpin> AsyncRead for BoundedStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
        let mut count = this.count.lock();
        count.read += (buf.filled().len() - before) as u64;
        if count.read <= count.due + SLACK {
            return Poll::Ready(Ok(()));
        }
        count.retired = true;
        let text = "the server sent more than was asked for, and the connection was closed";
        // The client of a cluster does not repeat a command after an error of this kind.
        Poll::Ready(Err(io::Error::new(io::ErrorKind::Unsupported, text)))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for BoundedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// A connection to one server. Clones share it, and the last one closes it.
#[derive(Clone)]
pub(super) struct Bounded {
    connection: MultiplexedConnection,
    shared: Arc<Shared>,
}

struct Shared {
    count: Arc<Mutex<Count>>,
    /// The task that reads and writes; the socket ends with it.
    driver: AbortHandle,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Bounded {
    /// Connects to a server within this time, over TLS where its address says so.
    pub(super) async fn connect(
        info: &ConnectionInfo,
        tls: Option<&Arc<ClientConfig>>,
        within: Duration,
    ) -> RedisResult<Self> {
        let made = tokio::time::timeout(within, Self::connect_over(info, tls));
        let late = |_| Err(io::Error::from(io::ErrorKind::TimedOut).into());
        made.await.unwrap_or_else(late)
    }

    async fn connect_over(
        info: &ConnectionInfo,
        tls: Option<&Arc<ClientConfig>>,
    ) -> RedisResult<Self> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None) // ours holds
            .set_response_timeout(None) // that of our jobs holds
            .set_pipeline_buffer_size(QUEUE);
        match (info.addr(), tls) {
            (ConnectionAddr::Tcp(host, port), _) => {
                Self::over(info, connect_tcp(host, *port).await?, config).await
            }
            (ConnectionAddr::TcpTls { host, port, .. }, Some(tls)) => {
                let name = ServerName::try_from(host.clone())
                    .map_err(|_| wrong("the host of this address cannot have a certificate"))?;
                let (tcp, tls) = (connect_tcp(host, *port).await?, Arc::clone(tls));
                let stream = TlsConnector::from(tls).connect(name, tcp).await?;
                Self::over(info, stream, config).await
            }
            _ => Err(wrong("this kind of address is not supported")),
        }
    }

    /// A connection over this stream, on which the login has been made.
    async fn over<S>(
        info: &ConnectionInfo,
        stream: S,
        config: AsyncConnectionConfig,
    ) -> RedisResult<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let count = Arc::new(Mutex::new(Count::default()));
        let stream = BoundedStream {
            stream,
            count: Arc::clone(&count),
        };
        let (connection, driver) =
            MultiplexedConnection::new_with_config(info.redis_settings(), stream, config).await?;
        count.lock().read = 0;
        let driver = tokio::spawn(driver).abort_handle();
        let shared = Arc::new(Shared { count, driver });
        Ok(Self { connection, shared })
    }

    /// Whether it takes no more commands.
    pub(super) fn is_retired(&self) -> bool {
        self.shared.count.lock().retired
    }

    /// Begins a command whose answer has at most `bound` bytes. Callers wait for at most
    /// [`IN_FLIGHT`] bytes together. If more would be due, earlier commands were abandoned: the
    /// connection is closed.
    fn begin(&self, bound: u64) -> RedisResult<PendingCommand> {
        let mut count = self.shared.count.lock();
        if count.due > 0 && count.due.saturating_add(bound) > IN_FLIGHT as u64 {
            count.retired = true;
            self.shared.driver.abort();
        }
        if count.retired {
            return Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
        }
        count.due += bound;
        count.open += 1;
        Ok(PendingCommand {
            shared: Arc::clone(&self.shared),
            bound,
            answered: None,
        })
    }
}

/// A pending command. One that ends without an answer retires its connection.
struct PendingCommand {
    shared: Arc<Shared>,
    bound: u64,
    /// Bytes of the answer.
    answered: Option<u64>,
}

impl PendingCommand {
    async fn wait<T>(
        mut self,
        asked: impl Future<Output = RedisResult<T>>,
        len: impl Fn(&T) -> u64,
    ) -> RedisResult<T> {
        let answer = asked.await;
        self.answered = answer.as_ref().ok().map(len);
        answer
    }
}

impl Drop for PendingCommand {
    fn drop(&mut self) {
        let mut count = self.shared.count.lock();
        count.open -= 1;
        if let Some(len) = self.answered {
            count.due -= self.bound;
            count.read = count.read.saturating_sub(len);
        } else {
            count.retired = true; // its answer may still come, so what is due stays
        }
        if count.open == 0 {
            (count.read, count.due) = (0, 0);
            if count.retired {
                self.shared.driver.abort();
            }
        }
    }
}

impl ConnectionLike for Bounded {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        async move {
            let begun = self.begin(answer_bound(command))?;
            let asked = self.connection.req_packed_command(command);
            begun.wait(asked, answer_len).await
        }
        .boxed()
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        commands: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        async move {
            let begun = self.begin(commands.cmd_iter().map(answer_bound).sum())?;
            let asked = self.connection.req_packed_commands(commands, offset, count);
            let len = |answers: &Vec<Value>| answers.iter().map(answer_len).sum();
            begun.wait(asked, len).await
        }
        .boxed()
    }

    fn get_db(&self) -> i64 {
        self.connection.get_db()
    }
}

/// What the nodes of a cluster are connected to with. The client of a cluster makes its connections
/// by an address alone, and passes on the number of a database. A cluster has only database 0, so
/// that number is one of [`CLUSTERS`] here.
pub(super) struct ClusterTls {
    number: i64,
}

/// By number.
static CLUSTERS: Mutex<BTreeMap<i64, Arc<ClientConfig>>> = Mutex::new(BTreeMap::new());
static LAST_NUMBER: AtomicI64 = AtomicI64::new(0);

impl ClusterTls {
    pub(super) fn new(tls: Arc<ClientConfig>) -> Self {
        let number = LAST_NUMBER.fetch_add(1, Ordering::Relaxed) + 1;
        CLUSTERS.lock().insert(number, tls);
        Self { number }
    }

    /// What is passed on as the number of a database.
    pub(super) fn number(&self) -> i64 {
        self.number
    }
}

impl Drop for ClusterTls {
    fn drop(&mut self) {
        CLUSTERS.lock().remove(&self.number);
    }
}

impl Connect for Bounded {
    fn connect_with_config<'a, T>(info: T, _config: AsyncConnectionConfig) -> RedisFuture<'a, Self>
    where
        T: IntoConnectionInfo + Send + 'a,
    {
        async move {
            let info = info.into_connection_info()?;
            let tls = CLUSTERS.lock().get(&info.redis_settings().db()).cloned();
            let settings = info.redis_settings().clone().set_db(0);
            let info = info.set_redis_settings(settings);
            Self::connect(&info, tls.as_ref(), CONNECT_NODE).await
        }
        .boxed()
    }
}

/// Connects to every address of a host at once, and takes the first one that answers.
async fn connect_tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let addresses = tokio::net::lookup_host((host, port)).await?;
    let connects = addresses.map(|address| TcpStream::connect(address).boxed());
    let connects: Vec<_> = connects.collect();
    if connects.is_empty() {
        return Err(io::ErrorKind::NotFound.into()); // the name has no address
    }
    let (stream, _others) = futures_util::future::select_ok(connects).await?;
    stream.set_nodelay(true)?;
    SockRef::from(&stream).set_tcp_user_timeout(Some(UNACKNOWLEDGED))?;
    Ok(stream)
}

fn wrong(text: &'static str) -> RedisError {
    (ErrorKind::InvalidClientConfig, text).into()
}
