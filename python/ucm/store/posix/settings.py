"""What a POSIX store is told: the common store keys, the sizes of its blocks, and whose they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from ucm.config.model import BreakerConfig, Deadlines, QuarantineConfig, StoreSettings
from ucm.config.words import nearest
from ucm.errors import ConfigError, InvalidInputError

#: Top-level keys of an identity, in order (``docs/format.md``); here those of a caller who names none.
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


class PosixStoreSettings(StoreSettings):
    """Keys of :class:`~ucm.store.posix.connector.UcmPosixStore`; sizes in bytes."""

    #: Bytes of one contiguous piece on the device.
    tensor_size: _Bytes | None = None
    #: Bytes of each piece of one layer, where they differ.
    tensor_size_list: tuple[_Bytes, ...] = ()
    #: Bytes of what one row of a load or dump moves: one layer, or all of them.
    shard_size: _Bytes
    #: Bytes of KV in one block.
    block_size: _Bytes
    #: The identity: the JSON text of ``docs/format.md``, or any other text that tells these blocks from others'.
    identity: str = ""
    #: KV group, pipeline rank, tensor rank.
    part: tuple[int, int, int] = (0, 0, 0)
    #: Tokens in a block, for the record's header.
    block_tokens: Annotated[int, Field(ge=0)] = 0
    #: Element type, for the record's header.
    dtype: str = "opaque"
    #: -1 opens the store for lookups only.
    device_id: Annotated[int, Field(ge=-1)] = 0
    #: Words for the manifest, outside the identity.
    labels: dict[str, str] = Field(default_factory=dict)
    deadlines: Deadlines = Deadlines()
    breaker: BreakerConfig = BreakerConfig()
    quarantine: QuarantineConfig = QuarantineConfig()

    @model_validator(mode="after")
    def _one_root(self) -> PosixStoreSettings:
        if len(self.storage_backends) != 1:
            raise ValueError(
                f"storage_backends names {len(self.storage_backends)} directories; this version uses exactly one"
            )
        if (self.tensor_size is None) == (not self.tensor_size_list):
            raise ValueError("give either tensor_size or tensor_size_list")
        return self

    @property
    def tensors(self) -> list[int]:
        """Bytes of each piece of one layer."""
        return list(self.tensor_size_list) or [self.tensor_size or 0]

    @property
    def identity_json(self) -> str:
        """The canonical identity; another text than that becomes the ``weights`` of an otherwise empty one."""
        if self.identity.startswith('{"format_version":'):
            return self.identity
        return json.dumps(_ANONYMOUS | {"weights": self.identity}, separators=(",", ":"), ensure_ascii=True)

    def setup(self) -> dict[str, Any]:
        """The dictionary that the core takes; times in seconds."""
        capacity, quota = self.storage_capacity, self.namespace_quota
        return {
            "root": self.storage_backends[0],
            "identity": self.identity_json,
            "part": self.part,
            "tensor_sizes": self.tensors,
            "shard_size": self.shard_size,
            "block_size": self.block_size,
            "block_tokens": self.block_tokens,
            "dtype": self.dtype,
            "lookup_only": self.device_id < 0,
            "labels": self.labels,
            "staging_bytes": self.staging_capacity,
            "io_direct": self.io_direct,
            "layout": self.layout,
            "segment_size": self.segment_size,
            "segment_age_s": self.segment_age,
            "capacity_bytes": None if capacity is None else capacity.bytes,
            "capacity_percent": None if capacity is None else capacity.percent,
            "floor_bytes": self.free_space_floor.bytes,
            "floor_percent": self.free_space_floor.percent,
            "quota_bytes": None if quota is None else quota.bytes,
            "quota_percent": None if quota is None else quota.percent,
            "expire_after_s": self.expire_after,
            "file_mode": self.file_mode,
            "dir_mode": self.dir_mode,
            "io_threads": self.posix_lookup_concurrency if self.device_id < 0 else self.posix_data_trans_concurrency,
            "copy_threads": 1,
            "lookup_s": self.deadlines.lookup_ms / 1000,
            "load_s": self.deadlines.load_unknown_s,
            "dump_s": self.deadlines.dump_s,
            "probe_s": self.deadlines.probe_s,
            "shutdown_s": self.deadlines.shutdown_s,
            "paranoid": self.verify == "paranoid",
            **{f"breaker_{key}": value for key, value in self.breaker.model_dump().items()},
            **{f"quarantine_{key}": value for key, value in self.quarantine.model_dump().items()},
        }


def read_settings(config: Mapping[str, Any]) -> PosixStoreSettings:
    """Checked settings; a key that is not one, or a value that is wrong, is a :class:`~ucm.errors.ConfigError`."""
    known = PosixStoreSettings.model_fields
    for key in config:
        if key not in known:
            near = nearest(key, known)
            raise ConfigError(
                f"UcmPosixStore has no key {key!r}" + (f"; did you mean {near!r}?" if near else ""),
                context={"key": key},
            )
    try:
        return PosixStoreSettings.model_validate(dict(config))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        cause = ConfigError if where.partition(".")[0] in StoreSettings.model_fields else InvalidInputError
        raise cause(f"{where + ': ' if where else ''}{first['msg']}", context={"store": "UcmPosixStore"}) from None
