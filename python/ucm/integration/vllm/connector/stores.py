"""The stores that a configuration names, and the small files that are kept beside their roots.

The scheduler side and every rank make the same list of :class:`ConfiguredStore`, in order, each
with the function that opens it; :class:`~.scheduler.readiness.StoreSelection` chooses one.

A :class:`RootFile` is a JSON file beside a root's marker that keeps results which are slow to
compute, across processes. It is a cache: its content is checked when it is read and may be missing.
A writer replaces it as a whole, and two concurrent writers may lose entries of one. Calls on a
directory that does not answer are limited in time and number. Stores without a directory use the
user's state directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from ucm.config import UcmConfig
from ucm.config.fields import without_login
from ucm.config.rules import real_path
from ucm.errors import ConfigError
from ucm.mode import state_directory
from ucm.store.factory import (
    ROOT_MARKER,
    StoreClass,
    UcmConnectorFactoryV1,
    why_unavailable,
    why_unusable,
)
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

# Configured stores
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfiguredStore:
    """One configured store."""

    name: str  # class and module, the same in every process of an engine
    where: str  # for the log
    config: Mapping[str, Any]
    make: Callable[[dict[str, Any]], UcmKVStoreBaseV1]


def engine_stores(
    config: UcmConfig, parallel: Any, platform: str = "host", step_tokens: int = 0
) -> list[ConfiguredStore]:
    """The stores for an engine with this ``ParallelConfig`` of vLLM, whose KV lies on this
    platform, and which computes at most ``step_tokens`` in a step. Memory is divided among the
    ranks of one host; without vLLM's ``local_world_size`` all ranks are on this one."""
    world, replicas = parallel.world_size, getattr(parallel, "data_parallel_size_local", 1)
    here = getattr(parallel, "local_world_size", world)
    processes, several = here * max(1, replicas), here < world
    return stores_of(config, processes, platform, several_hosts=several, step_tokens=step_tokens)


def stores_of(
    config: UcmConfig,
    processes: int,
    platform: str = "host",
    *,
    several_hosts: bool = False,
    step_tokens: int = 0,
) -> list[ConfiguredStore]:
    """The stores a configuration names, in order, where ``processes`` of this host each open
    one."""
    engine = {
        "platform": platform,
        "processes": processes,
        "scheduler_elsewhere": several_hosts,
        "step_tokens": step_tokens,
    }
    return [_configured_store(one, engine) for one in (config, *config.alternatives)]


def refuse_model_directory(config: UcmConfig, models: Iterable[str]) -> None:
    """Raise :class:`~ucm.errors.ConfigError` for a root that is a model's directory, or lies in
    one. ``models``: as vLLM is given them, directories or names."""
    directories = [os.path.abspath(real_path(model)) for model in models if os.path.isdir(model)]
    for root in (root for one in (config, *config.alternatives) for root in one.roots):
        real = os.path.abspath(real_path(root))
        for model in directories:
            if os.path.commonpath((real, model)) == model:
                which = "is the directory of the model"
                if real != model:
                    which = f"lies in the directory of the model, {model}"
                raise ConfigError(
                    f"storage_backends: {root} {which}; blocks are written, counted and removed"
                    " below a root, so choose another directory, outside the model's"
                )


def refuse_missing_store(config: UcmConfig) -> None:
    """Raise :class:`~ucm.errors.ConfigError` if none of the configured stores can be used here: a
    directory in which nothing can be written, or a store that does not answer in time. Of a user's
    own store only its directories are tried."""
    configs, allowance = (config, *config.alternatives), config.deadlines.probe_s
    stores = zip(configs, stores_of(config, 1), strict=True)
    whys = [_why_missing(one, store, allowance) for one, store in stores]
    if all(whys):
        raise ConfigError(f"require_store is true, and no store can be used: {'; '.join(whys)}")


def _why_missing(config: UcmConfig, store: ConfiguredStore, allowance: float) -> str:
    answer: Future[str] = Future()

    def look() -> None:
        try:
            answer.set_result(_why_unusable(config, store))
        except BaseException as error:
            answer.set_result(f"{store.where}: {error}")

    threading.Thread(target=look, name="ucm-require", daemon=True).start()
    try:
        return answer.result(allowance)
    except TimeoutError:
        return f"{store.where}: no answer within {allowance:g} s"


def _why_unusable(config: UcmConfig, store: ConfiguredStore) -> str:
    if why := "; ".join(filter(None, map(why_unusable, config.roots))):
        return why
    if config.user_store:
        return ""
    sizes = dict.fromkeys(("tensor_size", "shard_size", "block_size"), 4096)
    lookups_only = {**store.config, **sizes, "identity": "require_store", "device_id": -1}
    opened = store.make(lookups_only)
    try:
        return f"{store.where}: {why}" if (why := why_unavailable(opened)) else ""
    finally:
        opened.close()


def _configured_store(config: UcmConfig, engine: dict[str, Any]) -> ConfiguredStore:
    """``engine``: the facts of the engine that a store of ucm's gets."""
    name, module = config.ucm_connector_name, config.ucm_connector_module_path

    def make(store_config: dict[str, Any]) -> UcmKVStoreBaseV1:
        platform = engine["platform"]
        if config.user_store and platform != "host":
            _must_serve_accelerators(UcmConnectorFactoryV1.resolve(name, module), platform)
            store_config = store_config | {"platform": platform}
        return UcmConnectorFactoryV1.make(name, store_config, module)

    keys = config.store_config()
    if not config.user_store:
        keys |= engine
    roots = keys.get("storage_backends") or config.root or ()
    every = (roots,) if isinstance(roots, str) else roots
    where = ", ".join(without_login(str(root)) for root in every)
    full = f"{module}.{name}" if module else name
    return ConfiguredStore(full, f"{full} on {where}" if where else full, keys, make)


