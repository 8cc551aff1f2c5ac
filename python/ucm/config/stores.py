"""The stores and tiers ucm knows by name, which of them are built, and the keys that only one of them has.

A store that is built moves its name to :data:`BUILT_STORES`; nothing else here changes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ucm.config.sizes import Capacity, parse_capacity, parse_flag, parse_size

#: Word of a backend or of a pipeline stage, in lower case -> class name of the store.
BACKEND_WORDS: dict[str, str] = {
    "posix": "UcmPosixStore",
    "nfs": "UcmNfsStore",
    "cache": "UcmCacheStore",
    "ds3fs": "UcmDs3fsStore",
    "mooncake": "UcmMooncakeStore",
    "pc": "UcmPcStore",
    "object": "UcmObjectStore",
    "redis": "UcmRedisStore",
    "pipeline": "UcmPipelineStore",
    "empty": "UcmEmptyStore",
    "fake": "UcmFakeStore",
    "compress": "UcmCompressStage",
}

#: Stages of the original that ucm has no store for; they parse so that the answer names them.
FOREIGN_STAGES: tuple[str, ...] = ("delegator", "dram", "yuanrong", "asu")

KNOWN_STORES: frozenset[str] = frozenset(BACKEND_WORDS.values())

BUILT_STORES: frozenset[str] = frozenset(
    {
        "UcmPosixStore",
        "UcmNfsStore",
        "UcmPcStore",
        "UcmCacheStore",
        "UcmPipelineStore",
        "UcmEmptyStore",
        "UcmFakeStore",
    }
)

#: Store that can be a stage of a pipeline -> what the core calls the kind.
STAGE_KINDS: dict[str, str] = {
    "UcmCacheStore": "cache",
    "UcmPosixStore": "posix",
    "UcmNfsStore": "posix",
    "UcmPcStore": "posix",
    "UcmCompressStage": "compress",
}

#: What is no store but only a stage before one, and what to write instead of it alone.
ONLY_STAGES: dict[str, str] = {
    "UcmCompressStage": "Compress keeps nothing itself; write it before the stage it compresses for: "
    '"Compress|Pc", or "Cache|Compress|Pc"',
}

#: Stores that keep their blocks in segments, whatever ``layout`` says.
IN_SEGMENTS: frozenset[str] = frozenset({"UcmPcStore"})

#: Stores that need no directory.
WITHOUT_ROOT: frozenset[str] = frozenset({"UcmCacheStore", "UcmEmptyStore", "UcmFakeStore", *ONLY_STAGES})

#: What to write today instead of a store that is not built yet.
INSTEAD: dict[str, str] = {
    "UcmDs3fsStore": "use UcmPosixStore (storage_backend: posix) on the mount point of 3FS",
    "UcmMooncakeStore": "use UcmPosixStore (storage_backend: posix) on a directory",
    "UcmObjectStore": "use UcmPosixStore (storage_backend: posix) on a directory",
    "UcmRedisStore": "use UcmPosixStore (storage_backend: posix) on a directory",
}


def _cache_size(value: Any) -> int | Capacity:
    size = parse_capacity(value)
    return size if size.bytes is None else size.bytes


def _lower(value: Any) -> Any:
    return value.strip().lower().replace("-", "") if isinstance(value, str) else value


_Bytes = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]
_CacheSize = Annotated[int | Capacity, BeforeValidator(_cache_size)]
_Flag = Annotated[bool, BeforeValidator(parse_flag)]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, arbitrary_types_allowed=True)


class CacheOptions(_Options):
    """Keys of the host memory tier."""

    #: Bytes of each process, or a share of the machine's memory for all processes of the engine together.
    cache_size: _CacheSize = 1 << 30
    #: What goes first when it is full.
    cache_policy: Annotated[Literal["lru", "s3fifo"], BeforeValidator(_lower)] = "lru"


class CompressOptions(_Options):
    """The stage that compresses for the one below it: it has no keys."""


class FakeOptions(_Options):
    """Keys of the store of tests that has no bytes."""

    buffer_number: Annotated[int, Field(ge=1, le=1 << 24)] = 1 << 20
    allow_wrong_tokens: _Flag = False


class Ds3fsOptions(_Options):
    """Keys of the 3FS store."""

    ior_entries: Annotated[int, Field(ge=1)] = 1024
    ior_depth: Annotated[int, Field(ge=1)] = 32
    numa_id: Annotated[int, Field(ge=-1)] = 0


class MooncakeOptions(_Options):
    """Keys of the Mooncake store."""

    local_hostname: str | None = None
    metadata_server: str | None = None
    master_server_address: str | None = None
    device_name: str = ""
    protocol: str = "tcp"
    global_segment_size: _Bytes = 25 * (1 << 27)  # 3.125 GiB
    local_buffer_size: _Bytes = 1 << 30


OPTIONS: dict[str, type[_Options]] = {
    "UcmCacheStore": CacheOptions,
    "UcmCompressStage": CompressOptions,
    "UcmFakeStore": FakeOptions,
    "UcmDs3fsStore": Ds3fsOptions,
    "UcmMooncakeStore": MooncakeOptions,
}

#: Key that only some store has -> that store.
OPTION_OWNER: dict[str, str] = {key: store for store, model in OPTIONS.items() for key in model.model_fields}


def option_keys(store: str, stages: tuple[str, ...] = ()) -> frozenset[str]:
    """Keys beside the common ones that ``store``, or one of its pipeline's ``stages``, takes."""
    return frozenset(key for name in (store, *stages) if name in OPTIONS for key in OPTIONS[name].model_fields)
