"""The messages between the scheduler side and the workers: one small, versioned object in each
direction per step.

The scheduler side sends :class:`UCMConnectorMetadata`. The workers answer with
:class:`UCMConnectorWorkerMetadata`, which holds one :class:`RankReport` per rank; a rank's first
report carries its :class:`Handshake`. vLLM's own channel for handshakes is not used: inside a
MultiConnector it passes the metadata of one connector to all. vLLM pickles these objects, so keys
travel as joined bytes and device block numbers as NumPy arrays, and a step with nothing to do sends
a few bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ucm.integration.vllm.attention.plan import SparsePlan
from ucm.integration.vllm.connector.identity.weights import WeightsReport
from ucm.store.ucmstore_v1 import Priority

#: Changes with every change of meaning; a mismatch between the sides switches ucm off.
VERSION = 15

#: Length of a block key in bytes.
KEY = 16


def join_keys(keys: Sequence[bytes]) -> bytes:
    """Block keys as one string of bytes."""
    return b"".join(keys)


def split_keys(joined: bytes) -> list[bytes]:
    """The opposite of :func:`join_keys`."""
    return [joined[at : at + KEY] for at in range(0, len(joined), KEY)]


@dataclass(slots=True)
class GroupBlocks:
    """Blocks of a load in one KV group."""

    group: int  # its number
    first: int  # ordinal of the first block in the request's chain
    keys: bytes
    blocks: npt.NDArray[np.int64]  # device block numbers


@dataclass(slots=True)
class Load:
    """Blocks to read for one request, on every rank, in chain order: those of the first KV
    group."""

    request: str
    first: int  # ordinal of the first block in the request's chain
    keys: bytes
    blocks: npt.NDArray[np.int64]  # device block numbers
    timeout: float | None = None  # seconds it may take, None for the store's own deadline
    #: Keys of blocks that are selected from without being read: only their representations are
    #: loaded. The others are then those of the windows, on both sides of these.
    unread: bytes = b""
    rest: list[GroupBlocks] = field(default_factory=list)  # of the other KV groups
    #: Its blocks are not those of its tokens yet (Blend): without any of them, none counts.
    whole: bool = False


@dataclass(slots=True)
class Dump:
    """Blocks to write or to compare, on every rank, in chain order; their sources do not change
    before the job is flushed."""

    job: int
    request: str
    first: int
    parent: bytes  # key of the block before the first, empty for the start of a chain
    keys: bytes
    blocks: npt.NDArray[np.int64]
    refused: tuple[int, ...] = ()  # rows whose stored record some rank could not use: replaced
    tenant: bytes = b""  # tag of the tenant of these blocks, empty for none
    group: int = 0  # number of the KV group
    compare: bool = False  # with the stored blocks; nothing is written


@dataclass(frozen=True, slots=True)
class BlendHit:
    """A chunk of another prompt: tokens ``[start, end)`` of this one. ``source``: place of token
    ``start`` in the prompt whose records were loaded. ``blocks``: device block numbers where the
    records of its blocks ``source // block_tokens`` to ``(source + end - start - 1) //
    block_tokens`` were loaded, in order."""

    start: int
    end: int
    source: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Blend:
    """The work of the first step of a request whose load had chunks (Blend)."""

    request: str
    #: Device block numbers of the request, from its first block on, through token ``end - 1``.
    table: tuple[int, ...]
    exact: int  # tokens before it are an exact prefix, in whole blocks: never written
    end: int  # of the loaded tokens, in whole blocks
    hits: tuple[BlendHit, ...]  # in order, without overlap, within [exact, end)
    tokens: npt.NDArray[np.uint32]  # ids of the tokens [exact, end), then of those that ask
    question: int  # tokens that ask, the last ones of the prompt; not written
    asks_at: int  # place of the first of them, at ``end`` or behind it


@dataclass(slots=True)
class Blended:
    """What a rank did for a request, in tokens: of hits, and of those between hits (missed)."""

    reused: int = 0
    computed: int = 0
    missed: int = 0


@dataclass(slots=True)
class StoreSetup:
    """The setup of a worker's store, sent when the identity is known and every rank agreed: once
    for each configured store that is tried."""

    identity: str  # the identity's JSON text
    config: dict[str, Any]
    choice: int = 0  # which of the configured stores
    attempt: int = 0  # counts the setups
    trial: bool = False  # there are others: one that cannot be used is reported, not kept


@dataclass(slots=True)
class Prefetch:
    """Blocks of waiting requests, to be brought into every rank's own memory: a hint."""

    cancelled: bytes = b""  # keys that no request waits for any more
    wanted: list[tuple[Priority, bytes]] = field(default_factory=list)  # keys by urgency


