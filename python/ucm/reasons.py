"""Why a block was not a hit: the names of ``ucm_core::MissReason`` for Python, and the reason an
error stands for.

The core's enum is the one list; this one mirrors it, and a test compares the two.
``docs/format-verify.md`` says what each means, ``docs/reasons.md`` what to do about it.
"""

from __future__ import annotations

from enum import StrEnum

from ucm.errors import UcmError


class MissReason(StrEnum):
    """The reasons, in the order of the core."""

    ABSENT = "absent"
    WRONG_LENGTH = "wrong_length"
    TRUNCATED = "truncated"
    NOT_A_RECORD = "not_a_record"
    BAD_HEADER = "bad_header"
    BAD_CHECKSUM = "bad_checksum"
    NEWER_VERSION = "newer_version"
    SEED_FORM = "seed_form"
    FOREIGN_ID = "foreign_id"
    FOREIGN_IDENTITY = "foreign_identity"
    FOREIGN_PART = "foreign_part"
    FOREIGN_SHAPE = "foreign_shape"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    BUSY = "busy"
    IO_ERROR = "io_error"
    UNHEALTHY = "unhealthy"
    OTHER_RANK = "other_rank"
    IDENTITY_PENDING = "identity_pending"
    IDENTITY_UNKNOWN = "identity_unknown"
    TOO_SHORT = "too_short"
    LOOKUP_LATE = "lookup_late"
    LOAD_FAILED = "load_failed"
    DISABLED = "disabled"
    LAST_TOKEN = "last_token"  # noqa: S105 - a token of a prompt
    UNKEYABLE = "unkeyable"
    UNSUPPORTED = "unsupported"
    NOT_TAKEN = "not_taken"
    ABORTED = "aborted"
    INTERNAL = "internal"
    DECLINED = "declined"
    WRONG_KEY = "wrong_key"
    NOT_ENCRYPTED = "not_encrypted"


#: Reasons after which a record is left as it is: no hit, and no dump replaces it.
LEFT_ALONE = frozenset({MissReason.NEWER_VERSION, MissReason.WRONG_KEY})

#: Reasons that name a failure of the cache, and not its contents or a rule.
FAULTS = frozenset(
    (
        MissReason.WRONG_LENGTH,
        MissReason.TRUNCATED,
        MissReason.NOT_A_RECORD,
        MissReason.BAD_HEADER,
        MissReason.BAD_CHECKSUM,
        MissReason.FOREIGN_ID,
        MissReason.FOREIGN_IDENTITY,
        MissReason.FOREIGN_PART,
        MissReason.FOREIGN_SHAPE,
        MissReason.REFUSED,
        MissReason.TIMEOUT,
        MissReason.IO_ERROR,
        MissReason.UNHEALTHY,
        MissReason.LOOKUP_LATE,
        MissReason.LOAD_FAILED,
        MissReason.INTERNAL,
        MissReason.WRONG_KEY,
    )
)

_NAMES = frozenset(MissReason)

#: The reason of an error that names none itself, by its kind. Any other kind is an error of ours.
_BY_KIND = {
    "not_found": MissReason.ABSENT,
    "timeout": MissReason.TIMEOUT,
    "busy": MissReason.BUSY,
    "unhealthy": MissReason.UNHEALTHY,
    "closed": MissReason.UNHEALTHY,
    "io": MissReason.IO_ERROR,
    "no_space": MissReason.IO_ERROR,
    "corrupt": MissReason.BAD_CHECKSUM,
    "foreign": MissReason.FOREIGN_IDENTITY,
}

#: Kinds of failure that say nothing about the record. After any other it counts as bad until it is
#: written again.
_TRANSIENT = frozenset({"timeout", "busy", "unhealthy", "closed", "no_space"})


def is_transient(error: BaseException) -> bool:
    """Whether a block that could not be loaded may be there all the same, and is worth another
    try."""
    return getattr(error, "kind", "") in _TRANSIENT


def named(name: object, otherwise: MissReason) -> MissReason:
    """The reason of that name; stores of others may use a name that is none."""
    return MissReason(name) if isinstance(name, str) and name in _NAMES else otherwise


def reason_of(error: BaseException) -> MissReason:
    """Why the block an error speaks of was not a hit: what the error's context names, else what its
    kind says."""
    if isinstance(error, UcmError):
        return named(error.context.get("reason"), _BY_KIND.get(error.kind, MissReason.INTERNAL))
    return MissReason.IO_ERROR if isinstance(error, OSError) else MissReason.INTERNAL
