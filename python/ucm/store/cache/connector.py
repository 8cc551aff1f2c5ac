"""``UcmCacheStore``: the engine over host memory alone, what a pipeline writes as
``Cache|Empty``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ucm.store.posix.connector import UcmPosixStore
from ucm.store.posix.settings import EngineSettings


class UcmCacheStore(UcmPosixStore):
    """Blocks in memory that the processes of this host share; all are gone with the last of these.

    With ``backend: {name, config}`` it is the cache above that store, a pipeline of the two.
    """

    store_name: ClassVar[str] = "UcmCacheStore"

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> EngineSettings:
        if config.get("backend"):
            from ucm.store.pipeline.settings import read_stages

            return read_stages(config, cls.__name__)
        return super()._read(config)
