//! The HTTP client below the clients of object stores, and the limits on what a server may send.
//!
//! No length that a server announces is believed: nothing is reserved for it, and each request says
//! how many bytes of an answer it takes ([`Most`]). A longer answer fails there. Answers that are
//! collected in memory share one limit a store. A redirect is not followed, because keys would go
//! along, and of an answer that reports an error only status and code are kept.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::StreamExt;
use http_body::{Body, Frame};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions, Extensions};
use reqwest::header::{HeaderMap, LOCATION};
use reqwest::tls::Certificate;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use super::errors::{causes, code_in, plain};
use crate::network::use_ring;

/// How long making a connection may take, to a bucket and to a machine's own service of keys; and
/// how long one request may take. Deadlines of ours are mostly sooner.
const CONNECT: Duration = Duration::from_secs(5);
const CONNECT_METADATA: Duration = Duration::from_secs(1);
const REQUEST: Duration = Duration::from_secs(120);
/// Longest page of a listing, bytes.
pub(super) const PAGE: u64 = 1 << 20;
/// Longest answer to a request that says nothing else: to a put, to a question for keys, and that
/// of an error.
const SMALL: u64 = 64 << 10;
/// Bytes that the answers of one store may hold in memory together, and the unit in which they are
/// counted.
pub(super) const IN_FLIGHT: u64 = 128 << 20;
const UNIT: u64 = 1 << 10;
/// Longest name of a host that is repeated.
const HOST: usize = 255;

/// How many bytes of its answer a request takes; it lies in the extensions of the request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Most {
    bytes: u64,
    /// The bytes go where there is room for them already, as they arrive.
    streamed: bool,
}

impl Most {
    /// An answer that is collected in memory.
    pub(super) fn collected(bytes: u64) -> Extensions {
        Self::extensions(bytes, false)
    }

    /// An answer that is copied to its place as it arrives.
    pub(super) fn streamed(bytes: u64) -> Extensions {
        Self::extensions(bytes, true)
    }

    fn extensions(bytes: u64, streamed: bool) -> Extensions {
        let mut extensions = Extensions::new();
        extensions.insert(Self { bytes, streamed });
        extensions
    }
}

/// Makes the clients of one store: that of the bucket, and those that ask for keys.
#[derive(Debug, Clone)]
pub(super) struct Connector {
    /// Settings of a client, which are passed to [`HttpConnector::connect`].
    pub(super) options: ClientOptions,
    connections: usize,
    authorities: Vec<Certificate>,
    room: Arc<Semaphore>,
}

