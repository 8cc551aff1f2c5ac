"""The exception tree of ucm: one class per kind of error of the core.

Every exception carries ``kind`` (the kind's name), ``code`` (the number that users of the original
know), ``context`` (where and with what it happened) and ``retryable``. Its text is ``(code)
message``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar


class UcmError(RuntimeError):
    """Base of everything ucm raises on purpose."""

    kind: ClassVar[str] = "internal"
    code: ClassVar[int] = -1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, context: dict[str, Any] | None = None) -> None:
        self.message = message
        self.context: dict[str, Any] = dict(context or {})
        super().__init__(message)

    def __str__(self) -> str:
        where = ", ".join(f"{key}={value}" for key, value in self.context.items())
        return f"({self.code}) {self.message}" + (f" [{where}]" if where else "")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.context, self.__dict__.copy())


def _rebuild(
    cls: type[UcmError], message: str, context: dict[str, Any], state: dict[str, Any], **more: Any
) -> UcmError:
    error = cls(message, context=context, **more)
    error.__dict__.update(state)
    return error


class InvalidInputError(UcmError, ValueError):
    """An argument is wrong: shape, length, range, type."""

    kind, code = "invalid_input", -50000


class ConfigError(UcmError, ValueError):
    """The configuration is wrong; the text names the key and what to write instead."""

    kind, code = "config", -50000


class UnknownConnectorError(ConfigError):
    """No store or connector of that name is registered."""


class NotFoundError(UcmError):
    """The requested block is not stored."""

    kind, code = "not_found", -50005


class BusyError(UcmError):
    """A bounded queue or pool is full right now; nothing was changed."""

    kind, code, retryable = "busy", -50004, True


class DeadlineError(UcmError, TimeoutError):
    """A deadline passed."""

    kind, code, retryable = "timeout", -50010, True


class StoreIOError(UcmError):
    """The operating system refused."""

    kind, code, retryable = "io", -50002, True


class NoSpaceError(UcmError):
    """The medium or the configured limit is full."""

    kind, code, retryable = "no_space", -50009, True


class CorruptError(UcmError):
    """Stored bytes failed verification: a miss, never data."""

    kind, code = "corrupt", -50011


class ForeignError(UcmError):
    """A stored record belongs to another identity, part, id or format."""

    kind, code = "foreign", -50012


class UnhealthyError(UcmError):
    """The backend is switched off for now by its breaker."""

    kind, code, retryable = "unhealthy", -50013, True


class ClosedError(UcmError):
    """The object was closed."""

    kind, code = "closed", -50014


class ForkedError(UcmError):
    """The object was made in another process, before a fork."""

    kind, code = "forked", -50015


class UnsupportedError(UcmError):
    """Not supported by this store, device or build."""

    kind, code = "unsupported", -50008


class InternalError(UcmError):
    """A promise of our own code was broken. Please report."""


class TaskError(UcmError):
    """A load or dump failed for some of its rows.

    ``failures`` maps the row's index to the error of that row; rows that are not in it are done.
    """

    kind, code = "io", -1

    def __init__(
        self, message: str, *, failures: dict[int, UcmError], context: dict[str, Any] | None = None
    ):
        super().__init__(message, context=context)
        self.failures = failures

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = super().__reduce__()
        return partial(rebuild, failures=self.failures), arguments


#: Exception class of each kind of the core.
BY_KIND: dict[str, type[UcmError]] = {
    cls.kind: cls
    for cls in (
        InvalidInputError,
        ConfigError,
        NotFoundError,
        BusyError,
        DeadlineError,
        StoreIOError,
        NoSpaceError,
        CorruptError,
        ForeignError,
        UnhealthyError,
        ClosedError,
        ForkedError,
        UnsupportedError,
        InternalError,
    )
}

#: Names of the original (0.8.1).
StoreNotFoundError = NotFoundError
StoreUnhealthyError = UnhealthyError
