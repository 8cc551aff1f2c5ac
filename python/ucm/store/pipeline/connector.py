"""``UcmPipelineStore``: one engine over several stages, e.g. ``Cache|Posix``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ucm.store.pipeline.settings import read_pipeline_settings
from ucm.store.posix.connector import UcmPosixStore
from ucm.store.posix.settings import EngineSettings


class UcmPipelineStore(UcmPosixStore):
    """The stages that ``store_pipeline`` names, top first; every key of theirs as in
    ``docs/configuration.md``."""

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> EngineSettings:
        return read_pipeline_settings(config)

    @classmethod
    def _word(cls) -> str:
        return "pipeline"
