"""The stores that a configuration names, in order, each with the function that opens it.

The scheduler side and every rank make the same list; :mod:`.scheduler.store_selection` decides which store is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ucm.config import UcmConfig
from ucm.config.sizes import without_login
from ucm.config.stores import PIPELINE, STORES
from ucm.store.factory_v1 import UcmConnectorFactoryV1
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1


@dataclass(frozen=True)
class ConfiguredStore:
    """One configured store."""

    name: str  # class and module, the same in every process of an engine
    where: str  # for the log
    config: Mapping[str, Any]
    make: Callable[[dict[str, Any]], UcmKVStoreBaseV1]


#: Stores that may divide the machine's memory among the ranks.
_IN_MEMORY = frozenset({PIPELINE, *(name for name, store in STORES.items() if store.kind.memory)})


def engine_stores(config: UcmConfig, parallel: Any, platform: str = "host") -> list[ConfiguredStore]:
    """The stores for an engine with this ``ParallelConfig`` of vLLM, whose KV lies on this platform.

    Memory is divided among the ranks of one host; where vLLM says nothing of hosts all ranks are on this one.
    """
    world = parallel.world_size
    here = getattr(parallel, "local_world_size", world)
    replicas = max(1, getattr(parallel, "data_parallel_size_local", 1))
    return stores_of(config, here * replicas, platform, several_hosts=here < world)


def stores_of(
    config: UcmConfig, processes: int, platform: str = "host", *, several_hosts: bool = False
) -> list[ConfiguredStore]:
    """The stores a configuration names, in order, where so many processes of this host each open one."""
    return [_configured_store(one, processes, platform, several_hosts) for one in (config, *config.alternatives)]


def _configured_store(config: UcmConfig, processes: int, platform: str, several_hosts: bool) -> ConfiguredStore:
    name, module = config.ucm_connector_name, config.ucm_connector_module_path

    def make(store_config: dict[str, Any]) -> UcmKVStoreBaseV1:
        return UcmConnectorFactoryV1.create_connector(name, store_config, module)

    told = config.store_config()
    if not config.user_store:
        told["platform"] = platform
    if not config.user_store and name in _IN_MEMORY:
        told["processes"] = processes
        told["scheduler_elsewhere"] = several_hosts
    roots = told.get("storage_backends") or config.root or ()
    where = without_login(roots if isinstance(roots, str) else ", ".join(map(str, roots)))
    full = f"{module}.{name}" if module else name
    return ConfiguredStore(full, f"{full} on {where}" if where else full, told, make)
