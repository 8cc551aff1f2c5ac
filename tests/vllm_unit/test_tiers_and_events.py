"""What vLLM learns of stored blocks, through its own scheduler: the tier of a hit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy_engine import BLOCK, BLOCKS, ToyEngine, expected

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
    assert list(request.output_token_ids) == expected(prompt(seed), 3)
    engine.until(lambda: not engine.connector._scheduler.dumps.under_way)
    return request


def fill_the_device(engine: ToyEngine) -> None:
    """Other requests take every block of the device, and store nothing."""
    for seed in range(1, BLOCKS // FULL + 2):
        ask(engine, f"other {seed}", seed, ucm={"load": False, "dump": False})


def test_a_hit_counts_for_the_tier_that_it_was_found_in(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
