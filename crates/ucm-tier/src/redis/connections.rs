//! The connections to a server or a cluster, and how questions go over them.
//!
//! Each connection carries many questions at once, in order (a *pipeline*). One of them is for what
//! is short, so that a lookup does not stand behind megabytes; the others carry records, in turn.
//! They are made when they are first wanted, by a task of their own that goes on when the caller
//! that asked first gives up, and anew after an error or a question that was not answered in time.
//! Nothing is sent twice on our side: what fails is a miss, and the breaker of the tier keeps the
//! time until the next attempt. No connection brings more than was asked for ([`super::bounded`]),
//! and what the records under way on all of them may have together has one limit ([`IN_FLIGHT`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::stream::{FuturesUnordered, StreamExt};
use parking_lot::{Mutex, RwLock};
use redis::aio::ConnectionLike;
use redis::cluster::{ClusterClient, ClusterClientBuilder};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{MultipleNodeRoutingInfo, RoutingInfo, SingleNodeRoutingInfo};
use redis::{Arg, Cmd, ConnectionInfo, Pipeline, RedisError, Value};
use rustls::ClientConfig;
use tokio::sync::Semaphore;
use tokio::time::error::Elapsed;
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::{Clock, MonotonicTime, Runtime};
use ucm_io::IoJob;

use super::address::{Address, TlsFiles};
use super::bounded::{Bounded, CONNECT, CONNECT_NODE, ClusterTls, IN_FLIGHT, answer_bound};
use super::info::ServerInfo;
use crate::network::{keep_memory_of_answers, use_ring};

/// Share of the time of a job within which a node of a cluster answers.
const NODE_SHARE: f64 = 0.75;
/// How long after one could not be made the next attempt waits; who asks meanwhile gets the same
/// answer.
const AGAIN: Duration = Duration::from_millis(500);
/// The client of a cluster is made anew where questions are late and nothing has come for this
/// long: it may wait for nodes that are gone.
const SILENCE: Duration = Duration::from_secs(1);
/// What these are counted in.
const UNIT: usize = 4 << 10;
/// Keys that one step of a listing asks for.
const SCAN: usize = 1000;

/// Bytes that the keys of a listing may take, each with [`OF_KEY`].
const MOST_NAMED: usize = 256 << 20;
/// Bytes that a key takes besides its own.
const OF_KEY: usize = 64;

/// What is said where user and password are not right, or have not the right.
const NO_LOGIN: &str = "the server does not let us in; check user and password (redis_username, \
                        redis_password) and their rights";

/// What a question is about.
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
    /// What connections lead to, once somebody has looked.
    server: RwLock<Option<Server>>,
    /// The first is for what is short.
    lines: Vec<Arc<Line>>,
    turn: AtomicUsize,
    /// Units of [`IN_FLIGHT`] that are free.
    in_flight: Semaphore,
}

/// What answers: one server, or a cluster.
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

/// The place of one connection.
#[derive(Default)]
struct Line {
    state: tokio::sync::Mutex<State>,
    /// Connections up to this number are not used any more.
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

/// What has come on a connection.
#[derive(Default)]
struct Health {
    /// When something last came.
    last_answer: MonotonicTime,
    /// The first question that was late since then, as of when it was asked.
    unanswered: Option<MonotonicTime>,
}

impl Connections {
    /// So many connections for records to these nodes, and one beside them. Nothing is touched.
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

