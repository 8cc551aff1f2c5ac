"""A live engine over a root that is harmed between requests, with the checks of the matrix."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import places
from harness import Engine, EngineError, EngineHost, wait_until
from places import Place
from specs import BLOCK, PATIENT, Ask, EngineSpec, Result, StoreSpec, prompt

from ucm.store import BlockHasher, part_mask, record_ids

#: Full blocks of every prompt; its answer fills none.
BLOCKS = 4
LENGTH, ANSWER = BLOCKS * BLOCK + 10, 6
#: A limit that is independent of the disk of the tests: a share of it, because some roots are on
#: small ones.
FLOOR: Mapping[str, Any] = {"free_space_floor": 0}
#: The engine's configuration: deadlines that a row can wait for, a breaker that tries again at
#: once, and no limit of damage, because the matrix makes more in a minute than a healthy disk in
#: years.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "deadlines": (
        PATIENT | {"load_min_ms": 6000, "load_max_s": 6.0, "load_unknown_s": 6.0, "dump_s": 10.0}
    ),
    "breaker": {"cool_down_s": 0.5, "damaged_per_minute": 1_000_000},
}

#: Bytes of memory above a root: so little that it has space only for the blocks of a few prompts.
MEMORY = 512 << 10

#: An engine that has just started has no store yet.
_OURS, _LOOKUPS = (
    f"{store}.stats() if {store} else {{'misses': {{}}}}"
    for store in ("connector._worker._store", "connector._scheduler.readiness.store")
)

#: The state of the store, and its identity.
_OPENED = "(connector._scheduler.readiness.phase, connector._scheduler.readiness.identity_text)"


@dataclass(frozen=True)
class Kind:
    """A live engine of the matrix: the model runner and the store."""

    runner: str
    #: Memory above a directory of segments, instead of block files.
    over_pc: bool = False

    def spec(self, model: Path, root: Path, transfer: Mapping[str, Any] | None) -> EngineSpec:
        """Our store on this root, or another connector's arguments with ``{root}`` replaced."""
        if transfer is not None:
            transfer = _placed(transfer, str(root))
        store = StoreSpec(root, "UcmPosixStore", options={"layout": "file", **FLOOR})
        if self.over_pc:
            options = {
                "store_pipeline": "Cache|Pc",
                "cache_size": MEMORY,
                "segment_age": 0,
                **FLOOR,
            }
            store = StoreSpec(root, "UcmPipelineStore", options=options)
        return EngineSpec(
            model,
            self.runner,
            store,
            blocks=300,
            prefix_caching=False,
            extra_config={name: dict(keys) for name, keys in SETTINGS.items()},
            transfer=transfer,
            label=f"trust-{self.runner}{'-pc' if self.over_pc else ''}",
        )


def _placed(value: Any, root: str) -> Any:
    if isinstance(value, str):
        return value.replace("{root}", root)
    if isinstance(value, Mapping):
        return {key: _placed(entry, root) for key, entry in value.items()}
    return [_placed(entry, root) for entry in value] if isinstance(value, list) else value


@dataclass
class Prompt:
    """A prompt, its right answer, and the locations of its blocks, in order."""

    tokens: list[int]
    right: Result
    copies: list[Place]


