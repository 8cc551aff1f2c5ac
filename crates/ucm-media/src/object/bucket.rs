//! A bucket: the calls of its client, with bounds on every answer, and its errors as ours.
//!
//! The client tries a request again a few times where that can help (a busy server, a lost
//! connection), with growing pauses; the deadline of the caller that waits ends all of it. No
//! answer is longer than was requested, and a listing ends where a page brings nothing new.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::aws::S3ConditionalPut;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;
use object_store::{
    BackoffConfig, Error as ClientError, Extensions, GetOptions, GetRange, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, RetryConfig,
    UpdateVersion,
};
use reqwest::tls::Certificate;
use ucm_core::{Error, ErrorKind, Result};

use super::credentials;
use super::errors::{ErrorText, one_line};
use super::http::{Connector, Most, PAGE, Refused};
use crate::secret_file;

/// Pauses before a request is tried again, and how long after its beginning it is.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
const TRIED_FOR: Duration = Duration::from_secs(30);
/// Longest object that is put with one request, bytes, which is also the length of the parts of a
/// longer one; and how many of them are sent at once.
const PART: usize = 16 << 20;
const PARTS_AT_ONCE: usize = 4;
/// Most objects that one listing names, and bytes of their names and tags.
pub(super) const MOST_LISTED: usize = 1 << 20;
const MOST_NAMED: usize = 256 << 20;
/// Objects that are read, or removed, at once.
pub(super) const AT_ONCE: usize = 16;
/// Longest document.
pub(super) const DOCUMENT: u64 = 16 << 20;
/// Most objects on one page of a listing. Azure sends up to 5000, more bytes than a page may have.
const PAGE_OBJECTS: usize = 256;
/// Longest token that names the next page of a listing, bytes.
const TOKEN: usize = 8 << 10;
/// Pages without an object one after the other, which Azure for one may send between others.
const EMPTY_PAGES: u32 = 8;
/// The codes of servers that have no room.
const FULL: [&str; 6] = [
    "507 Insufficient Storage",
    "InsufficientCapacity",
    "NoSpaceLeft",
    "QuotaExceeded",
    "StorageFull",
    "StorageQuotaExceeded",
];

/// Where the client requests keys when none are configured: services of the vendor's own machines.
const NO_KEYS: [&str; 2] = ["//169.254.169.254", "//metadata.google.internal"];
/// The answers of servers that do not know a condition of a put.
const NO_CONDITIONS: [&str; 4] = [
    "501 Not Implemented",
    "405 Method Not Allowed",
    "400 Bad Request: NotImplemented",
    "400 Bad Request: InvalidArgument",
];

/// Where a bucket is, as it is configured.
#[derive(Debug, Clone, Default)]
pub struct BucketConfig {
    /// `s3://`, `az://` or `gs://`, the bucket, and what every name in it begins with.
    pub url: String,
    /// Where its server is, if not at the vendor's.
    pub endpoint: Option<String>,
    /// Region of the bucket.
    pub region: Option<String>,
    /// File with the keys, if they are not to be found in the usual places.
    pub credentials: Option<PathBuf>,
    /// File with the authorities that are trusted, beside those of the system.
    pub ca: Option<PathBuf>,
    /// How often a request is tried again.
    pub retries: usize,
    /// Connections that are kept open.
    pub connections: usize,
}

/// The parts of a URL.
pub(super) struct Url<'a> {
    pub(super) scheme: &'a str,
    pub(super) bucket: &'a str,
    pub(super) prefix: &'a str,
}

impl<'a> Url<'a> {
    /// `Config` where `url` is not of this form.
    pub(super) fn parse(url: &'a str) -> Result<Self> {
        let wrong = || {
            let text = "a bucket is written s3://bucket/prefix, az://container/prefix or \
                        gs://bucket/prefix, and keys go into the environment or the files of the \
                        vendor's own tools";
            Error::new(ErrorKind::Config, text)
        };
        let (scheme, rest) = url.split_once("://").ok_or_else(wrong)?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let plain = |text: &str| !text.contains(['@', '?', '#', ':', ' ']);
        let fits = ["s3", "az", "gs"].contains(&scheme)
            && !bucket.is_empty()
            && plain(bucket)
            && plain(prefix);
        let url = Self {
            scheme,
            bucket,
            prefix,
        };
        fits.then_some(url).ok_or_else(wrong)
    }
}