@dataclass(slots=True)
class UCMConnectorMetadata(KVConnectorMetadata):
    """What the workers do in this step."""

    version: int = VERSION
    setup: StoreSetup | None = None
    loads: list[Load] = field(default_factory=list)
    dumps: list[Dump] = field(default_factory=list)
    touched: list[tuple[int, bytes]] = field(default_factory=list)  # pieces of chains, by ordinal
    prefetch: Prefetch | None = None
    #: Flush the stores once the dumps of this step were begun: another engine waits for them.
    publish: bool = False
    #: Dumps whose blocks other requests got: read before this step writes them.
    jobs_to_flush: list[int] = field(default_factory=list)
    #: Read the blocks of all dumps under way before this step writes: any may be written.
    flush_all: bool = False
    #: Loads that vLLM waits for and the scheduler side cannot plan: failed, without keys.
    undone: list[Load] = field(default_factory=list)
    given_up: str = ""  # why the scheduler side does nothing any more; the workers end too
    check_weights: int | None = None  # compare the weights in memory, for this generation
    sparse: SparsePlan | None = None  # where sparse attention is configured
    #: Requests that run for the first time since their chunks were loaded.
    blends: list[Blend] = field(default_factory=list)


@dataclass(slots=True)
class DumpResult:
    """The end of one dump on one rank."""

    job: int
    failed: tuple[int, ...] = ()  # rows that were not published
    busy: bool = False  # refused at once, nothing was read
    left_alone: tuple[int, ...] = ()  # not published: a record is there that no dump replaces


@dataclass(slots=True)
class LoadFailure:
    """A load without all its blocks: vLLM computes from the first missing one."""

    request: str
    first: int  # ordinal of the first missing block
    refused: bytes  # keys whose records are bad, not merely late
    reasons: tuple[str, ...] = ()  # names of MissReason, of every block from the first on
    newer: bytes = b""  # keys whose records stay, newer or of another key: no hits
    unselectable: bool = False  # representations are missing; the KV may be loaded whole


@dataclass(slots=True)
class LoadServed:
    """The tiers that had the blocks of a load."""

    request: str
    tiers: tuple[int, ...]  # blocks by tier, the top one first


@dataclass(slots=True)
class Handshake:
    """The facts of a worker, in its first report."""

    part: tuple[int, int, int]  # KV group, pipeline rank, tensor rank (0 for replicated KV)
    rank: int
    writer: bool  # False where another rank holds the same bytes and writes them
    identity: dict[str, Any]  # without the weights
    shapes: dict[str, Any]  # the store's size keys, in bytes
    problem: str = ""  # why this rank cannot be served, empty when it can
    stores: tuple[str, ...] = ()  # the configured stores, in order
    only_stores: str = ""  # why nothing may be loaded, empty when it may
    prefix_caching: bool = True  # vLLM's flag there, once the layers are built
    beside: bool = False  # whether this is one connector of several
    no_blend: str = ""  # why chunks cannot be reused on this rank, empty when they can
    #: Part and shapes of the other KV groups that have layers on this rank.
    rest: tuple[tuple[tuple[int, int, int], dict[str, Any]], ...] = ()


@dataclass(frozen=True, slots=True)
class StoreRoom:
    """How much the largest tier of a rank's store holds, in bytes."""

    tier: str
    capacity: int
    used: int
    record: int  # of one block's part on this rank
    quota: int | None = None  # of each tenant, where tenants have one
    quota_removed: int = 0  # blocks removed there because their tenant was above its quota
    expire_after: float | None = None  # seconds without use after which a block is removed


@dataclass(slots=True)
class RankReport:
    """What happened on one rank since its last report."""

    rank: int
    handshake: Handshake | None = None  # in its first report
    ready: bool = False  # its store is open
    broken: str = ""  # why its store cannot be used, empty when it can
    attempt: int = 0  # the setup that this is about
    unavailable: str = ""  # why the store of that setup cannot be used here
    healthy: bool = True
    last_job: int = 0  # newest dump this rank has seen
    free_slots: int | None = None  # blocks a dump could take after that, None when unbounded
    staged: list[int] = field(default_factory=list)
    done: list[DumpResult] = field(default_factory=list)
    load_failures: list[LoadFailure] = field(default_factory=list)
    added: bytes = b""  # record ids this rank can read before others, since its last report
    removed: bytes = b""  # and those that others have found by now, or that were removed
    wants_touches: bool = False  # its store uses hints about blocks in use
    prefetch_room: int = 0  # blocks that may be prefetched there
    served: list[LoadServed] = field(default_factory=list)
    weights: WeightsReport | None = None  # after a request for it
    room: StoreRoom | None = None  # now and then, where its store reports one


@dataclass(slots=True)
class UCMConnectorWorkerMetadata(KVConnectorWorkerMetadata):
    """The reports of all ranks of a step, one after the other."""

    version: int = VERSION
    ranks: list[RankReport] = field(default_factory=list)
    break_even: list[int] = field(default_factory=list)  # break-even length in tokens, by rank
    #: Blocks (request and ordinal) that are not on the device and whose records are lost.
    lost: list[tuple[str, int]] = field(default_factory=list)
    blended: list[Blended] = field(default_factory=list)  # of the first rank

    def aggregate(self, other: KVConnectorWorkerMetadata) -> UCMConnectorWorkerMetadata:
        """Both sets of reports; vLLM merges the workers' answers with this."""
        if not isinstance(other, UCMConnectorWorkerMetadata):
            return self
        return UCMConnectorWorkerMetadata(
            self.version,
            self.ranks + other.ranks,
            self.break_even + other.break_even,
            self.lost + other.lost,
            self.blended + other.blended,
        )
