"""Several entries of ``ucm_connectors``: one configuration with alternatives for its store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ucm.config.model import STORE_SECTIONS, StoreSettings, UcmConfig

#: Keys that an alternative may set; all others are the engine's and hold whichever store is used.
_OF_STORE = {
    *StoreSettings.model_fields,
    *STORE_SECTIONS,
    "ucm_connector_name",
    "ucm_connector_module_path",
    "ucm_connector_config",
    "store_pipeline",
    "options",
}


def with_alternatives(first: UcmConfig, others: Sequence[UcmConfig]) -> UcmConfig:
    """``first`` with those of ``others`` that name another store; a source that was overruled names
    the same again.

    Their warnings and problems become those of the whole: an entry that cannot run in this version
    is an error even if another could, because it would never be tried.
    """
    different: list[UcmConfig] = []
    for other in others:
        if all(_store(other) != _store(known) for known in (first, *different)):
            different.append(other)
    warnings, problems = list(first.warnings), list(first.problems)
    for number, other in enumerate(different, 2):
        warnings += [warning for warning in other.warnings if warning not in warnings]
        problems += [
            f"store {number} of `ucm_connectors`: {text}"
            for text in other.problems
            if text not in problems
        ]
        if engine_keys := _differing(first, other):
            warnings.append(
                f"store {number} of `ucm_connectors` sets {', '.join(engine_keys)}: keys of the"
                " engine are taken from the first entry; write them at the top level"
            )
    return first.with_findings(
        origins=first.origins,
        warnings=tuple(warnings),
        problems=tuple(problems),
        alternatives=tuple(different),
    )


def _store(config: UcmConfig) -> tuple[Any, ...]:
    pipeline = [stage.model_dump() for stage in config.store_pipeline]
    return (
        config.ucm_connector_name,
        config.ucm_connector_module_path,
        config.store_config(),
        pipeline,
    )


def _differing(first: UcmConfig, other: UcmConfig) -> list[str]:
    """Keys of the engine that an alternative sets to another value; one that it leaves out is no
    contradiction."""
    keys = [key for key in UcmConfig.model_fields if key not in _OF_STORE]
    given = {key.partition(".")[0] for key in other.origins}
    return [key for key in keys if key in given and getattr(first, key) != getattr(other, key)]