/// The bytes of an object as they arrive.
pub(super) type Pieces = BoxStream<'static, object_store::Result<Bytes>>;

/// A version of an object, by which it is replaced only where it is still that one.
pub(super) type Version = UpdateVersion;

/// See the module.
pub(crate) struct Bucket {
    client: Client,
    shown: String,
}

/// The client of a vendor's protocol, twice: as a store, and page by page.
struct Client {
    store: Arc<dyn ObjectStore>,
    pages: Arc<dyn PaginatedListStore>,
    /// A listing is in order of names, and can begin behind one.
    is_ordered: bool,
}

impl Client {
    /// The inner error is the client's. `http`: it is reached without TLS.
    fn new(
        place: &BucketConfig,
        url: &Url<'_>,
        connector: Connector,
        retry: RetryConfig,
        http: bool,
    ) -> Result<object_store::Result<Self>> {
        Ok(match (url.scheme, &place.credentials) {
            ("s3", file) => {
                let mut builder = credentials::of_s3(file.as_deref())?
                    .with_bucket_name(url.bucket)
                    .with_client_options(connector.options.clone())
                    .with_http_connector(connector)
                    .with_retry(retry)
                    .with_conditional_put(S3ConditionalPut::ETagMatch)
                    // Over TLS a second checksum is not worth its time: records have their own.
                    .with_unsigned_payload(!http);
                if let Some(endpoint) = &place.endpoint {
                    builder = builder.with_endpoint(endpoint);
                }
                if let Some(region) = &place.region {
                    builder = builder.with_region(region);
                }
                // A directory bucket (S3 Express) lists in no order.
                let is_ordered = !url.bucket.ends_with("--x-s3");
                builder.build().map(|client| Self {
                    is_ordered,
                    ..Self::of(client)
                })
            }
            ("az", None) => {
                let mut builder = MicrosoftAzureBuilder::from_env()
                    .with_container_name(url.bucket)
                    .with_client_options(connector.options.clone())
                    .with_http_connector(connector)
                    .with_retry(retry);
                if let Some(endpoint) = &place.endpoint {
                    builder = builder.with_endpoint(endpoint.clone());
                }
                builder.build().map(Self::of)
            }
            ("az", Some(_)) => {
                let text = "keys of Azure come from the environment (AZURE_STORAGE_ACCOUNT_NAME \
                            and its like), not from a file; leave object_credentials out";
                return Err(Error::new(ErrorKind::Config, text));
            }
            ("gs", file) => {
                let mut builder = GoogleCloudStorageBuilder::from_env()
                    .with_bucket_name(url.bucket)
                    .with_client_options(connector.options.clone())
                    .with_http_connector(connector)
                    .with_retry(retry);
                if let Some(endpoint) = &place.endpoint {
                    builder = builder.with_base_url(endpoint);
                }
                if let Some(file) = file {
                    secret_file::read(file, "object_credentials")?;
                    builder = builder.with_service_account_path(file.display().to_string());
                }
                builder.build().map(Self::of)
            }
            (scheme, _) => {
                let text = format!("{scheme}:// has no client here");
                return Err(Error::new(ErrorKind::Config, text));
            }
        })
    }

    fn of<T: ObjectStore + PaginatedListStore>(client: T) -> Self {
        let client = Arc::new(client);
        Self {
            store: Arc::clone(&client) as Arc<dyn ObjectStore>,
            pages: client,
            is_ordered: true,
        }
    }
}

