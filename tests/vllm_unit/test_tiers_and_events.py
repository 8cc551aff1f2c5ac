"""What vLLM's own scheduler reports of stored blocks: the tier of a hit, and events for routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toy_engine import BLOCK, BLOCKS, ToyEngine, expected
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_GPU, MEDIUM_STORAGE, BlockStored
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from ucm.integration.vllm.connector.groups import groups_of
from ucm.integration.vllm.connector.scheduler.events import block_events

#: Full blocks of a prompt.
FULL = 6


def prompt(seed: int) -> list[int]:
    """Tokens that depend on the seed from the first one on."""
    return [(7 * at + seed) % 500 for at in range(FULL * BLOCK + 5)]


def pipeline(root: Path, stages: str = "Cache|Posix") -> dict[str, Any]:
    """Keys of a store below a directory."""
    return {
        "store_pipeline": stages,
        "storage_backends": str(root / "blocks"),
        "storage_capacity": "1GiB",
        "free_space_floor": 0,
        "cache_size": "16MiB",
        "staging_capacity": "16MiB",
    }


def ask(engine: ToyEngine, name: str, seed: int = 0, **params: Any) -> Any:
    """Run one request to its end, and its dumps; its tokens are right."""
    request = engine.add(name, prompt(seed), 3, **params)
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == expected(prompt(seed), 3, engine.specs)
    engine.until(lambda: not engine.connector._scheduler.dumps.under_way)
    return request


def fill_the_device(engine: ToyEngine, device: int = BLOCKS) -> None:
    """Other requests take every block of the device, and store nothing."""
    for seed in range(1, device // FULL + 2):
        ask(engine, f"other {seed}", seed, ucm={"load": False, "dump": False})


def test_a_hit_counts_for_the_tier_that_it_was_found_in(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm.v1.metrics.cache_hit_source")  # older vLLMs do not ask
    first = ToyEngine(engines, tiny, monkeypatch, store=pipeline(tmp_path))
    ask(first, "cold")
    assert first.hits == {}
    fill_the_device(first)
    assert first.hits == {}
    ask(first, "warm")
    assert first.hits == {"host": FULL * BLOCK}
    first.close()
    second = ToyEngine(engines, tiny, monkeypatch, store=pipeline(tmp_path))
    ask(second, "restarted")
    assert second.hits == {"disk": FULL * BLOCK}
    fill_the_device(second)
    ask(second, "limited", ucm={"max_load_tokens": 2 * BLOCK})
    assert second.hits.total() == (FULL + 2) * BLOCK  # it may have come up into memory by then
    second.close()


SHAPE: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
WHOLE = FullAttentionSpec(block_size=BLOCK, **SHAPE)
WINDOW = SlidingWindowSpec(block_size=BLOCK, sliding_window=2 * BLOCK + 1, **SHAPE)
#: Its blocks have twice as many tokens, because vLLM has pages of one size.
NARROW = SlidingWindowSpec(
    block_size=BLOCK, sliding_window=2 * BLOCK + 1, **SHAPE | {"num_kv_heads": 1}
)
STATE = MambaSpec(
    block_size=BLOCK,
    shapes=((2 * 2 * BLOCK * 32,),),
    dtypes=(torch.float32,),
    mamba_type=MambaAttentionBackendEnum.MAMBA2,
    mamba_cache_mode="align",
)
MODELS = {
    "full and a window": (WHOLE, WINDOW),
    "full and a window of larger blocks": (WHOLE, NARROW),
    "full and a state": (WHOLE, STATE),
    "windows alone": (WINDOW, WINDOW),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_sources_of_a_hit_of_several_groups_sum_to_its_tokens(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also where only the last blocks of a group, or of all, are loaded."""
    pytest.importorskip("vllm.v1.metrics.cache_hit_source")  # older vLLMs do not ask
    args = {"specs": MODELS[name], "blocks": 3 * BLOCKS, "store": pipeline(tmp_path)}
    first = ToyEngine(engines, tiny, monkeypatch, **args)
    ask(first, "cold")
    fill_the_device(first, 3 * BLOCKS)
    ask(first, "warm")
    # requests with windows alone return blocks before they need others
    assert first.hits == ({"host": FULL * BLOCK} if WHOLE in MODELS[name] else {})
    first.close()
    second = ToyEngine(engines, tiny, monkeypatch, **args)
    ask(second, "restarted")
    assert second.hits == {"disk": FULL * BLOCK}
    second.close()


# Events
# --------------------------------------------------------------------------------------------------

EVENTS = {
    "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    "prefix_caching_hash_algo": "sha256",
}


def recorded(engine: ToyEngine) -> list[Any]:
    """The events that vLLM publishes from now on."""
    events: list[Any] = []
    engine.scheduler.kv_event_publisher.publish = lambda batch: events.extend(batch.events)
    return events


