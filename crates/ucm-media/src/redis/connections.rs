//! The connections to a server or a cluster, and how commands are sent over them.
//!
//! Each connection carries many commands at once, in order (a *pipeline*). One is for short
//! commands, so that a lookup does not wait behind megabytes; the others carry records, in turn. A
//! connection is made at its first use, by a task that continues after its first caller's deadline,
//! and again after an error or a command without an answer in time. Failed commands are misses; the
//! breaker of the tier spaces the attempts. No connection buffers more than was requested
//! ([`super::bounded`]), and all records in flight together have one limit ([`IN_FLIGHT`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::stream::{FuturesUnordered, StreamExt};
use redis::aio::ConnectionLike;
use redis::cluster::{ClusterClient, ClusterClientBuilder};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{MultipleNodeRoutingInfo, RoutingInfo, SingleNodeRoutingInfo};
use redis::{Arg, Cmd, ConnectionInfo, Pipeline, RedisError, Value};
use rustls::ClientConfig;
use tokio::sync::Semaphore;
use tokio::time::error::Elapsed;
use ucm_core::sync::{Mutex, RwLock};
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, MonotonicTime, Runtime};
use ucm_io::IoJob;

use super::address::{Address, TlsFiles};
use super::bounded::{Bounded, CONNECT, CONNECT_NODE, ClusterTls, IN_FLIGHT, answer_bound};
use super::info::ServerInfo;
use crate::network::{keep_memory_of_answers, use_ring};

/// Share of the time of a job within which a node of a cluster answers.
const NODE_SHARE: f64 = 0.75;
/// Time between two attempts to connect; until then callers get the error of the last attempt.
const AGAIN: Duration = Duration::from_millis(500);
/// The client of a cluster is made anew if commands are late and nothing was received for this
/// long: it may wait for nodes that are down.
const SILENCE: Duration = Duration::from_secs(1);
/// The unit of [`IN_FLIGHT`], bytes.
const UNIT: usize = 4 << 10;
/// Keys that one step of a listing requests.
const SCAN: usize = 1000;

/// Bytes that the keys of a listing may take, each with [`OF_KEY`].
const MOST_NAMED: usize = 256 << 20;
/// Bytes that a key takes besides its own.
const OF_KEY: usize = 64;

/// Text of errors about the user, the password or their rights.
const NO_LOGIN: &str = "the server does not let us in; check user and password (redis_username, \
                        redis_password) and their rights";

/// The payload of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Traffic {
    /// A few bytes there and back.
    Short,
    /// A record.
    Record,
}

/// See the module.
pub(super) struct Connections {
    runtime: Arc<Runtime>,
    clock: Arc<dyn Clock>,
    addresses: Vec<Address>,
    tls: TlsFiles,
    /// The server, after [`Connections::discover`].
    server: RwLock<Option<Server>>,
    /// The first is for short commands.
    lines: Vec<Arc<Line>>,
    turn: AtomicUsize,
    /// Units of [`IN_FLIGHT`] that are free.
    in_flight: Semaphore,
}

/// One server, or a cluster.
#[derive(Clone)]
enum Server {
    One(Box<Node>),
    Cluster(Box<Cluster>),
}

/// The client of a cluster, and what it refers to by a number.
#[derive(Clone)]
struct Cluster {
    client: ClusterClient,
    tls: Option<Arc<ClusterTls>>,
}

/// One server and how it is reached.
#[derive(Clone)]
struct Node {
    info: ConnectionInfo,
    tls: Option<Arc<ClientConfig>>,
}

/// A connection that is open.
#[derive(Clone)]
enum Link {
    One(Bounded),
    /// The client of a cluster makes new connections with what its number refers to, so that is
    /// kept with it.
    Cluster {
        connection: ClusterConnection<Bounded>,
        _tls: Option<Arc<ClusterTls>>,
    },
}

/// One connection, or the lack of one.
#[derive(Default)]
struct Line {
    state: tokio::sync::Mutex<State>,
    /// Connections up to this number are abandoned.
    given_up: AtomicU64,
    health: Mutex<Health>,
}

