"""What a pipeline is told: the keys of every store of the core, and its stages with those of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from ucm.config import parse, warn_once
from ucm.config.model import Stage, StoreSettings
from ucm.config.pipelines import CACHE, COMPRESS, kind_of, with_roots, word_of
from ucm.config.stores import IN_SEGMENTS
from ucm.config.words import UNUSED
from ucm.errors import ConfigError
from ucm.store.cache.settings import cache_stage
from ucm.store.posix.settings import EngineSettings, read_settings


class PipelineSettings(EngineSettings):
    """Keys of :class:`~ucm.store.pipeline.connector.UcmPipelineStore` beside those of its stages."""

    #: Processes of this host that each open such a store.
    processes: int = Field(default=1, ge=1)
    #: Whether the scheduler half may run on another host.
    scheduler_elsewhere: bool = False
    #: The stages, top first.
    store_pipeline: tuple[Stage, ...] = ()

    def stages(self) -> list[dict[str, Any]]:
        """What the core is told of each stage, top first."""
        told = []
        for stage in with_roots(self.store_pipeline, self.storage_backends):
            if kind_of(stage) == COMPRESS:
                told.append({"kind": COMPRESS})
                continue
            if kind_of(stage) == CACHE:
                size, policy = stage.options["cache_size"], stage.options["cache_policy"]
                setup = cache_stage(size, policy, self.processes, self.scheduler_elsewhere)
            else:
                setup = self.posix_stage(self._of_stage(stage))
            told.append({**setup, "write_policy": stage.write_policy})
        return told

    def _of_stage(self, stage: Stage) -> StoreSettings:
        """The common keys of one stage: its own, else those written beside the pipeline."""
        own = stage.model_fields_set
        keys = {key: getattr(stage if key in own else self, key) for key in StoreSettings.model_fields}
        if stage.store in IN_SEGMENTS:
            keys["layout"] = "segment"
        return StoreSettings.model_validate(keys | {"storage_backends": stage.storage_backends})

    @property
    def label(self) -> str:
        """What stands before its messages in the log."""
        return "|".join(word_of(stage.store) for stage in self.store_pipeline)


#: Keys of this store that are none of a configuration file, or mean something else there.
_OF_ENGINE = frozenset(PipelineSettings.model_fields) - frozenset(StoreSettings.model_fields) - {"store_pipeline"}


def read_pipeline_settings(config: Mapping[str, Any]) -> PipelineSettings:
    """Checked settings. Stages are read as in a configuration file, with the same spellings and refusals."""
    if not (config.get("store_pipeline") or config.get("pipeline")):
        raise ConfigError('UcmPipelineStore needs store_pipeline, its stages from top to bottom, e.g. "Cache|Posix"')
    return read_stages(config, "UcmPipelineStore")


def read_stages(config: Mapping[str, Any], store: str) -> PipelineSettings:
    """The stages that a configuration of this store names, and the keys beside them."""
    if "device" in config:
        config = {key: value for key, value in config.items() if key != "device"} | {"device_id": config["device"]}
    written = {key: value for key, value in config.items() if key not in _OF_ENGINE}
    if not written.get("storage_backends"):
        written.pop("storage_backends", None)  # each stage has its own
    read = parse(written | {"ucm_connector_name": store}, {})
    read.require_built()
    for warning in read.warnings:
        warn_once(warning)
    own = {key: config[key] for key in config if key in _OF_ENGINE}
    common = {key: getattr(read, key) for key in StoreSettings.model_fields if key not in UNUSED}
    settings = read_settings(own | common, PipelineSettings, store)
    one = Stage(store=read.ucm_connector_name, options=read.options)  # a pipeline of one stage is that store
    return settings.model_copy(update={"store_pipeline": read.store_pipeline or (one,)})