impl Connector {
    /// `http`: the bucket is reached without TLS. `connections` are kept open, `authorities`
    /// trusted beside those of the system.
    pub(super) fn new(http: bool, connections: usize, authorities: Vec<Certificate>) -> Self {
        use_ring();
        Self {
            options: ClientOptions::new()
                .with_allow_http(http)
                .with_connect_timeout(CONNECT),
            connections,
            authorities,
            room: Arc::new(Semaphore::new((IN_FLIGHT / UNIT) as usize)),
        }
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let value = |key| options.get_config_value(&key);
        let connect = ClientConfigKey::ConnectTimeout;
        let is_ours = value(connect) == self.options.get_config_value(&connect);
        let client = reqwest::Client::builder()
            .user_agent(concat!("ucm/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .timeout(REQUEST)
            .connect_timeout(if is_ours { CONNECT } else { CONNECT_METADATA })
            .pool_max_idle_per_host(self.connections)
            .tls_certs_merge(self.authorities.iter().cloned())
            .https_only(value(ClientConfigKey::AllowHttp).as_deref() != Some("true"))
            .http1_only()
            .dns_resolver(Shuffled)
            // A shorter form would hide how long an answer is.
            .no_gzip()
            .no_brotli()
            .no_zstd()
            .no_deflate()
            .build();
        let client = client.map_err(|error| object_store::Error::Generic {
            store: "HTTP client",
            source: Box::new(error),
        })?;
        Ok(HttpClient::new(Service {
            client: HttpClient::new(client),
            room: Arc::clone(&self.room),
        }))
    }
}

/// Resolves a name to its addresses in an order of chance, so that requests spread over the
/// servers.
struct Shuffled;

impl reqwest::dns::Resolve for Shuffled {
    fn resolve(&self, name: reqwest::dns::Name) -> reqwest::dns::Resolving {
        Box::pin(async move {
            // A set ends with the wait for it, and a lookup that has not begun is not made.
            let mut lookup = JoinSet::new();
            lookup.spawn_blocking(move || (name.as_str(), 0).to_socket_addrs());
            let Some(found) = lookup.join_next().await else {
                return Err("the lookup of a name was not made".into());
            };
            let mut found: Vec<SocketAddr> = found??.collect();
            found.sort_by_cached_key(|_| ucm_infra::random_u64());
            Ok(Box::new(found.into_iter()) as reqwest::dns::Addrs)
        })
    }
}

/// A client that keeps to the limits of [`Most`] and to those of the store.
#[derive(Debug)]
struct Service {
    client: HttpClient,
    room: Arc<Semaphore>,
}

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (bytes, streamed) = (SMALL, false);
        let most = request.extensions().get().copied();
        let most = most.unwrap_or(Most { bytes, streamed });
        let (parts, body) = self.client.execute(request).await?.into_parts();
        let not_modified = parts.status == reqwest::StatusCode::NOT_MODIFIED;
        if parts.status.is_redirection() && !not_modified {
            let redirect = Refused::redirect(&parts.headers);
            return Err(HttpError::new(HttpErrorKind::Unknown, redirect));
        }
        if !parts.status.is_success() {
            let code = read_code(body).await;
            return Ok(HttpResponse::from_parts(parts, code.into()));
        }
        let announced = body.size_hint().upper().unwrap_or(u64::MAX);
        let room = match most.streamed {
            true => None,
            false => self.reserve(announced.min(most.bytes)).await,
        };
        let body = HttpResponseBody::new(Bounded {
            body,
            most: most.bytes,
            left: most.bytes,
            cut: false,
            room,
        });
        Ok(HttpResponse::from_parts(parts, body))
    }
}

impl Service {
    /// Waits until `bytes` more may be in memory; the deadline of the caller ends that.
    async fn reserve(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        let units = bytes.min(IN_FLIGHT).div_ceil(UNIT);
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        Arc::clone(&self.room).acquire_many_owned(units).await.ok()
    }
}

/// A body that reports no length, and fails behind the bytes that were requested.
struct Bounded {
    body: HttpResponseBody,
    most: u64,
    left: u64,
    /// A piece was longer than the rest of these bytes.
    cut: bool,
    /// Its share of the store's limit, until it ends.
    room: Option<OwnedSemaphorePermit>,
}

impl Body for Bounded {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        while !self.cut {
            let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
            let Some(Ok(frame)) = frame else {
                self.room = None;
                return Poll::Ready(frame);
            };
            // Anything else than data says nothing of an object.
            let Ok(mut data) = frame.into_data() else {
                continue;
            };
            let len = data.len() as u64;
            self.cut = len > self.left;
            data.truncate(usize::try_from(self.left).unwrap_or(usize::MAX));
            self.left -= data.len() as u64;
            if !data.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
        }
        self.room = None;
        let long = Refused::TooLong(self.most);
        Poll::Ready(Some(Err(HttpError::new(HttpErrorKind::Decode, long))))
    }
}

/// An answer that is not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Refused {
    /// It has more bytes than this.
    TooLong(u64),
    /// It names another place: the host, and the bucket's region, as far as the answer has them.
    Redirect {
        host: Option<String>,
        region: Option<String>,
    },
}

impl Refused {
    fn redirect(headers: &HeaderMap) -> Self {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let location =
            text(LOCATION.as_str()).and_then(|location| reqwest::Url::parse(location).ok());
        let host = location.as_ref().and_then(|url| {
            let host = url.host_str().filter(|host| host.len() <= HOST)?;
            Some(match url.port() {
                Some(port) => format!("{host}:{port}"),
                None => host.to_owned(),
            })
        });
        let region = text("x-amz-bucket-region").map(plain);
        Self::Redirect {
            host,
            region: region.filter(|region| !region.is_empty()),
        }
    }

