//! The addresses of servers and the login, parsed from the configuration. A password is passed to
//! the client only: an address is shown without it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use ucm_core::{Error, ErrorKind, Result};

use crate::secret_file;

/// The user and the password, if the address has none.
#[derive(Clone, Default)]
pub struct Login {
    /// Name of the user; `default` where none is given.
    pub username: Option<String>,
    /// The password.
    pub password: Option<String>,
}

/// Certificates for TLS, beside those of the system. Files in PEM.
#[derive(Debug, Clone, Default)]
pub struct TlsFiles {
    /// The authorities that are trusted; none: those of the system.
    pub ca: Option<PathBuf>,
    /// Our own certificate and its key, where the server wants one.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

/// One server, or one node of a cluster.
#[derive(Clone)]
pub(super) struct Address {
    info: ConnectionInfo,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, host, port) = match self.info.addr() {
            ConnectionAddr::Tcp(host, port) => ("redis", host, port),
            ConnectionAddr::TcpTls { host, port, .. } => ("rediss", host, port),
            _ => return f.write_str("another kind of address"), // refused by `parse`
        };
        let db = self.info.redis_settings().db();
        write!(f, "{scheme}://{host}:{port}/{db}")
    }
}

impl Address {
    /// Reads the addresses of a configuration, at least one.
    pub(super) fn parse_all(written: &[String], login: &Login) -> Result<Vec<Self>> {
        if written.is_empty() {
            let text =
                "storage_backends names no server; write redis://host:port, or rediss:// for TLS";
            return Err(Error::new(ErrorKind::Config, text));
        }
        let parse = |written: &String| Self::parse(written, login);
        written.iter().map(parse).collect()
    }

    /// Reads `redis://[user:password@]host[:port][/number]`, or the same with `rediss` for TLS.
    /// `Config` for anything else; the error does not repeat what was written, which may be a
    /// password.
    fn parse(written: &str, login: &Login) -> Result<Self> {
        let wrong = |why: &'static str| {
            let text = "an address is redis://host:port/number, or rediss:// for TLS; a password \
                        in it is written with %xx for / @ : and the like, or given apart \
                        (redis_password)";
            Error::new(ErrorKind::Config, text).with("wrong", why)
        };
        let mut schemes = ["redis://", "rediss://"].iter();
        if !schemes.any(|scheme| written.starts_with(scheme)) {
            return Err(wrong("the scheme"));
        }
        let info = written.into_connection_info();
        let info = info.map_err(|_| wrong("what follows the scheme"))?;
        if matches!(info.addr(), ConnectionAddr::TcpTls { insecure: true, .. }) {
            return Err(wrong(
                "#insecure, which accepts any certificate; name the authority with redis_tls_ca",
            ));
        }
        let mut settings = info.redis_settings().clone();
        if let Some(username) = &login.username {
            settings = settings.set_username(username);
        }
        if let Some(password) = &login.password {
            settings = settings.set_password(password);
        }
        Ok(Self {
            info: info.set_redis_settings(settings),
        })
    }

    /// The form that the client takes.
    pub(super) fn info(&self) -> ConnectionInfo {
        self.info.clone()
    }

    /// Number of its database; a cluster has only 0.
    pub(super) fn database(&self) -> i64 {
        self.info.redis_settings().db()
    }

    /// Whether it is reached by TLS.
    pub(super) fn is_tls(&self) -> bool {
        matches!(self.info.addr(), ConnectionAddr::TcpTls { .. })
    }
}

impl TlsFiles {
    /// The configuration of TLS with these files. `Config` for a file that cannot be read or used.
    pub(super) fn client_config(&self) -> Result<Arc<ClientConfig>> {
        let mut roots = RootCertStore::empty();
        if let Some(path) = &self.ca {
            for certificate in certificates(path)? {
                let added = roots.add(certificate);
                added.map_err(|error| wrong_file(path, error))?;
            }
        } else {
            let found = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(found.certs);
            if let (true, Some(error)) = (roots.is_empty(), found.errors.into_iter().next()) {
                let text = "the authorities that this system trusts cannot be read; name one with \
                            redis_tls_ca";
                return Err(Error::new(ErrorKind::Config, text).caused_by(error));
            }
        }
        let config = ClientConfig::builder().with_root_certificates(roots);
        let Some((certificate, key)) = &self.certificate else {
            return Ok(Arc::new(config.with_no_client_auth()));
        };
        let own_key = PrivateKeyDer::from_pem_slice(&secret_file::read(key, "redis_tls_key")?)
            .map_err(|error| wrong_file(key, error))?;
        let config = config.with_client_auth_cert(certificates(certificate)?, own_key);
        let config = config.map_err(|error| wrong_file(certificate, error))?;
        Ok(Arc::new(config))
    }
}

/// The certificates of a file in PEM.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let text = std::fs::read(path).map_err(|error| {
        let unread = Error::new(ErrorKind::Config, "a file for TLS cannot be read");
        unread.with("path", path.display()).caused_by(error)
    })?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| wrong_file(path, error))?;
    if found.is_empty() {
        let none = Error::new(ErrorKind::Config, "a file for TLS cannot be used");
        let none = none.with("path", path.display());
        return Err(none.with("why", "there is no certificate in it"));
    }
    Ok(found)
}

fn wrong_file(path: &Path, error: impl std::error::Error + Send + Sync + 'static) -> Error {
    let text = "a file for TLS has not what is expected there in PEM";
    Error::new(ErrorKind::Config, text)
        .with("path", path.display())
        .caused_by(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_shown_without_its_password() {
        let login = Login::default();
        for (written, shown) in [
            ("redis://h", "redis://h:6379/0"),
            ("redis://:secret@h:7000/3", "redis://h:7000/3"),
            (
                "rediss://user:secret@h.example",
                "rediss://h.example:6379/0",
            ),
        ] {
            assert_eq!(Address::parse(written, &login).unwrap().to_string(), shown);
        }
        let apart = Login {
            username: Some("user".to_owned()),
            password: Some("secret".to_owned()),
        };
        let address = Address::parse("redis://h", &apart).unwrap();
        assert_eq!(address.info().redis_settings().password(), Some("secret"));
        assert!(!address.to_string().contains("secret"));
    }

    #[test]
    fn a_file_without_a_certificate_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "no PEM").unwrap();
        let files = TlsFiles {
            ca: Some(file.path().to_owned()),
            ..TlsFiles::default()
        };
        let error = files.client_config().err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(
            error.to_string().contains("no certificate in it"),
            "{error}"
        );
    }

    #[test]
    fn what_is_no_address_is_refused_without_repeating_it() {
        for wrong in [
            "http://secret",
            "redis+unix:///secret",
            "redis://user:secret@",
            "redis://h/secret",
            "rediss://h#insecure",
            "rediss://:secret@h:port",
        ] {
            let error = Address::parse(wrong, &Login::default()).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Config, "{wrong}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }
}