    /// Looks what answers at the addresses, by this deadline, and uses that from now on.
    pub(super) fn discover(&self, deadline: MonotonicTime) -> Result<ServerInfo> {
        let tls = match self.addresses.iter().any(Address::is_tls) {
            true => Some(self.tls.client_config()?),
            false => None,
        };
        let nodes: Vec<_> = self
            .addresses
            .iter()
            .map(|address| {
                let (info, tls) = (address.info(), tls.clone());
                (address.to_string(), Node { info, tls })
            })
            .collect();
        let first = async move {
            // All at once: one that does not answer keeps no one from the others.
            let ask = |(at, node): (String, Node)| async move {
                match tokio::time::timeout(CONNECT, node.ask_info()).await {
                    Ok(Ok(info)) => Ok((node, info)),
                    Ok(Err(error)) => Err(error.with("address", at)),
                    Err(_) => Err(late().with("address", at)),
                }
            };
            let mut asked: FuturesUnordered<_> = nodes.into_iter().map(ask).collect();
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
        // One that became a replica while it was in use can be read all the same.
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
        if let Some(other) = self
            .addresses
            .iter()
            .find(|address| address.database() != 0)
        {
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
        let client = client.map_err(no_client)?;
        Ok(Server::Cluster(Box::new(Cluster { client, tls })))
    }

    /// Asks these questions and waits for all answers, for as long as somebody waits for this job:
    /// an answer or a refusal for each, in order, or why none came.
    pub(super) fn ask(
        &self,
        io: &IoJob,
        traffic: Traffic,
        questions: impl IntoIterator<Item = Cmd>,
    ) -> Result<Vec<Result<Value>>> {
        let mut pipeline = Pipeline::new();
        questions
            .into_iter()
            .for_each(|question| _ = pipeline.add_command(question));
        let asked = pipeline.len();
        let weight = match traffic {
            Traffic::Short => 0,
            Traffic::Record => pipeline.cmd_iter().map(units_of).sum(),
        };
        // Sooner than the deadline, so that what other nodes have answered counts.
        let time = io.deadline().since(self.clock.now()).mul_f64(NODE_SHARE);
        let pipeline = &pipeline;
        let answers = self.with_link(io, traffic, weight, |mut link| async move {
            link.ask(pipeline, time).await
        })?;
        if answers.len() != asked {
            return Err(Error::internal("the server did not answer every question"));
        }
        Ok(answers)
    }

    /// [`Connections::ask`] with one question.
    pub(super) fn ask_one(&self, io: &IoJob, traffic: Traffic, question: Cmd) -> Result<Value> {
        let mut answers = self.ask(io, traffic, [question])?;
        answers
            .pop()
            .unwrap_or_else(|| Err(Error::internal("a question has no answer")))
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

    /// What the server says of itself, of a cluster all nodes together.
    pub(super) fn info(&self, io: &IoJob) -> Result<ServerInfo> {
        let info = self.with_link(io, Traffic::Short, 0, |mut link| async move {
            link.info().await
        })?;
        Ok(ServerInfo::parse(&info))
    }

    /// Asks over a connection, and once more over a new one where it turns out that the server had
    /// ended it: it may end what was idle, and what is asked here may be asked twice. `weight`:
    /// units of [`IN_FLIGHT`] that this takes.
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
        let connecting = tokio::spawn(async move { line.connect(server).await });
        connecting
            .await
            .unwrap_or_else(|_| Err(Error::internal("making a connection panicked")))
    }

    fn usable(&self, state: &State) -> Option<(u64, Link)> {
        let fresh = state.number > self.given_up.load(Ordering::Acquire);
        let link = state
            .open
            .clone()
            .filter(|link| fresh && !link.is_retired())?;
        Some((state.number, link))
    }

    async fn connect(&self, server: Server) -> Result<(u64, Link)> {
        let mut state = self.state.lock().await;
        if let Some(open) = self.usable(&state) {
            return Ok(open); // made by the caller that was first
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

    /// Notes how a question that was asked at `began` ended. Where one after the other is late and
    /// nothing else comes, the connection is given up.
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
                self.give_up();
            }
        }
    }

    /// The next question goes over a new connection. Where one is being made, it is new anyway.
    fn give_up(&self) {
        if let Ok(state) = self.state.try_lock() {
            self.given_up.fetch_max(state.number, Ordering::AcqRel);
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
        Bounded::connect(&self.info, self.tls.as_ref()).await
    }

    async fn ask_info(&self) -> Result<ServerInfo> {
        let mut connection = self.connect().await.map_err(no_answer)?;
        let info = connection.req_packed_command(&redis::cmd("INFO")).await;
        let refused = |error: RedisError| match error.code() {
            // an account that may not ask: it is taken for one server
            Some("NOPERM") => Ok(ServerInfo::default()),
            _ => Err(no_answer(error)),
        };
        match info.and_then(Value::extract_error) {
            Ok(info) => Ok(ServerInfo::parse(&info)),
            Err(error) => refused(error),
        }
    }
}

/// What a question and its answer take of [`IN_FLIGHT`], in units.
fn units_of(question: &Cmd) -> usize {
    let sent = question.args_iter().map(|arg| match arg {
        Arg::Simple(word) => word.len(),
        _ => 0,
    });
    let expected = usize::try_from(answer_bound(question)).unwrap_or(usize::MAX);
    expected.saturating_add(sent.sum()).div_ceil(UNIT)
}

impl Link {
    /// Whether it takes no more questions. The client of a cluster renews its connections itself.
    fn is_retired(&self) -> bool {
        match self {
            Self::One(connection) => connection.is_retired(),
            Self::Cluster { .. } => false,
        }
    }

    /// An answer or a refusal for each question, of a cluster also why none came in `time`; an
    /// error where the connection to the only server broke.
    async fn ask(
        &mut self,
        questions: &Pipeline,
        time: Duration,
    ) -> Result<Vec<Result<Value>>, RedisError> {
        let answers = match self {
            Self::One(connection) => match questions.cmd_iter().next() {
                // By itself, one is told why the connection broke.
                Some(one) if questions.len() == 1 => vec![connection.req_packed_command(one).await],
                _ => {
                    let asked = connection.req_packed_commands(questions, 0, questions.len());
                    asked.await?.into_iter().map(Ok).collect()
                }
            },
            Self::Cluster { connection, .. } => {
                return Ok(ask_nodes(connection, questions, time).await);
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

    async fn info(&mut self) -> Result<Value, RedisError> {
        let question = redis::cmd("INFO");
        match self {
            Self::One(connection) => connection.req_packed_command(&question).await,
            Self::Cluster { connection, .. } => {
                let all = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
                connection.route_command(question, all).await
            }
        }
        .and_then(Value::extract_error)
    }

    async fn scan(&mut self, pattern: &str) -> Result<Vec<Vec<u8>>, RedisError> {
        let nodes = match self {
            Self::One(_) => vec![None],
            Self::Cluster { connection, .. } => {
                primaries(connection).await?.into_iter().map(Some).collect()
            }
        };
        let (mut found, mut named) = (Vec::new(), 0);
        for node in nodes {
            let mut cursor = "0".to_owned();
            loop {
                let mut question = redis::cmd("SCAN");
                question
                    .arg(&cursor)
                    .arg("MATCH")
                    .arg(pattern)
                    .arg("COUNT")
                    .arg(SCAN);
                let answer = match (&mut *self, &node) {
                    (Self::Cluster { connection, .. }, Some((host, port))) => {
                        let node = SingleNodeRoutingInfo::ByAddress {
                            host: host.clone(),
                            port: *port,
                        };
                        connection
                            .route_command(question, RoutingInfo::SingleNode(node))
                            .await
                    }
                    (Self::One(connection), _) => connection.req_packed_command(&question).await,
                    (Self::Cluster { .. }, None) => break,
                };
                let (next, keys): (String, Vec<Vec<u8>>) =
                    redis::from_redis_value(answer?.extract_error()?)?;
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

/// Asks the nodes side by side; over each connection that is a pipeline again. A node that is gone,
/// or silent for so long, fails its own questions alone: the others go on, and the client looks for
/// it by itself.
async fn ask_nodes(
    connection: &ClusterConnection<Bounded>,
    questions: &Pipeline,
    time: Duration,
) -> Vec<Result<Value>> {
    let one = |question| {
        let mut connection = connection.clone();
        let asked = async move { connection.req_packed_command(question).await };
        tokio::time::timeout(time, asked)
    };
    let answers = futures_util::future::join_all(questions.cmd_iter().map(one)).await;
    if answers.iter().all(Result::is_err) && !answers.is_empty() {
        // no one answers: the deadline of the caller that waits says so
        std::future::pending::<()>().await;
    }
    let settled = |answer: Result<Result<Value, RedisError>, Elapsed>| match answer {
        Ok(answer) => answer.and_then(Value::extract_error).map_err(no_answer),
        Err(_) => Err(Error::new(
            ErrorKind::Timeout,
            "this node of the cluster did not answer in time",
        )),
    };
    answers.into_iter().map(settled).collect()
}

/// The primaries of a cluster: host and port of each.
async fn primaries(
    connection: &mut ClusterConnection<Bounded>,
) -> Result<Vec<(String, u16)>, RedisError> {
    let mut question = redis::cmd("CLUSTER");
    question.arg("SLOTS");
    let any = RoutingInfo::SingleNode(SingleNodeRoutingInfo::Random);
    let ranges = connection
        .route_command(question, any)
        .await?
        .extract_error()?;
    let mut nodes = Vec::new();
    let Value::Array(ranges) = ranges else {
        return Ok(nodes);
    };
    for range in ranges {
        // First slot, last slot, the primary (host, port, ...), replicas.
        let Value::Array(range) = range else { continue };
        if let Some(Value::Array(primary)) = range.into_iter().nth(2) {
            let mut primary = primary.into_iter();
            if let (Some(host), Some(port)) = (primary.next(), primary.next()) {
                nodes.push((
                    redis::from_redis_value(host)?,
                    redis::from_redis_value(port)?,
                ));
            }
        }
    }
    nodes.sort_unstable();
    nodes.dedup();
    Ok(nodes)
}

/// A listing that does not come on, or is too long.
fn endless() -> RedisError {
    let text = "the server lists keys without end, or more than can be listed";
    std::io::Error::new(std::io::ErrorKind::Unsupported, text).into()
}

fn late() -> Error {
    Error::new(ErrorKind::Timeout, "the server took no connection in time")
}

fn no_client(error: RedisError) -> Error {
    Error::new(ErrorKind::Config, "no client can be made for this server").caused_by(error)
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

/// Why the server refused. A server that keeps no more, or cannot save what it has, is full.
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
        // A health of writes alone: what it has can be read.
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

/// The error of a write. A server that lets us not write has answered, and what it has can be read.
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
