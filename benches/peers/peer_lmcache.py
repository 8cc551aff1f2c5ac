"""LMCache's L2 adapters ``fs``, ``fs_native`` and ``resp``, driven as LMCache's own ``lmcache bench
l2`` drives them."""

from __future__ import annotations

import argparse
import json
import os
import select
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd
from peer import THREADS, Blocks, Peer, split

#: Longest wait for one batch, in seconds.
PATIENCE = 60.0


class LMCacheL2(Peer):
    """Option ``type``: the adapter."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._native = options.get("type") == "fs_native"
        if options.get("type") == "fs":
            self.threads = "an event loop and its own pool"
        self._adapter: Any = None

    def version(self) -> str:
        return metadata.version("lmcache")

    def prepare(self, directory: str, block_bytes: int, count: int, direct: bool) -> None:
        spec = self._spec(directory, direct)
        parsed = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))
        self._adapter = create_l2_adapter(parsed.adapters[0])

    def _spec(self, directory: str, direct: bool) -> dict[str, Any]:
        """The adapter's configuration."""
        spec: dict[str, Any] = {
            "type": self.options["type"],
            "base_path": directory,
            "use_odirect": direct,
        }
        if self._native:
            spec["num_workers"] = THREADS
        return spec

    def name_blocks(self, ids: Sequence[bytes]) -> list[Any]:
        return [ObjectKey(chunk_hash=key, model_name="bench", kv_rank=0) for key in ids]

    def wrap(self, blocks: Blocks) -> list[Any]:
        objects = []
        for block in blocks:
            described = MemoryObjMetadata(
                shape=torch.Size([block.nbytes]),
                dtype=torch.uint8,
                address=0,
                phy_size=block.nbytes,
                fmt=MemoryFormat.KV_2LTD,
                ref_count=1,
            )
            objects.append(
                TensorMemoryObj(
                    raw_data=torch.from_numpy(block), metadata=described, parent_allocator=None
                )
            )
        return objects

    def dump(self, names: list[Any], memory: list[Any]) -> None:
        parts = split(len(names), THREADS)
        tasks = [self._adapter.submit_store_task(names[part], memory[part]) for part in parts]
        done: dict[Any, Any] = {}

        def collect() -> bool:
            done.update(self._adapter.pop_completed_store_tasks())
            return len(done) == len(tasks)

        self._wait(self._adapter.get_store_event_fd(), collect)
        if not all(done[task].is_successful() for task in tasks):
            raise RuntimeError("a store task failed")

    def load(self, names: list[Any], memory: list[Any]) -> None:
        parts = split(len(names), THREADS)
        tasks = [self._adapter.submit_load_task(names[part], memory[part]) for part in parts]
        found = self._bitmaps(
            tasks, self._adapter.get_load_event_fd(), self._adapter.query_load_result
        )
        loaded = sum(bitmap.popcount() for bitmap in found)
        if loaded != len(names):
            raise RuntimeError(f"{loaded} of {len(names)} blocks were loaded")

    def lookup(self, names: list[Any]) -> Sequence[bool]:
        task = self._adapter.submit_lookup_and_lock_task(names, {})
        (bitmap,) = self._bitmaps(
            [task],
            self._adapter.get_lookup_and_lock_event_fd(),
            self._adapter.query_lookup_and_lock_result,
        )
        return [bitmap.test(number) for number in range(len(names))]

    def after_lookup(self, names: list[Any]) -> None:
        self._adapter.submit_unlock(names)

    def _bitmaps(self, tasks: list[Any], event: int, query: Callable[[Any], Any]) -> list[Any]:
        """The result of every task, each of which is returned once."""
        done: dict[Any, Any] = {}

        def collect() -> bool:
            for task in tasks:
                if task not in done and (answer := query(task)) is not None:
                    done[task] = answer
            return len(done) == len(tasks)

        self._wait(event, collect)
        return [done[task] for task in tasks]

    def _wait(self, event: int, collect: Callable[[], bool]) -> None:
        """Collects results at the adapter's signals, until all have arrived."""
        poller = select.poll()
        poller.register(event, select.POLLIN)
        while not collect():
            if not poller.poll(PATIENCE * 1000):
                raise TimeoutError(f"no result within {PATIENCE:.0f} s")
            consume_fd(event)

    def close(self) -> None:
        if self._adapter is not None:
            self._adapter.close()
            self._adapter = None


class LMCacheRedis(LMCacheL2):
    """The adapter for Redis, with the concurrency of ucm's stores; the directory of a round is the
    server's address."""

    threads = "16"

    def _spec(self, directory: str, direct: bool) -> dict[str, Any]:
        host, _, port = directory.partition(":")
        return {"type": "resp", "host": host, "port": int(port), "num_workers": 16}
