"""The identity of what an engine computes now, which changes when the weights in memory are
replaced.

As long as memory holds what was loaded, the weights are named by their files. When vLLM was told to
read other files since then, these name the weights. Weights that came by other means have no name
that another process could know: their KV is stored under a random one, for this process alone.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from ucm.errors import UcmError
from ucm.integration.vllm.connector.guard import info_once, logger
from ucm.integration.vllm.connector.identity.engine_identity import (
    identity_digest,
    identity_text,
    with_weights,
)
from ucm.integration.vllm.connector.identity.weight_files import WeightSource
from ucm.integration.vllm.connector.identity.weights import DECLARED, WeightsDigest, WeightsState
from ucm.integration.vllm.connector.identity.weights_report import WeightsReport

#: The random words in the text of an identity.
_RANDOM = re.compile(r" reset:[0-9a-f]{32}|(?<=\"private:)[0-9a-f]{32}")


def lasting(text: str) -> str:
    """The text of an identity without its random words: what processes that differ in these alone
    share."""
    return _RANDOM.sub("", text)


class UnknowableError(UcmError):
    """The weights in memory cannot be named, so neither can their KV."""

    kind = "unkeyable"


class LiveIdentity:
    """The identity of what one engine computes now; seen from its scheduler side."""

    def __init__(
        self, own: dict[str, Any], source: WeightSource, mode: str, root: str | None
    ) -> None:
        """``own`` is without weights; ``mode`` and ``root`` as :class:`WeightsDigest` takes
        them."""
        self._own, self._mode, self._root = own, mode, root
        self._weights = WeightsDigest(source, mode, root)
        self._renewed = False
        self._private = ""
        self._word = ""  # joins the weights once what was stored before is to be forgotten
        self._forgotten = False  # since the last comparison of the weights

    def wait(self) -> WeightsState:
        """What is known of the weights, after some seconds of waiting for it."""
        return self._weights.wait()

    def text(self) -> str | None:
        """As JSON; None while pending; raises :class:`UnknowableError` when it never will be
        known."""
        weights = self._private or self._named()
        if weights is None:
            return None
        if self._word:
            weights = f"{weights} {self._word}"
        whole = with_weights(self._own, weights)
        text = identity_text(whole)
        logger.info(
            "identity of this engine's KV: %s, weights %s", identity_digest(whole).hex(), weights
        )
        logger.debug("identity spelled out: %s", text)
        return text

    def _named(self) -> str | None:
        state = self._weights.state
        if state.kind == "pending":
            return None
        if state.kind == "known":
            return state.text
        if not self._renewed:
            raise UnknowableError(state.reason)
        return self._make_private(state.reason)

    def _make_private(self, why: str) -> str:
        self._private = f"private:{secrets.token_hex(16)}"
        info_once(
            "the weights in memory have no name (%s): their KV is kept for this process alone", why
        )
        return self._private

    def why_invalid(self) -> str:
        """Why the identity no longer holds, empty while it does; looks at the files again without
        waiting."""
        if self._private:
            return ""
        state = self._weights.recheck(0.0)
        return "" if state.kind in ("known", "pending") else state.reason

    def forget(self) -> None:
        """Give this engine's KV a random name from the next :meth:`update` on, so that nothing
        stored before is found.

        The name lasts as long as this process: an engine that is started later has the name of its
        weights again.
        """
        self._word, self._forgotten = f"reset:{secrets.token_hex(16)}", True

    def update(self, reports: list[WeightsReport]) -> bool:
        """Every rank has compared the weights in its memory: whether the identity is another one
        now."""
        forgotten, self._forgotten = self._forgotten, False
        return self._compared(reports) or forgotten

    def _compared(self, reports: list[WeightsReport]) -> bool:
        if all(report.unchanged for report in reports):
            state = self._weights.state
            if self._private or state.kind in ("known", "pending"):
                return False
            if state.kind == "unknown":  # the files changed, memory did not
                self._make_private(state.reason)
            return True
        named = {report.named for report in reports}
        self._weights.close()
        self._renewed, self._private = True, ""
        files = named.pop() if len(named) == 1 else None
        if files is None or self._mode.startswith(DECLARED):
            self._make_private("they were replaced, and not from files that vLLM names")
        else:
            since_ns = min(report.since_ns for report in reports)
            self._weights = WeightsDigest(files, self._mode, self._root, since_ns=since_ns)
        return True

    def close(self) -> None:
        """End the threads."""
        self._weights.close()
