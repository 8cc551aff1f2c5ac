"""Blend in the scheduler side: which chunks of a prompt a request claims, where their records are
loaded, which of its tokens are exact, and what the workers do with its first step.

A claim ends at the last chunk, in whole blocks, and holds all tokens between the chunks; vLLM
queries once. The records of chunks are loaded one after the other into the request's own blocks
behind its exact prefix. They are not at the places of their tokens before the first step, so the
load counts whole or not at all, and the workers receive the chunks when the request first runs.

Tokens behind the exact prefix have approximate KV: nothing of it is stored, or enters vLLM's prefix
cache. :class:`ExactPrefixes` has its end from the answer to vLLM's question on.

:class:`BlendPlanner` outlives a side that is given up: a request whose chunks were loaded has
foreign KV in its blocks until its first step, so vLLM must not run it without the workers' part.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from ucm.config.sparse import BlendConfig
from ucm.errors import ConfigError, InvalidInputError
from ucm.integration.vllm.connector.admission.admission import Admission, Cut, Verdict
from ucm.integration.vllm.connector.groups import UNKNOWN
from ucm.integration.vllm.connector.guard import logger, throttle
from ucm.integration.vllm.connector.identity.keys import ExtraKeys, UnkeyableError
from ucm.integration.vllm.connector.metadata import Blend, BlendHit, split_keys
from ucm.integration.vllm.connector.scheduler.lookup import BlockTracker, Lookup, Lookups
from ucm.sparse.base import ALL_TOKENS
from ucm.sparse.blend.chunks import (
    ChunkFinder,
    Hit,
    Range,
    pieces_of,
    requested_chunks,
    separators_of,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

#: One in this number of claims that would be slower than computing is made, to measure again; at
#: most this number of lengths of a claim are tried.
TRIED = 32
#: Prompts that are not added to the table again when they are found again.
REMEMBERED = 1024


class ExactPrefixes(WeakKeyDictionary["Request", int]):
    """How many of its first tokens have exact KV, of each request with chunks behind them."""

    def __call__(self, request: Request) -> int:
        """The same of any request, now or once they are computed."""
        return self.get(request, ALL_TOKENS)


# The claim
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """The chunks that a request claims behind its exact prefix."""

    exact: int  # tokens before the first that may be approximate, in whole blocks
    end: int  # of the claim, in whole blocks
    hits: tuple[Hit, ...]
    #: Ordinal of the request's own block that a record of a hit is loaded into, by its key; of one
    #: that is part of the exact prefix, its block there.
    places: Mapping[bytes, int]
    keys: tuple[bytes, ...]  # of those loaded behind the exact prefix, in order
    cut: Cut | None = None  # what the load of these saves, and what it reads
    learns: bool = False

    @property
    def reused(self) -> int:
        """Tokens of hits."""
        return sum(hit.tokens for hit in self.hits)

    @property
    def missed(self) -> int:
        """Tokens between them."""
        return self.end - self.exact - self.reused


def parts_of(
    hit: Hit, there: Collection[bytes], first: int, end: int, block_tokens: int
) -> Iterator[Hit]:
    """The parts of a hit within the tokens ``[first, end)`` whose records are ``there``, each of a
    block's tokens at least."""
    size, keys, moved = block_tokens, split_keys(hit.keys), hit.start - hit.source
    block, begin = hit.source // size, None
    for at in range(len(keys) + 1):
        if at < len(keys) and keys[at] in there:
            begin = at if begin is None else begin
        elif begin is not None:
            source = max(hit.source, (block + begin) * size, first - moved)
            upto = min(hit.source + hit.tokens, (block + at) * size, end - moved)
            if upto - source >= size:
                held = keys[source // size - block : -(-upto // size) - block]
                yield Hit(source + moved, upto + moved, source, b"".join(held), hit.prompt)
            begin = None


def claim_of(
    hits: Sequence[Hit],
    there: KeysView[bytes] | set[bytes],
    exact_keys: Sequence[bytes],
    limit: int,
    block_tokens: int,
    *,
    ratio: float = 0.0,
    most_computed: float = math.inf,
    fewest: int = 0,
) -> Claim | None:
    """The longest claim of these hits, of which the records in ``there`` can be loaded, behind the
    blocks of ``exact_keys`` and before token ``limit``; None without one. ``ratio``: share of the
    tokens of hits that is computed again; with all others of the claim these are at most
    ``most_computed``. ``fewest``: tokens of hits of a claim, at least."""
    size, exact = block_tokens, len(exact_keys) * block_tokens
    prefix = {key: at for at, key in enumerate(exact_keys)}
    known = there | prefix.keys()
    found = [part for hit in hits for part in parts_of(hit, known, exact, limit, size)]
    reused, ends = 0, list[int]()  # of hits, as many as may be claimed
    for at, hit in enumerate(found, 1):
        reused += hit.tokens
        if hit.end // size * size - exact - reused + _share(ratio, reused) <= most_computed:
            ends.append(at)
    for upto in reversed(ends[-TRIED:]):
        *before, last = found[:upto]
        end = last.end // size * size
        kept = _fitting([*before, *parts_of(last, known, exact, end, size)], prefix, end, size)
        if not kept or kept[-1].end <= end - size:
            continue  # it is a shorter claim
        places = dict(prefix)
        for key in (key for hit in kept for key in split_keys(hit.keys)):
            places.setdefault(key, len(places))
        claim = Claim(exact, end, tuple(kept), places, tuple(places)[len(prefix) :])
        if claim.reused < max(fewest, 1):
            return None
        if claim.missed + _share(ratio, claim.reused) <= most_computed:
            return claim
    return None


def _share(ratio: float, tokens: int) -> int:
    """The number of tokens that are computed again, of this many tokens of hits."""
    return int(ratio * tokens + 1e-9)


def _fitting(
    hits: Sequence[Hit], prefix: Mapping[bytes, int], end: int, block_tokens: int
) -> list[Hit]:
    """The parts of hits whose records have room from the end of a request's ``prefix`` to token
    ``end``. A hit that begins and ends inside of blocks lies in more of them than it fills: those
    with the fewest tokens are left out."""
    size, exact = block_tokens, len(prefix) * block_tokens
    used = Counter[bytes]()  # tokens of each record
    for hit in hits:
        at = hit.source
        for key in split_keys(hit.keys):
            upto = min((at // size + 1) * size, hit.source + hit.tokens)
            used[key] += upto - at
            at = upto
    loaded, room = [key for key in used if key not in prefix], (end - exact) // size
    best = {*sorted(loaded, key=lambda key: -used[key])[:room], *prefix}
    return [part for hit in hits for part in parts_of(hit, best, exact, end, size)]


# One engine's claims
# --------------------------------------------------------------------------------------------------


@dataclass
class _Chunks:
    """The chunks of a request, and the lookup of their records."""

    hits: list[Hit]
    preemptions: int
    pieces_end: int  # of the last piece, 0 without pieces
    lookup: Lookup | None = None  # None without hits
    decided: tuple[Any, Claim | None] = (None, None)  # the last claim, and what it followed from


@dataclass
class _Job:
    """A claim that was answered or is being loaded, until its request runs."""

    request: Request
    claim: Claim
    local: int  # tokens that were on the device
    failed: bool = False

    @property
    def runs(self) -> bool:
        """Whether vLLM goes on behind the loaded tokens, as after a load that has not failed."""
        return bool(self.request.num_computed_tokens == self.claim.end)


class BlendPlanner:
    """One engine's Blend, on the scheduler side."""

    def __init__(
        self,
        config: BlendConfig,
        block_tokens: int,
        *,
        step_tokens: int = 0,
        separators: Sequence[Sequence[int]] = (),
        why_not: str = "",
    ) -> None:
        """``step_tokens``: most tokens of a step, 0 where that is not known; ``separators``: those
        of the configuration, as tokens; ``why_not``: why nothing is blended in this engine."""
        self._config, self._block_tokens, self._separators = config, block_tokens, separators
        # of a claim, beside the question
        self._most_computed = step_tokens - config.question_tokens if step_tokens else math.inf
        self._finder = self._empty()
        self.exact_tokens = ExactPrefixes()
        self._remembered = deque[bytes](maxlen=REMEMBERED)  # last keys of prompts that were added
        self._chunks: dict[str, _Chunks] = {}
        self._claims: dict[str, _Job] = {}  # answered
        self._jobs: dict[str, _Job] = {}
        self._banned: set[str] = set()  # requests whose load of chunks failed
        self._slower = 0  # claims that would be slower than computing
        self._manager: KVCacheManager | None = None
        self._why_not = ""
        self.refuse(why_not)

    def refuse(self, why: str) -> None:
        """Nothing is blended in this engine from here on, for this reason; logged once."""
        if why and not self._why_not:
            self._why_not = why
            logger.warning("Blend is off, and prefixes are cached as without it: %s", why)

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Bind the block tables, and the managers that fill vLLM's prefix cache."""
        self._manager = manager
        for each in manager.coordinator.single_type_managers:
            if hasattr(each, "exact_tokens"):
                each.exact_tokens = self.exact_tokens
            else:
                self.refuse(
                    "the attention backend of this engine has no place where ucm can keep"
                    " approximate KV out of vLLM's prefix cache; docs/blend.md lists those that do"
                )

    # Chunks
    # ----------------------------------------------------------------------------------------------

    def _empty(self) -> ChunkFinder:
        config = self._config
        return ChunkFinder(self._block_tokens, config.chunk_size, alone=config.chunk_alone)

    def _described(
        self, request: Request, extra_keys: ExtraKeys
    ) -> tuple[Sequence[int], list[Range], bytes] | None:
        """The tokens of a prompt, its pieces and what else shapes its KV; None where KV depends on
        more than that, or its pieces are wrong."""
        beside = request.lora_request, request.prompt_embeds, request.pooling_params
        if self._why_not or request.mm_features or any(one is not None for one in beside):
            return None
        tokens = request._all_token_ids[: request.num_prompt_tokens]
        try:
            pieces = pieces_of(
                tokens,
                chunks=requested_chunks(request.kv_transfer_params),
                separators=self._separators,
                chunk_end_token_id=self._config.chunk_end_token_id,
            )
            return tokens, pieces, repr(extra_keys.of(request, 0, 1)).encode()
        except (InvalidInputError, UnkeyableError) as error:
            text = "request %s: its chunks are not reused: %s"
            throttle.warning("chunks", text, request.request_id, error)
            return None

    def forget(self) -> None:
        """Keys of before name other KV, or none: another identity."""
        self._finder = self._empty()
        self._chunks.clear()
        self._remembered.clear()

    def stored(self, request: Request, keys: Sequence[bytes], extra_keys: ExtraKeys) -> None:
        """The first blocks of a prompt are stored under these keys: their chunks can be found."""
        if not keys or keys[-1] in self._remembered:
            return
        if (found := self._described(request, extra_keys)) is not None:
            tokens, pieces, extra = found
            self._finder.add(tokens, keys, pieces=pieces, extra=extra)
            self._remembered.append(keys[-1])

    def look_up(
        self,
        request: Request,
        lookups: Lookups,
        extra_keys: ExtraKeys,
        clock: Callable[[], float],
        first: int = 0,
    ) -> Lookup | None:
        """The lookup of the records of a request's chunks, begun once until it is preempted; None
        without chunks. The tokens before ``first`` are those of a prefix that was stored."""
        name = request.request_id
        if name in self._banned or self._why_not:
            return None
        known = self._chunks.get(name)
        if known is not None and known.preemptions == request.num_preemptions:
            return known.lookup
        known = self._chunks[name] = _Chunks([], request.num_preemptions, 0)
        if (found := self._described(request, extra_keys)) is not None:
            tokens, pieces, extra = found
            first = next((start for start, end in pieces if start <= first < end), first)
            known.hits = self._finder.find(tokens, first=first, pieces=pieces, extra=extra)
            known.pieces_end = pieces[-1][1] if pieces else 0
        if known.hits:
            keys = list(dict.fromkeys(key for hit in known.hits for key in split_keys(hit.keys)))
            known.lookup = lookups.start(lambda: keys, clock, at_once=True, each=True)
        return known.lookup

    # The question
    # ----------------------------------------------------------------------------------------------

    def asked(self, request: Request) -> None:
        """vLLM queries what can be loaded for a request that holds no computed blocks but those of
        its prefix cache: an earlier claim is void."""
        self._claims.pop(request.request_id, None)
        if self._jobs.pop(request.request_id, None) is not None:  # its load failed
            self._banned.add(request.request_id)
        self.exact_tokens.pop(request, None)

    def claim(
        self,
        request: Request,
        local: int,
        exact_keys: Sequence[bytes],
        known: BlockTracker,
        admission: Admission,
        block_bytes: int,
    ) -> int:
        """The end of what a request loads, with chunks where that pays, in tokens. ``local``:
        tokens on the device; ``exact_keys``: of the blocks of its exact prefix."""
        size, chunks = self._block_tokens, self._chunks.get(request.request_id)
        exact = len(exact_keys) * size
        if chunks is None or chunks.lookup is None or chunks.lookup.keys is None:
            return exact
        pairs = zip(chunks.lookup.keys, chunks.lookup.tiers, strict=False)
        tiers = {key: tier for key, tier in pairs if tier < UNKNOWN and not known.is_refused(key)}
        decided_by = (local, exact, tiers, room := self._room())
        if chunks.decided[0] != decided_by:
            limit = (request.num_tokens - 1) // size * size
            claim = claim_of(
                chunks.hits,
                tiers.keys(),
                exact_keys,
                min(limit, chunks.pieces_end or limit),
                size,
                ratio=self._config.ratio,
                most_computed=room,
                fewest=self._config.min_hit_blocks * size,
            )
            if claim is not None:
                again = chunks.decided[0] is not None
                claim = self._judged(request, claim, tiers, admission, block_bytes, again)
            chunks.decided = decided_by, claim
        claim = chunks.decided[1]
        if claim is None:
            return exact
        # vLLM caches blocks when a load ends, so this stands before any load.
        self.exact_tokens[request] = claim.exact
        self._claims[request.request_id] = _Job(request, claim, local)
        return claim.end

    def _judged(
        self,
        request: Request,
        claim: Claim,
        tiers: Mapping[bytes, int],
        admission: Admission,
        block_bytes: int,
        again: bool,
    ) -> Claim | None:
        """The claim, if it is quicker than computing its tokens, or measures that. ``again``: one
        of this request was judged before."""
        counts = Counter(tiers[key] for key in claim.keys)
        sizes = {tier: count * max(block_bytes, 1) for tier, count in counts.items()}
        tokens, rate = claim.end - claim.exact, admission.compute_rate
        whole = rate.seconds(tokens, request.num_tokens - claim.end)
        step = rate.blend_seconds(self._computed(claim))
        saved = tokens - self._computed(claim)
        if whole and step is not None and admission.measures:
            # The time that is left for the load, in tokens that are computed in it.
            left = int(tokens * (1 - step / whole))
            self._slower += left <= 0 and not again
            if left <= 0 and self._slower % TRIED:
                return None
            saved = left if left > 0 else saved
        cut = Cut(max(saved, 1), sizes)
        rest = request.num_tokens - claim.exact - cut.tokens
        chosen, verdict = admission.decide([cut], rest, again=again)
        if chosen is None:
            return None
        return replace(claim, cut=cut, learns=verdict is Verdict.LEARN)

    def _room(self) -> float:
        """The most tokens that the workers may compute of another claim. Claims whose requests have
        not run yet may all run in one step, and fit into it together, each with its question."""
        taken = (self._computed(job.claim) for job in self._jobs.values())
        return self._most_computed - sum(each + self._config.question_tokens for each in taken)

    def _computed(self, claim: Claim) -> int:
        """Tokens of a claim that the workers compute."""
        return claim.missed + _share(self._config.ratio, claim.reused)

    # Loads
    # ----------------------------------------------------------------------------------------------

    def admitted(self, request: Request, external: int) -> Claim | None:
        """vLLM has given a request blocks, and waits for the load of ``external`` tokens. Returns
        the claim that is to be loaded, None without chunks. vLLM may take less of it, which ends
        among its chunks then: a claim without hits, whose load is not planned and so fails."""
        name = request.request_id
        if (job := self._claims.pop(name, None)) is None:
            return None
        if not external:  # it runs in this step, and computes all
            del self.exact_tokens[request]
            return None
        self._jobs[name], end = job, job.local + external
        if end != job.claim.end:
            job.claim = replace(job.claim, end=end, hits=())
            self.failed(name)
        return job.claim

    def failed(self, name: str) -> None:
        """A rank lacks a record of a load: vLLM computes all tokens of the claim. If it should go
        on as if they were loaded, the workers do that."""
        job = self._jobs.get(name)
        if job is not None or name in self._chunks:  # it has not ended
            self._banned.add(name)
        if job is not None:
            job.failed = True
            self.exact_tokens[job.request] = job.local

    def finished(self, request: Request) -> None:
        """It ended, or was aborted."""
        name = request.request_id
        for each in (self._chunks, self._claims, self._jobs):
            each.pop(name, None)
        self._banned.discard(name)

    # Steps
    # ----------------------------------------------------------------------------------------------

    def computed_in(self, scheduled: Collection[str]) -> int | None:
        """Tokens of claims that the workers compute before a step with these requests; None where
        they blend nothing in it."""
        jobs = [job for name, job in self._jobs.items() if name in scheduled and job.runs]
        return sum(self._computed(job.claim) for job in jobs) if jobs else None

    def plan(self, output: SchedulerOutput) -> list[Blend]:
        """What the workers do before a step, for requests that run for the first time since their
        chunks were loaded: vLLM calls them then, as if there were something to load. Raises where
        that cannot be planned, since the blocks have foreign KV."""
        blends = []
        for name in sorted(self._jobs.keys() & output.num_scheduled_tokens.keys()):
            job = self._jobs.pop(name)
            if job.runs:
                blends.append(self._blend(job))
            else:  # its load failed, so all of it is computed
                self.exact_tokens.pop(job.request, None)
        if blends:
            output.has_sync_kv_loads = True
        return blends

    def _blend(self, job: _Job) -> Blend:
        assert self._manager is not None  # bound before the first request
        request, claim, size = job.request, job.claim, self._block_tokens
        blocks = self._manager.get_blocks(request.request_id).blocks[0]
        table = tuple(block.block_id for block in blocks[: claim.end // size])
        exact = job.local if job.failed else claim.exact
        hits = () if job.failed else claim.hits
        question = min(self._config.question_tokens, request.num_tokens - claim.end)
        asks_at, tokens = request.num_tokens - question, request._all_token_ids

        def placed(hit: Hit) -> BlendHit:
            blocks = tuple(table[claim.places[key]] for key in split_keys(hit.keys))
            return BlendHit(hit.start, hit.end, hit.source, blocks)

        return Blend(
            request=request.request_id,
            table=table,
            exact=exact,
            end=claim.end,
            hits=tuple(map(placed, hits)),
            tokens=np.array([*tokens[exact : claim.end], *tokens[asks_at:]], dtype=np.uint32),
            question=question,
            asks_at=asks_at,
        )


# An engine's planner
# --------------------------------------------------------------------------------------------------


def why_not_blended(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Why chunks cannot be reused in this engine, as far as the scheduler side knows; empty where
    they can."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    groups, drafts = len(kv_cache_config.kv_cache_groups), vllm_config.speculative_config
    contexts = ("decode_context_parallel_size", "prefill_context_parallel_size")
    split = (
        getattr(parallel, "enable_dbo", False) or (getattr(parallel, "num_ubatches", 1) or 1) > 1
    )
    experts = parallel.data_parallel_size > 1 and model.is_moe
    draft = drafts is not None and drafts.method not in ("ngram", "suffix")
    whys = {
        f"this model has {groups} KV cache groups, and chunks are reused in one": groups != 1,
        "the decoder of this model attends to an encoder": model.is_encoder_decoder,
        "with pipeline parallelism no rank has all layers": parallel.pipeline_parallel_size > 1,
        "context parallelism splits a request's tokens over ranks": any(
            getattr(parallel, name, 1) > 1 for name in contexts
        ),
        "microbatches (enable_dbo) split the rows of a step": split,
        "with data parallelism the experts of a model wait for each other's layers": experts,
        "a draft model has KV of its own, which nothing would fill": draft,
    }
    return next((why for why, so in whys.items() if so), "")


def separators_in(config: BlendConfig, vllm_config: VllmConfig) -> list[tuple[int, ...]]:
    """The configured separators as tokens. Raises :class:`~ucm.errors.ConfigError` for those that
    have none."""
    from vllm.tokenizers import cached_tokenizer_from_config

    texts = [one for one in config.separators if isinstance(one, str)]
    found = [one for one in config.separators if not isinstance(one, str)]
    try:
        if texts:  # there is no tokenizer with skip_tokenizer_init
            encode = cached_tokenizer_from_config(vllm_config.model_config).encode
            found += separators_of(texts, lambda text: encode(text, add_special_tokens=False))
    except (AttributeError, InvalidInputError) as error:
        raise ConfigError(
            "blend.separators: a text has no tokens, or skip_tokenizer_init is set; write tokens"
            " instead, as [[12, 13]]"
        ) from error
    return found
