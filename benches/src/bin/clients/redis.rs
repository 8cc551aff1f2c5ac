//! The crate `redis` alone: `SET` and `GET` of one value each, over a few connections with many
//! concurrent requests.

use bytes::Bytes;
use redis::aio::MultiplexedConnection;
use redis::{Client, Pipeline, cmd};

use crate::{Result, each};

/// Connections, as `redis_connections` of the store.
const CONNECTIONS: usize = 4;

/// Connections to one server.
pub(crate) struct Redis(Vec<MultiplexedConnection>);

impl Redis {
    pub(crate) async fn open(at: &str) -> Result<Self> {
        let client = Client::open(format!("redis://{at}"))?;
        let mut connections = Vec::with_capacity(CONNECTIONS);
        for _ in 0..CONNECTIONS {
            connections.push(client.get_multiplexed_async_connection().await?);
        }
        Ok(Self(connections))
    }

    /// Round robin, so that all connections have the same load.
    fn turn(&self, number: usize) -> MultiplexedConnection {
        self.0[number % CONNECTIONS].clone()
    }

    pub(crate) async fn put(&self, keys: &[String], values: &[Bytes]) -> Result<()> {
        let jobs = keys
            .iter()
            .zip(values)
            .enumerate()
            .map(|(number, (key, value))| {
                let (mut connection, key, value) = (self.turn(number), key.clone(), value.clone());
                async move {
                    Ok(cmd("SET")
                        .arg(key)
                        .arg(&value[..])
                        .exec_async(&mut connection)
                        .await?)
                }
            });
        each(jobs).await.map(drop)
    }

    pub(crate) async fn get(&self, keys: &[String], into: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let jobs = keys
            .iter()
            .zip(into)
            .enumerate()
            .map(|(number, (key, mut into))| {
                let (mut connection, key) = (self.turn(number), key.clone());
                async move {
                    let value: Vec<u8> = cmd("GET").arg(key).query_async(&mut connection).await?;
                    into.get_mut(..value.len())
                        .ok_or("a value is too long")?
                        .copy_from_slice(&value);
                    Ok(into)
                }
            });
        each(jobs).await
    }

    /// All with one round trip.
    pub(crate) async fn exist(&self, keys: &[String]) -> Result<Vec<bool>> {
        let mut pipeline = Pipeline::with_capacity(keys.len());
        for key in keys {
            pipeline.cmd("EXISTS").arg(key);
        }
        Ok(pipeline.query_async(&mut self.turn(0)).await?)
    }
}
