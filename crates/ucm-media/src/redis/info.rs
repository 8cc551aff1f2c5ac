//! The fields of `INFO` that are used here.

use redis::{InfoDict, Value};
use ucm_core::in_units;

/// Of a cluster, sizes are those of all its nodes together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ServerInfo {
    pub(super) version: String,
    pub(super) is_cluster: bool,
    pub(super) is_replica: bool,
    /// Bytes in use.
    pub(super) used: u64,
    /// The limit on that; none where there is no limit.
    pub(super) limit: Option<u64>,
    /// The server's policy of eviction.
    pub(super) policy: String,
}

impl ServerInfo {
    /// Reads an answer to `INFO`, or those of several nodes.
    pub(super) fn parse(answer: &Value) -> Self {
        match answer {
            Value::Map(nodes) => {
                let mut nodes = nodes.iter().map(|(_, node)| Self::parse(node));
                let first = nodes.next().unwrap_or_default();
                nodes.fold(first, |all, node| Self {
                    used: all.used + node.used,
                    limit: all.limit.zip(node.limit).map(|(a, b)| a + b),
                    ..all
                })
            }
            Value::BulkString(bytes) => Self::read(&String::from_utf8_lossy(bytes)),
            Value::SimpleString(text) | Value::VerbatimString { text, .. } => Self::read(text),
            _ => Self::default(),
        }
    }

    fn read(text: &str) -> Self {
        let info = InfoDict::new(text);
        let text = |key| info.get::<String>(key).unwrap_or_default();
        Self {
            version: text("redis_version"),
            is_cluster: text("cluster_enabled") == "1",
            is_replica: text("role") == "slave",
            used: info.get("used_memory").unwrap_or(0),
            limit: info.get("maxmemory").filter(|&limit| limit > 0),
            policy: text("maxmemory_policy"),
        }
    }

    /// How much the server keeps, as a text.
    pub(super) fn bound(&self) -> String {
        match self.limit {
            Some(limit) => format!("at most {} ({})", in_units(limit), self.policy),
            None => "no maxmemory".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_and_a_cluster_say_what_they_are() {
        let text = "# Server\r\nredis_version:7.0.15\r\n# \
                    Memory\r\nused_memory:1000\r\nmaxmemory:5000\r\n\
                    maxmemory_policy:allkeys-lru\r\n# Replication\r\nrole:master\r\n# \
                    Cluster\r\ncluster_enabled:1\r\n";
        let node = Value::BulkString(text.as_bytes().to_vec());
        let info = ServerInfo::parse(&node);
        assert_eq!(
            (info.version.as_str(), info.is_cluster, info.is_replica),
            ("7.0.15", true, false)
        );
        assert_eq!((info.used, info.limit), (1000, Some(5000)));
        let at = |port| Value::SimpleString(format!("h:{port}"));
        let all = ServerInfo::parse(&Value::Map(vec![(at(1), node.clone()), (at(2), node)]));
        assert_eq!((all.used, all.limit), (2000, Some(10_000)));
        assert_eq!(all.bound(), "at most 9.8 KiB (allkeys-lru)");
        let none = ServerInfo::parse(&Value::SimpleString("maxmemory:0\nrole:slave\n".to_owned()));
        assert_eq!((none.limit, none.is_replica), (None, true));
    }
}
