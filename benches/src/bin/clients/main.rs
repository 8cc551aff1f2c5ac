//! Client libraries alone, with which `make bench-remote` compares the stores built on them:
//! `clients redis` or `clients s3`.
//!
//! It has the protocol of `benches/peers/child.py`: for each round it reads a line of JSON with the
//! address of an empty server and writes a line with the figures. A round first puts the same
//! number of other blocks, so that connections are open. It then times puts, gets into memory of
//! the caller, lookups, and single blocks in sequence. The returned bytes are compared. It adds
//! nothing to the library: no checksums, headers or deadlines. It has the connections, concurrency
//! and threads of the store.
#![allow(clippy::print_stdout, reason = "it answers on standard output")]

mod redis;
mod s3;

use std::error::Error;
use std::future::Future;
use std::io::{BufRead, Write};
use std::process::ExitCode;
use std::time::Instant;

use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use serde::Deserialize;
use serde_json::{Value, json};

/// An error ends the round and is reported.
type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Concurrent requests, as `redis_concurrency` and `object_concurrency` of the stores.
const AT_ONCE: usize = 16;
/// Threads that drive the client, as in `ucm_infra::Runtime`.
const THREADS: usize = 2;
/// A lookup takes microseconds: the median of this number counts.
const LOOKUPS: usize = 7;

/// The driver's request of one round.
#[derive(Deserialize)]
struct Round {
    /// `host:port` of the server.
    directory: String,
    block_bytes: usize,
    count: usize,
    seed: u64,
    /// Blocks put and got in sequence.
    singles: usize,
}

/// The client of a server.
enum Client {
    Redis(redis::Redis),
    S3(s3::Segments),
}

impl Client {
    async fn open(kind: &str, at: &str) -> Result<Self> {
        match kind {
            "redis" => Ok(Self::Redis(redis::Redis::open(at).await?)),
            "s3" => Ok(Self::S3(s3::Segments::open(at)?)),
            other => Err(format!("{other} is no client; write redis or s3").into()),
        }
    }

    async fn put(&self, keys: &[String], values: &[Bytes]) -> Result<()> {
        match self {
            Self::Redis(client) => client.put(keys, values).await,
            Self::S3(client) => client.put(keys, values).await,
        }
    }

    /// Fills memory of the caller, which it takes during the call.
    async fn get(&self, keys: &[String], into: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        match self {
            Self::Redis(client) => client.get(keys, into).await,
            Self::S3(client) => client.get(keys, into).await,
        }
    }

    /// None if there is nothing to compare.
    async fn exist(&self, keys: &[String]) -> Result<Option<Vec<bool>>> {
        match self {
            Self::Redis(client) => client.exist(keys).await.map(Some),
            Self::S3(_) => Ok(None), // the store's lookups use an index
        }
    }
}

/// Runs each of these, [`AT_ONCE`] at a time and on every thread; returns the results in order.
async fn each<T: Send + 'static, F>(jobs: impl Iterator<Item = F>) -> Result<Vec<T>>
where
    F: Future<Output = Result<T>> + Send + 'static,
{
    let started = stream::iter(jobs).map(tokio::spawn).buffered(AT_ONCE);
    let ended = started.map(|job| job.unwrap_or_else(|stopped| Err(stopped.into())));
    ended.try_collect().await
}

