"""What this version has not got: a configuration that names it is understood, then refused with a
sentence.

Each part that is built removes its line here.
"""

from __future__ import annotations

from collections.abc import Iterator

from ucm.config.model import UcmConfig
from ucm.config.pipelines import codec_problems, pipeline_problems, place_problems, root_problems
from ucm.config.sparse import algorithms
from ucm.config.stores import BUILT_STORES, instead_of, needs_directory, schemes_of, why_not_alone


def problems_of(config: UcmConfig) -> list[str]:
    """Why the configuration cannot run, one sentence each."""
    return [*_store_problems(config), *_connector_problems(config)]


def _store_problems(config: UcmConfig) -> Iterator[str]:
    if config.user_store:
        if config.encryption_key_file is not None:
            yield (
                "encryption_key_file is for ucm's own stores: a store of your own has to encrypt by"
                " itself; leave the key out, or put it into its ucm_connector_config"
            )
        if config.tenant_quota is not None:
            yield (
                "tenant_quota is for ucm's own stores: a store of your own has to bound its tenants"
                " by itself; leave the key out"
            )
        return
    name = config.ucm_connector_name
    used = [
        (name, config.options),
        *((stage.store, stage.options) for stage in config.store_pipeline),
    ]
    if any(
        store == "UcmFakeStore" and not options.get("allow_wrong_tokens") for store, options in used
    ):
        yield (
            "UcmFakeStore loads nothing, so the engine would answer with wrong tokens; it is for"
            " tests: write allow_wrong_tokens: true there, and use UcmPosixStore everywhere else"
        )
    if why := why_not_alone(name):
        yield why
    elif name not in BUILT_STORES:
        stages = "|".join(stage.store for stage in config.store_pipeline)
        what = f"{name} ({stages})" if stages else name
        instead = instead_of(name) or "use UcmPosixStore (storage_backend: posix) on a directory"
        yield f"{what} is not built yet; {instead}"
    elif config.store_pipeline:
        yield from pipeline_problems(config.store_pipeline, config)
    elif not needs_directory(name):
        if schemes_of(name):
            yield from place_problems(name, config.storage_backends)
    elif why := next(place_problems(name, config.storage_backends), ""):
        yield why
    elif not config.storage_backends:
        yield (
            "no directory is given to keep blocks in; write storage_backends: /some/directory "
            "(kv_connector_extra_config or file), or set UCM_STORAGE_PATH"
        )
    else:
        yield from root_problems(config, config.storage_backends)
        yield from codec_problems(name, config.codec, config.layout)


def _connector_problems(config: UcmConfig) -> Iterator[str]:
    if config.use_layerwise:
        yield "use_layerwise: true is not built yet; leave it out, blocks are then moved whole"
    if config.kv_connector == "UCMBlendConnector":
        yield "UCMBlendConnector is not built yet; use UCMConnector"
    if config.sparse.enabled:
        yield from _sparse_problems(config)
    if config.rerope.enabled:
        yield (
            "ReRoPE is not built yet; leave out rerope and VLLM_USE_REROPE (REROPE_WINDOW,"
            " TRAINING_LENGTH)"
        )


def _sparse_problems(config: UcmConfig) -> Iterator[str]:
    if config.sparse.type is None:
        known = ", ".join(algorithms())
        yield f"sparse.enabled: true names no algorithm; write sparse.type: one of {known}"
    elif config.sparse.type in ("Blend", "ReRoPE"):
        yield (
            f"sparse attention ({config.sparse.type}) is not built yet; leave out its keys or set"
            " ENABLE_SPARSE=false"
        )
