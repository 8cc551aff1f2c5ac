"""``UcmCacheStore``: the engine over host memory alone, what a pipeline writes as ``Cache|Empty``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ucm.config.stores import CacheOptions
from ucm.store.cache.settings import cache_stage
from ucm.store.posix.connector import UcmPosixStore
from ucm.store.posix.settings import EngineSettings, read_settings


class CacheStoreSettings(EngineSettings, CacheOptions):
    """Keys of :class:`UcmCacheStore`; those of directories have no meaning here."""

    #: Processes of this host that each open such a store.
    processes: int = 1
    #: Whether the scheduler half may run on another host.
    scheduler_elsewhere: bool = False

    def stages(self) -> list[dict[str, Any]]:
        """What the core is told of each stage, top first."""
        return [cache_stage(self.cache_size, self.cache_policy, self.processes, self.scheduler_elsewhere)]

    @property
    def label(self) -> str:
        """What stands before its messages in the log."""
        return "memory"


class UcmCacheStore(UcmPosixStore):
    """Blocks in memory that the processes of this host share; all are gone with the last of these.

    With ``backend: {name, config}`` it is the cache above that store, a pipeline of the two.
    """

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> EngineSettings:
        if config.get("backend"):
            from ucm.store.pipeline.settings import read_stages

            return read_stages(config, cls.__name__)
        return read_settings(config, CacheStoreSettings, cls.__name__)
