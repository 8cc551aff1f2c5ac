"""Directories that outlive engines, and the record of an ended engine."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from software_driver import IN_USE
from specs import ROOM, EngineSpec, Result, StoreSpec

from stores import Faults

#: Of the tiny Llama that all engines but one run.
LAYERS = 3
#: Data files of the stores: PlainStore's and the record files of the POSIX store.
BLOCK_FILE = re.compile(r"[0-9a-f]{32}\.(\d+|bin)")


@dataclass(frozen=True)
class Disk:
    """A directory of stores, and the entry of a store on it."""

    root: Path

    @property
    def faults(self) -> Faults:
        """The control files of the :class:`stores.FaultStore` on this directory."""
        return Faults(self.root.parent / f"{self.root.name}-control")

    def store(self) -> StoreSpec:
        """The store under test: ``UCM_TEST_STORE`` is ``plain`` or ``posix``, else posix where it
        is built."""
        if store_under_test() == "posix":
            return StoreSpec(
                self.root, "UcmPosixStore", options={"layout": "file", **ROOM, **over_device()}
            )
        return StoreSpec(self.root, "PlainStore", "stores")

    def faulty(self) -> StoreSpec:
        """The same store behind gates."""
        inner = self.store()
        options = {"control": str(self.faults.control), "inner": inner.name, **inner.options}
        return StoreSpec(self.root, "FaultStore", "stores", options)

    def files(self) -> list[Path]:
        """The files of published blocks."""
        return sorted(
            path
            for path in self.root.rglob("*")
            if path.is_file() and BLOCK_FILE.fullmatch(path.name)
        )


def over_device() -> dict[str, str]:
    """The settings of a store for the device of the KV, in a run over the software driver: small
    pieces go by its kernels."""
    return {"platform": "cuda", "transfer": "staging"} if IN_USE else {}


def store_under_test() -> str:
    """``plain`` or ``posix``."""
    default = "posix" if importlib.util.find_spec("ucm._core") is not None else "plain"
    return os.environ.get("UCM_TEST_STORE", default)


def new_disk(work: Path, name: str) -> Disk:
    """An empty directory for blocks."""
    root = work / name
    root.mkdir()
    return Disk(root)


@dataclass(frozen=True)
class Life:
    """The answers of the ended cold engine, and its disk."""

    runner: str
    model: Path
    disk: Disk
    answers: dict[str, Result]
    runner_module: str
    policy: str
    stored: int = 0  # blocks on the disk when it had ended

    @property
    def cold_spec(self) -> EngineSpec:
        """The engine that stored everything."""
        return EngineSpec(self.model, self.runner, self.disk.store(), label=f"cold-{self.runner}")

    @property
    def events(self) -> str:
        """The address at which the warm engine publishes events of blocks."""
        return f"ipc://{self.disk.root.parent}/events-{self.runner}"

    @property
    def warm_spec(self) -> EngineSpec:
        """An engine on this disk: a smaller pool and gates before the store, the same identity, and
        events of blocks."""
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.events}
        return self.cold_spec.but(
            store=self.disk.faulty(),
            blocks=40,
            args={"kv_events_config": events},
            label=f"warm-{self.runner}",
        )
