"""What a pipeline is told: the keys of every store of the core, and its stages with those of their
own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ucm.config import parse, warn_once
from ucm.config.model import Stage, StoreSettings
from ucm.config.pipelines import with_codecs, with_roots, word_of
from ucm.config.stores import PIPELINE, STORES
from ucm.config.words import UNUSED
from ucm.errors import ConfigError
from ucm.store.posix.settings import EngineSettings, read_settings


class PipelineSettings(EngineSettings):
    """Keys of :class:`~ucm.store.pipeline.connector.UcmPipelineStore` beside those of its
    stages."""

    #: The stages, top first.
    store_pipeline: tuple[Stage, ...] = ()

    def stages(self) -> list[dict[str, Any]]:
        """What the core is told of each stage, top first."""
        stages = with_codecs(with_roots(self.store_pipeline, self.storage_backends), self)
        return [
            STORES[stage.store].told(partial(self._of_stage, stage))
            | {"write_policy": stage.write_policy}
            for stage in stages
        ]

    def _of_stage(self, stage: Stage, key: str) -> Any:
        """What a key of a stage is set to: its own, else what is written beside the pipeline."""
        if key in stage.options:
            return stage.options[key]
        of_stage = key in stage.model_fields_set or key == "storage_backends"
        return getattr(stage if of_stage else self, key)

    @property
    def label(self) -> str:
        """What stands before its messages in the log."""
        return "|".join(word_of(stage.store) for stage in self.store_pipeline)


#: Keys of this store that are none of a configuration file, or mean something else there.
_OF_ENGINE = (
    frozenset(PipelineSettings.model_fields)
    - frozenset(StoreSettings.model_fields)
    - {"store_pipeline"}
)


def read_pipeline_settings(config: Mapping[str, Any]) -> PipelineSettings:
    """Checked settings. Stages are read as in a configuration file, with the same spellings and
    refusals."""
    if not (config.get("store_pipeline") or config.get("pipeline")):
        raise ConfigError(
            "UcmPipelineStore needs store_pipeline, its stages from top to bottom, e.g."
            ' "Cache|Posix"'
        )
    return read_stages(config, PIPELINE)


def read_stages(config: Mapping[str, Any], store: str) -> PipelineSettings:
    """The stages that a configuration of this store names, and the keys beside them."""
    if "device" in config:
        config = {key: value for key, value in config.items() if key != "device"} | {
            "device_id": config["device"]
        }
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
    # a pipeline of one stage is that store
    one = Stage(store=read.ucm_connector_name, options=read.options)
    return settings.model_copy(update={"store_pipeline": read.store_pipeline or (one,)})