#[derive(Default)]
struct State {
    /// Number of the last connection here.
    number: u64,
    open: Option<Link>,
    failed: Option<(Instant, Error)>,
}

/// When a connection last answered.
#[derive(Default)]
struct Health {
    /// When something was last received.
    last_answer: MonotonicTime,
    /// When the first command that was late since then was sent.
    unanswered: Option<MonotonicTime>,
}

impl Connections {
    /// This many connections for records to these nodes, and one more. Nothing is reached yet.
    pub(super) fn new(
        addresses: Vec<Address>,
        tls: TlsFiles,
        connections: usize,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        use_ring();
        keep_memory_of_answers();
        Ok(Self {
            runtime: Runtime::of_this_process()?,
            clock,
            addresses,
            tls,
            server: RwLock::new(None),
            lines: (0..=connections.max(1)).map(|_| Arc::default()).collect(),
            turn: AtomicUsize::new(0),
            in_flight: Semaphore::new(IN_FLIGHT / UNIT),
        })
    }

    /// Finds out what answers at the addresses, by this deadline, and uses that from now on.
    pub(super) fn discover(&self, deadline: MonotonicTime) -> Result<ServerInfo> {
        let tls = match self.addresses.iter().any(Address::is_tls) {
            true => Some(self.tls.client_config()?),
            false => None,
        };
        // All at once: one that does not answer does not delay the others.
        let ask = |address: &Address| {
            let (info, tls, at) = (address.info(), tls.clone(), address.to_string());
            async move {
                let node = Node { info, tls };
                let asked = tokio::time::timeout(CONNECT, node.ask_info()).await;
                match asked.unwrap_or_else(|_| Err(late())) {
                    Ok(info) => Ok((node, info)),
                    Err(error) => Err(error.with("address", at)),
                }
            }
        };
        let mut asked: FuturesUnordered<_> = self.addresses.iter().map(ask).collect();
        let first = async move {
            let mut failed = Error::internal("no address was given");
            while let Some(answer) = asked.next().await {
                match answer {
                    Ok(answer) => return Ok(answer),
                    Err(error) => failed = error,
                }
            }
            Err(failed)
        };
        let (node, info) = self.runtime.wait(&*self.clock, deadline, first)?;
        // A server that became a replica while in use can still be read.
        let is_first = self.server.read().is_none();
        if info.is_replica && !info.is_cluster && is_first {
            let text =
                "this server is a replica and takes no writes; give the address of its primary";
            return Err(Error::new(ErrorKind::Config, text));
        }
        let server = match (info.is_cluster, self.addresses.len()) {
            (true, _) => self.cluster(tls)?,
            (false, 1) => Server::One(Box::new(node)),
            (false, several) => {
                let text = "several addresses are nodes of one cluster, but the one that answered \
                            is no node of a cluster";
                return Err(Error::new(ErrorKind::Config, text).with("addresses", several));
            }
        };
        *self.server.write() = Some(server);
        Ok(info)
    }

    fn cluster(&self, tls: Option<Arc<ClientConfig>>) -> Result<Server> {
        let mut addresses = self.addresses.iter();
        if let Some(other) = addresses.find(|address| address.database() != 0) {
            let text = "a cluster has no numbered databases; leave the number out of the address";
            return Err(Error::new(ErrorKind::Config, text).with("address", other));
        }
        let nodes: Vec<_> = self.addresses.iter().map(Address::info).collect();
        let tls = tls.map(|tls| Arc::new(ClusterTls::new(tls)));
        // Its own timeouts are out of the way: those of our jobs and connections hold.
        let client = ClusterClientBuilder::new(nodes)
            .database_id(tls.as_ref().map_or(0, |tls| tls.number()))
            .connection_timeout(CONNECT_NODE)
            .response_timeout(Duration::from_secs(3600))
            .retries(3)
            .build();
        let none = || Error::new(ErrorKind::Config, "no client can be made for this server");
        let client = client.map_err(|error| none().caused_by(error))?;
        Ok(Server::Cluster(Box::new(Cluster { client, tls })))
    }

