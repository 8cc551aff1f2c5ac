"""Which tokens of a request have exact KV: the KV that dense attention would have computed.

What is computed under a selection is approximate, and so is all that is computed from it later. It
must not be stored under the dense identity, nor stay in vLLM's prefix cache: a later prompt would
go on from it densely, and its blocks would be taken for exact ones. One number per request says
where that begins; the dump planner and the manager of vLLM's prefix cache both stop there
(:class:`ExactTokens`).

The number is known before a step runs: tokens computed before the first decode step are dense, and
from then on the method says up to which length it selects nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ucm.integration.vllm.connector.guard import throttle
from ucm.sparse.base import UcmSparseBase

if TYPE_CHECKING:
    from vllm.v1.request import Request


class ExactTokens:
    """The scheduler's side of one engine."""

    def __init__(self, method: UcmSparseBase) -> None:
        self._method = method
        #: Tokens that each request had when it was admitted last, and how often it had been
        #: preempted then.
        self._admitted: WeakKeyDictionary[Request, tuple[int, int]] = WeakKeyDictionary()
        #: Dense tokens of those that were admitted with the rest of their prompt to be computed
        #: under a selection.
        self._selecting: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def selects_from(self, request: Request, tokens: int | None) -> None:
        """What follows the first ``tokens`` of a request that is admitted is computed under a
        selection, be it of its prompt; None: it has given back its blocks, and is admitted as
        others are."""
        if tokens is None:
            self._selecting.pop(request, None)
        else:
            self._selecting[request] = tokens

    def prefill_tokens(self, request: Request) -> int:
        """Tokens of a request that are computed densely before its first decode step: the prompt,
        and after a preemption also the output that is computed again; of a prompt that is selected
        from in the store, what is stored."""
        if request in self._selecting:
            return self._selecting[request]
        preemptions, tokens = self._admitted.get(request, (-1, 0))
        if preemptions != request.num_preemptions:
            # Asked for by both sides while the request is admitted, before anything is appended to
            # it.
            tokens = request.num_tokens
            self._admitted[request] = request.num_preemptions, tokens
        return tokens

    def __call__(self, request: Request) -> int:
        """How many of its first tokens have exact KV, now or once they are computed."""
        return self.after_prefill(self.prefill_tokens(request))

    def after_prefill(self, tokens: int) -> int:
        """The same of a request of which so many tokens are computed before its first decode step.
        None is exact where the method fails to say: it may be a user's."""
        try:
            return int(self._method.exact_tokens(tokens))
        except Exception as error:
            throttle.warning(
                "exact_tokens", "exact_tokens of %s failed: %r", type(self._method).__name__, error
            )
            return 0