impl Bucket {
    /// A client for this place; nothing is touched. `Config` where none can be made.
    pub(super) fn new(place: &BucketConfig) -> Result<Self> {
        let url = Url::parse(&place.url)?;
        let endpoint = place.endpoint.as_deref().unwrap_or_default();
        let http = endpoint.starts_with("http://");
        if endpoint.contains('@') {
            let text = "object_endpoint is http://host:port, without a user or a password; keys go \
                        into the environment or the files of the vendor's own tools";
            return Err(Error::new(ErrorKind::Config, text));
        }
        let authorities = match &place.ca {
            Some(path) => certificates(path)?,
            None => Vec::new(),
        };
        let connector = Connector::new(http, place.connections, authorities);
        let retry = RetryConfig {
            backoff: BackoffConfig {
                init_backoff: FIRST_PAUSE,
                max_backoff: LONGEST_PAUSE,
                ..BackoffConfig::default()
            },
            max_retries: place.retries,
            retry_timeout: TRIED_FOR,
        };
        let wrong = |error: ClientError| {
            let text = "no client can be made for this bucket";
            let wrong = Error::new(ErrorKind::Config, text).with("bucket", &place.url);
            wrong.caused_by(ErrorText::of(&error))
        };
        let client = Client::new(place, &url, connector, retry, http)?;
        Ok(Self {
            client: client.map_err(wrong)?,
            shown: place.url.clone(),
        })
    }