    /// Sends these commands and waits for all answers until the job's deadline: an answer or a
    /// refusal for each, in order, or why there is none.
    pub(super) fn ask(
        &self,
        io: &IoJob,
        traffic: Traffic,
        commands: impl IntoIterator<Item = Cmd>,
    ) -> Result<Vec<Result<Value>>> {
        let mut pipeline = Pipeline::new();
        commands
            .into_iter()
            .for_each(|command| _ = pipeline.add_command(command));
        let asked = pipeline.len();
        let weight = match traffic {
            Traffic::Short => 0,
            Traffic::Record => pipeline.cmd_iter().map(units_of).sum(),
        };
        // Before the deadline, so that the answers of other nodes count.
        let time = io.deadline().since(self.clock.now()).mul_f64(NODE_SHARE);
        let pipeline = &pipeline;
        let answers = self.with_link(io, traffic, weight, |mut link| async move {
            link.ask(pipeline, time).await
        })?;
        if answers.len() != asked {
            return Err(Error::internal("the server did not answer every command"));
        }
        Ok(answers)
    }

    /// [`Connections::ask`] with one command.
    pub(super) fn ask_one(&self, io: &IoJob, traffic: Traffic, command: Cmd) -> Result<Value> {
        let answer = self.ask(io, traffic, [command])?.pop();
        answer.unwrap_or_else(|| Err(Error::internal("a command has no answer")))
    }

    /// Sends short commands, each answered with a number; none for an answer that is no number,
    /// also of a key that has something else than a value.
    pub(super) fn numbers(
        &self,
        io: &IoJob,
        commands: impl IntoIterator<Item = Cmd>,
    ) -> Result<Vec<Result<Option<i64>>>> {
        let number = |answer: Result<Value>| match answer {
            Ok(Value::Int(number)) => Ok(Some(number)),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == ErrorKind::Foreign => Ok(None),
            Err(error) => Err(error),
        };
        let answers = self.ask(io, Traffic::Short, commands)?;
        Ok(answers.into_iter().map(number).collect())
    }

    /// Every key of this pattern, on all nodes.
    pub(super) fn scan(&self, io: &IoJob, pattern: &str) -> Result<Vec<Vec<u8>>> {
        self.with_link(io, Traffic::Short, 0, |mut link| async move {
            link.scan(pattern).await
        })
    }

    /// The answer to `INFO`, of a cluster all nodes together.
    pub(super) fn info(&self, io: &IoJob) -> Result<ServerInfo> {
        let info = self.with_link(io, Traffic::Short, 0, |mut link| async move {
            link.info().await
        })?;
        Ok(ServerInfo::parse(&info))
    }

