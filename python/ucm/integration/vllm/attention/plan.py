"""The plan of a step for the workers' sparse attention, and the request of each row of the batch.

The scheduler side knows the requests of a step, a worker the rows, in the order of vLLM's model
runner, which names no requests. But no two requests write to one device block, so the block of a
row's last token names the request. This file imports no other file of the package: the connector's
metadata imports it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm.sparse.base import SparseRow, UcmSparseMetadata


@dataclass(slots=True)
class OffloadChange:
    """Blocks of a request that leave the device, or that stay in the store when it is admitted, and
    the hot blocks that it was given for them."""

    request: str
    begin: int  # logical: the first of its blocks that may leave
    blocks: npt.NDArray[np.int64]  # device blocks that leave now, after those that left before
    keys: bytes  # and their keys in the store
    hot: list[int] = field(default_factory=list)  # further device blocks
    unread: bytes = b""  # keys of its first offloaded blocks, which are not loaded


@dataclass(slots=True)
class SparsePlan:
    """One step, for every rank."""

    #: Tokens of a block.
    block_tokens: int
    #: Requests with fewer tokens are dense.
    break_even: int
    #: The workers are to measure it: see :func:`.setup.measure`.
    measure: bool = False
    #: The requests of the step, in any order, and the device block of the last token of each.
    rows: list[SparseRow] = field(default_factory=list)
    last_blocks: list[int] = field(default_factory=list)
    #: Requests that have ended since the step before.
    finished: list[str] = field(default_factory=list)
    #: Blocks that leave the device, and requests all of whose blocks have been given back.
    offloaded: list[OffloadChange] = field(default_factory=list)
    given_back: list[str] = field(default_factory=list)
    #: Device blocks that requests were given when they were admitted: their old content is invalid.
    given: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    #: The metadata of the method's scheduler side, None without any.
    metadata: UcmSparseMetadata | None = None


def in_order(plan: SparsePlan, metadata: Any) -> list[SparseRow] | None:
    """The rows of a step in the order of its attention metadata; None where a row has no
    request."""
    found = [row for row in by_last_block(plan, metadata) if row is not None]
    return found if len(found) == len(plan.rows) == len(set(plan.last_blocks)) else None


def by_last_block(plan: SparsePlan, metadata: Any) -> list[SparseRow | None]:
    """The row of each place of the batch, None for an unknown request."""
    known = dict(zip(plan.last_blocks, plan.rows, strict=True))
    return [known.get(block) for block in last_blocks(metadata, plan.block_tokens, len(plan.rows))]


def last_blocks(metadata: Any, block_tokens: int, rows: int) -> Sequence[int]:
    """The device block of the last token of each of the first ``rows`` rows."""
    ends = metadata.query_start_loc[1 : rows + 1].long() - 1
    slots = metadata.slot_mapping.index_select(0, ends.to(metadata.slot_mapping.device))
    return [int(slot) // block_tokens for slot in slots.tolist()]


def written_blocks(metadata: Any, block_tokens: int) -> npt.NDArray[np.int64]:
    """The device blocks that a step writes keys to; -1 for padding."""
    slots: npt.NDArray[np.int64] = metadata.slot_mapping.cpu().numpy().astype(np.int64)
    return np.unique(slots // block_tokens)