    /// A whole small object and its version; nothing where there is none. `Config` where it has
    /// more than `most` bytes.
    pub(super) async fn get(&self, path: &Path, most: u64) -> Result<Option<(Bytes, Version)>> {
        let options = GetOptions {
            extensions: Most::collected(most + 1), // one more shows that it is too long
            ..GetOptions::default()
        };
        let found = match self.client.store.get_opts(path, options).await {
            Ok(found) => found,
            Err(ClientError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(self.failed(path, &error)),
        };
        let version = Version {
            e_tag: found.meta.e_tag.clone(),
            version: found.meta.version.clone(),
        };
        let bytes = match found.meta.size > most {
            true => None,
            false => self.collect(path, found.into_stream(), most).await?,
        };
        let Some(bytes) = bytes else {
            let long = Error::new(ErrorKind::Config, "this document is too long to be ours");
            let long = long.with("object", one_line(path.as_ref()));
            return Err(long.with("most", most));
        };
        Ok(Some((bytes.into(), version)))
    }

    /// A stretch of an object, as it arrives; fewer bytes where the object ends before. The caller
    /// takes no more than it requested. `NotFound` where there is none.
    pub(super) async fn stream(&self, path: &Path, range: Range<u64>) -> Result<Pieces> {
        let extensions = Most::streamed(range.end - range.start);
        self.pieces(path, range, extensions).await
    }

    /// The bytes of a stretch.
    pub(super) async fn range(&self, path: &Path, range: Range<u64>) -> Result<Vec<u8>> {
        let most = range.end - range.start;
        let pieces = self.pieces(path, range, Most::collected(most + 1)).await?;
        let bytes = self.collect(path, pieces, most).await?;
        bytes.ok_or_else(|| {
            let text = "the object store sends more than the range that was requested";
            Error::new(ErrorKind::Io, text).with("object", one_line(path.as_ref()))
        })
    }

    async fn pieces(
        &self,
        path: &Path,
        range: Range<u64>,
        extensions: Extensions,
    ) -> Result<Pieces> {
        let options = GetOptions {
            range: Some(GetRange::Bounded(range)),
            extensions,
            ..GetOptions::default()
        };
        let found = self.client.store.get_opts(path, options).await;
        let found = found.map_err(|error| self.failed(path, &error))?;
        Ok(found.into_stream())
    }

    /// All that arrives; nothing where that is more than `most` bytes.
    async fn collect(&self, path: &Path, mut pieces: Pieces, most: u64) -> Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(|error| self.failed(path, &error))?;
            if (bytes.len() + piece.len()) as u64 > most {
                return Ok(None);
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(Some(bytes))
    }

    /// Puts an object, in place of one of that name. Here and in every other put: `Unhealthy` where
    /// the server answers that these keys may not write.
    pub(super) async fn put(&self, path: &Path, bytes: Bytes) -> Result<()> {
        self.put_as(path, bytes, PutMode::Overwrite).await.map(drop)
    }

    /// Puts an object where there is none of that name; false where there is.
    pub(super) async fn put_new(&self, path: &Path, bytes: Bytes) -> Result<bool> {
        self.put_as(path, bytes, PutMode::Create).await
    }

    /// Replaces an object that is still this version; false where it is another.
    pub(super) async fn replace(
        &self,
        path: &Path,
        bytes: Bytes,
        version: Version,
    ) -> Result<bool> {
        self.put_as(path, bytes, PutMode::Update(version)).await
    }

    /// `Unsupported` where the server says that it does not know the condition.
    async fn put_as(&self, path: &Path, bytes: Bytes, mode: PutMode) -> Result<bool> {
        let conditional = !matches!(mode, PutMode::Overwrite);
        let (bytes, options) = (PutPayload::from(bytes), PutOptions::from(mode));
        match self.client.store.put_opts(path, bytes, options).await {
            Ok(_) => Ok(true),
            Err(ClientError::AlreadyExists { .. } | ClientError::Precondition { .. }) => Ok(false),
            Err(error) if conditional && has_no_conditions(&error) => {
                let text = "the object store has no conditional writes";
                Err(Error::new(ErrorKind::Unsupported, text).caused_by(ErrorText::of(&error)))
            }
            Err(error) => Err(self.write_failed(path, &error)),
        }
    }

    /// Puts a large object under a name that no other writer uses: in parts, several at once, where
    /// it is longer than one. It is there whole or not at all; the parts of one that is given up
    /// are removed.
    pub(super) async fn put_large(
        &self,
        path: &Path,
        bytes: Bytes,
        conditional: bool,
    ) -> Result<()> {
        if bytes.len() <= PART {
            // A lost answer makes the client ask again, and then it is there already: it is ours.
            return match conditional {
                true => self.put_new(path, bytes).await.map(|_| ()),
                false => self.put(path, bytes).await,
            };
        }
        let failed = |error: ClientError| self.write_failed(path, &error);
        let upload = self.client.store.put_multipart(path).await;
        let mut upload = Upload(Some(upload.map_err(failed)?));
        let Some(parts) = upload.0.as_mut() else {
            return Err(Error::internal("an upload ended before it began"));
        };
        let starts = (0..bytes.len()).step_by(PART);
        let pieces = starts.map(|start| bytes.slice(start..bytes.len().min(start + PART)));
        let sending = pieces.map(|piece| parts.put_part(PutPayload::from(piece)));
        let sending: Vec<_> = sending.collect();
        let mut sending = futures_util::stream::iter(sending).buffer_unordered(PARTS_AT_ONCE);
        while sending.try_next().await.map_err(failed)?.is_some() {}
        drop(sending);
        parts.complete().await.map_err(failed)?;
        upload.0 = None;
        Ok(())
    }

    /// What lies below a prefix. `NoSpace` where that is more than one listing names.
    pub(super) async fn list(&self, prefix: &Path) -> Result<Vec<ObjectMeta>> {
        let mut found = Vec::new();
        let all = self
            .list_into(prefix, None, MOST_LISTED, &mut found)
            .await?;
        if all {
            return Ok(found);
        }
        let text = "there are more objects below this prefix than can be counted; give the store a \
                    prefix of its own, or a larger object_size";
        let cut = Error::new(ErrorKind::NoSpace, text).with("bucket", &self.shown);
        Err(cut.with("most", MOST_LISTED))
    }

    /// True if listings are in the order of names: one can go on behind the last name of another.
    pub(super) fn is_ordered(&self) -> bool {
        self.client.is_ordered
    }

    /// Adds to `found` the objects below a prefix, from behind this name on if one is given, as
    /// they arrive: they stay there where this fails, or the caller waits no longer. False where it
    /// ends at the `most` first ones. `Io` where a page brings nothing new and names another page.
    pub(super) async fn list_into(
        &self,
        prefix: &Path,
        behind: Option<&Path>,
        most: usize,
        found: &mut Vec<ObjectMeta>,
    ) -> Result<bool> {
        let below = Some(format!("{prefix}/")).filter(|_| !prefix.as_ref().is_empty());
        let (mut token, mut last, mut empty, mut named) = (None, None, 0, 0);
        loop {
            let from = behind.filter(|_| self.client.is_ordered);
            let options = PaginatedListOptions {
                offset: from.map(Path::to_string),
                max_keys: Some(PAGE_OBJECTS),
                page_token: token.clone(),
                extensions: Most::collected(PAGE),
                ..PaginatedListOptions::default()
            };
            let pages = &self.client.pages;
            let page = pages.list_paginated(below.as_deref(), options).await;
            let page = page.map_err(|error| self.failed(prefix, &error))?;
            let objects = page.result.objects;
            let first = objects.iter().map(|meta| &meta.location).max().cloned();
            // Without an order only another token, and the limits, show that a listing continues.
            let came_on = !self.client.is_ordered || first > last;
            let is_empty = objects.is_empty();
            for meta in objects {
                // Not every server can begin behind a name.
                if behind.is_some_and(|behind| meta.location <= *behind) {
                    continue;
                }
                named += meta.location.as_ref().len() + meta.e_tag.as_ref().map_or(0, String::len);
                if found.len() == most || named > MOST_NAMED {
                    return Ok(false);
                }
                found.push(meta);
            }
            let Some(next) = page.page_token else {
                return Ok(true);
            };
            empty = if is_empty { empty + 1 } else { 0 };
            let is_stuck = empty > EMPTY_PAGES || (!is_empty && !came_on);
            let is_another =
                !next.is_empty() && next.len() <= TOKEN && token.as_ref() != Some(&next);
            if is_stuck || !is_another {
                let text = "the object store lists without an end: a page brings nothing new and \
                            names another one";
                let endless = Error::new(ErrorKind::Io, text).with("bucket", &self.shown);
                return Err(endless.with("prefix", one_line(prefix.as_ref())));
            }
            (token, last) = (Some(next), last.max(first));
        }
    }

    /// Metadata of an object; nothing where there is none.
    pub(super) async fn head(&self, path: &Path) -> Result<Option<ObjectMeta>> {
        match self.client.store.head(path).await {
            Ok(meta) => Ok(Some(meta)),
            Err(ClientError::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed(path, &error)),
        }
    }

    /// Removes an object; it is no error where there is none. `Unhealthy` where the server answers
    /// that these keys may not delete.
    pub(super) async fn delete(&self, path: &Path) -> Result<()> {
        match self.client.store.delete(path).await {
            Ok(()) | Err(ClientError::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.write_failed(path, &error)),
        }
    }

    /// Whether the server keeps to `If-None-Match` and `If-Match`, tried on an object of this name,
    /// which may stay behind. `Unsupported` where the server refuses one of them.
    pub(super) async fn try_conditions(&self, path: &Path) -> Result<bool> {
        let word = |text: &'static str| Bytes::from_static(text.as_bytes());
        // False only where an answer was lost and the client has put it twice: it is read below.
        let _first = self.put_new(path, word("first")).await?;
        if self.put_new(path, word("again")).await? {
            return Ok(false);
        }
        let Some((found, version)) = self.get(path, DOCUMENT).await? else {
            let text = "the object store does not have an object that was put there just now";
            return Err(Error::new(ErrorKind::Io, text));
        };
        if found != "first" || (version.e_tag.is_none() && version.version.is_none()) {
            return Ok(false);
        }
        let replaced = self.replace(path, word("second"), version.clone()).await?;
        if !replaced {
            let found = self.get(path, DOCUMENT).await?;
            if found.is_none_or(|(found, _)| found != "second") {
                return Ok(false);
            }
        }
        Ok(!self.replace(path, word("third"), version).await?)
    }

    /// Converts an error of the client.
    pub(super) fn failed(&self, path: &Path, error: &ClientError) -> Error {
        let told = ErrorText::of(error);
        let at = |failed: Error| {
            let failed = failed.with("bucket", &self.shown);
            failed.with("object", one_line(path.as_ref()))
        };
        if let Some(redirect @ Refused::Redirect { .. }) = Refused::behind(error) {
            let text = format!("the object store {redirect}");
            return at(Error::new(ErrorKind::Io, text));
        }
        let (kind, text) = match error {
            ClientError::NotFound { .. } => (ErrorKind::NotFound, "there is no such object"),
            _ if FULL.iter().any(|full| told.0.contains(full)) => {
                (ErrorKind::NoSpace, "the object store has no more room")
            }
            _ if NO_KEYS.iter().any(|service| told.0.contains(service)) => {
                let text = "no keys were found in the environment, the files of the vendor's tools \
                            or object_credentials, and this machine has no service that gives them";
                (ErrorKind::Io, text)
            }
            ClientError::PermissionDenied { .. } | ClientError::Unauthenticated { .. } => {
                let text = "the object store does not let us; check the keys (environment, files \
                            of the vendor's tools) and their rights";
                (ErrorKind::Io, text)
            }
            _ => {
                let text = "the object store failed, or cannot be reached";
                (ErrorKind::Io, text)
            }
        };
        at(Error::new(kind, text)).caused_by(told)
    }

    /// The same of a write or a removal. A server that refuses it has answered: reading goes on.
    fn write_failed(&self, path: &Path, error: &ClientError) -> Error {
        let failed = self.failed(path, error);
        let refused = matches!(error, ClientError::PermissionDenied { .. });
        if !refused || failed.kind() != ErrorKind::Io {
            return failed;
        }
        let text = "the object store does not let us write or delete this; check the rights of the \
                    keys";
        let refused = Error::new(ErrorKind::Unhealthy, text).with("bucket", &self.shown);
        let refused = refused.with("object", one_line(path.as_ref()));
        refused.caused_by(ErrorText::of(error))
    }
}

/// Whether a server, or the client for it, refuses the condition of a put and not this one put.
fn has_no_conditions(error: &ClientError) -> bool {
    let told = ErrorText::of(error);
    matches!(
        error,
        ClientError::NotImplemented { .. } | ClientError::NotSupported { .. }
    ) || NO_CONDITIONS.iter().any(|refusal| told.0.contains(refusal))
}

/// An upload that was begun and not completed: its parts are removed, or they would lie there
/// unseen for ever.
struct Upload(Option<Box<dyn MultipartUpload>>);

impl Drop for Upload {
    fn drop(&mut self) {
        if let (Some(mut upload), Ok(runtime)) =
            (self.0.take(), tokio::runtime::Handle::try_current())
        {
            runtime.spawn(async move { upload.abort().await });
        }
    }
}

fn certificates(path: &PathBuf) -> Result<Vec<Certificate>> {
    let unread = |text: String| {
        let wrong = "the file with authorities for TLS cannot be used";
        let wrong = Error::new(ErrorKind::Config, wrong).with("path", path.display());
        wrong.with("why", text)
    };
    let pem = std::fs::read(path).map_err(|error| unread(error.to_string()))?;
    let found = Certificate::from_pem_bundle(&pem).map_err(|error| unread(error.to_string()))?;
    if found.is_empty() {
        return Err(unread("there is no certificate in it".to_owned()));
    }
    Ok(found)
}

/// When an object was put, ns of Unix time by the server's clock.
pub(super) fn time_of(meta: &ObjectMeta) -> u64 {
    let nanos = meta.last_modified.timestamp_nanos_opt().unwrap_or(0);
    u64::try_from(nanos).unwrap_or(0)
}

#[cfg(test)]
pub(super) mod tests {
    use object_store::ListResult;
    use object_store::list::PaginatedListResult;
    use object_store::memory::InMemory;

