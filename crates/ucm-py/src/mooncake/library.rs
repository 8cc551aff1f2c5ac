//! Mooncake's Python client: the calls that are used, and the meaning of its codes.
//!
//! A call to the pool releases the GIL while it waits, so holding it here costs other threads no
//! more than the arguments take. Setting a client up and closing it do not, and take minutes where
//! the master hangs: they are called only after it was seen to answer ([`Pool::host`]).

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use pyo3::call::PyCallArgs;
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;
use ucm_core::{Error, ErrorKind, Result};

/// How long the master may take to accept a connection, and to answer.
const REACH: Duration = Duration::from_secs(2);
/// The head of a call of a function that no master has, as its RPC (coro_rpc of yalantinglibs) is
/// written: magic, version, form of the arguments, type, then u32 each: sequence, function, length
/// of the arguments and of the attachment. A running master answers at once that there is no such
/// function.
const NO_CALL: [u8; 20] = [21, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A value was found.
pub(super) const FOUND: i64 = 1;
/// No error.
pub(super) const OK: i64 = 0;
const NO_SPACE: i64 = -200;
pub(super) const WRONG_ARGUMENT: i64 = -600;
/// There is no value with a key.
pub(super) const NO_VALUE: i64 = -704;
/// An error of the object: absent, evicted during the call, not written to its end, its lease over.
const OF_THE_OBJECT: std::ops::RangeInclusive<i64> = -799..=-702;
/// The master did not answer.
const NO_MASTER: std::ops::RangeInclusive<i64> = -999..=-900;

/// Where the pool is, and what this process brings to it.
pub(super) struct Pool {
    /// Address of the master.
    pub(super) master: String,
    /// Address of the metadata server, or Mooncake's word for none.
    pub(super) metadata: String,
    /// Under which name others reach this host, if that is given.
    pub(super) host: Option<String>,
    /// How bytes travel.
    pub(super) protocol: String,
    /// The network device.
    pub(super) device: String,
    /// Bytes that this process lends.
    pub(super) lent: u64,
    /// Bytes for the client that moves records.
    pub(super) buffer: u64,
}

impl Pool {
    /// The name of this host for a new client, once the master was seen to answer: Mooncake itself
    /// tries for minutes. `Io` where it does not. A master behind another service is not checked.
    pub(super) fn host(&self) -> Result<String> {
        let given = self.host.clone().filter(|host| !host.is_empty());
        if self.master.contains("://") {
            return given.ok_or_else(|| {
                let text = "local_hostname is not given, and cannot be found out from a master \
                            behind another service";
                Error::new(ErrorKind::Config, text).with("master", &self.master)
            });
        }
        let unreachable = |error| {
            let text = "Mooncake's master cannot be reached";
            Error::from_io(error, text).with("master", &self.master)
        };
        let mut last = std::io::Error::from(std::io::ErrorKind::NotFound);
        for address in self.master.to_socket_addrs().map_err(unreachable)? {
            match TcpStream::connect_timeout(&address, REACH).and_then(answered) {
                Ok(stream) => {
                    let found = || {
                        let here = stream.local_addr().map_err(unreachable)?;
                        Ok(here.ip().to_string())
                    };
                    return given.map_or_else(found, Ok);
                }
                Err(error) => last = error,
            }
        }
        Err(unreachable(last))
    }
}

/// The connection, once something was received: an answer, or its end. An error if there is
/// neither.
fn answered(mut stream: TcpStream) -> std::io::Result<TcpStream> {
    use std::io::ErrorKind::{TimedOut, WouldBlock};
    stream.set_read_timeout(Some(REACH))?;
    stream.write_all(&NO_CALL)?;
    let came = stream.read(&mut [0]);
    match came {
        Err(error) if matches!(error.kind(), TimedOut | WouldBlock) => {
            let text = "it accepts connections and does not answer";
            Err(std::io::Error::new(TimedOut, text))
        }
        _ => Ok(stream),
    }
}

/// Refuses, with what to do, where the client cannot be imported.
pub(super) fn check_installed() -> Result<()> {
    let imported = Python::try_attach(|py| {
        quiet(py)?;
        py.import("mooncake.store").map(drop)
    });
    match imported {
        Some(Ok(())) => Ok(()),
        Some(Err(error)) => {
            let missing =
                Python::try_attach(|py| error.is_instance_of::<PyImportError>(py)).unwrap_or(false);
            let kind = match missing {
                true => ErrorKind::Config,
                false => ErrorKind::Io,
            };
            let text = "UcmMooncakeStore needs Mooncake's client, which cannot be imported; \
                        install \
                        mooncake-transfer-engine (or -non-cuda, and the system's libibverbs1), or \
                        name another store";
            Err(Error::new(kind, text).caused_by(error))
        }
        None => Err(ending()),
    }
}

/// Mooncake logs every step to the error stream unless this is set before it is loaded.
fn quiet(py: Python<'_>) -> PyResult<()> {
    let environment = py.import("os")?.getattr("environ")?;
    environment.call_method1("setdefault", ("MC_LOG_LEVEL", "ERROR"))?;
    Ok(())
}

fn ending() -> Error {
    Error::new(ErrorKind::Closed, "the Python interpreter ends")
}

/// Works with Python for one batch. `Io` for what it raises, `Closed` once the interpreter ends.
pub(super) fn attached<T>(work: impl FnOnce(Python<'_>) -> PyResult<T>) -> Result<T> {
    let raised =
        |error: PyErr| Error::new(ErrorKind::Io, "Mooncake's client raised").caused_by(error);
    Python::try_attach(|py| work(py).map_err(raised)).unwrap_or_else(|| Err(ending()))
}

/// A client. It must not be called any more once it was closed: it would crash.
pub(super) struct Handle(Py<PyAny>);

impl Handle {
    /// A client under this name that lends `lent` bytes and has `buffer` bytes for itself. Holds
    /// the GIL, for minutes where the master does not answer.
    pub(super) fn set_up(pool: &Pool, host: &str, lent: u64, buffer: u64) -> Result<Self> {
        let (handle, code) = attached(|py| {
            let module = py.import("mooncake.store")?;
            let client = module.getattr("MooncakeDistributedStore")?.call0()?;
            let what = (
                host,
                &pool.metadata,
                lent,
                buffer,
                &pool.protocol,
                &pool.device,
                &pool.master,
            );
            let code: i64 = client.call_method1("setup", what)?.extract()?;
            Ok((Self(client.unbind()), code))
        })?;
        if code == OK {
            return Ok(handle);
        }
        let text = "Mooncake refused to set up a client; its own log (MC_LOG_LEVEL=INFO) says why";
        Err(Error::new(ErrorKind::Io, text)
            .with("code", code)
            .with("master", &pool.master))
    }

    /// Works with the client for one batch; `None`, and nothing was done, where it has lost its
    /// master.
    pub(super) fn batch<T>(
        &self,
        work: impl FnOnce(&Calls<'_>) -> PyResult<T>,
    ) -> Result<Option<T>> {
        attached(|py| {
            let calls = Calls(self.0.bind(py).clone());
            let health: i64 = calls.0.call_method0("health_check")?.extract()?;
            if health == OK {
                work(&calls).map(Some)
            } else {
                Ok(None)
            }
        })
    }

    /// Ends the client and every transfer of it. Holds the GIL, of a client that lends for minutes
    /// where the master does not answer.
    pub(super) fn close(self) {
        let _ended = attached(|py| {
            let client = self.0.into_bound(py);
            client.call_method0("close").map(drop)
        });
    }

    /// Leaves the client as it is until the process ends; the master drops it after a silence.
    pub(super) fn leave(self) {
        let _ = std::mem::ManuallyDrop::new(self.0); // its destructor closes it
    }
}

/// A client within one batch. Addresses are of registered memory that belongs to the caller until
/// the call returned; see [`is_settled`] for when it may be used again.
pub(super) struct Calls<'py>(Bound<'py, PyAny>);

impl<'py> Calls<'py> {
    /// The codes of one call for several keys.
    fn batch(&self, name: &str, arguments: impl PyCallArgs<'py>) -> PyResult<Vec<i64>> {
        self.0.call_method1(name, arguments)?.extract()
    }

    /// For each key 1, 0 or an error.
    pub(super) fn exist(&self, keys: &[&str]) -> PyResult<Vec<i64>> {
        self.batch("batch_is_exist", (keys,))
    }

    /// Reads each value to an address with `room` bytes; its length, or an error.
    pub(super) fn get(
        &self,
        keys: &[&str],
        addresses: &[u64],
        room: &[usize],
    ) -> PyResult<Vec<i64>> {
        self.batch("batch_get_into", (keys, addresses, room))
    }

    /// The length of one value, or an error.
    pub(super) fn length(&self, key: &str) -> PyResult<i64> {
        self.0.call_method1("get_size", (key,))?.extract()
    }

    /// The length of each value, or an error.
    pub(super) fn lengths(&self, keys: &[&str]) -> PyResult<Vec<i64>> {
        keys.iter().map(|key| self.length(key)).collect()
    }

    /// Reads `len` bytes of one value, from `start` on, which must be there; how many, or an
    /// error.
    pub(super) fn piece(&self, key: &str, address: u64, start: usize, len: usize) -> PyResult<i64> {
        let (addresses, keys) = ([address], [[key]]);
        let what = (addresses, keys, [[[0usize]]], [[[start]]], [[[len]]]);
        let read: Vec<Vec<Vec<i64>>> = self.0.call_method1("get_into_ranges", what)?.extract()?;
        let mut read = read.into_iter().flatten().flatten();
        Ok(read.next().unwrap_or(WRONG_ARGUMENT))
    }

    /// Stores each value; one that is there stays, unless it is to be replaced.
    pub(super) fn put(
        &self,
        keys: &[&str],
        addresses: &[u64],
        lengths: &[usize],
        replace: bool,
    ) -> PyResult<Vec<i64>> {
        let call = match replace {
            true => "batch_upsert_from",
            false => "batch_put_from",
        };
        self.batch(call, (keys, addresses, lengths))
    }

    /// Removes each value, also one that was read just now.
    pub(super) fn remove(&self, keys: &[&str]) -> PyResult<Vec<i64>> {
        self.batch("batch_remove", (keys, true))
    }

    /// Makes memory known.
    pub(super) fn register(&self, address: u64, len: usize) -> PyResult<i64> {
        let arguments = (address, len);
        self.0.call_method1("register_buffer", arguments)?.extract()
    }
}

/// Whether an operation with this answer is over in every respect. After any other failure Mooncake
/// may still move bytes of the buffer, which must not be used again until the client was closed.
pub(super) fn is_settled(code: i64) -> bool {
    code >= OK
        || code == NO_SPACE
        || code == WRONG_ARGUMENT
        || OF_THE_OBJECT.contains(&code)
        || NO_MASTER.contains(&code)
}

/// The error that a number stands for.
pub(super) fn error_of(code: i64) -> Error {
    let (kind, text) = match code {
        NO_SPACE => (
            ErrorKind::NoSpace,
            "the pool has no room for this record now; Mooncake evicts by itself",
        ),
        WRONG_ARGUMENT => (
            ErrorKind::Foreign,
            "the value with this record's key is longer than a record",
        ),
        code if OF_THE_OBJECT.contains(&code) => (
            ErrorKind::NotFound,
            "the pool does not have this record (any more)",
        ),
        code if NO_MASTER.contains(&code) => (ErrorKind::Io, "Mooncake's master does not answer"),
        _ => (
            ErrorKind::Io,
            "Mooncake could not transfer the bytes; the process that holds them may have ended",
        ),
    };
    Error::new(kind, text).with("code", code)
}
