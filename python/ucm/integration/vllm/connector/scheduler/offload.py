"""Which blocks of a request leave the device while it decodes, and how many hot blocks it gets for
them.

vLLM has its manager free unneeded blocks before it allocates for a step, and the manager calls this
module. A block may leave once every rank has stored it, and once it lies between the windows of the
selection. The method says how much a request holds
(:meth:`~ucm.sparse.base.UcmSparseBase.estimate_num_slots_sparsed`). The blocks that left, and those
given instead, go to the workers with the next plan, whether the request is in it or not: other
requests may write its blocks in that very step.

A prompt that is stored but for its last tokens is decoded from without a load: it is admitted with
the blocks of its windows and with hot ones, as if the others had left, and the workers load their
representations alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np

from ucm.integration.vllm.attention.plan import OffloadChange
from ucm.integration.vllm.attention.spec import ExactTokens
from ucm.integration.vllm.connector.guard import throttle
from ucm.integration.vllm.connector.metadata import join_keys
from ucm.sparse.base import INVALID_SLOT
from ucm.sparse.method import BlockSparse

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Keys of a request's first blocks that are in the store on every rank, in their order.
StoredKeys = Callable[["Request"], Sequence[bytes]]


@dataclass(slots=True)
class _State:
    """One request, some of whose blocks have left."""

    end: int  # logical: the first behind those that have
    hot: int = 0  # blocks that it is to have for them


@dataclass(frozen=True, slots=True)
class _Admission:
    """A prompt that is to be selected from without being loaded."""

    unread: range  # logical: the blocks that stay in the store
    stored: int  # blocks of it that are stored; the last ones are loaded


class OffloadPlanner:
    """The offload of one engine."""

    def __init__(
        self,
        method: BlockSparse,
        requests: Mapping[str, Request],
        exact: ExactTokens,
        block_tokens: int,
        spare: int,
        *,
        several_queries: bool = True,
    ) -> None:
        """``requests``: those that are alive, by id; ``spare``: most blocks that may have left at a
        time, for which the workers keep representations; ``several_queries``: attention reads a
        selection for rows of several tokens too (latent attention does not), so that the end of a
        prompt can be selected for."""
        self._method = method
        self._requests = requests
        self._exact = exact
        self._block_tokens = block_tokens
        self._free = spare
        policy = method.policy_of_blocks(block_tokens)
        self._init, self._local, self._budget = policy.init, policy.local, policy.budget
        # A block in the last window when a choice was made is kept until the next one is used.
        lead = policy.stride - 1 + policy.lag
        self._local_until_chosen = policy.local - (-lead // block_tokens)
        self._selects_stored = several_queries and method.settings.select_stored
        self._states: dict[str, _State] = {}
        self._admissions: dict[str, _Admission] = {}
        self._changes: dict[str, OffloadChange] = {}
        self._given_back: list[str] = []
        self._no_gain: dict[str, int] = {}  # a request's blocks when leaving did not pay
        self._all_stay: WeakSet[Request] = WeakSet()  # requests that have lost a block
        #: The connector's: the blocks that every rank has stored. None until there is a store.
        self.stored: StoredKeys | None = None

    # Prompts that are stored
    # -----------------------------------------------------------------------------------------

    def consider(self, request: Request, first: int, stored: int) -> None:
        """vLLM has the first ``first`` blocks of a new request, and those up to ``stored`` can be
        loaded. Where the rest of its prompt fits into the last window, and loading them all is more
        than giving it hot blocks, they are selected from, and only those of the windows are
        loaded."""
        size = self._block_tokens
        self.forget(request.request_id)
        fresh = not (request.num_preemptions or request.num_output_tokens)
        if not self._selects_stored or self.stored is None or not fresh:
            return
        if self._init == 0:  # a failure is reported by the first block, which must be loaded
            return
        unread = range(self._init, stored + 1 - self._local_until_chosen)
        blocks = -(-request.num_tokens // size)
        if (
            blocks - stored <= self._local
            and stored * size >= self._exact.after_prefill(0)
            and self._budget(blocks) < min(len(unread), stored - first)
            and len(unread) <= self._free
            and len(self.stored(request)) >= stored
        ):
            self._admissions[request.request_id] = _Admission(unread, stored)

    def forget(self, request_id: str) -> None:
        """Forget the decision about a request."""
        self._admissions.pop(request_id, None)

    def unread(self, request_id: str) -> range:
        """Blocks for which a request that is being admitted gets no device block."""
        admission = self._admissions.get(request_id)
        return range(0) if admission is None else admission.unread

    def admitted(self, request: Request) -> range:
        """A request was given blocks; returns those of it that stay in the store and are not
        loaded."""
        admission = self._admissions.pop(request.request_id, None)
        if admission is None:
            return range(0)
        assert self.stored is not None
        unread = admission.unread
        self._states[request.request_id] = _State(unread.stop)
        self._free -= len(unread)
        keys = self.stored(request)[unread.start : unread.stop]
        self._change(request.request_id).unread = join_keys(keys)
        self._exact.selects_from(request, admission.stored * self._block_tokens)
        return unread

    # What the manager calls
    # -------------------------------------------------------------------------------------------

    def leaving(
        self, request_id: str, processed: int, held: int, frees: Callable[[range], int] = len
    ) -> range:
        """Logical blocks that leave now, of a request with ``processed`` tokens whose steps have
        ended. ``frees``: how many of them no other request holds."""
        request, size = self._requests.get(request_id), self._block_tokens
        nothing = range(0)
        if request is None or self.stored is None or request in self._all_stay:
            return nothing
        state = self._states.get(request_id)
        dense_until = self._exact.after_prefill(0)
        if processed < max(self._exact.prefill_tokens(request), dense_until):
            return nothing
        slots = self._slots(request)
        if slots == INVALID_SLOT:
            return nothing
        begin = self._init if state is None else state.end
        blocks = -(-(processed + 1) // size)
        upto = min(blocks, held) - self._local_until_chosen
        if upto <= begin:
            return nothing
        keys = self.stored(request)
        leaving = range(begin, min(upto, len(keys), begin + self._free))
        hot = -(-slots // size) - self._init - self._local
        if state is None:
            if self._no_gain.get(request_id) == blocks:
                return nothing
            # more would be held than before; checked again once a block
            if frees(leaving) <= hot:
                self._no_gain[request_id] = blocks
                return nothing
        return leaving

    def _slots(self, request: Request) -> int:
        """The method's estimate; all blocks stay where it fails."""
        try:
            return int(self._method.estimate_num_slots_sparsed(request))
        except Exception as error:
            about, kind = "estimate_num_slots_sparsed", type(self._method).__name__
            throttle.warning(about, "%s of %s failed: %r", about, kind, error)
            return INVALID_SLOT

    def lost(self, request: Request) -> None:
        """A block of a request is neither on the device nor in the store. None of it leaves any
        more; it begins again (:meth:`begins_anew`) and computes the lost block."""
        if request.request_id in self._states and request not in self._all_stay:
            self._all_stay.add(request)
            text = "request %s: a block that had left the device is lost: computed again"
            throttle.warning("lost", text, request.request_id)

    def begins_anew(self, request_id: str) -> bool:
        """Whether a request is to free all its blocks, as one does that vLLM preempts: admitted
        again, it loads stored blocks and computes the rest densely."""
        return request_id in self._states and self._requests.get(request_id) in self._all_stay

    def left(self, request_id: str, leaving: range, blocks: Sequence[int]) -> None:
        """These blocks have left."""
        assert self.stored is not None
        request = self._requests[request_id]
        state = self._states.setdefault(request_id, _State(leaving.start))
        state.end = leaving.stop
        self._free -= len(leaving)
        change = self._change(request_id)
        change.blocks = np.concatenate([change.blocks, np.array(blocks, dtype=np.int64)])
        change.keys += join_keys(self.stored(request)[leaving.start : leaving.stop])

    def hot(self, request_id: str, tokens: int) -> int:
        """How many hot blocks a request needs for a step that ends with ``tokens`` tokens."""
        state, unread = self._states.get(request_id), self.unread(request_id)
        end = state.end if state is not None else unread.stop if unread else self._init
        wanted = min(self._budget(-(-tokens // self._block_tokens)), end - self._init)
        if state is not None:
            wanted = state.hot = max(state.hot, wanted)
        return wanted

    def given(self, request_id: str, blocks: Sequence[int]) -> None:
        """It was given further hot blocks."""
        self._change(request_id).hot += blocks

    def gave_back(self, request_id: str) -> None:
        """It holds no blocks any more: it has ended, or was preempted."""
        self._changes.pop(request_id, None)
        self._no_gain.pop(request_id, None)
        self.forget(request_id)
        state = self._states.pop(request_id, None)
        if state is not None:
            self._free += state.end - self._init
            self._given_back.append(request_id)
            if request := self._requests.get(request_id):
                self._exact.selects_from(request, None)

    # What the workers are sent
    # ---------------------------------------------------------------------------------------

    def take(self) -> tuple[list[OffloadChange], list[str]]:
        """The changes since the last call, and the requests that hold no blocks any more."""
        changes, given_back = list(self._changes.values()), self._given_back
        self._changes, self._given_back = {}, []
        return changes, given_back

    def _change(self, request_id: str) -> OffloadChange:
        if request_id not in self._changes:
            nothing = np.empty(0, dtype=np.int64)
            self._changes[request_id] = OffloadChange(request_id, self._init, nothing, b"")
        return self._changes[request_id]
