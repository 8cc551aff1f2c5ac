"""KVStar MultiStep: pruned and merged keys choose the blocks, for several steps at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from ucm.sparse.positional import PositionalMethod


class KVStarMultiStep(PositionalMethod):
    """Estimated attention over pruned and merged keys."""

    algorithm: ClassVar[str] = "KVStarMultiStep"


class ReqStage(Enum):
    """What a request is at."""

    PREFILL = 0
    DECODE = 1


@dataclass
class ReqMeta:
    """How far a request is."""

    request_id: str
    index_in_batch: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_computed_tokens: int = 0
    num_sparsed_tokens: int = -1
    vllm_block_ids: list[int] = field(default_factory=list)
    token_blk_size: int = 16
    prompt_token_ids: list[int] = field(default_factory=list)
    query_start_loc: int = -1
    query_len: int = -1
    retrieval_stride: int = 8
    block_hashes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Number of its decode step, 0 while the prompt is computed."""
        return self.num_output_tokens

    @property
    def stage(self) -> ReqStage:
        """Whether it decodes."""
        return ReqStage.DECODE if self.num_output_tokens > 0 else ReqStage.PREFILL
