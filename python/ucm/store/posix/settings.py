"""What a store of the core is told: the keys of its tiers, the sizes of its blocks, and whose they
are."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from ucm.config import warn_once
from ucm.config.fields import Section, plain, section_of
from ucm.config.layer import gibibytes
from ucm.config.model import BreakerConfig, Deadlines, StoreSettings
from ucm.config.pipelines import place_problems, root_problems
from ucm.config.secret import for_core
from ucm.config.sizes import without_login
from ucm.config.stores import DEFAULT_STORE, STORES, own_keys
from ucm.config.words import (
    ALIASES,
    GIBIBYTES,
    MEANINGLESS,
    PLATFORMS,
    UNUSED,
    nearest_key,
    without_effect,
)
from ucm.errors import ConfigError, InvalidInputError

#: Top-level keys of an identity, in order (``docs/format.md``); here those of a caller who names
#: none.
_ANONYMOUS: dict[str, Any] = {
    "format_version": 1,
    "architecture": "",
    "world_size": 1,
    "dtype": "",
    "weights": "",
    "model_config": {},
    "position": {},
    "kv_dtype": "",
    "attention_backend": "",
    "kv_packing": {},
    "kv_layout": "",
    "kv_groups": [],
    "block_tokens": 1,
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "decode_context_parallel": 1,
}

_Bytes = Annotated[int, Field(ge=1)]

T = TypeVar("T", bound="EngineSettings")


def _of_bytes(side: Any) -> Any:
    """The bytes alone are as good as a section."""
    return side if isinstance(side, Mapping | Section) else {"bytes": side}


class SideConfig(Section):
    """A side shard. Its content has a version: one of another version is another side shard."""

    #: Bytes of a whole block.
    bytes: _Bytes
    version: Annotated[int, Field(ge=0, lt=2**32)] = 0


class PartConfig(Section):
    """Another part of the namespace and the sizes of its blocks, by the keys of the store."""

    #: KV group, pipeline rank, tensor rank.
    part: tuple[int, int, int]
    tensor_size: _Bytes | None = None
    tensor_size_list: tuple[_Bytes, ...] = ()
    shard_size: _Bytes
    block_size: _Bytes

    @model_validator(mode="after")
    def _one_spelling(self) -> Self:
        _check_tensors(self.tensor_size, self.tensor_size_list)
        return self

    def spec(self) -> dict[str, Any]:
        """The description that the core takes."""
        return {
            "part": self.part,
            "tensor_sizes": list(self.tensor_size_list) or [self.tensor_size],
            "shard_size": self.shard_size,
            "block_size": self.block_size,
        }


def _check_tensors(size: int | None, sizes: tuple[int, ...]) -> None:
    if (size is None) == (not sizes):
        raise ValueError("give either tensor_size or tensor_size_list")


class EngineSettings(StoreSettings):
    """Keys of every store of the core; sizes in bytes."""

    #: The store whose keys these are.
    store_name: ClassVar[str] = DEFAULT_STORE

    #: Bytes of one contiguous piece on the device.
    tensor_size: _Bytes | None = None
    #: Bytes of each piece of one layer, where they differ.
    tensor_size_list: tuple[_Bytes, ...] = ()
    #: Bytes of what one row of a load or dump moves: one layer, or all of them.
    shard_size: _Bytes
    #: Bytes of KV in one block.
    block_size: _Bytes
    #: The identity: the JSON text of ``docs/format.md``, or any other text that tells these blocks
    #: from others'.
    identity: str = ""
    #: KV group, pipeline rank, tensor rank.
    part: tuple[int, int, int] = (0, 0, 0)
    #: Parts of the namespace whose blocks have other sizes than this one's, for a store that looks
    #: up the blocks of all of them. Without it a store over directories takes the sizes from the
    #: manifest; one over memory, a server or a bucket does not find blocks of other sizes.
    parts: tuple[PartConfig, ...] = ()
    #: Side shards that blocks may have beside their KV, by name (1 to 16 of a-z, 0-9, _, -, .): the
    #: bytes of each for a whole block, or those and the version of its content. At most 8, and 16
    #: MiB together.
    sides: dict[str, Annotated[SideConfig, BeforeValidator(_of_bytes)]] = Field(
        default_factory=dict
    )
    #: Tokens in a block, for the record's header.
    block_tokens: Annotated[int, Field(ge=0)] = 0
    #: Element type, for the record's header.
    dtype: str = "opaque"
    #: Where the KV lies: a device of the core, by the words of a configuration's ``platform``.
    platform: str = "host"
    #: -1 opens the store for lookups only.
    device_id: Annotated[int, Field(ge=-1)] = 0
    #: Words for the manifest, outside the identity.
    labels: dict[str, str] = Field(default_factory=dict)
    #: Processes of this host that each open such a store: they share its memory.
    processes: int = Field(default=1, ge=1)
    #: Whether the scheduler side may run on another host.
    scheduler_elsewhere: bool = False
    #: Most tokens that a step of the engine computes; 0 where there is no engine.
    step_tokens: int = Field(default=0, ge=0)
    deadlines: Deadlines = Deadlines()
    breaker: BreakerConfig = BreakerConfig()

    @model_validator(mode="after")
    def _one_spelling(self) -> Self:
        _check_tensors(self.tensor_size, self.tensor_size_list)
        return self

    @property
    def tensors(self) -> list[int]:
        """Bytes of each piece of one layer."""
        return list(self.tensor_size_list) or [self.tensor_size or 0]

    @property
    def identity_json(self) -> str:
        """The canonical identity; another text than that becomes the ``weights`` of an otherwise
        empty one."""
        if self.identity.startswith('{"format_version":'):
            return self.identity
        return json.dumps(
            _ANONYMOUS | {"weights": self.identity}, separators=(",", ":"), ensure_ascii=True
        )

    @property
    def label(self) -> str:
        """What stands before its messages in the log."""
        found = STORES[self.store_name]
        placed = (found.kind.needs_directory or found.kind.schemes) and self.storage_backends
        return ":".join(map(without_login, self.storage_backends)) if placed else found.word

    @property
    def device(self) -> str:
        """What the core calls the device, with its number where it has one."""
        kind = PLATFORMS.get(self.platform.lower(), self.platform)
        return kind if kind == "host" else f"{kind}:{max(self.device_id, 0)}"

    def stages(self) -> list[dict[str, Any]]:
        """What the core is told of each stage, top first."""
        return [STORES[self.store_name].told(partial(getattr, self))]

    def side_specs(self) -> list[tuple[str, int, int]]:
        """Name, version and bytes of every side shard, in order."""
        return [(name, side.version, side.bytes) for name, side in self.sides.items()]

    def setup(self) -> str:
        """The description that the core takes, as JSON; times in seconds."""
        return for_core(
            {
                "stages": self.stages(),
                "device": self.device,
                "transfer": self.transfer,
                "identity": self.identity_json,
                "part": self.part,
                "parts": [part.spec() for part in self.parts],
                "tensor_sizes": self.tensors,
                "shard_size": self.shard_size,
                "block_size": self.block_size,
                "block_tokens": self.block_tokens,
                "dtype": self.dtype,
                "sides": self.side_specs(),
                "labels": self.labels,
                "processes": self.processes,
                "scheduler_elsewhere": self.scheduler_elsewhere,
                "lookup_only": self.device_id < 0,
                "staging_bytes": self.staging_capacity,
                "step_bytes": -(-self.step_tokens // max(self.block_tokens, 1)) * self.block_size,
                # two write what they gathered; the third gathers on where these wait for a medium
                "copy_threads": 3,
                "lookup_s": self.deadlines.lookup_ms / 1000,
                "load_s": self.deadlines.load_unknown_s,
                "dump_s": self.deadlines.dump_s,
                "probe_s": self.deadlines.probe_s,
                "shutdown_s": self.deadlines.shutdown_s,
                "paranoid": self.verify == "paranoid",
                "encryption_key_file": (
                    self.encryption_key_file and os.path.expanduser(self.encryption_key_file)
                ),
                "tenant_quota": plain(self.tenant_quota),
                **{f"breaker_{key}": value for key, value in self.breaker.model_dump().items()},
            }
        )


class TierSettings(EngineSettings):
    """Keys of a store of one tier."""

    @model_validator(mode="after")
    def _fitting_places(self) -> Self:
        for why in place_problems(self.store_name, self.storage_backends):
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _has_roots(self) -> Self:
        if not STORES[self.store_name].kind.needs_directory:
            return self
        if not self.storage_backends:
            raise ConfigError("storage_backends names no directory; give one, or several")
        for problem in root_problems(self, self.storage_backends):
            raise ConfigError(problem)
        return self


@cache
def settings_of(store: str) -> type[TierSettings]:
    """The settings of the store of one tier with this name: the keys of every store, and those of
    its kind."""
    kind = STORES[store].kind
    made = section_of(f"{store}Settings", kind.options, own_keys(kind), TierSettings)
    made.store_name = store
    return made


def in_our_words(config: Mapping[str, Any], known: Container[str], store: str) -> dict[str, Any]:
    """``config`` with the spellings of a configuration file for keys that are ``known``; what means
    nothing there means nothing here either, and is left out with the same warning."""
    ours: dict[str, Any] = {}
    for key, value in config.items():
        name = "device_id" if key == "device" else ALIASES.get(key, key).removeprefix("options.")
        instead = UNUSED.get(name) or (None if name in known else MEANINGLESS.get(name))
        if instead is not None:
            warn_once(without_effect([f"{store}.{key}"], instead))
            continue
        if name not in known:
            name = key  # an error of the one that reads it, under the name that was written
        elif key in GIBIBYTES:
            value = gibibytes(value, key, store)
        if ours.setdefault(name, value) != value:
            raise ConfigError(
                f'"{key}" and another spelling of {name} for {store} differ; keep one of them'
            )
    return ours


def read_settings(config: Mapping[str, Any], kind: type[T], store: str) -> T:
    """Checked settings; a key that is not one, or a value that is wrong, is a
    :class:`~ucm.errors.ConfigError`."""
    known = kind.model_fields
    config = in_our_words(config, known, store)
    for key in config:
        if key not in known:
            near = nearest_key(key, known)
            raise ConfigError(
                f"{store} has no key {key!r}" + (f"; did you mean {near!r}?" if near else ""),
                context={"key": key},
            )
    try:
        given = {key: value for key, value in config.items() if key != "storage_backends" or value}
        return kind.model_validate(given)  # no directory is as good as none given
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = first.get("ctx", {}).get("error")
        if isinstance(said, ConfigError):
            raise ConfigError(said.message, context={"store": store}) from None
        where = ".".join(str(part) for part in first["loc"])
        cause = (
            ConfigError
            if where.partition(".")[0] in StoreSettings.model_fields
            else InvalidInputError
        )
        raise cause(
            f"{where + ': ' if where else ''}{first['msg']}", context={"store": store}
        ) from None