    /// What an error of the client comes from, where that is an answer which was not taken.
    pub(super) fn behind(error: &object_store::Error) -> Option<&Self> {
        causes(error).find_map(|cause| cause.downcast_ref())
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong(most) => write!(f, "the answer has more than {most} bytes"),
            Self::Redirect { host, region } => {
                let host = host.as_deref().unwrap_or("a host that it does not name");
                let region = region.iter().map(|region| format!(": {region}"));
                let region: String = region.collect();
                write!(
                    f,
                    "answers with a redirect to {host}: set endpoint or region \
                     (object_endpoint, object_region{region})"
                )
            }
        }
    }
}

impl std::error::Error for Refused {}

/// The code in the body of an error: S3, Azure and Google write `<Code>...</Code>`. Nothing else of
/// it is kept.
async fn read_code(body: HttpResponseBody) -> String {
    let (mut pieces, mut text) = (body.bytes_stream(), Vec::new());
    while let Some(Ok(piece)) = pieces.next().await {
        let left = SMALL as usize - text.len();
        text.extend_from_slice(&piece[..piece.len().min(left)]);
        if piece.len() >= left {
            break;
        }
    }
    code_in(&String::from_utf8_lossy(&text))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use object_store::client::HttpRequestBody;

    use super::super::hostile::{Server, endless, wait, whole};
    use super::*;

    fn request(extensions: Extensions) -> HttpRequest {
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.extensions_mut() = extensions;
        request
    }

    /// A server whose answers never end.
    #[derive(Debug)]
    struct Silent;

    #[async_trait]
    impl HttpService for Silent {
        async fn call(&self, _request: HttpRequest) -> Result<HttpResponse, HttpError> {
            Ok(HttpResponse::new(HttpResponseBody::new(Never)))
        }
    }

    struct Never;

    impl Body for Never {
        type Data = Bytes;
        type Error = HttpError;

        fn poll_frame(
            self: Pin<&mut Self>,
            _context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
            Poll::Pending
        }
    }

    #[test]
    fn answers_of_one_store_share_one_limit() {
        let service = Service {
            client: HttpClient::new(Silent),
            room: Connector::new(true, 1, Vec::new()).room,
        };
        let part = IN_FLIGHT / 8;
        let mut held = Vec::new();
        while let Some(answer) = service.call(request(Most::collected(part))).now_or_never() {
            held.push(answer.unwrap());
            assert!(held.len() <= 8, "{} of an eighth", held.len());
        }
        assert_eq!(held.len(), 8);
        let streamed = service.call(request(Most::streamed(part))).now_or_never();
        assert!(
            streamed.is_some(),
            "what goes where there is room already needs none"
        );
        held.pop();
        assert!(
            service
                .call(request(Most::collected(part)))
                .now_or_never()
                .is_some()
        );
    }

    #[test]
    fn a_client_for_keys_has_the_same_limits_and_follows_nowhere() {
        let connector = Connector::new(false, 1, Vec::new());
        let metadata = connector.options.clone().with_allow_http(true);
        let client = connector
            .connect(&metadata.with_connect_timeout(CONNECT_METADATA))
            .unwrap();
        let ask = |port: u16| {
            let mut request = request(Extensions::new());
            *request.uri_mut() = format!("http://127.0.0.1:{port}/latest").parse().unwrap();
            wait(async { Ok(client.execute(request).await) }).unwrap()
        };
        let server = Server::start(endless("200 OK", "", ""));
        let answer = ask(server.port).unwrap();
        let failed = wait(async { Ok(answer.into_body().bytes().await) }).unwrap();
        assert!(
            failed.unwrap_err().to_string().contains("more than 65536"),
            "it is no token"
        );
        assert!(server.sent() < 32 << 20);
        let server = Server::start(whole(
            "307 Temporary Redirect",
            "Location: http://127.0.0.1:1/\r\n",
            "",
        ));
        let failed = ask(server.port).unwrap_err().to_string();
        assert!(failed.contains("redirect to 127.0.0.1:1"), "{failed}");
    }
}