    /// Sends over a connection, and once more over a new one if the server had closed it: it may
    /// close idle ones, and every command here may be sent twice. `weight`: units of [`IN_FLIGHT`].
    fn with_link<T, F>(
        &self,
        io: &IoJob,
        traffic: Traffic,
        weight: usize,
        ask: impl Fn(Link) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T, RedisError>>,
    {
        let unknown = || Error::new(ErrorKind::Unhealthy, "the server was not reached yet");
        let server = self.server.read().clone().ok_or_else(unknown)?;
        let (line, began) = (self.line(traffic), self.clock.now());
        let answered = io.wait(&self.runtime, async {
            let units = u32::try_from(weight.min(IN_FLIGHT / UNIT)).unwrap_or(u32::MAX);
            let closed = |_| Error::internal("the limit of bytes in flight was closed");
            let _in_flight = self.in_flight.acquire_many(units).await.map_err(closed)?;
            let (number, link) = line.link(server.clone()).await?;
            let error = match ask(link).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            line.given_up.fetch_max(number, Ordering::AcqRel);
            if !error.is_connection_dropped() {
                return Err(no_answer(error));
            }
            let (number, link) = line.link(server.clone()).await?;
            ask(link).await.map_err(|error| {
                line.given_up.fetch_max(number, Ordering::AcqRel);
                no_answer(error)
            })
        });
        line.note(answered.as_ref().err(), began, self.clock.now());
        answered
    }

    fn line(&self, traffic: Traffic) -> &Arc<Line> {
        let records = self.lines.len() - 1;
        let number = match traffic {
            Traffic::Short => 0,
            Traffic::Record => 1 + self.turn.fetch_add(1, Ordering::Relaxed) % records,
        };
        &self.lines[number]
    }
}

impl Line {
    /// The open connection, or a new one.
    async fn link(self: &Arc<Self>, server: Server) -> Result<(u64, Link)> {
        if let Ok(state) = self.state.try_lock()
            && let Some(open) = self.usable(&state)
        {
            return Ok(open);
        }
        let line = Arc::clone(self);
        let made = tokio::spawn(async move { line.connect(server).await }).await;
        made.unwrap_or_else(|_| Err(Error::internal("making a connection panicked")))
    }

    fn usable(&self, state: &State) -> Option<(u64, Link)> {
        let fresh = state.number > self.given_up.load(Ordering::Acquire);
        let link = state.open.clone();
        let link = link.filter(|link| fresh && !link.is_retired())?;
        Some((state.number, link))
    }

