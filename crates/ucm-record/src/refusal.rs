//! Why a record is refused: the counted reason and the faulty field.

use std::fmt;

use ucm_core::{Error, ErrorKind, MissReason};

/// The fault of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The counted reason.
    pub reason: MissReason,
    /// The faulty field.
    pub field: &'static str,
    /// The value that was found.
    pub found: String,
    /// The value that was expected.
    pub expected: String,
}

impl Refusal {
    /// `field` has the value `found` instead of `expected`.
    pub fn new(
        reason: MissReason,
        field: &'static str,
        found: impl fmt::Display,
        expected: impl fmt::Display,
    ) -> Self {
        Self {
            reason,
            field,
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }

    /// There are fewer bytes than expected.
    pub(crate) fn truncated(found: u64, expected: u64) -> Self {
        Self::new(MissReason::Truncated, "length", found, expected)
    }
}

/// Checks that a field has the expected value.
pub(crate) fn same<T: PartialEq + fmt::Display>(
    reason: MissReason,
    field: &'static str,
    found: T,
    expected: T,
) -> Result<(), Refusal> {
    let refusal = || Refusal::new(reason, field, &found, &expected);
    (found == expected).then_some(()).ok_or_else(refusal)
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is {}, expected {}",
            self.field, self.found, self.expected
        )
    }
}

impl From<Refusal> for MissReason {
    fn from(refusal: Refusal) -> Self {
        refusal.reason
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::new(ErrorKind::Corrupt, refusal.to_string())
    }
}
