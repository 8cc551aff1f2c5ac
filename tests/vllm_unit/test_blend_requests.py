"""Chunks of other prompts in vLLM's own scheduler and KV cache manager, with both sides of the
connector, around the model of arithmetic: what is approximate reaches neither the store nor vLLM's
prefix cache, and a load that fails leaves nothing foreign.

The workers' part is that of this file: it checks that every chunk was loaded from where the plan
says, and puts it at its place as it is, or computes every token. The KV of this model depends on
all tokens before it, so a chunk as it is has wrong KV behind other tokens, and everything that is
computed from it is wrong too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_engine import BLOCK, LateStore, ToyEngine, _state, expected

from ucm.errors import ConfigError
from ucm.integration.vllm.attention.spec import SparseFullAttentionSpec
from ucm.integration.vllm.connector.metadata import Blend, Blended
from ucm.integration.vllm.connector.scheduler.blend import separators_in
from ucm.integration.vllm.connector.worker import blend as worker_side
from ucm.store import part_mask, record_ids

pytestmark = pytest.mark.timeout(300)

SPEC = SparseFullAttentionSpec(
    block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32, beside_bytes=0
)
COUNT, CHUNK = 4, 2 * BLOCK


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    LateStore.blocks.clear()
    yield
    LateStore.blocks.clear()


def states_of(tokens: Sequence[int], layer: int) -> list[int]:
    """The exact KV of these tokens in a layer."""
    found, before = [], 1 + layer
    for token in tokens:
        before = _state(before, token)
        found.append(before)
    return found


class BlendEngine(ToyEngine):
    """An engine that blends. ``exactly``: its workers compute every token of a claim."""

    def __init__(
        self, engines: Any, tiny: Path, patch: Any, *, exactly: bool = False, **args: Any
    ) -> None:
        keys: dict[str, Any] = {"chunk_size": CHUNK, "min_hit_blocks": 1, "ratio": 0.0}
        keys = {"blend": keys | args.pop("blend", {}), **args.pop("keys", {})}
        args = {"blocks": 60, "max_num_batched_tokens": 512} | args
        self.exactly, self.blends = exactly, list[Blend]()
        self.at_once: list[int] = []  # requests of a step that were blended
        self.ratio = float(keys["blend"]["ratio"])
        self.prompts: list[list[int]] = []  # all that were asked
        self.requests: list[Any] = []
        workers = SimpleNamespace(why_not="", register_kv_caches=lambda _: None, run=self.blended)
        patch.setattr(worker_side, "BlendWorker", lambda *_: workers)
        super().__init__(engines, tiny, patch, specs=[SPEC, SPEC], keys=keys, **args)

    def blended(self, blends: Sequence[Blend]) -> list[Blended]:
        """The workers' part of a step, in which they compute no more tokens than vLLM may."""
        done = [self.blend(blend) for blend in blends]
        claims = [each for blend, each in zip(blends, done, strict=True) if blend.hits]
        computed = sum(int(self.ratio * each.reused) + each.missed for each in claims)
        assert computed <= self.config.scheduler_config.max_num_batched_tokens
        self.at_once.append(len(claims))
        return done

    def add(self, name: str, tokens: list[int], count: int = COUNT, *args: Any, **more: Any) -> Any:
        request = super().add(name, tokens, count, *args, **more)
        self.prompts.append(tokens)
        self.requests.append(request)
        return request

    def run(self, *prompts: list[int], **more: Any) -> list[list[int]]:
        """The output tokens of requests that run at the same time."""
        first = len(self.prompts)
        made = [self.add(f"r{first + at}", each, **more) for at, each in enumerate(prompts)]
        self.until(lambda: all(request.is_finished() for request in made))
        self.settle()
        return [list(request.output_token_ids) for request in made]

    def settle(self) -> None:
        """Steps until no dump is under way."""
        side = self.connector._scheduler
        self.until(lambda: not (side.dumps.under_way or side.has_pending_push_work))

    def evict(self) -> None:
        """Other prompts take the place of all others on the device."""
        for _ in range(5):
            self.run(document(1000 + len(self.prompts), 15 * BLOCK))

    def blend(self, blend: Blend) -> Blended:
        """The workers' part of one request, checked against what its plan says."""
        self.blends.append(blend)
        (request,) = [each for each in self.requests if each.request_id == blend.request]
        tokens, (exact, end) = list(request.all_token_ids), (blend.exact, blend.end)
        assert exact % BLOCK == end % BLOCK == 0 and len(blend.table) == end // BLOCK
        assert blend.table == tuple(self.tables(blend.request)[: end // BLOCK])
        assert 0 < blend.question == len(tokens) - blend.asks_at and blend.asks_at >= end
        assert blend.tokens.tolist() == tokens[exact:end] + tokens[blend.asks_at :]
        assert blend.tokens.dtype == "uint32"
        read = [self.read(hit, layer) for hit in blend.hits for layer in (0, 1)]
        covered = exact
        for hit in blend.hits:
            assert covered <= hit.start < hit.end <= end
            covered = hit.end
        for layer, cache in enumerate(self.caches.values()):
            own = states_of(tokens, layer)
            for at in range(exact):  # whatever was loaded or computed before the chunks is right
                assert self.at(cache, blend.table, at) == own[at]
            reused = {}
            for hit, found in zip(blend.hits, read[layer::2], strict=True):
                reused |= dict(zip(range(hit.start, hit.end), found, strict=True))
            for at in range(exact, end):
                before = self.at(cache, blend.table, at - 1) if at else 1 + layer
                state = _state(before, tokens[at])
                if not self.exactly:
                    state = reused.get(at, state)
                cache[blend.table[at // BLOCK], :, at % BLOCK] = state
        tokens_of_hits = sum(hit.end - hit.start for hit in blend.hits)
        return Blended(tokens_of_hits, 0, end - exact - tokens_of_hits)

    def read(self, hit: Any, layer: int) -> list[int]:
        """The loaded KV of a hit, which is that of a prompt with these tokens there."""
        cache = list(self.caches.values())[layer]
        first = hit.source // BLOCK
        found = [
            int(cache[hit.blocks[at // BLOCK - first], 0, at % BLOCK, 0])
            for at in range(hit.source, hit.source + hit.end - hit.start)
        ]
        assert len(hit.blocks) == -(-(hit.source + hit.end - hit.start) // BLOCK) - first
        ends = hit.source + hit.end - hit.start
        sources = (states_of(prompt, layer)[hit.source : ends] for prompt in self.prompts)
        assert found in list(sources)
        return found

    def at(self, cache: Any, table: Sequence[int], at: int) -> int:
        return int(cache[table[at // BLOCK], 0, at % BLOCK, 0])

    def tables(self, name: str) -> list[int]:
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return list(table)

    def records(self, request: Any) -> list[bytes]:
        """The ids of a request's records."""
        maker = self.connector._scheduler._keys
        return [] if maker is None else record_ids(maker.first(request), part_mask(0, 0, 0))

    def check(self) -> int:
        """Every block in the store and in vLLM's prefix cache has exact KV; returns how many were
        checked."""
        pool = self.scheduler.kv_cache_manager.block_pool
        seen, known = 0, set[bytes]()
        for request in self.requests:
            tokens = list(request.all_token_ids)
            exact = [states_of(tokens, layer) for layer in (0, 1)]
            for at, key in enumerate(self.records(request)):
                part = [each[at * BLOCK : (at + 1) * BLOCK] for each in exact]
                known.add(key)
                if (stored := LateStore.blocks.get(key)) is not None:
                    rows = torch.frombuffer(bytearray(stored), dtype=torch.float32)
                    layers = rows.view(2, 2, BLOCK, -1)[:, 0, :, 0].long().tolist()
                    assert layers == part, ("stored", request.request_id, at)
                    seen += 1
            for at, hashed in enumerate(request.block_hashes):
                for block in pool.get_cached_block(hashed, [0]) or ():
                    for layer, cache in enumerate(self.caches.values()):
                        kept = cache[block.block_id, 0, :, 0].long().tolist()
                        right = exact[layer][at * BLOCK : (at + 1) * BLOCK]
                        assert kept == right, ("cached", request.request_id, at)
                    seen += 1
        assert LateStore.blocks.keys() <= known
        return seen


@pytest.fixture
def made(engines: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes engines, and closes them."""
    living = []

    def make(model: Path = tiny, **args: Any) -> BlendEngine:
        living.append(BlendEngine(engines, model, monkeypatch, **args))
        return living[-1]

    yield make
    for engine in living:
        engine.close()


def document(seed: int, tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(500) for _ in range(tokens)]


def joined(parts: Sequence[Sequence[int]]) -> list[int]:
    return [token for part in parts for token in part]


DOCS = [document(1, 3 * BLOCK + 11), document(2, 4 * BLOCK + 5), document(3, 3 * BLOCK + 2)]
QUESTION = document(9, 21)


def ranges(parts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The chunks of a prompt made of these parts."""
    found, at = [], 0
    for part in parts:
        found.append([at, at + len(part)])
        at += len(part)
    return found


def served(engine: BlendEngine) -> None:
    """Each document was behind another beginning, and is stored there."""
    for at, each in enumerate(DOCS):
        lead = document(20 + at, 17 + at)
        ((answer),) = engine.run([*lead, *each, *QUESTION], ucm={"chunks": ranges([lead, each])})
        assert answer == expected(engine.prompts[-1], COUNT, [SPEC, SPEC])


def test_chunks_of_stored_prompts_are_claimed_and_loaded(made: Any) -> None:
    """In another order, at other offsets in their blocks, with text between them; computed by the
    workers, the answer is right."""
    engine = made(exactly=True)
    served(engine)
    between = document(30, 13)
    parts = [DOCS[2], DOCS[0], between, DOCS[1]]
    prompt = [*joined(parts), *QUESTION]
    (answer,) = engine.run(prompt, ucm={"chunks": ranges(parts)})
    assert answer == expected(prompt, COUNT, [SPEC, SPEC])
    (blend,) = engine.blends
    assert blend.exact == 0 and len(blend.hits) == 3
    # Each chunk begins and ends inside of blocks, so it lies in one more than it fills: there is no
    # room for the blocks with the fewest of their tokens.
    assert [hit.end - hit.start for hit in blend.hits[:2]] == [len(DOCS[2]) - 13, len(DOCS[0])]
    assert len({number for hit in blend.hits for number in hit.blocks}) <= blend.end // BLOCK
    assert blend.end == sum(map(len, parts)) // BLOCK * BLOCK
    assert engine.claims[-1] == blend.end
    assert engine.check() > 20
    # vLLM counts all that was loaded; ours count the exact part alone.
    assert engine.connector.stats()["hit_blocks"] == engine.connector.stats()["loaded_blocks"] == 0


def test_aligned_chunks_are_found_at_any_offset(made: Any) -> None:
    """No request names its chunks."""
    engine = made(exactly=True)
    first = document(40, 8 * BLOCK)
    engine.run([*first, *QUESTION])
    prompt = [*document(41, 7), *first[CHUNK : 3 * CHUNK], *document(42, 50), *first[:CHUNK], 1, 2]
    (answer,) = engine.run(prompt)
    assert answer == expected(prompt, COUNT, [SPEC, SPEC])
    (blend,) = engine.blends
    assert [(hit.start, hit.source) for hit in blend.hits] == [(7, CHUNK), (57 + 2 * CHUNK, 0)]


# Where chunks end, and the names of the connector
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory, engines: Any) -> Path:
    """A tiny model whose tokenizer has a word for each token, and puts one before a text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    made: Path = engines.make_model(tmp_path_factory.mktemp("worded") / "model")
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="w1 $A", special_tokens=[("w1", 1)])
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(made)
    return made


@pytest.mark.parametrize(
    ("keys", "end"),
    [
        ({"separators": ["w510 w511"]}, [510, 511]),
        ({"separators": ["w509", [510, 511]]}, [510, 511]),
        ({"chunk_end_token_id": 511}, [511]),
    ],
)
def test_the_configuration_says_where_chunks_end(
    made: Any, worded: Path, keys: dict[str, Any], end: list[int]
) -> None:
    """No request names its chunks, and no document is as long as a chunk that is found."""
    keys = {"chunk_size": 512, **keys}
    engine = made(exactly=True, model=worded, skip_tokenizer_init=False, blend=keys)
    docs = [[*each, *end] for each in DOCS]
    for at, each in enumerate(docs):
        engine.run([*document(20 + at, 17 + at), *end, *each, *QUESTION])
    parts = [docs[2], docs[0], docs[1]]
    prompt = [*joined(parts), *QUESTION]
    (answer,) = engine.run(prompt)
    assert answer == expected(prompt, COUNT, [SPEC, SPEC])
    (blend,) = engine.blends
    before = [17 + at + len(end) for at in (2, 0, 1)]  # each document, in its stored prompt
    moved = [start - own for (start, _), own in zip(ranges(parts), before, strict=True)]
    assert [hit.start - hit.source for hit in blend.hits] == moved
    # What stands behind the last end is the question.
    assert blend.end == sum(map(len, parts)) // BLOCK * BLOCK


@pytest.mark.parametrize(("text", "without"), [("", False), ("w510", True)])
def test_a_separator_without_tokens_is_refused(
    engines: Any, worded: Path, text: str, without: bool
) -> None:
    """Because its text has none, or because there is no tokenizer."""
    config = engines.engine_config(worded, skip_tokenizer_init=without)
    with pytest.raises(ConfigError, match=r"blend\.separators: a text has no tokens"):
        separators_in(SimpleNamespace(separators=(text,)), config)  # type: ignore[arg-type]


@pytest.mark.parametrize("extra", [{"blend": {}}, {"enable_blending": True}, {}])
def test_the_connector_of_blend_by_the_name_of_the_original(
    engines: Any, tiny: Path, tmp_path: Path, extra: dict[str, Any]
) -> None:
    """As vLLM makes it. It does not start without Blend."""
    from vllm.config import KVTransferConfig, set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    transfer = KVTransferConfig(
        kv_connector="UCMBlendConnector",
        kv_connector_module_path="ucm.integration.vllm.blend_connector",
        kv_role="kv_both",
        kv_connector_extra_config={"storage_path": str(tmp_path), **extra},
    )
    config = engines.engine_config(tiny, kv_transfer_config=transfer)
    given = config, KVConnectorRole.SCHEDULER, engines.kv_configs(config)[0]
    with set_current_vllm_config(config):
        if not extra:
            with pytest.raises(ConfigError, match="UCMBlendConnector needs Blend: write"):
                KVConnectorFactory.create_connector(*given)
            return
        made: Any = KVConnectorFactory.create_connector(*given)
    assert type(made).__name__ == "UCMBlendConnector" and made._blend_planner is not None
    made.shutdown()


# What becomes of a request
# --------------------------------------------------------------------------------------------------


def test_reused_chunks_are_exact_for_nobody(made: Any) -> None:
    """The answer of a request with reused KV is wrong in this model. None of its blocks behind the
    exact prefix is stored or cached, in its prompt or in its output; the same prompt blends again,
    and is computed right where its chunks were evicted."""
    engine = made()
    served(engine)
    parts = [DOCS[1], DOCS[0]]
    prompt, chunks = [*joined(parts), *QUESTION], {"chunks": ranges(parts)}
    right = expected(prompt, COUNT, [SPEC, SPEC])
    stored = set(LateStore.blocks)
    for _ in range(2):
        ((answer),) = engine.run(prompt, count=3 * BLOCK, ucm=chunks)
        assert answer[:COUNT] != right
        assert LateStore.blocks.keys() == stored
        engine.check()
    assert [(blend.exact, len(blend.hits)) for blend in engine.blends] == [(0, 2)] * 2
    engine.connector._blend_planner.refuse("the test")
    assert engine.run(prompt, ucm=chunks) == [right]
    engine.check()


def test_an_exact_prefix_stays_exact_and_goes_first(made: Any) -> None:
    """On the device, in the store, or both; blocks of the prefix stay in vLLM's cache."""
    engine = made()
    served(engine)
    opening = document(50, 4 * BLOCK)
    engine.run([*opening, *QUESTION])
    engine.evict()
    parts = [opening, DOCS[2]]
    prompt = [*joined(parts), *QUESTION]
    for _ in range(2):
        engine.run(prompt, ucm={"chunks": ranges(parts)})
        engine.check()
    first, again = engine.blends
    assert first.exact == again.exact == 4 * BLOCK == engine.claims[-2] - (first.end - first.exact)
    # The second time the prefix is on the device, and only the chunk is loaded.
    assert engine.claims[-1] == again.end - again.exact
    assert engine.connector.stats()["hit_blocks"] == 4
    engine.run([*opening, *document(51, 40)])
    engine.check()


def test_claims_of_one_step_fit_into_it_together(made: Any) -> None:
    """Four requests at a time would compute more in their first step than a step may: some claim,
    and the others compute as usual. Later there is room for them again."""
    keys = {"ratio": 0.15, "question_tokens": len(QUESTION)}
    engine = made(exactly=True, max_num_batched_tokens=288, blend=keys)
    served(engine)
    orders = [(0, 2), (1, 0), (2, 1), (1, 2)]
    prompts, chunks = [], []
    for at, order in enumerate(orders):
        parts = [document(60 + at, 40), *(DOCS[number] for number in order)]
        prompts.append([*joined(parts), *QUESTION])
        chunks.append({"chunks": ranges(parts)})
    made_now = [
        engine.add(f"q{at}", prompt, ucm=named)
        for at, (prompt, named) in enumerate(zip(prompts, chunks, strict=True))
    ]
    engine.until(lambda: all(request.is_finished() for request in made_now))
    for request in made_now:
        right = expected(request.prompt_token_ids, COUNT, [SPEC, SPEC])
        assert list(request.output_token_ids) == right
    assert max(engine.at_once) >= 2 and 2 <= len(engine.blends) < 4
    engine.settle()
    declined = {f"q{at}" for at in range(4)} - {blend.request for blend in engine.blends}
    again = int(declined.pop()[1:])
    other = [7, *prompts[again]]  # no prefix of what is stored by now
    parts = ranges([other[:41], *(DOCS[number] for number in orders[again])])
    engine.run(other, ucm={"chunks": parts})
    assert engine.blends[-1].request == engine.requests[-1].request_id
    engine.check()


def test_a_blended_request_that_is_preempted_asks_anew(made: Any) -> None:
    """Another request is ahead of it, and both grow until the device is full."""
    engine = made(exactly=True, blocks=24)
    served(engine)
    engine.evict()
    ahead = engine.add("ahead", document(70, 10 * BLOCK), 4 * BLOCK, ucm={"load": False})
    engine.step()
    parts = [DOCS[1], DOCS[0]]
    prompt = [*joined(parts), *QUESTION]
    request = engine.add("behind", prompt, 4 * BLOCK, ucm={"chunks": ranges(parts)})
    engine.until(lambda: ahead.is_finished() and request.is_finished())
    assert request.num_preemptions >= 1
    first, again = [blend for blend in engine.blends if blend.request == "behind"]
    assert first.hits and again.hits
    assert again.asks_at > first.asks_at, "its answer so far is part of the question"
    for each in (ahead, request):
        right = expected(each.prompt_token_ids, 4 * BLOCK, [SPEC, SPEC])
        assert list(each.output_token_ids) == right
    engine.settle()
    engine.check()


@pytest.mark.parametrize("exactly", [True, False])
def test_a_long_question_behind_chunks_is_computed_in_several_steps(
    made: Any, exactly: bool
) -> None:
    engine = made(exactly=exactly, max_num_batched_tokens=128)
    served(engine)
    parts, question = [DOCS[1], DOCS[0]], document(71, 250)
    prompt = [*joined(parts), *question]
    request = engine.add("long", prompt, ucm={"chunks": ranges(parts)})
    ends = set[int]()

    def over() -> bool:
        ends.add(request.num_computed_tokens)
        return bool(request.is_finished())

    engine.until(over)
    (blend,) = engine.blends
    assert blend.hits and blend.end == sum(map(len, parts)) // BLOCK * BLOCK
    assert sum(blend.end < end < len(prompt) for end in ends) == 2
    right = expected(prompt, COUNT, [SPEC, SPEC])
    assert (list(request.output_token_ids) == right) == exactly
    before = set(LateStore.blocks)
    engine.settle()
    assert LateStore.blocks.keys() == before
    engine.check()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("lost", ["the first chunk", "the last chunk"])
def test_a_load_without_one_record_counts_for_nothing(made: Any, local: bool, lost: str) -> None:
    """vLLM computes from the first block that was to be loaded, whatever block is missing: blocks
    of chunks are not at the places of their tokens."""
    engine = made(exactly=True)
    served(engine)
    opening = document(50, 2 * BLOCK)
    engine.run([*opening, *QUESTION])
    if not local:
        engine.evict()
    parts = [opening, DOCS[0], DOCS[1]]
    prompt = [*joined(parts), *QUESTION]
    request = engine.add("lost", prompt, ucm={"chunks": ranges(parts)})
    engine.until(lambda: engine.loads and engine.loads[-1] == "lost")
    of = engine.requests[0 if lost == "the first chunk" else 1]
    del LateStore.blocks[engine.records(of)[2]]
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == expected(prompt, COUNT, [SPEC, SPEC])
    assert not engine.blends
    assert engine.loads.count("lost") == 1  # no chunks again for this request
    engine.settle()
    assert engine.check() > 20
    # It was computed, so all of it is exact, and stored.
    assert set(engine.records(request)[: len(prompt) // BLOCK]) <= LateStore.blocks.keys()
    assert engine.connector._blend_planner.exact_tokens(request) > len(prompt)


@pytest.mark.parametrize("when", ["loading", "loaded", "running"])
def test_a_side_that_is_given_up_leaves_nothing_foreign(made: Any, when: str) -> None:
    engine = made(exactly=True)
    served(engine)
    parts = [DOCS[1], DOCS[2]]
    prompt = [*joined(parts), *QUESTION]
    request = engine.add("left", prompt, ucm={"chunks": ranges(parts)})
    engine.until(lambda: engine.loads and engine.loads[-1] == "left")
    if when == "loaded":
        engine.until(lambda: "left" in engine.reported)
    elif when == "running":
        engine.until(lambda: bool(engine.blends))
    engine.connector._give_up("the test")
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == expected(prompt, COUNT, [SPEC, SPEC])
    assert len(engine.blends) == (when != "loading") or when == "loading"
    engine.check()


def test_blocks_that_others_computed_are_not_taken_for_loaded_chunks(made: Any) -> None:
    """A load of chunks is lost with its side. By then another request has computed the same prompt,
    so vLLM has as many tokens of it as were claimed: in blocks that both use."""
    engine = made()
    served(engine)
    parts = [DOCS[1], DOCS[2]]
    prompt = [*joined(parts), *QUESTION]
    right = expected(prompt, 2 * COUNT, [SPEC, SPEC])
    request = engine.add("left", prompt, ucm={"chunks": ranges(parts)})
    engine.until(lambda: engine.loads and engine.loads[-1] == "left")
    assert engine.claims[-1] == (len(prompt) - 1) // BLOCK * BLOCK
    twin = engine.add("twin", prompt, 2 * COUNT, ucm={"load": False})
    engine.step()
    engine.connector._give_up("the test")
    engine.until(lambda: request.is_finished() and twin.is_finished())
    assert not engine.blends
    assert list(request.output_token_ids) == right[:COUNT]
    assert list(twin.output_token_ids) == right
    engine.check()


def test_an_abort_at_any_step_leaves_nothing(made: Any) -> None:
    from vllm.v1.request import RequestStatus

    engine = made()
    served(engine)
    parts = [DOCS[1], DOCS[2]]
    prompt = [*joined(parts), *QUESTION]
    for number in range(14):
        name, blends = f"aborted {number}", len(engine.blends)
        request = engine.add(name, prompt, count=8, ucm={"chunks": ranges(parts)})
        if number < 12:
            for _ in range(number):
                engine.step()
        else:
            engine.until(lambda before=blends: len(engine.blends) > before)
        engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        engine.until(lambda: engine.idle() or bool(engine.scheduler.requests) is False)
        engine.settle()
        engine.check()
        planner = engine.connector._blend_planner
        assert not (planner._jobs or planner._claims or planner._chunks or planner._banned)
        assert request.is_finished()
    engine.until(engine.idle)
    assert len(engine.blends) >= 2


def test_after_a_restart_chunks_are_found_again_where_prompts_are(made: Any) -> None:
    """The table is empty, and fills with the prompts that a lookup finds."""
    served(made(exactly=True))
    engine = made(exactly=True)
    parts = [DOCS[1], DOCS[0]]
    prompt, chunks = [*joined(parts), *QUESTION], {"chunks": ranges(parts)}
    engine.run(prompt, ucm=chunks)
    assert not engine.blends
    served(engine)
    other = [*document(60, 3), *prompt]
    (answer,) = engine.run(other, ucm={"chunks": ranges([other[:3], *parts])})
    assert engine.blends and answer == expected(other, COUNT, [SPEC, SPEC])


def test_a_cache_that_forgets_knows_no_chunks_of_before(made: Any) -> None:
    engine = made(exactly=True, keys={"on_reset": "forget"})
    served(engine)
    assert engine.connector.reset_cache()
    parts = [DOCS[1], DOCS[0]]
    engine.run([*joined(parts), *QUESTION], ucm={"chunks": ranges(parts)})
    assert not engine.blends


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(made: Any, seed: int) -> None:
    """Many requests on a device with little room: preempted, aborted, evicted, with records that
    disappear at any time. Computed by the workers every answer is right; reused, no block that is
    stored or cached is wrong."""
    from vllm.v1.request import RequestStatus

    source = random.Random(seed)
    exactly = seed % 2 == 0
    engine = made(exactly=exactly, blocks=34, max_num_batched_tokens=192, blend={"ratio": 0.15})
    docs = [document(100 + at, source.randrange(BLOCK, 5 * BLOCK)) for at in range(5)]
    waiting, finished = [], 0
    for number in range(24):
        parts = source.sample(docs, source.randrange(1, 4))
        if source.random() < 0.5:
            parts.insert(
                source.randrange(len(parts) + 1), document(number, source.randrange(1, 40))
            )
        prompt = [*joined(parts), *document(200 + number, source.randrange(1, 60))]
        prompt = prompt[: 15 * BLOCK]
        named = [pair for pair in ranges(parts) if pair[1] <= len(prompt)]
        more = {"ucm": {"chunks": named}} if source.random() < 0.7 else {}
        salt = "one" if source.random() < 0.1 else None
        waiting.append(
            engine.add(f"q{number}", prompt, source.randrange(1, 3 * BLOCK), salt, **more)
        )
        for _ in range(source.randrange(12)):
            engine.step()
            if source.random() < 0.05 and LateStore.blocks:
                del LateStore.blocks[source.choice(list(LateStore.blocks))]
        if source.random() < 0.15:
            chosen = source.choice(waiting)
            engine.scheduler.finish_requests(chosen.request_id, RequestStatus.FINISHED_ABORTED)
        engine.check()
    engine.until(lambda: all(request.is_finished() for request in waiting))
    engine.settle()
    assert engine.check() > 30
    for request in waiting:
        if request.status == RequestStatus.FINISHED_LENGTH_CAPPED and exactly:
            answer = list(request.output_token_ids)
            assert answer == expected(request.prompt_token_ids, len(answer), [SPEC, SPEC])
            finished += 1
    assert finished > 12 or not exactly
    assert any(blend.hits for blend in engine.blends)
