"""The KV cache groups of an engine, as parts of the blocks of the store, and the longest hit that
all of them can serve.

vLLM puts layers of one kind into a group with a block table of its own. A block of the store covers
as many tokens as the least common multiple of the groups' block sizes, so that every hit ends at
the end of one, as vLLM's own hits do. A :class:`Group` is one vLLM block of one group in each such
block: a group whose blocks are smaller than that counts several times.

What a hit needs of a group is one number, the first token that the next one can still see
(:class:`Reach`): blocks before it are not looked up, and vLLM has none for them in a request's
table. Everything else is the same for all kinds of layers. The rule is that of vLLM's
``find_longest_cache_hit``, which ``tests/vllm_unit/test_groups.py`` runs beside this one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ucm.integration.vllm.connector.identity.engine_identity import (
    layer_specs,
    spec_kind,
    transferable_groups,
)
from ucm.store import part_mask

#: In a table of tiers: no record, and not looked up.
ABSENT, UNKNOWN = 255, 254
#: A table of tiers in which what was not looked up counts as absent.
_KNOWN = bytes(range(UNKNOWN)) + bytes((ABSENT, ABSENT))


@dataclass(frozen=True)
class Reach:
    """How far back the next token sees in a layer of this kind."""

    kind: Literal["whole", "window", "chunk", "state"]
    #: Tokens of the window or chunk.
    tokens: int = 0

    def first_token(self, tokens: int) -> int:
        """The first token that the one behind ``tokens`` (> 0) others can see."""
        if self.kind == "window":
            return max(tokens - self.tokens + 1, 0)
        if self.kind == "chunk":
            return tokens - tokens % self.tokens
        return tokens - 1 if self.kind == "state" else 0


WHOLE = Reach("whole")

#: The KV specs of vLLM that are served. Each is the class itself, since a derived one may keep
#: other things in its pages. vLLM replays the end of a hit (``Request.replay_start``), whose blocks
#: must not be stored in that step, for ``SlidingWindowMLASpec`` alone.
SERVED = (
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "MambaSpec",
)


def reach_of(spec: Any) -> Reach:
    """What a hit needs of the layers of a served spec."""
    kind = spec_kind(spec)
    if kind == "SlidingWindowSpec":
        # vLLM keeps, and a load fills, blocks of some more tokens for drafters
        return Reach("window", spec.sliding_window + getattr(spec, "extra_retained_tokens", 0))
    if kind == "ChunkedLocalAttentionSpec":
        return Reach("chunk", spec.attention_chunk_size)
    return Reach("state") if kind == "MambaSpec" else WHOLE


@dataclass(frozen=True)
class Group:
    """One vLLM block of one KV cache group, in every block of the store."""

    #: Its number in the parts of a block: the first is 0.
    number: int
    #: Which of vLLM's groups.
    table: int
    #: Tokens of a vLLM block of the group.
    tokens: int
    #: Which of its vLLM blocks in a block of the store, of how many.
    at: int = 0
    ratio: int = 1
    reach: Reach = WHOLE
    #: Whether a draft model's layers are in it. They depend on tokens behind the block, so a hit
    #: counts if the next vLLM block is there too, which is computed again.
    draft: bool = False
    #: Whether only blocks are stored that vLLM itself keeps in its prefix cache. Of a state only
    #: these hold it at their end.
    only_cached: bool = False

    @property
    def mask(self) -> bytes:
        """Between a block's key and the key of this group's part of it; empty for the first."""
        return part_mask(self.number, 0, 0) if self.number else b""

    @property
    def frees_early(self) -> bool:
        """Whether vLLM takes blocks away from a request that still runs."""
        return self.reach.kind != "whole"

    def first_needed(self, blocks: int) -> int:
        """The first block of the store whose part of this group a hit of ``blocks`` needs."""
        return self.first_seen(blocks * self.ratio * self.tokens) if blocks else 0

    def first_seen(self, tokens: int) -> int:
        """The first block of the store whose part of this group the token behind ``tokens`` (> 0)
        others can see. vLLM takes those before it away when that token is computed."""
        first = self.reach.first_token(tokens) // self.tokens
        return max(-(-(first - self.at) // self.ratio), 0)

    def device_blocks(self, table: Sequence[Any]) -> Sequence[Any]:
        """Of a request's table of this group, the vLLM blocks that lie in blocks of the store."""
        return table if self.ratio == 1 else table[self.at :: self.ratio]


