//! One error type for the whole core: kind, message, context and cause.
//!
//! `Display` is one line fit for a log; `Debug` adds the chain of causes. The numeric codes are
//! those of the original UCM, whose exceptions print them.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// Result of the core.
pub type Result<T, E = Error> = std::result::Result<T, E>;

crate::named! {
    /// The kind of an error. It decides what a caller can do about it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[non_exhaustive]
    pub enum ErrorKind {
        /// An argument is wrong: shape, length, range, type. Not retryable.
        InvalidInput = "invalid_input",
        /// The configuration is wrong. Not retryable.
        Config = "config",
        /// The requested thing does not exist (for a block: a miss).
        NotFound = "not_found",
        /// A bounded queue or pool is full right now. Retryable at once or later; nothing was
        /// changed.
        Busy = "busy",
        /// A deadline passed. Retryable.
        Timeout = "timeout",
        /// An operation of the operating system failed. The source says whether it is retryable.
        Io = "io",
        /// The medium or the configured limit is full. Retryable after space was freed.
        NoSpace = "no_space",
        /// Stored bytes failed verification: a miss, never data.
        Corrupt = "corrupt",
        /// A stored record belongs to another identity, part, id or a newer format: a miss.
        Foreign = "foreign",
        /// The breaker of the backend is open. Retryable after the cool-down.
        Unhealthy = "unhealthy",
        /// The object was closed.
        Closed = "closed",
        /// The object was made in another process, before a fork.
        Forked = "forked",
        /// The operation is not supported by this backend, device or build.
        Unsupported = "unsupported",
        /// A bug in ucm. Please report it.
        Internal = "internal",
    }
}

impl ErrorKind {
    /// The numeric code shown to users; that of the original where one exists.
    pub fn code(self) -> i32 {
        match self {
            Self::InvalidInput | Self::Config => -50000,
            Self::Io => -50002,
            Self::Busy => -50004,
            Self::NotFound => -50005,
            Self::Unsupported => -50008,
            Self::NoSpace => -50009,
            Self::Timeout => -50010,
            Self::Corrupt => -50011,
            Self::Foreign => -50012,
            Self::Unhealthy => -50013,
            Self::Closed => -50014,
            Self::Forked => -50015,
            Self::Internal => -1,
        }
    }
}

/// An error: kind, message, context pairs (where), and the cause. Cheap to clone, so that one
/// failure can be reported for many blocks.
///
/// ```
/// use ucm_core::{Error, ErrorKind};
///
/// let full = Error::new(ErrorKind::NoSpace, "the medium is full; make room on it").with("free", 512);
/// assert_eq!(full.kind(), ErrorKind::NoSpace);
/// assert!(full.to_string().contains("free=512"));
/// ```
#[derive(Clone)]
pub struct Error(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    message: Cow<'static, str>,
    context: Vec<(&'static str, String)>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// A new error; the message says what is wrong and what to do.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Arc::new(Inner {
            kind,
            message: message.into(),
            context: Vec::new(),
            source: None,
        }))
    }

    /// Shorthand for a wrong argument.
    pub fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::InvalidInput, message)
    }

    /// Shorthand for a bug in ucm.
    pub fn internal(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// Adds one context pair, such as a path or an id.
    pub fn with(mut self, key: &'static str, value: impl fmt::Display) -> Self {
        Arc::make_mut(&mut self.0)
            .context
            .push((key, value.to_string()));
        self
    }

    /// Adds the cause.
    pub fn caused_by(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.0).source = Some(Arc::new(source));
        self
    }

    /// A failure of the operating system; the kind follows from the error number (ENOENT and ESTALE
    /// are `NotFound`, ENOSPC and EDQUOT `NoSpace`, ETIMEDOUT `Timeout`, anything else `Io`).
    pub fn from_io(error: std::io::Error, what: impl Into<Cow<'static, str>>) -> Self {
        use std::io::ErrorKind as K;
        let kind = match error.kind() {
            K::NotFound | K::StaleNetworkFileHandle => ErrorKind::NotFound,
            K::StorageFull | K::QuotaExceeded => ErrorKind::NoSpace,
            K::TimedOut => ErrorKind::Timeout,
            K::Unsupported => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        Self::new(kind, what).caused_by(error)
    }

    /// What kind of failure.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The message without context.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The context pairs in the order they were added.
    pub fn context(&self) -> &[(&'static str, String)] {
        &self.0.context
    }

    /// The error number of the operating system, if the cause is one.
    pub fn os_code(&self) -> Option<i32> {
        let source = self.0.source.as_deref()?;
        source.downcast_ref::<std::io::Error>()?.raw_os_error()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        for (i, (key, value)) in self.0.context.iter().enumerate() {
            write!(f, "{}{key}={value}", if i == 0 { " [" } else { ", " })?;
        }
        if !self.0.context.is_empty() {
            f.write_str("]")?;
        }
        if let Some(source) = &self.0.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({}): {self}", self.0.kind.name(), self.0.kind.code())?;
        let mut source = self.0.source.as_deref().and_then(std::error::Error::source);
        while let Some(error) = source {
            write!(f, "\n  caused by: {error}")?;
            source = error.source();
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|e| e as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_says_what_where_and_why() {
        let error = Error::from_io(
            std::io::Error::from_raw_os_error(28),
            "cannot write the block",
        )
        .with("path", "/x/y.bin");
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert_eq!(error.os_code(), Some(28));
        let text = error.to_string();
        assert!(
            text.starts_with("cannot write the block [path=/x/y.bin]: "),
            "{text}"
        );
        assert!(!text.contains('\n'));
    }

    #[test]
    fn stale_and_absent_files_are_not_found() {
        for code in [2, 116] {
            let error = Error::from_io(std::io::Error::from_raw_os_error(code), "x");
            assert_eq!(error.kind(), ErrorKind::NotFound);
        }
    }
}
