"""The stores that a configuration names, in order, each with the function that opens it.

The scheduler side and every rank make the same list; :mod:`.scheduler.store_selection` decides
which store is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ucm.config import UcmConfig
from ucm.config.fields import without_login
from ucm.config.rules import real_path
from ucm.errors import ConfigError
from ucm.store.factory import StoreClass, UcmConnectorFactoryV1
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1


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
    platform, and which computes at most so many tokens in a step.

    Memory is divided among the ranks of one host; where vLLM says nothing of hosts all ranks are on
    this one.
    """
    world = parallel.world_size
    here = getattr(parallel, "local_world_size", world)
    replicas = max(1, getattr(parallel, "data_parallel_size_local", 1))
    return stores_of(
        config, here * replicas, platform, several_hosts=here < world, step_tokens=step_tokens
    )


def stores_of(
    config: UcmConfig,
    processes: int,
    platform: str = "host",
    *,
    several_hosts: bool = False,
    step_tokens: int = 0,
) -> list[ConfiguredStore]:
    """The stores a configuration names, in order, where so many processes of this host each open
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
    one.

    ``models``: as vLLM is given them, directories or names.
    """
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


def _configured_store(config: UcmConfig, engine: dict[str, Any]) -> ConfiguredStore:
    """``engine``: what a store of ucm's is told of the engine."""
    name, module = config.ucm_connector_name, config.ucm_connector_module_path

    def make(store_config: dict[str, Any]) -> UcmKVStoreBaseV1:
        platform = engine["platform"]
        if config.user_store and platform != "host":
            _must_serve_accelerators(UcmConnectorFactoryV1.resolve(name, module), platform)
            store_config = store_config | {"platform": platform}
        return UcmConnectorFactoryV1.create_connector(name, store_config, module)

    told = config.store_config()
    if not config.user_store:
        told |= engine
    roots = told.get("storage_backends") or config.root or ()
    where = ", ".join(
        without_login(str(root)) for root in ((roots,) if isinstance(roots, str) else roots)
    )
    full = f"{module}.{name}" if module else name
    return ConfiguredStore(full, f"{full} on {where}" if where else full, told, make)


def _must_serve_accelerators(store: StoreClass, platform: str) -> None:
    """Raises ConfigError for a store that would take the device's addresses for the host's: the
    process would end."""
    if not getattr(store, "serves_accelerators", False):
        raise ConfigError(
            f"the store {store.__name__} reads and writes the host's memory, and the KV lies on"
            f" {platform}: let it copy from and to the device (ucm.trans), or hand its rows to a"
            " store of ucm's, and set serves_accelerators = True in its class"
        )
