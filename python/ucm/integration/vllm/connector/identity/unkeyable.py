"""The error of a request whose blocks cannot be named exactly."""

from __future__ import annotations

from typing import Any

from ucm.errors import UnsupportedError
from ucm.reasons import MissReason


class UnkeyableError(UnsupportedError):
    """A request whose blocks have no name: it is computed as usual, and nothing of it is looked up
    or stored.

    ``reason`` is what its blocks are missed for: ``identity_pending`` where asking again later may
    help.
    """

    def __init__(
        self,
        message: str,
        *,
        context: dict[str, Any] | None = None,
        reason: MissReason = MissReason.UNKEYABLE,
    ) -> None:
        super().__init__(message, context=context)
        self.reason = reason

    @property
    def pending(self) -> bool:
        """Whether asking again later may help."""
        return self.reason == MissReason.IDENTITY_PENDING