class Live:
    """An engine and its root."""

    def __init__(
        self, host: EngineHost, spec: EngineSpec, root: Path, has_memory: bool = False
    ) -> None:
        self._host, self._spec = host, spec
        self.has_memory = has_memory
        self.engine = host.get(spec)
        self.root = root
        #: True for our connector, which reports reasons.
        self.ours = spec.transfer is None
        #: Seconds until a cache is healthy again; longer than our longest pause.
        self.patience = 240.0 if self.ours else 30.0
        self._source = random.Random(7)
        self._digest = b""

    def revive(self) -> None:
        """Starts another engine if a harm has ended this one, so that it costs one row and not all
        that follow."""
        try:
            self.engine.scheduler()
        except EngineError:
            self.restart()

    def restart(self) -> None:
        """Ends the engine's processes at once, and starts another on the same root."""
        self.engine.kill()
        self.engine = self._host.get(self._spec)

    @property
    def transfer(self) -> dict[str, Any] | None:
        """The arguments of vLLM's KVTransferConfig for the engine's connector."""
        return self._spec.kv_transfer()

    @contextmanager
    def instead(self, label: str, **changes: Any) -> Iterator[Engine]:
        """Replaces it by an engine of another kind on the same root; afterwards it runs again."""
        self.engine = self._host.get(self._spec.but(label=f"{self._spec.label}-{label}", **changes))
        yield self.engine
        self.engine = self._host.get(self._spec)

    def ask(self, tokens: list[int], salt: str | None = None) -> Result:
        """One request alone. It does not fail."""
        answer = self.engine.generate(Ask(tokens, ANSWER, salt=salt))[0]
        assert answer.finish == "length", "a request failed"
        assert len(answer.tokens) == ANSWER
        self.engine.wait_idle()
        return answer

    def new_prompt(self) -> list[int]:
        """A new prompt."""
        return prompt(self._source.randrange(1 << 48), LENGTH)

    def store_prompt(self) -> Prompt:
        """Sends a new prompt, computed without any cache, until it is stored and then a hit."""
        for _ in range(24):
            stored = self._store_prompt()
            # A block in memory is a hit and is not offered again, even if it was not written below.
            if stored.copies or not self.has_memory:
                return stored
        raise AssertionError("blocks in memory are never in the directory")

    def _store_prompt(self) -> Prompt:
        tokens, before = self.new_prompt(), set(self.files())
        right = self.ask(tokens)
        assert right.cached == 0, "a new prompt was found in a cache"
        stored = Prompt(tokens, right, [])
        # After a harm the connector may pause before it offers blocks again, and it offers only
        # those of a live request.
        self.await_hit(stored, "a new prompt is stored, and then a hit")
        if self.ours:
            # A block in memory is a hit even if it is not written below; other blocks are written,
            # late on a busy disk.
            poll(lambda: bool(self.copies_of(tokens)), 10 if self.has_memory else self.patience)
            stored.copies = self.copies_of(tokens)
            assert stored.copies or self.has_memory, "a hit is on no disk"
        else:
            files = sorted(set(self.files()) - before, key=lambda path: path.stat().st_mtime_ns)
            stored.copies = [Place(path) for path in files]
        return stored

    def forget(self) -> None:
        """Evicts the prompts so far from memory by others."""
        for _ in range(3 if self.has_memory else 0):
            self.store_prompt()

    def files(self) -> list[Path]:
        """Every file below the root."""
        return [path for path in self.root.rglob("*") if path.is_file()]

    def copies_of(self, tokens: list[int]) -> list[Place]:
        """The locations of a prompt's blocks in our store, all or none: their keys follow from the
        identity in the manifest."""
        if not self._digest:
            (manifest,) = wait_until(
                lambda: list(self.root.glob("*/manifest.json")), "the manifest is there"
            )
            self._digest = bytes.fromhex(json.loads(manifest.read_text())["digest"])
        keys = BlockHasher(self._digest, BLOCK).hash_blocks(tokens)
        found = places.newest(self.root)
        ids = record_ids(keys, part_mask(0, 0, 0))
        return [found[record] for record in ids] if all(record in found for record in ids) else []

    def is_hit(self, stored: Prompt) -> bool:
        """Sends the prompt again and checks the answer. True if all of it is from the cache."""
        before = self.counts()
        answer = self.ask(stored.tokens)
        assert answer.tokens == stored.right.tokens, "wrong tokens"
        if not self.ours:
            return answer.cached >= BLOCK
        news = counted(before, self.counts())
        # vLLM's own number of cached tokens is the claimed one, also after a failed load.
        return news.get("blocks_loaded", 0) >= BLOCKS and not news.get("blocks_failed")

    def await_hit(self, stored: Prompt, what: str) -> None:
        """Sends it until all of it comes from the cache."""
        wait_until(lambda: self.is_hit(stored), what, self.patience)

    def opened(self) -> str:
        """The identity of the open store, as a text."""
        return self.engine.scheduler_eval(_OPENED)

    def await_opened(self, opened: str, tokens: list[int], right: Result) -> None:
        """Sends it until the store of that identity is open again: a request waits for that only
        for a limited time."""

        def is_open() -> bool:
            assert self.ask(tokens).tokens == right.tokens, "wrong tokens"
            return self.opened() == opened

        wait_until(is_open, "these weights are known again and their store is open", self.patience)

    def await_stored(self, stored: Prompt) -> None:
        """Sends it until all of it is in the directory, and not in memory only.

        A block in memory is a hit even if it is not in the directory, and a process that knows a
        segment does not write its blocks again before it reads the footer again. So memory is
        emptied and the prompt is sent again.
        """

        def found() -> bool:
            if poll(lambda: bool(self.copies_of(stored.tokens)), 2):
                return True
            self.forget()
            self.await_hit(stored, "the prompt is a hit again")
            return False

        wait_until(found, "every block of the prompt is in the directory", self.patience)

    def await_written(self) -> None:
        """Waits until no block is being stored; a request and its device blocks are free
        earlier."""
        if self.ours:
            wait_until(lambda: not self.counts()["blocks_in_flight"], "every block is written")

    def counts(self) -> dict[str, int]:
        """Misses by reason and counters of the worker's and the scheduler's store, summed; empty
        for other connectors."""
        if not self.ours:
            return {}
        total: dict[str, int] = {}
        told = [
            self.engine.rpc("probe_worker_eval", _OURS)[0],
            self.engine.scheduler_eval(_LOOKUPS),
        ]
        for text in told:
            stats = ast.literal_eval(text)
            numbers = {name: value for name, value in stats.items() if isinstance(value, int)}
            for name, value in (numbers | stats["misses"]).items():
                total[name] = total.get(name, 0) + value
        return total


def counted(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What was counted in between."""
    return {
        name: value - before.get(name, 0)
        for name, value in after.items()
        if value != before.get(name, 0)
    }


def poll(condition: Callable[[], bool], deadline: float) -> bool:
    """True if the condition becomes true within this number of seconds."""
    try:
        return wait_until(condition, "", deadline)
    except AssertionError:
        return False