    async fn connect(&self, server: Server) -> Result<(u64, Link)> {
        let mut state = self.state.lock().await;
        if let Some(open) = self.usable(&state) {
            return Ok(open); // made by the first caller
        }
        state.open = None;
        if let Some((at, error)) = &state.failed
            && at.elapsed() < AGAIN
        {
            return Err(error.clone());
        }
        let made = tokio::time::timeout(CONNECT, server.connect()).await;
        match made.unwrap_or_else(|_| Err(late())) {
            Ok(link) => {
                state.number += 1;
                (state.open, state.failed) = (Some(link.clone()), None);
                *self.health.lock() = Health::default();
                Ok((state.number, link))
            }
            Err(error) => {
                state.failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    /// Notes how a command sent at `began` ended. If one after the other is late and nothing else
    /// is received, the connection is abandoned.
    fn note(&self, error: Option<&Error>, began: MonotonicTime, now: MonotonicTime) {
        let mut health = self.health.lock();
        if !error.is_some_and(|error| error.kind() == ErrorKind::Timeout) {
            *health = Health {
                last_answer: now,
                unanswered: None,
            };
        } else if health.last_answer < began {
            let since = *health.unanswered.get_or_insert(began);
            if now.since(since) >= SILENCE {
                *health = Health::default();
                drop(health);
                // The next command uses a new connection. One that is being made is new anyway.
                if let Ok(state) = self.state.try_lock() {
                    self.given_up.fetch_max(state.number, Ordering::AcqRel);
                }
            }
        }
    }
}

impl Server {
    async fn connect(&self) -> Result<Link> {
        let made = match self {
            Self::One(node) => node.connect().await.map(Link::One),
            Self::Cluster(cluster) => {
                let made = cluster.client.get_async_generic_connection().await;
                made.map(|connection| Link::Cluster {
                    connection,
                    _tls: cluster.tls.clone(),
                })
            }
        };
        made.map_err(no_answer)
    }
}

impl Node {
    async fn connect(&self) -> Result<Bounded, RedisError> {
        Bounded::connect(&self.info, self.tls.as_ref(), CONNECT).await
    }

    async fn ask_info(&self) -> Result<ServerInfo> {
        let mut connection = self.connect().await.map_err(no_answer)?;
        let info = connection.req_packed_command(&redis::cmd("INFO")).await;
        match info.and_then(Value::extract_error) {
            Ok(info) => Ok(ServerInfo::parse(&info)),
            // an account without the right: it is taken for one server
            Err(error) if error.code() == Some("NOPERM") => Ok(ServerInfo::default()),
            Err(error) => Err(no_answer(error)),
        }
    }
}

/// Units of [`IN_FLIGHT`] that a command and its answer take.
fn units_of(command: &Cmd) -> usize {
    let sent = command.args_iter().map(|arg| match arg {
        Arg::Simple(word) => word.len(),
        _ => 0,
    });
    let expected = usize::try_from(answer_bound(command)).unwrap_or(usize::MAX);
    expected.saturating_add(sent.sum()).div_ceil(UNIT)
}

impl Link {
    /// Whether it takes no more commands. The client of a cluster renews its connections itself.
    fn is_retired(&self) -> bool {
        match self {
            Self::One(connection) => connection.is_retired(),
            Self::Cluster { .. } => false,
        }
    }

    /// An answer or a refusal for each command, of a cluster also why there was none in `time`; an
    /// error if the connection to the only server broke.
    async fn ask(
        &mut self,
        commands: &Pipeline,
        time: Duration,
    ) -> Result<Vec<Result<Value>>, RedisError> {
        let answers = match self {
            Self::One(connection) => match commands.cmd_iter().next() {
                // A single command returns why the connection broke.
                Some(one) if commands.len() == 1 => vec![connection.req_packed_command(one).await],
                _ => {
                    let asked = connection.req_packed_commands(commands, 0, commands.len());
                    asked.await?.into_iter().map(Ok).collect()
                }
            },
            Self::Cluster { connection, .. } => {
                return Ok(ask_nodes(connection, commands, time).await);
            }
        };
        let settled =
            |answer: Result<Value, RedisError>| match answer.and_then(Value::extract_error) {
                Ok(value) => Ok(Ok(value)),
                Err(error) if error.code().is_some() => Ok(Err(refusal(&error))),
                Err(error) => Err(error),
            };
        answers.into_iter().map(settled).collect()
    }

    /// The answer to `INFO`; of a cluster those of all primaries, by their addresses.
    async fn info(&mut self) -> Result<Value, RedisError> {
        let all = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
        self.ask_one(redis::cmd("INFO"), all).await
    }

    /// Sends one command, in a cluster to these nodes.
    async fn ask_one(&mut self, command: Cmd, to: RoutingInfo) -> Result<Value, RedisError> {
        let answer = match self {
            Self::One(connection) => connection.req_packed_command(&command).await,
            Self::Cluster { connection, .. } => connection.route_command(command, to).await,
        };
        answer.and_then(Value::extract_error)
    }

    async fn scan(&mut self, pattern: &str) -> Result<Vec<Vec<u8>>, RedisError> {
        let nodes = match self {
            Self::One(_) => vec![SingleNodeRoutingInfo::Random],
            Self::Cluster { .. } => nodes_of(self.info().await?),
        };
        let (mut found, mut named) = (Vec::new(), 0);
        for node in nodes {
            let mut cursor = "0".to_owned();
            loop {
                let mut command = redis::cmd("SCAN");
                command.arg(&cursor).arg("MATCH").arg(pattern);
                command.arg("COUNT").arg(SCAN);
                let to = RoutingInfo::SingleNode(node.clone());
                let answer = self.ask_one(command, to).await?;
                let (next, keys): (String, Vec<Vec<u8>>) = redis::from_redis_value(answer)?;
                named += keys.iter().map(|key| key.len() + OF_KEY).sum::<usize>();
                found.extend(keys);
                if next == "0" {
                    break;
                }
                if next == cursor || named > MOST_NAMED {
                    return Err(endless());
                }
                cursor = next;
            }
        }
        found.sort_unstable();
        found.dedup(); // a step may name a key that another one named
        Ok(found)
    }
}

/// The nodes of a cluster that answered.
fn nodes_of(answers: Value) -> Vec<SingleNodeRoutingInfo> {
    let node = |(at, _): (Value, Value)| {
        let at: String = redis::from_redis_value(at).ok()?;
        let (host, port) = at.rsplit_once(':')?;
        let (host, port) = (host.to_owned(), port.parse().ok()?);
        Some(SingleNodeRoutingInfo::ByAddress { host, port })
    };
    match answers {
        Value::Map(answers) => answers.into_iter().filter_map(node).collect(),
        _ => Vec::new(),
    }
}

/// Sends to the nodes side by side; on each connection that is a pipeline again. A node that is
/// down, or silent for `time`, fails its own commands alone; the client reconnects by itself.
async fn ask_nodes(
    connection: &ClusterConnection<Bounded>,
    commands: &Pipeline,
    time: Duration,
) -> Vec<Result<Value>> {
    let one = |command| {
        let mut connection = connection.clone();
        let asked = async move { connection.req_packed_command(command).await };
        tokio::time::timeout(time, asked)
    };
    let answers = futures_util::future::join_all(commands.cmd_iter().map(one)).await;
    if answers.iter().all(Result::is_err) && !answers.is_empty() {
        // no node answers: the caller ends with its deadline
        std::future::pending::<()>().await;
    }
    let settled = |answer: Result<Result<Value, RedisError>, Elapsed>| match answer {
        Ok(answer) => answer.and_then(Value::extract_error).map_err(no_answer),
        Err(_) => {
            let text = "this node of the cluster did not answer in time";
            Err(Error::new(ErrorKind::Timeout, text))
        }
    };
    answers.into_iter().map(settled).collect()
}

/// A listing that does not advance, or is too long.
fn endless() -> RedisError {
    let text = "the server lists keys without end, or more than can be listed";
    std::io::Error::new(std::io::ErrorKind::Unsupported, text).into()
}

fn late() -> Error {
    Error::new(ErrorKind::Timeout, "the server took no connection in time")
}

/// Why nothing was answered.
fn no_answer(error: RedisError) -> Error {
    match error.code() {
        Some(_) => refusal(&error),
        None if error.kind() == redis::ErrorKind::AuthenticationFailed => {
            Error::new(ErrorKind::Io, NO_LOGIN).caused_by(error)
        }
        None if error.is_timeout() => late().caused_by(error),
        None => Error::new(ErrorKind::Io, "the server cannot be reached").caused_by(error),
    }
}

/// Why the server refused. A server that takes no more, or cannot save, counts as full.
fn refusal(error: &RedisError) -> Error {
    let (kind, text) = match error.code() {
        Some("OOM") => (
            ErrorKind::NoSpace,
            "the server is full (maxmemory) and removes nothing by itself",
        ),
        Some("MISCONF") => (
            ErrorKind::NoSpace,
            "the server takes no writes, for it cannot save them",
        ),
        // Only writes are unhealthy: what it has can be read.
        Some("READONLY") => (
            ErrorKind::Unhealthy,
            "the server has become a replica and takes no writes; give the address of the primary",
        ),
        Some("NOREPLICAS") => (
            ErrorKind::Unhealthy,
            "the server takes no writes, for it has fewer replicas than it wants",
        ),
        Some("WRONGTYPE") => (
            ErrorKind::Foreign,
            "what has this record's key is no record",
        ),
        Some("NOAUTH" | "WRONGPASS" | "NOPERM") => (ErrorKind::Io, NO_LOGIN),
        _ => (ErrorKind::Io, "the server refused"),
    };
    Error::new(kind, text).caused_by(error.clone())
}

/// The error of a write. A server that refuses writes has answered, and what it has can be read.
pub(super) fn of_write(error: Error) -> Error {
    let cause =
        std::error::Error::source(&error).and_then(|cause| cause.downcast_ref::<RedisError>());
    match cause.and_then(RedisError::code) {
        Some("NOPERM" | "ERR") => {
            let text =
                "the server lets us write nothing; check the rights of the user (redis_username)";
            let cause = cause.cloned();
            let refused = Error::new(ErrorKind::Unhealthy, text);
            cause.into_iter().fold(refused, Error::caused_by)
        }
        _ => error,
    }
}