def _must_serve_accelerators(store: StoreClass, platform: str) -> None:
    """Raise ConfigError for a store that would take the device's addresses for the host's."""
    if not getattr(store, "serves_accelerators", False):
        raise ConfigError(
            f"the store {store.__name__} reads and writes the host's memory, and the KV lies on"
            f" {platform}: let it copy from and to the device (ucm.trans), or hand its rows to a"
            " store of ucm's, and set serves_accelerators = True in its class"
        )


# Files beside a root
# --------------------------------------------------------------------------------------------------

#: Most bytes of such a file.
LONGEST = 16 << 20

#: Seconds that a directory has to answer, and most calls that may hang on one.
ANSWER_S, MOST_HANGING = 2.0, 4

_under_way: Counter[str] = Counter()
_counting = threading.Lock()
_T = TypeVar("_T")


def layout_and_tiers(config: Mapping[str, Any], store: UcmKVStoreBaseV1) -> tuple[str, str]:
    """How blocks lie below the root of a store that was just opened (file, segment; empty where
    that is not known), and its tiers."""
    tiers: Iterable[str] = store.tier_names
    with contextlib.suppress(Exception):  # a store of the user's own
        tiers = tiers or [tier["name"] for tier in store.stats().get("tiers", ())]
    return _layout_of(config), ",".join(tiers)


def _layout_of(config: Mapping[str, Any]) -> str:
    if config.get("layout"):
        return str(config["layout"])
    roots = config.get("storage_backends") or ()
    first = roots if isinstance(roots, str) else next(iter(roots), "")
    if not first or "://" in first:
        return ""
    try:
        with open(os.path.join(first, ROOT_MARKER), "rb") as file:
            return str(json.loads(file.read(LONGEST))["layout"]["kind"])
    except FileNotFoundError:
        return "segment"  # as of a new root
    except (OSError, ValueError, KeyError, TypeError):
        return ""


class RootFile:
    """Entries by name, each an object, in the list ``kind`` of one file."""

    def __init__(self, root: str, name: str, kind: str, limit: int) -> None:
        """``limit``: most entries; the newest are kept."""
        self._root, self._name, self._kind, self._limit = root, name, kind, limit

    def marked(self) -> bool:
        """Whether a store has opened the root and it is there; nothing is written where it is not
        (an unmounted share, a new root). The state directory is made if necessary."""
        if self._root != state_directory():
            return os.path.exists(os.path.join(self._root, ROOT_MARKER))
        with contextlib.suppress(OSError):
            os.makedirs(self._root, mode=0o700, exist_ok=True)
        return os.path.isdir(self._root)

    def read_soon(self) -> dict[str, dict[str, Any]]:
        """:meth:`read`; nothing where that takes too long."""
        return self._soon(self.read, {})

    def merge_soon(self, new: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]] | None:
        """:meth:`merge` if the root is marked; None where it is not, or that takes too long."""
        return self._soon(lambda: self.merge(new) if self.marked() else None, None)

    def _soon(self, work: Callable[[], _T], late: _T) -> _T:
        """The result of ``work``, or ``late`` where the directory does not answer in time."""
        with _counting:
            if _under_way[self._root] >= MOST_HANGING:
                return late
            _under_way[self._root] += 1
        answer: Future[_T] = Future()

        def run() -> None:
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)
            finally:
                with _counting:
                    _under_way[self._root] -= 1

        try:
            threading.Thread(target=run, name="ucm-memo", daemon=True).start()
        except RuntimeError:  # no thread could be started
            with _counting:
                _under_way[self._root] -= 1
            return late
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            return late

    def read(self) -> dict[str, dict[str, Any]]:
        """The entries; none without the file, for another version, or for a damaged one."""
        try:
            # A link in its place is not followed, and is replaced by the next merge.
            how = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            handle = os.open(os.path.join(self._root, self._name), how)
            with open(handle, encoding="ascii") as file:
                stored = json.loads(file.read(LONGEST))
        except (OSError, ValueError, RecursionError):
            return {}
        sound = isinstance(stored, dict) and stored.get("version") == 1
        entries = stored.get(self._kind) if sound else None
        if not isinstance(entries, dict):
            return {}
        return {name: entry for name, entry in entries.items() if isinstance(entry, dict)}

    def merge(self, new: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Write these entries beside those of others, and return all. Raises :class:`OSError`."""
        merged = {name: entry for name, entry in self.read().items() if name not in new}
        merged.update((name, dict(entry)) for name, entry in new.items())
        kept = dict(list(merged.items())[-self._limit :])
        text = json.dumps({"version": 1, self._kind: kept}, separators=(",", ":"))
        # Named like a root's private files: the collector removes one left by a killed process.
        private = os.path.join(self._root, f".{uuid.uuid4().hex}.tmp")
        handle = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(handle, "w", encoding="ascii") as file:
                file.write(text)
            os.replace(private, os.path.join(self._root, self._name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(private)
            raise
        return kept
