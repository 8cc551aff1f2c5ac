"""What the host of the selectors must know of a step: which request each row of the batch belongs
to, and how far it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ucm.sparse.base import UcmSparseMetadata


@dataclass(frozen=True, slots=True)
class SparseRow:
    """One row of the batch: the tokens of one sequence that are computed in this step."""

    request_id: str
    #: Tokens whose KV exists once this step has run (vLLM's ``seq_len`` of the row).
    tokens: int
    #: Tokens that are computed densely before the first decode step: the prompt, and after a
    #: preemption also the output that is computed again. Of a prompt that is selected from without
    #: being read, what is stored of it.
    prefill_tokens: int
    #: Tokens of the prompt alone: steps are counted from here, so that a resumed request keeps its
    #: rhythm.
    prompt_tokens: int
    #: Tokens computed in this step.
    queries: int = 1

    @property
    def decodes(self) -> bool:
        """Whether the row computes nothing but tokens after everything that is computed densely:
        one, or the last ones of a prompt that is selected from."""
        return self.tokens - self.queries >= self.prefill_tokens

    @property
    def step(self) -> int:
        """Number of the decode step, 1 for the first token after the prompt; 0 or less while the
        prompt is computed."""
        return self.tokens - self.prompt_tokens


@dataclass(slots=True)
class SparseBatch(UcmSparseMetadata):
    """The rows of a step, in the order of the attention metadata, and the requests that have ended
    since the last one."""

    rows: Sequence[SparseRow] = ()
    finished: Sequence[str] = field(default=())