#: The groups of a model with full attention alone.
ONE_GROUP = (Group(0, 0, 1),)


def groups_of(
    kv_cache_config: Any,
    context_ranks: int = 1,
    window_records: str = "all",
    drafting: bool = False,
) -> tuple[Group, ...]:
    """The groups of a served engine. ``context_ranks`` share the blocks of a context;
    ``window_records``: the key of that name. ``drafting``: layers of a draft model are in a group
    that vLLM marks, or in any group if it marks none."""
    every, kept = kv_cache_config.kv_cache_groups, transferable_groups(kv_cache_config)
    marked = [one.kv_cache_spec for one in every if getattr(one, "is_eagle_group", False)]
    unmarked = drafting and not marked
    sizes = [_block_tokens(group.kv_cache_spec, context_ranks) for group in kept]
    block, found = math.lcm(*sizes), list[Group]()
    for group, tokens in zip(kept, sizes, strict=True):
        table = next(at for at, one in enumerate(every) if one is group)
        reach = reach_of(layer_specs(group.kv_cache_spec)[0])
        draft, ratio = unmarked or group.kv_cache_spec in marked, block // tokens
        few = reach.kind == "state" or (reach != WHOLE and window_records == "boundaries")
        for at in range(ratio):
            number, drafts = len(found), draft and not at
            found.append(Group(number, table, tokens, at, ratio, reach, drafts, few))
    return tuple(found)


def _block_tokens(spec: Any, context_ranks: int) -> int:
    sharded = context_ranks > 1 and getattr(spec, "dcp_sharded", True)
    return int(spec.block_size) * (context_ranks if sharded else 1)


def fails_whole(groups: Sequence[Group]) -> bool:
    """Whether a failed load leaves nothing of use to its request: a shorter prefix would need other
    blocks than those that were loaded. vLLM also accepts no failed blocks of several groups."""
    return len(groups) > 1 or groups[0].frees_early


def longest_hit(
    groups: Sequence[Group], tables: Sequence[bytes | bytearray], limit: int
) -> tuple[int, list[tuple[int, range]]]:
    """The longest hit, in blocks, of at most ``limit``, and what of it is not known: by group, the
    blocks that are still to be looked up. It counts if there are none.

    ``tables``: for each group the tier of each block, :data:`ABSENT` or :data:`UNKNOWN`.
    """
    hit = limit
    while hit > 0:
        unknown: list[tuple[int, range]] = []
        shorter = hit
        for at, (group, table) in enumerate(zip(groups, tables, strict=True)):
            first, end = group.first_needed(hit), hit + group.draft
            if end > len(table):
                shorter = min(shorter, len(table) - group.draft)
                continue
            # A block that this hit needs is needed by every shorter one that it lies in.
            absent = table.rfind(ABSENT, first, end)
            if absent >= 0:
                shorter = min(shorter, absent - group.draft)
            elif (last := table.rfind(UNKNOWN, first, end)) >= 0:
                unknown.append((at, range(table.find(UNKNOWN, first, end), last + 1)))
        if shorter == hit:
            return hit, unknown
        hit = max(shorter, 0)
    return 0, []


def known_hit(groups: Sequence[Group], tables: Sequence[bytes | bytearray], limit: int) -> int:
    """The same, where no block is looked up any more."""
    return longest_hit(groups, [table.translate(_KNOWN) for table in tables], limit)[0]


def shorter_hits(tiers: bytes) -> list[int]:
    """The lengths to which a hit may be cut, the shortest first: up to the first block that is in
    none of the upper tiers, for each number of these. At most one fewer than there are tiers."""
    kinds = sorted(set(tiers))
    ends = {min(map(tiers.find, kinds[above:])) for above in range(1, len(kinds))}
    return sorted(ends - {0})


def hit_tiers(groups: Sequence[Group], tables: Sequence[bytes | bytearray], hit: int) -> bytes:
    """The tier of each block of a hit: the lowest of its parts'. A block that no group needs, as
    before the windows of all layers, counts like the next one that is loaded."""
    tiers, begin = bytearray(hit), hit
    for group, table in zip(groups, tables, strict=True):
        first = group.first_needed(hit)
        tiers[first:] = map(max, tiers[first:], table[first:hit])
        begin = min(begin, first)
    tiers[:begin] = tiers[begin : begin + 1] * begin
    return bytes(tiers)
