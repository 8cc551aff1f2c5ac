"""A live engine over a root that is harmed between requests, and what the matrix asks of it."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import EngineError, EngineHost, wait_until
from specs import BLOCK, PATIENT, Ask, EngineSpec, Result, StoreSpec, prompt

from ucm.store import BlockHasher, part_mask, record_ids

#: Full blocks of every prompt; its answer fills none.
BLOCKS = 4
LENGTH, ANSWER = BLOCKS * BLOCK + 10, 6
#: What the engine is told: deadlines that a row may wait for, a breaker that tries again at once, and no limit to
#: damage, for a matrix of it is more in a minute than a healthy disk has in years.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "deadlines": PATIENT | {"load_min_ms": 6000, "load_max_s": 6.0, "load_unknown_s": 6.0, "dump_s": 10.0},
    "breaker": {"cool_down_s": 0.5},
    "quarantine": {"max_per_minute": 1_000_000},
}

_OURS = "connector._worker._store.stats()"
_LOOKUPS = "connector._scheduler.gate.store.stats()"


def spec_of(model: Path, runner: str, root: Path, transfer: Mapping[str, Any] | None) -> EngineSpec:
    """The engine of one runner: our store on this root, or another connector's arguments with ``{root}`` replaced."""
    if transfer is not None:
        transfer = _placed(transfer, str(root))
    return EngineSpec(
        model,
        runner,
        StoreSpec(root, "UcmPosixStore"),
        blocks=300,
        prefix_caching=False,
        extra_config={name: dict(keys) for name, keys in SETTINGS.items()},
        transfer=transfer,
        label=f"trust-{runner}",
    )


def _placed(value: Any, root: str) -> Any:
    if isinstance(value, str):
        return value.replace("{root}", root)
    if isinstance(value, Mapping):
        return {key: _placed(entry, root) for key, entry in value.items()}
    return [_placed(entry, root) for entry in value] if isinstance(value, list) else value


@dataclass
class Prompt:
    """A prompt, the right answer to it, and the files that its blocks are stored in, in order."""

    tokens: list[int]
    right: Result
    files: list[Path]


class Live:
    """An engine and its root."""

    def __init__(self, host: EngineHost, spec: EngineSpec, root: Path) -> None:
        self._host, self._spec = host, spec
        self.engine = host.get(spec)
        self.root = root
        #: Whether it is our connector, so that reasons can be asked for.
        self.ours = spec.transfer is None
        #: Seconds in which a cache is healthy again; past the longest pause of ours.
        self.patience = 240.0 if self.ours else 30.0
        self._source = random.Random(7)
        self._digest = b""

    def revive(self) -> None:
        """Starts another engine if a harm has ended this one, so that it costs one row and not all that follow."""
        try:
            self.engine.scheduler()
        except EngineError:
            self.engine.kill()
            self.engine = self._host.get(self._spec)

    def ask(self, tokens: list[int], salt: str | None = None) -> Result:
        """One request alone. It does not fail."""
        answer = self.engine.generate(Ask(tokens, ANSWER, salt=salt))[0]
        assert answer.finish == "length", "a request failed"
        assert len(answer.tokens) == ANSWER
        self.engine.wait_idle()
        return answer

    def new_prompt(self) -> list[int]:
        """A prompt that was never asked before."""
        return prompt(self._source.randrange(1 << 48), LENGTH)

    def store_prompt(self) -> Prompt:
        """Asks a new prompt, computed without any cache, until it is stored; asked again it is a hit."""
        tokens, before = self.new_prompt(), set(self.files())
        right = self.ask(tokens)
        assert right.cached == 0, "a new prompt was found in a cache"
        stored = Prompt(tokens, right, self.files_of(tokens) if self.ours else [])
        # After a harm the connector may pause before it offers blocks again, and offers only those of a live request.
        self.await_hit(stored, "a new prompt is stored, and then a hit")
        if not self.ours:
            stored.files = sorted(set(self.files()) - before, key=lambda path: path.stat().st_mtime_ns)
        return stored

    def files(self) -> list[Path]:
        """Every file below the root that holds blocks."""
        files = [path for path in self.root.rglob("*") if path.is_file()]
        return [path for path in files if path.suffix == ".bin"] if self.ours else files

    def files_of(self, tokens: list[int]) -> list[Path]:
        """Where our store keeps the blocks of a prompt: their keys follow from the identity in the manifest."""
        if not self._digest:
            (manifest,) = wait_until(lambda: list(self.root.glob("*/manifest.json")), "the manifest is there")
            self._digest = bytes.fromhex(json.loads(manifest.read_text())["digest"])
        keys = BlockHasher(self._digest, BLOCK).hash_blocks(tokens)
        blocks = self.root / self._digest.hex()[:32] / "blocks"
        ids = record_ids(keys, part_mask(0, 0, 0))
        return [blocks / f"{record[0]:02x}" / f"{record.hex()}.bin" for record in ids]

    def is_hit(self, stored: Prompt) -> bool:
        """Asks again; the answer is right whatever happens. Whether all of it came from the cache."""
        before = self.counts()
        answer = self.ask(stored.tokens)
        assert answer.tokens == stored.right.tokens, "wrong tokens"
        if not self.ours:
            return answer.cached >= BLOCK
        news = counted(before, self.counts())
        # vLLM's own number of cached tokens is what was claimed, also when the load failed.
        return news.get("blocks_loaded", 0) >= BLOCKS and not news.get("blocks_failed")

    def await_hit(self, stored: Prompt, what: str) -> None:
        """Asks until all of it comes from the cache."""
        wait_until(lambda: self.is_hit(stored), what, self.patience)

    def await_written(self) -> None:
        """Waits until no block is on its way to the store: a request, and its device blocks, are free before."""
        if self.ours:
            wait_until(lambda: not self.counts()["blocks_in_flight"], "every block is written")

    def counts(self) -> dict[str, int]:
        """Misses by reason and counters of the worker's and the scheduler's store, added up; empty for others."""
        if not self.ours:
            return {}
        total: dict[str, int] = {}
        told = [self.engine.rpc("probe_worker_eval", _OURS)[0], self.engine.scheduler_eval(_LOOKUPS)]
        for text in told:
            stats = ast.literal_eval(text)
            numbers = {name: value for name, value in stats.items() if isinstance(value, int)}
            for name, value in (numbers | stats["misses"]).items():
                total[name] = total.get(name, 0) + value
        return total


def counted(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What was counted in between."""
    return {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}


def poll(condition: Callable[[], bool], deadline: float) -> bool:
    """Whether the condition becomes true within so many seconds."""
    try:
        return wait_until(condition, "", deadline)
    except AssertionError:
        return False
