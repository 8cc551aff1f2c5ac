"""``UcmPosixStore``: the Rust engine over a directory on any file system that mounts, and the base
of every store of the core. :class:`EngineSettings` holds its settings: the keys of its tiers, the
sizes of its blocks, and whose they are; :class:`PipelineSettings` has several stages."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Container, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Annotated, Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from ucm._core import Asked, Store
from ucm._core import Sides as CoreSides
from ucm._core import Task as CoreTask
from ucm.config.fields import (
    Capacity,
    Section,
    concealed,
    for_core,
    parse_age,
    plain,
    section_of,
    without_login,
)
from ucm.config.loading import gibibytes, parse, warn_once
from ucm.config.model import BreakerConfig, Deadlines, Stage, StoreSettings
from ucm.config.rules import place_problems, root_problems, with_codecs, with_roots, word_of
from ucm.config.words import (
    ALIASES,
    COMMON,
    DEFAULT_STORE,
    GIBIBYTES,
    KIND_OF_WORD,
    MEANINGLESS,
    PIPELINE,
    PLATFORMS,
    STORES,
    UNUSED,
    nearest_key,
    own_keys,
    without_effect,
)
from ucm.errors import ClosedError, ConfigError, DeadlineError, InvalidInputError, UcmError
from ucm.store.kv_layout import KVLayout, block_numbers
from ucm.store.ucmstore_v1 import (
    Addresses,
    Blocks,
    Ids,
    Ints,
    Medium,
    Priority,
    Sides,
    SidesTask,
    Task,
    UcmKVStoreBaseV1,
    Until,
    rows_failed,
    task_of,
    wait_all,
)

#: Keys of an identity, in order (``docs/format.md``); here those of a caller who names none.
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

A = TypeVar("A")
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
    """Another part of the namespace and the sizes of its blocks."""

    #: KV group, pipeline rank, tensor rank.
    part: tuple[int, int, int]
    #: Bytes of one contiguous piece on the device.
    tensor_size: _Bytes | None = None
    #: Bytes of each piece of one layer, where they differ.
    tensor_size_list: tuple[_Bytes, ...] = ()
    #: Bytes of what one row of a load or dump moves: one layer, or all of them.
    shard_size: _Bytes
    #: Bytes of KV in one block.
    block_size: _Bytes

    @model_validator(mode="after")
    def _one_spelling(self) -> Self:
        if (self.tensor_size is None) == (not self.tensor_size_list):
            raise ValueError("give either tensor_size or tensor_size_list")
        return self

    def spec(self) -> dict[str, Any]:
        """The description that the core takes."""
        return {
            "part": self.part,
            "tensor_sizes": list(self.tensor_size_list) or [self.tensor_size],
            "shard_size": self.shard_size,
            "block_size": self.block_size,
        }


class OwnPartConfig(PartConfig):
    """A part that the store loads and dumps too."""

    #: Tokens in a block, and element type, for the record's header.
    block_tokens: Annotated[int, Field(ge=0)] = 0
    dtype: str = "opaque"

    def spec(self) -> dict[str, Any]:
        return super().spec() | {"block_tokens": self.block_tokens, "dtype": self.dtype}


class EngineSettings(StoreSettings, OwnPartConfig):
    """Keys of every store of the core; sizes in bytes."""

    #: The store whose keys these are.
    store_name: ClassVar[str] = DEFAULT_STORE

    #: The identity: the JSON text of ``docs/format.md``, or any other text that distinguishes these
    #: blocks from others'.
    identity: str = ""
    part: tuple[int, int, int] = (0, 0, 0)
    #: The other parts whose blocks the store loads and dumps, through
    #: :meth:`~ucm.store.ucmstore_v1.UcmKVStoreBaseV1.for_part`; the sizes above are those of the
    #: first. Slots, those of memory too, hold the longest record of all parts.
    own_parts: tuple[OwnPartConfig, ...] = ()
    #: Parts of the namespace whose blocks have other sizes, for a store that looks up the blocks of
    #: all of them. Without it a store over directories takes the sizes from the manifest; one over
    #: memory, a server or a bucket does not find blocks of other sizes.
    parts: tuple[PartConfig, ...] = ()
    #: Side shards that blocks may have beside their KV, by name (1 to 16 of a-z, 0-9, _, -, .): the
    #: bytes of each for a whole block, or those and the version of its content. At most 8, and 16
    #: MiB together.
    sides: dict[str, Annotated[SideConfig, BeforeValidator(_of_bytes)]] = Field(
        default_factory=dict
    )
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

    @property
    def identity_json(self) -> str:
        """The canonical identity; any other text becomes the ``weights`` of an otherwise empty
        one."""
        if self.identity.startswith('{"format_version":'):
            return self.identity
        whole = _ANONYMOUS | {"weights": self.identity}
        return json.dumps(whole, separators=(",", ":"), ensure_ascii=True)

    @property
    def label(self) -> str:
        """What stands before its messages in the log, unless they name the directory."""
        found = STORES[self.store_name]
        placed = (found.kind.needs_directory or found.kind.schemes) and self.storage_backends
        return ":".join(map(without_login, self.storage_backends)) if placed else found.word

    @property
    def device(self) -> str:
        """The core's name for the device, with its number where it has one."""
        kind = PLATFORMS.get(self.platform.lower(), self.platform)
        return kind if kind == "host" else f"{kind}:{max(self.device_id, 0)}"

    def stages(self) -> list[dict[str, Any]]:
        """The description of each stage for the core, top first."""
        return [STORES[self.store_name].described(partial(getattr, self))]

    def longest_life(self) -> float | None:
        """The longest ``expire_after`` of the stages below memory, in seconds; None without one."""
        lives: list[float] = []
        for stage in self.stages():
            kind = KIND_OF_WORD[stage["kind"]]
            if kind.memory:
                continue
            age = stage.get("expire_after") or kind.options.get("expire_after", {}).get("unset")
            try:
                lives.append(parse_age(age))
            except ValueError:  # none, or "never"
                return None
        return max(lives, default=None)

    def side_specs(self) -> list[tuple[str, int, int]]:
        """Name, version and bytes of every side shard, in order."""
        return [(name, side.version, side.bytes) for name, side in self.sides.items()]

    def step_bytes(self) -> int:
        """Bytes of the blocks of one step, in all own parts."""
        parts: tuple[OwnPartConfig, ...] = (self, *self.own_parts)
        blocks = (-(-self.step_tokens // max(part.block_tokens, 1)) for part in parts)
        return sum(count * part.block_size for count, part in zip(blocks, parts, strict=True))

    def setup(self) -> str:
        """The description for the core, as JSON; times in seconds."""
        limits = self.deadlines
        return for_core(
            {
                "stages": self.stages(),
                "device": self.device,
                "transfer": self.transfer,
                "identity": self.identity_json,
                **self.spec(),
                "own_parts": [part.spec() for part in self.own_parts],
                "parts": [part.spec() for part in self.parts],
                "sides": self.side_specs(),
                "labels": self.labels,
                "processes": self.processes,
                "scheduler_elsewhere": self.scheduler_elsewhere,
                "lookup_only": self.device_id < 0,
                "staging_bytes": self.staging_capacity,
                "step_bytes": self.step_bytes(),
                # two write what they gathered; the third gathers while these wait for a medium
                "copy_threads": 3,
                "lookup_s": limits.lookup_ms / 1000,
                "load_s": limits.load_unknown_s,
                **{key: getattr(limits, key) for key in ("dump_s", "probe_s", "shutdown_s")},
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
    """The settings of the store of one tier with this name: the keys of every store and of its
    kind."""
    kind = STORES[store].kind
    made = section_of(f"{store}Settings", kind.options, own_keys(kind), TierSettings)
    made.store_name = store
    return made


def in_our_words(config: Mapping[str, Any], known: Container[str], store: str) -> dict[str, Any]:
    """``config`` with the spellings of a configuration file for ``known`` keys; keys without
    meaning are left out with the same warning."""
    ours: dict[str, Any] = {}
    section = config.get("quarantine") or {}  # of older versions; one key moved to `breaker`
    for name in ("quarantine", "breaker"):
        if not isinstance(config.get(name) or {}, Mapping | Section):
            raise ConfigError(f"{name} of {store} is a section with keys below it")
    given = [pair for pair in config.items() if pair[0] != "quarantine"]
    given += [(f"quarantine.{key}", value) for key, value in section.items()]
    # those after `breaker`, into which they go
    for key, value in sorted(given, key=lambda pair: pair[0].startswith("quarantine.")):
        name = "device_id" if key == "device" else ALIASES.get(key, key).removeprefix("options.")
        instead = UNUSED.get(name) or (None if name in known else MEANINGLESS.get(name))
        if instead is not None:
            warn_once(without_effect([f"{store}.{key}"], instead))
            continue
        into, below = ours, name
        if name != key and name.startswith("breaker."):
            below = name.removeprefix("breaker.")
            into = ours["breaker"] = dict(ours.get("breaker") or {})
        elif name not in known:
            below = key  # an error of the one that reads it, under the name that was written
        elif key in GIBIBYTES:
            value = gibibytes(value, key, store)
        if into.setdefault(below, value) != value:
            other = f"another spelling of {name} for" if into is ours else f"{name} of"
            raise ConfigError(f'"{key}" and {other} {store} differ; keep one of them')
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
        inner = first.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):
            raise ConfigError(inner.message, context={"store": store}) from None
        where = ".".join(str(part) for part in first["loc"])
        of_all = where.partition(".")[0] in StoreSettings.model_fields
        cause = ConfigError if of_all else InvalidInputError
        text = f"{where}: {first['msg']}" if where else str(first["msg"])
        raise cause(text, context={"store": store}) from None


class PipelineSettings(EngineSettings):
    """Keys of :class:`~ucm.store.pipeline.connector.UcmPipelineStore`."""

    #: The stages, top first.
    store_pipeline: tuple[Stage, ...] = ()

    def stages(self) -> list[dict[str, Any]]:
        """The description of each stage for the core, top first."""
        stages = with_codecs(with_roots(self.store_pipeline, self.storage_backends), self)
        return [
            STORES[stage.store].described(partial(self._of_stage, stage))
            | {"write_policy": stage.write_policy}
            for stage in stages
        ]

    def _of_stage(self, stage: Stage, key: str) -> Any:
        """The value of a key of a stage: its own, else what is written beside the pipeline."""
        if key in stage.options:
            return stage.options[key]
        of_stage = key in stage.model_fields_set or key == "storage_backends"
        return getattr(stage if of_stage else self, key)

    @property
    def label(self) -> str:
        """What stands before its messages in the log."""
        return "|".join(word_of(stage.store) for stage in self.store_pipeline)


#: Keys of this store that are none of a configuration file, or mean something else there.
_OF_ENGINE = PipelineSettings.model_fields.keys() - {*StoreSettings.model_fields, "store_pipeline"}


def read_pipeline_settings(config: Mapping[str, Any]) -> PipelineSettings:
    """Checked settings. Stages are read as in a configuration file, with the same errors."""
    if not (config.get("store_pipeline") or config.get("pipeline")):
        raise ConfigError(
            "UcmPipelineStore needs store_pipeline, its stages from top to bottom, e.g."
            ' "Cache|Posix"'
        )
    return read_stages(config, PIPELINE)


def read_stages(config: Mapping[str, Any], store: str) -> PipelineSettings:
    """The stages that a configuration of this store names, and the keys beside them."""
    if "device" in config:
        config = dict(config)
        config["device_id"] = config.pop("device")
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


#: Part of the top level that prefetches may fill ahead of need (1 / n), and most blocks of them.
PREFETCH_SHARE, MAX_PREFETCH = 8, 1024


class PosixTask(Task):
    """A load or dump under way in the core."""

    handle: CoreTask

    def __init__(self, handle: CoreTask, kind: str) -> None:
        super().__init__(handle)
        self.kind = kind

    def _is_over(self) -> bool:
        return self.handle.check("published")

    def shard_done(self, row: int) -> bool:
        """Whether row ``row`` of a load is copied and verified, while others of its block may still
        be read. Never waits."""
        return self.handle.shard_done(row)

    def wait_shard(self, row: int, timeout: float | None = None) -> bool:
        """Wait for that, at most ``timeout`` seconds; False if the time was up, or the row has
        failed."""
        return self.handle.wait_shard(row, timeout)


class PosixSidesTask(PosixTask, SidesTask):
    """Side shards being read by the core."""

    def __init__(self, reading: CoreSides) -> None:
        super().__init__(reading.task, "read of side shards")
        self._reading = reading

    def result(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        if not self.completed:
            raise InvalidInputError("the side shards are not there yet: wait for the task first")
        return self._reading.result()

    def missing(self) -> dict[int, UcmError]:
        """Why side shards are missing, by the index of their ids: mostly because there is none."""
        return self.handle.failures()


class UcmPosixStore(UcmKVStoreBaseV1):
    """Records below a directory: host memory for staging, checksums on every read, bounded space.
    It is the base of every store of the core; ``docs/configuration-directory.md`` has the keys."""

    #: The name in the registry whose tier it opens.
    store_name: ClassVar[str] = DEFAULT_STORE

    has_staged_level = True
    takes_load_timeout = True

    #: The store of which this is a view for another part.
    _whole: Self | None = None

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.config = concealed(self.config)
        self.settings = self._read(config)
        self._logger = logging.getLogger(f"ucm.store.{self._word()}")
        self._last_warning = ""
        self._core = Store(self.settings.setup())
        self.side_sizes = {name: size for name, _, size in self._core.sides()}
        self._tiers = self._described_tiers()
        if len(self._tiers) > 1:
            self.tier_names = tuple(tier["name"] for tier in self._tiers)
        self.tier_media = tuple(map(_medium, self._tiers))
        self.has_own_memory = any(tier["memory"] for tier in self._tiers)
        self._hand_over_log()

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> EngineSettings:
        """The checked keys; overridden by stores of the core over other stages."""
        return read_settings(config, settings_of(cls.store_name), cls.__name__)

    @classmethod
    def _word(cls) -> str:
        """The store's word, under which it logs."""
        return STORES[cls.store_name].word

    def for_part(self, index: int) -> Self:
        whole = self._whole or self
        if not index:
            return whole
        core, own = whole._open().for_part(index), whole.settings.own_parts[index - 1]
        sizes = {key: getattr(own, key) for key in OwnPartConfig.model_fields}
        view = copy.copy(whole)
        view._whole, view._core, view._kv = whole, core, None
        view.settings = whole.settings.model_copy(update=sizes | {"sides": {}})
        view.config, view.side_sizes = whole.config | sizes, {}
        return view

    def lookup(self, block_ids: Ids) -> list[bool]:
        return self._logged(self._open().lookup(block_ids))

    def lookup_on_prefix(self, block_ids: Ids) -> int:
        return self.explain_on_prefix(block_ids)[0]

    def explain_on_prefix(self, block_ids: Ids) -> tuple[int, str]:
        run, reason = self._logged(self._open().explain_on_prefix(block_ids))
        return run - 1, reason or "absent"

    def locate_on_prefix(self, block_ids: Ids) -> tuple[bytes, str]:
        tiers, reason = self._logged(self._open().locate_on_prefix(block_ids))
        return tiers, reason or "absent"

    def begin_locate_on_prefix(self, block_ids: Ids) -> Asked:
        return self._logged(self._open().begin_locate_on_prefix(block_ids))

    def locate(self, block_ids: Ids) -> bytes:
        return self._logged(self._open().locate(block_ids))

    def begin_locate(self, block_ids: Ids) -> Asked:
        return self._logged(self._open().begin_locate(block_ids))

    @property
    def answers_at_once(self) -> bool:
        return self._open().answers_at_once()

    def load_data(
        self, block_ids: Ids, shard_index: Ints, addrs: Addresses, timeout: float | None = None
    ) -> PosixTask:
        """As in the base class; ``timeout`` in seconds, the configured deadline if None."""
        return PosixTask(self._open().load(block_ids, shard_index, _matrix(addrs), timeout), "load")

    def verify(self, block_ids: Ids, timeout: float | None = None) -> PosixTask:
        """Start a load of whole blocks that ends in the store's own memory: read and verified,
        copied nowhere. It fails where a load would: a refused record is no hit any more.
        ``timeout`` as in :meth:`load_data`."""
        return PosixTask(self._open().verify(block_ids, timeout), "load")

    def dump_data(
        self,
        block_ids: Ids,
        shard_index: Ints,
        addrs: Addresses,
        prerequisite_handle: int = 0,
        *,
        sides: Sides | None = None,
    ) -> PosixTask:
        """As in the base class; ``sides`` as of :meth:`dump`."""
        beside = self._beside(sides, len(block_ids))
        return PosixTask(
            self._open().dump(block_ids, shard_index, _matrix(addrs), prerequisite_handle, beside),
            "dump",
        )

    def load_sides(self, block_ids: Ids, name: str, timeout: float | None = None) -> PosixSidesTask:
        return PosixSidesTask(self._open().load_sides(block_ids, name, timeout))

    def dump_sides(self, block_ids: Ids, sides: Sides) -> PosixTask:
        """As in the base class. Row *i* of the task is block *i* with the first name, followed by
        those of the next."""
        if not sides.keys() <= self.side_sizes.keys():
            raise self._other_sides(sides)
        rows = [
            (name, _bytes(name, side, len(block_ids), self.side_sizes[name]))
            for name, side in sides.items()
        ]
        return PosixTask(self._open().dump_sides(block_ids, rows), "dump")

    def _beside(self, sides: Sides | None, rows: int) -> npt.NDArray[np.uint8] | None:
        """The shares of every side shard in order, a row for each row of the dump."""
        if not sides:
            return None
        if sides.keys() != self.side_sizes.keys():
            raise self._other_sides(sides)
        shards = self.settings.block_size // self.settings.shard_size
        shares = [
            _bytes(name, sides[name], rows, size // shards)
            for name, size in self.side_sizes.items()
        ]
        return np.ascontiguousarray(np.concatenate(shares, axis=1))

    def _other_sides(self, sides: Sides) -> InvalidInputError:
        return InvalidInputError(
            "a dump brings the side shards that the key `sides` of the store names, all of them",
            context={"given": sorted(sides), "declared": sorted(self.side_sizes)},
        )

    def register_kv(self, layout: KVLayout) -> None:
        if self._by_number:
            self._open().register_kv(layout.first, layout.stride, layout.num_blocks)
        super().register_kv(layout)

    @property
    def _by_number(self) -> bool:
        """Whether the core is passed block numbers: not where a subclass moves rows in its own way,
        or where a block is split into shards."""
        own, here = type(self), UcmPosixStore
        as_here = own.load_data is here.load_data and own.dump_data is here.dump_data
        return as_here and self.settings.shard_size == self.settings.block_size

    def load_blocks(self, block_ids: Ids, blocks: Blocks, timeout: float | None = None) -> Task:
        if not self._by_number:
            return super().load_blocks(block_ids, blocks, timeout)
        numbers = block_numbers(blocks)
        return PosixTask(self._open().load_blocks(block_ids, numbers, timeout), "load")

    def dump_blocks(
        self,
        block_ids: Ids,
        blocks: Blocks,
        prerequisite_handle: int = 0,
        *,
        sides: Sides | None = None,
    ) -> Task:
        if not self._by_number:
            return super().dump_blocks(block_ids, blocks, prerequisite_handle, sides=sides)
        numbers, beside = block_numbers(blocks), self._beside(sides, len(block_ids))
        return PosixTask(
            self._open().dump_blocks(block_ids, numbers, prerequisite_handle, beside), "dump"
        )

    def wait(self, task: Any, timeout: float | None = None, until: Until = "published") -> None:
        if isinstance(task, list | tuple):
            return wait_all(self, task, timeout, until)
        handle = _handle(task)
        finished = handle.wait(until, timeout)
        self._hand_over_log()
        if not finished:
            raise DeadlineError(f"the {task.kind} is not {until} yet", context={"timeout": timeout})
        task.completed = task.completed or until == "published" or task.kind != "dump"
        failures = {} if isinstance(task, PosixSidesTask) else handle.failures()
        if failures:
            raise rows_failed(task, failures)

    def check(self, task: Any, until: Until = "published") -> bool:
        finished = _handle(task).check(until)
        if finished and (until == "published" or task.kind != "dump"):
            task.completed = True
        return finished

    def describe(
        self,
        block_ids: Ids,
        *,
        parents: Sequence[bytes] | None = None,
        ordinals: Ints | None = None,
        tokens: Ints | None = None,
        tenant: bytes | None = None,
    ) -> None:
        self._open().describe(block_ids, parents, ordinals, tokens, tenant)

    def mark_bad(self, block_ids: Ids) -> None:
        self._open().mark_bad(block_ids)

    def clear_bad(self, block_ids: Ids) -> None:
        self._open().clear_bad(block_ids)

    distrust, trust = mark_bad, clear_bad

    def touch(self, block_ids: Ids) -> None:
        self._open().touch(block_ids)

    def touch_own(self, block_ids: Ids, first: int = 0) -> None:
        self._open().touch_own(block_ids, first)

    @property
    def wants_touch_own(self) -> bool:
        return self._open().wants_touch_own()

    def served(self, task: Any) -> Sequence[int]:
        """As in the base class; also while the load goes on."""
        return _handle(task).served()[: len(self._tiers)]

    def stages(self, task: Any) -> Mapping[str, Sequence[float]]:
        return _handle(task).stages()

    def prefetch_room(self) -> int:
        """A part of the top level, so that prefetched blocks do not evict those in use there."""
        stats = self.stats()
        if stats["tiers"][-1]["level"] == 0:
            return 0
        top = sum(int(tier["capacity_bytes"]) for tier in stats["tiers"] if tier["level"] == 0)
        return min(top // int(stats["slot_bytes"]) // PREFETCH_SHARE, MAX_PREFETCH)

    def prefetch(self, block_ids: Ids, priority: Priority = "normal") -> int:
        return self._open().prefetch(block_ids, priority)

    def cancel_prefetch(self, block_ids: Ids) -> int:
        return self._open().cancel_prefetch(block_ids)

    def flush(self) -> None:
        self._open().flush()

    def refresh(self) -> None:
        self._open().refresh()

    def cc_store(self) -> int:
        return self._open().cc_store()

    def stats(self) -> dict[str, Any]:
        self._hand_over_log()
        stats: dict[str, Any] = json.loads(self._core.stats())
        return stats

    def healthy(self) -> bool:
        return bool(json.loads(self._open().stats())["healthy"])

    def early(self) -> tuple[list[bytes], list[bytes]]:
        return self._open().early()

    def trouble(self) -> str:
        self._hand_over_log()
        return (self._whole or self)._last_warning

    def free_dump_slots(self) -> int | None:
        return self._open().free_dump_slots()

    @property
    def record_len(self) -> int:
        """Bytes of one record on the medium."""
        return self._core.record_len

    @property
    def tenant_quota(self) -> Capacity | None:
        """The limit of one tenant's blocks in each stage below memory, None for no limit."""
        return self.settings.tenant_quota

    @cached_property
    def expire_after(self) -> float | None:
        """Seconds without use after which no stage below memory has a block; None for never."""
        return self.settings.longest_life()

    def close(self) -> None:
        if self._whole is not None:
            return
        super().close()
        self._core.close()
        self._hand_over_log()

    def _described_tiers(self) -> list[dict[str, Any]]:
        tiers: list[dict[str, Any]] = json.loads(self._core.stats())["tiers"]
        return tiers

    def _open(self) -> Store:
        if (self._whole or self)._closed:
            raise ClosedError("the store is closed")
        return self._core

    def _logged(self, answer: A) -> A:
        self._hand_over_log()
        return answer

    def _hand_over_log(self) -> None:
        """Write what the core logged for this store since the last call: no thread of the core
        takes the GIL for it."""
        if self._whole is not None:
            return self._whole._hand_over_log()
        for level, message, fields in self._core.take_log():
            if level >= logging.WARNING:
                self._last_warning = message
            places = map(without_login, self.settings.storage_backends)
            named = any(place in message for place in places)
            text = message if named else f"{self.settings.label}: {message}"
            self._logger.log(level, "%s", text, extra={"fields": fields})


def _medium(tier: Mapping[str, Any]) -> Medium:
    """The medium of a described tier. Every tier in directories has the name of the first kind."""
    if tier["memory"]:
        return "host"
    return "disk" if tier["name"].rstrip("0123456789") == COMMON.word else ""


def _handle(task: Any) -> CoreTask:
    return task_of(PosixTask, task, "a UcmPosixStore", expected="PosixTask").handle


def _bytes(name: str, side: Any, rows: int, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of a side shard: ``size`` for each of ``rows`` rows, whatever the type of the
    array."""
    array = np.asarray(side)
    given = array.nbytes // len(array) if array.ndim and len(array) else size
    if not array.ndim or len(array) != rows or given != size:
        raise InvalidInputError(
            "a side shard is an array with as many bytes in each row as the description says",
            context={"name": name, "shape": array.shape, "bytes": given, "expected": (rows, size)},
        )
    return np.ascontiguousarray(array).view(np.uint8).reshape(rows, size)


def _matrix(addrs: Any) -> npt.NDArray[np.uint64]:
    matrix = np.asarray(addrs)
    if matrix.dtype != np.uint64:
        if matrix.size and not np.issubdtype(matrix.dtype, np.integer):
            raise InvalidInputError("addresses are integers", context={"dtype": str(matrix.dtype)})
        matrix = matrix.astype(np.uint64)
    if matrix.size == 0 and matrix.ndim != 2:
        matrix = matrix.reshape(0, 0)  # no rows, written as an empty list
    if matrix.ndim != 2:
        raise InvalidInputError(
            "addrs has shape (rows, pieces per row)", context={"shape": matrix.shape}
        )
    return np.ascontiguousarray(matrix)
