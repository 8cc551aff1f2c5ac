//! The records of a store where they lie by themselves, for tests that damage them: in files, or on
//! a Redis server.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use ucm_core::BlockId;
use ucm_media::registry;

use super::{Medium, Store, identity};

impl Store {
    /// The bytes that are stored under an id.
    pub(crate) fn stored(&self, id: BlockId) -> Option<Vec<u8>> {
        match self.fixture.medium {
            Medium::Kind("redis") => match self.redis(&[b"GET", self.key(id).as_bytes()]) {
                Reply::Bytes(bytes) => Some(bytes),
                Reply::Nil => None,
                other => unreachable!("{other:?}"),
            },
            _ => std::fs::read(self.file(id)).ok(),
        }
    }

    /// Others are stored under it.
    pub(crate) fn store_as(&self, id: BlockId, bytes: &[u8]) {
        match self.fixture.medium {
            Medium::Kind("redis") => {
                assert_eq!(
                    self.redis(&[b"SET", self.key(id).as_bytes(), bytes]),
                    Reply::Text("OK".into())
                );
            }
            _ => std::fs::write(self.file(id), bytes).unwrap(),
        }
    }

    /// Nothing is.
    pub(crate) fn remove_stored(&self, id: BlockId) {
        match self.fixture.medium {
            Medium::Kind("redis") => _ = self.redis(&[b"DEL", self.key(id).as_bytes()]),
            _ => _ = std::fs::remove_file(self.file(id)),
        }
    }

    /// The key of a record on the server.
    pub(crate) fn key(&self, id: BlockId) -> String {
        let options = registry::find("redis").unwrap().sample(&self.root).unwrap();
        let prefix = options["redis_key_prefix"].as_str().unwrap();
        format!(
            "{prefix}:{}:{id}",
            identity(self.fixture.weights).namespace()
        )
    }

    /// Reads from the server itself.
    pub(crate) fn redis(&self, words: &[&[u8]]) -> Reply {
        let address = self.fixture.server();
        ask(address.strip_prefix("redis://").unwrap(), words)
    }
}

/// What a server answers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Nil,
    Number(i64),
    Text(String),
    Bytes(Vec<u8>),
    Error(String),
}

/// One question to a Redis server at `host:port`, over a connection of its own.
pub(crate) fn ask(server: &str, words: &[&[u8]]) -> Reply {
    let mut stream = TcpStream::connect(server).unwrap();
    let mut question = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        question.extend(format!("${}\r\n", word.len()).bytes());
        question.extend_from_slice(word);
        question.extend(b"\r\n");
    }
    stream.write_all(&question).unwrap();
    let mut answer = BufReader::new(stream);
    let mut line = String::new();
    answer.read_line(&mut line).unwrap();
    let (kind, rest) = line.trim_end().split_at(1);
    match (kind, rest) {
        ("+", text) => Reply::Text(text.to_owned()),
        ("-", text) => Reply::Error(text.to_owned()),
        (":", number) => Reply::Number(number.parse().unwrap()),
        ("$", "-1") => Reply::Nil,
        ("$", len) => {
            let mut bytes = vec![0; len.parse().unwrap()];
            answer.read_exact(&mut bytes).unwrap();
            Reply::Bytes(bytes)
        }
        _ => unreachable!("no answer that is known here: {line}"),
    }
}