    use super::*;

    #[test]
    fn a_url_names_a_bucket_and_a_prefix() {
        let url = Url::parse("s3://bucket/a/b").unwrap();
        assert_eq!(
            (url.scheme, url.bucket, url.prefix),
            ("s3", "bucket", "a/b")
        );
        assert_eq!(Url::parse("gs://bucket").unwrap().prefix, "");
        for wrong in [
            "bucket",
            "s3://",
            "ftp://bucket",
            "s3://key:secret@bucket",
            "az://c/p?sas=secret",
        ] {
            let error = Url::parse(wrong).err().unwrap();
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }

    /// Objects in memory, two a page.
    struct Pages(Arc<InMemory>);

    #[async_trait::async_trait]
    impl PaginatedListStore for Pages {
        async fn list_paginated(
            &self,
            prefix: Option<&str>,
            options: PaginatedListOptions,
        ) -> object_store::Result<PaginatedListResult> {
            let behind = options.page_token.or(options.offset).map(Path::from);
            let mut found: Vec<ObjectMeta> = self.0.list(None).try_collect().await?;
            found.retain(|meta| {
                let below = meta
                    .location
                    .as_ref()
                    .starts_with(prefix.unwrap_or_default());
                below && behind.as_ref().is_none_or(|behind| meta.location > *behind)
            });
            found.sort_by(|one, other| one.location.cmp(&other.location));
            let more = found.len() > 2;
            found.truncate(2);
            let last = found.last().map(|meta| meta.location.to_string());
            Ok(PaginatedListResult {
                result: ListResult {
                    common_prefixes: Vec::new(),
                    objects: found,
                    extensions: Extensions::new(),
                },
                page_token: last.filter(|_| more),
            })
        }
    }

    fn in_memory() -> Bucket {
        bucket_over(&Arc::new(InMemory::new()))
    }

    /// A client of this store.
    pub(in crate::object) fn bucket_over(store: &Arc<InMemory>) -> Bucket {
        let client = Client {
            store: Arc::clone(store) as Arc<dyn ObjectStore>,
            pages: Arc::new(Pages(Arc::clone(store))),
            is_ordered: true,
        };
        Bucket {
            client,
            shown: "memory".to_owned(),
        }
    }

    #[test]
    fn keys_that_are_missing_are_named() {
        let bucket = in_memory();
        let error = ClientError::Generic {
            store: "S3",
            source: "Error performing PUT http://169.254.169.254/latest/api/token in 1s - error \
                 sending request"
                .into(),
        };
        let told = bucket.failed(&Path::from("a"), &error).to_string();
        assert!(
            told.contains("no keys were found") && told.contains("object_credentials"),
            "{told}"
        );
    }

    #[test]
    fn a_listing_that_ends_early_says_so_and_goes_on() {
        let bucket = in_memory();
        let work = async move {
            for name in ["a/1", "a/2", "a/3", "b/1"] {
                bucket.put(&Path::from(name), Bytes::new()).await?;
            }
            let (mut found, prefix) = (Vec::new(), Path::from("a"));
            let all = bucket.list_into(&prefix, None, 2, &mut found).await?;
            let behind = found.last().map(|meta: &ObjectMeta| meta.location.clone());
            let rest = bucket
                .list_into(&prefix, behind.as_ref(), 3, &mut found)
                .await?;
            let names: Vec<String> = found.iter().map(|meta| meta.location.to_string()).collect();
            Ok((all, rest, names))
        };
        let clock = ucm_infra::SystemClock::shared();
        let runtime = ucm_infra::Runtime::of_this_process().unwrap();
        let (all, rest, names) = runtime
            .wait(&*clock, ucm_infra::MonotonicTime::NEVER, work)
            .unwrap();
        assert_eq!((all, rest), (false, true));
        assert_eq!(names, ["a/1", "a/2", "a/3"]);
    }

    #[test]
    fn only_a_refusal_says_that_a_server_has_no_conditions() {
        let answer = |text: &str| ClientError::Generic {
            store: "S3",
            source: format!("PUT http://h/b in 3ms - Server returned non-2xx status code: {text}")
                .into(),
        };
        for refusal in [
            "501 Not Implemented: ",
            "405 Method Not Allowed: <Error><Code>MethodNotAllowed</Code></Error>",
            "400 Bad Request: <Error><Code>InvalidArgument</Code></Error>",
        ] {
            assert!(has_no_conditions(&answer(refusal)), "{refusal}");
        }
        for passing in [
            "500 Internal Server Error: ",
            "503 Service Unavailable: <Error><Code>SlowDown</Code></Error>",
            "400 Bad Request: <Error><Code>RequestTimeout</Code></Error>",
        ] {
            assert!(!has_no_conditions(&answer(passing)), "{passing}");
        }
    }
}