/// Incompressible bytes, different for each block.
fn content(seed: u64, block: usize, len: usize) -> Bytes {
    let mut state = seed ^ (block as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let words = (0..len.div_ceil(8)).flat_map(|_| {
        state = state
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        (state ^ (state >> 29)).to_le_bytes()
    });
    words.take(len).collect::<Vec<u8>>().into()
}

/// Microseconds for each key, the median of [`LOOKUPS`]; `None` if there is nothing to compare.
async fn lookup_us(client: &Client, keys: &[String], there: bool) -> Result<Option<f64>> {
    let mut took = Vec::with_capacity(LOOKUPS);
    for _ in 0..LOOKUPS {
        let start = Instant::now();
        let Some(found) = client.exist(keys).await? else {
            return Ok(None);
        };
        took.push(start.elapsed().as_secs_f64() * 1e6 / keys.len() as f64);
        if found.iter().any(|found| *found != there) {
            return Err("a key exists that should not, or a key is missing".into());
        }
    }
    Ok(median(took))
}

/// None of none.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// Milliseconds of a put and a get of one block, in sequence, the median of these.
async fn one_ms(
    client: &Client,
    keys: &[String],
    source: &[Bytes],
    target: Vec<Vec<u8>>,
) -> Result<[Option<f64>; 2]> {
    let (mut put, mut got) = (Vec::new(), Vec::new());
    for ((key, value), into) in keys.chunks(1).zip(source.chunks(1)).zip(target) {
        let start = Instant::now();
        client.put(key, value).await?;
        put.push(start.elapsed().as_secs_f64() * 1e3);
        let start = Instant::now();
        client.get(key, vec![into]).await?;
        got.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok([median(put), median(got)])
}

/// Figures as `child.py` names them: GB/s (10^9 bytes), microseconds for each id, milliseconds for
/// one block.
async fn round(kind: &str, round: &Round) -> Result<Value> {
    let (count, len) = (round.count, round.block_bytes);
    let keys = |what: &str, count: usize| -> Vec<String> {
        let name = |block| format!("{what}-{}-{block:032x}", round.seed);
        (0..count).map(name).collect()
    };
    let (warm, absent, keys, alone) = (
        keys("warm", count),
        keys("absent", count),
        keys("block", count),
        keys("alone", count.min(round.singles)),
    );
    let source: Vec<Bytes> = (0..count)
        .map(|block| content(round.seed, block, len))
        .collect();
    let client = Client::open(kind, &round.directory).await?;
    client.put(&warm, &source).await?;
    let mut target = client.get(&warm, vec![vec![1; len]; count]).await?;
    target.iter_mut().for_each(|block| block.fill(0));

    let start = Instant::now();
    client.put(&keys, &source).await?;
    let put = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let target = client.get(&keys, target).await?;
    let get = start.elapsed().as_secs_f64();
    if target != source {
        return Err("the bytes of a get differ from those of the put".into());
    }
    let present = lookup_us(&client, &keys, true).await?;
    let absent = lookup_us(&client, &absent, false).await?;
    let [put_one, get_one] = one_ms(&client, &alone, &source, target).await?;
    let bytes = (count * len) as f64;
    Ok(json!({
        "dump": bytes / put / 1e9,
        "load": bytes / get / 1e9,
        "lookup_present": present,
        "lookup_absent": absent,
        "dump_one": put_one,
        "load_one": get_one,
    }))
}

fn main() -> ExitCode {
    let kind = std::env::args().nth(1).unwrap_or_default();
    // The cryptography provider, which object_store's HTTP client leaves to the program.
    let _already = rustls::crypto::ring::default_provider().install_default();
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let Ok(runtime) = builder.worker_threads(THREADS).enable_all().build() else {
        return ExitCode::FAILURE;
    };
    let answer = |message: &Value| writeln!(std::io::stdout(), "{message}").is_ok();
    let threads = format!("{THREADS}, {AT_ONCE} requests at once");
    let mut goes_on = answer(&json!({"version": "as the store's", "threads": threads}));
    for line in std::io::stdin().lock().lines() {
        let Some(line) = line.ok().filter(|_| goes_on) else {
            break;
        };
        let figures = match serde_json::from_str::<Round>(&line) {
            Ok(asked) => runtime.block_on(round(&kind, &asked)),
            Err(error) => Err(error.into()),
        };
        goes_on = answer(&figures.unwrap_or_else(|error| json!({"failed": error.to_string()})));
    }
    ExitCode::SUCCESS
}
