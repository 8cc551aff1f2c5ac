"""What the scheduler side and the workers send each other: one small, versioned object in each
direction per step.

The scheduler side sends :class:`UCMConnectorMetadata`. The workers answer with
:class:`UCMConnectorWorkerMetadata`, which holds one :class:`RankReport` per rank; a rank's first
report carries its :class:`Handshake`. vLLM's own channel for handshakes is not used: inside a
MultiConnector it hands the metadata of one connector to all of them. vLLM pickles these objects, so
keys travel as joined bytes and device block numbers as NumPy arrays, and a step with nothing to do
sends a few bytes.
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

#: Changes with every change of meaning; the sides of one engine always agree, and a mismatch
#: switches ucm off.
VERSION = 11

#: Length of a block key in bytes.
KEY = 16


def join_keys(keys: Sequence[bytes]) -> bytes:
    """Block keys as one string of bytes."""
    return b"".join(keys)


def split_keys(joined: bytes) -> list[bytes]:
    """The opposite of :func:`join_keys`."""
    return [joined[at : at + KEY] for at in range(0, len(joined), KEY)]


@dataclass(slots=True)
class Load:
    """Blocks to read for one request, on every rank, in chain order."""

    request: str
    first: int  # ordinal of the first block in the request's chain
    keys: bytes
    blocks: npt.NDArray[np.int64]  # device block numbers
    timeout: float | None = None  # seconds it may take, None for the store's own deadline
    #: Keys of blocks that are selected from without being read: their representations alone are
    #: loaded. The others are then those of the windows, on both sides of these.
    unread: bytes = b""


@dataclass(slots=True)
class Dump:
    """Blocks to write, on every rank, in chain order; their sources do not change before the job is
    to be flushed."""

    job: int
    request: str
    first: int
    parent: bytes  # key of the block before the first, empty for the start of a chain
    keys: bytes
    blocks: npt.NDArray[np.int64]
    # rows whose stored record some rank could not use: to be replaced
    refused: tuple[int, ...] = ()
    tenant: bytes = b""  # tag of the tenant whose blocks these are, empty for none


@dataclass(slots=True)
class StoreSetup:
    """Sent when the identity is known and every rank agreed: what a worker opens its store with.

    Once; where several stores are configured, once for each that is tried.
    """

    identity: str  # the identity's JSON text
    config: dict[str, Any]
    choice: int = 0  # which of the configured stores
    attempt: int = 0  # counts the setups
    # there are others: one that cannot be opened or does not answer is reported, not kept
    trial: bool = False


@dataclass(slots=True)
class Prefetch:
    """Blocks of requests that wait, to be brought up in every rank's own memory: a hint."""

    cancelled: bytes = b""  # keys that no request waits for any more
    # keys by how soon they are wanted
    wanted: list[tuple[Priority, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class UCMConnectorMetadata(KVConnectorMetadata):
    """What the workers do in this step."""

    version: int = VERSION
    setup: StoreSetup | None = None
    loads: list[Load] = field(default_factory=list)
    dumps: list[Dump] = field(default_factory=list)
    # in use: pieces of chains, from an ordinal on
    touched: list[tuple[int, bytes]] = field(default_factory=list)
    prefetch: Prefetch | None = None
    jobs_to_flush: list[int] = field(
        default_factory=list
    )  # dumps whose blocks others got: read before this step writes
    #: Read the blocks of all dumps under way before this step writes: which of them are taken is
    #: not known.
    flush_all: bool = False
    #: Loads that vLLM waits for and the scheduler side cannot plan: failed, without keys.
    undone: list[Load] = field(default_factory=list)
    given_up: str = ""  # why the scheduler side does nothing any more; the workers end too
    # compare the weights in memory with those known, for this generation
    check_weights: int | None = None
    sparse: SparsePlan | None = None  # where sparse attention is configured


@dataclass(slots=True)
class DumpResult:
    """The end of one dump on one rank: nothing of it is under way any more."""

    job: int
    failed: tuple[int, ...] = ()  # rows that were not published
    busy: bool = False  # refused at once, nothing was read
    # rows not published: a record that no dump replaces is in the way
    left_alone: tuple[int, ...] = ()


@dataclass(slots=True)
class LoadFailure:
    """A load that did not bring all its blocks: vLLM computes from the first missing one."""

    request: str
    first: int  # ordinal of the first block that is not there
    refused: bytes  # keys whose records are bad, not merely late
    reasons: tuple[str, ...] = ()  # names of MissReason, of every block from the first on
    # keys whose records are left alone, newer or of another key: no hits, and not replaced
    newer: bytes = b""
    # representations are missing, which says nothing of the KV: it may be loaded whole
    unselectable: bool = False


@dataclass(slots=True)
class LoadServed:
    """The tiers that had the blocks of a load, as far as its rank's store reports."""

    request: str
    tiers: tuple[int, ...]  # blocks by tier, the top one first


@dataclass(slots=True)
class Handshake:
    """What a worker says about itself, in its first step."""

    part: tuple[int, int, int]  # KV group, pipeline rank, tensor rank (0 for replicated KV)
    rank: int
    writer: bool  # False where another rank holds the same bytes and writes them
    identity: dict[str, Any]  # without the weights
    shapes: dict[str, Any]  # the store's size keys, in bytes
    problem: str = ""  # why this rank cannot take part, empty when it can
    stores: tuple[str, ...] = ()  # the configured stores, in order
    only_stores: str = ""  # why nothing may be loaded, empty when it may
    # vLLM's flag there, which a worker may switch off while it builds the layers
    prefix_caching: bool = True


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
    attempt: int = 0  # which setup its news are about
    unavailable: str = ""  # why the store of that setup is of no use here
    healthy: bool = True  # False: its store fails for now, and says when it is back
    last_job: int = 0  # newest dump this rank has seen
    free_slots: int | None = None  # blocks a dump could take after that, None when unbounded
    staged: list[int] = field(default_factory=list)
    done: list[DumpResult] = field(default_factory=list)
    load_failures: list[LoadFailure] = field(default_factory=list)
    # record ids this rank can read before others see them, since its last report
    gained: bytes = b""
    lost: bytes = b""  # and those that others have found by now, or that were removed
    # its store is to be sent what is in use: no touch of another process reaches it
    wants_touches: bool = False
    prefetch_room: int = 0  # blocks that may be brought up there ahead of need
    served: list[LoadServed] = field(default_factory=list)
    weights: WeightsReport | None = None  # when it was asked for
    room: StoreRoom | None = None  # now and then, where its store reports one


@dataclass(slots=True)
class UCMConnectorWorkerMetadata(KVConnectorWorkerMetadata):
    """The reports of all ranks of a step, one after the other."""

    version: int = VERSION
    ranks: list[RankReport] = field(default_factory=list)
    # tokens from which on sparse attention pays, of each rank
    break_even: list[int] = field(default_factory=list)
    #: Blocks of requests that are not on the device, and whose records are missing or bad: request
    #: and ordinal.
    lost: list[tuple[str, int]] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> UCMConnectorWorkerMetadata:
        """Both sets of reports; vLLM merges the workers' answers with this."""
        if not isinstance(other, UCMConnectorWorkerMetadata):
            return self
        measured = self.break_even + other.break_even
        lost = self.lost + other.lost
        return UCMConnectorWorkerMetadata(self.version, self.ranks + other.ranks, measured, lost)