def blocks(events: list[Any], medium: str) -> dict[Any, tuple[Any, ...]]:
    """The events of each stored block, by its hash, without its medium."""
    said: dict[Any, tuple[Any, ...]] = {}
    for event in events:
        if not isinstance(event, BlockStored) or event.medium != medium:
            continue
        parent, size = event.parent_block_hash, event.block_size
        for at, name in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[at * size : at * size + size])
            extra = event.extra_keys[at] if event.extra_keys else None
            kind = (event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
            said[name] = (parent, tokens, size, extra, event.lora_id, event.lora_name, *kind)
            parent = name
    return said


def test_events_say_of_a_stored_block_what_vllm_says_of_it(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ToyEngine(engines, tiny, monkeypatch, store=pipeline(tmp_path), **EVENTS)
    events = recorded(engine)
    ask(engine, "a", salt="red")
    ask(engine, "b", 1, ucm={"dump": False})
    ask(engine, "c", 2)
    on_device, stored = blocks(events, MEDIUM_GPU), blocks(events, MEDIUM_STORAGE)
    assert (len(on_device), len(stored)) == (3 * FULL, 2 * FULL)
    assert stored == {name: on_device[name] for name in stored}
    assert {said[3] for said in stored.values()} == {None, ("red",)}
    assert {said[6] for said in stored.values()} == {0}
    engine.close()
    restarted = ToyEngine(engines, tiny, monkeypatch, store=pipeline(tmp_path), **EVENTS)
    events = recorded(restarted)
    ask(restarted, "again", salt="red")
    assert blocks(events, MEDIUM_STORAGE).items() < stored.items()
    restarted.close()


@pytest.mark.parametrize("name", MODELS)
def test_every_groups_blocks_are_what_vllm_says_of_them(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    args = {"specs": MODELS[name], "blocks": 3 * BLOCKS, "store": pipeline(tmp_path)} | EVENTS
    engine = ToyEngine(engines, tiny, monkeypatch, **args)
    events = recorded(engine)
    ask(engine, "a", salt="red")
    on_device = by_group(events, MEDIUM_GPU)
    stored = by_group(events, MEDIUM_STORAGE)
    assert stored.keys() == on_device.keys() == set(range(len(set(MODELS[name]))))
    compared = 0
    for group, said in stored.items():
        sizes = {one[2] for one in said.values()}
        size = engine.scheduler.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        assert sizes == {size}
        kept = type(MODELS[name][group]) is not MambaSpec
        full = FULL * BLOCK // engine.scheduler.block_size * engine.scheduler.block_size
        assert len(said) == full // size if kept else said
        for hashed in said.keys() & on_device[group].keys():
            compared += 1
            assert said[hashed] == on_device[group][hashed]
    assert compared, "vLLM said nothing of them: the test proves nothing"
    engine.close()
    restarted = ToyEngine(engines, tiny, monkeypatch, **args)
    events = recorded(restarted)
    ask(restarted, "again", salt="red")
    found = by_group(events, MEDIUM_STORAGE)
    assert found.keys() == stored.keys()
    for group, said in found.items():
        # Of windows and states a lookup finds what it needs.
        assert said
        assert said.items() <= stored[group].items()
    restarted.close()


def by_group(events: list[Any], medium: str) -> dict[int, dict[Any, tuple[Any, ...]]]:
    """The same by KV group, without the events in which vLLM skips blocks that it does not keep:
    their tokens are those of all."""
    said: dict[int, dict[Any, tuple[Any, ...]]] = {}
    for event in events:
        if isinstance(event, BlockStored):
            whole = len(event.block_hashes) * event.block_size == len(event.token_ids)
            known = said.setdefault(event.group_idx, {}) if event.medium == medium else {}
            known.update(blocks([event], medium) if whole else {})
    return said


def test_a_store_of_memory_alone_is_another_medium(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"store_pipeline": "Cache|Empty", "cache_size": "16MiB", "staging_capacity": "16MiB"}
    engine = ToyEngine(engines, tiny, monkeypatch, store=memory, **EVENTS)
    events = recorded(engine)
    ask(engine, "a")
    assert len(blocks(events, MEDIUM_CPU)) == FULL
    engine.close()


@pytest.mark.parametrize(
    ("algorithm", "seed", "published"),
    [
        ("sha256", None, True),
        ("sha256_cbor", None, True),
        ("xxhash", None, False),
        ("xxhash_cbor", None, False),
        ("xxhash", "0", True),
    ],
)
def test_hashes_that_differ_in_every_process_are_not_published(
    engines: Any,
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    seed: str | None,
    published: bool,
) -> None:
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    config = engines.engine_config(tiny, **EVENTS | {"prefix_caching_hash_algo": algorithm})
    kv_cache, _ = engines.kv_configs(config)
    groups = groups_of(kv_cache)
    assert (block_events(config, kv_cache, groups, lambda: 0.0) is not None) == published
    off = engines.engine_config(tiny)
    assert block_events(off, kv_cache, groups, lambda: 0.0) is None
