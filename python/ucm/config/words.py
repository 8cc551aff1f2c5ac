"""The words a user may write: stores and their keys, other spellings, environment names, platforms,
and keys that mean nothing here.

Stores, tiers and the keys of each come from the registry of the core, platforms from its table:
nothing here knows one by name, except the pipeline of several tiers, which is no kind.

Three classes of keys: *meant* (fields of the model and their other spellings), *known but without
meaning here* (one warning that names what to write instead), *unknown* (an error with the nearest
known key).
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ucm._core import platforms, tier_kinds
from ucm.config.fields import Schema, Section, json_type, plain, section_of


@dataclass(frozen=True)
class Kind:
    """A kind of tier."""

    #: What the core calls it.
    word: str
    #: ``medium`` keeps blocks, ``layer`` is a word before one that does and sets keys of it,
    #: ``python`` is a store class without the core, ``declared`` is not built yet.
    role: Literal["medium", "layer", "python", "declared"]
    #: Whether it is memory that the processes of a host share.
    memory: bool
    #: What to use instead, of a kind that is not built yet.
    instead: str
    #: Key -> what may be written for it.
    options: Mapping[str, Schema]
    #: Key -> what holds where nothing is written; in the order in which they are shown.
    defaults: Mapping[str, Any]
    #: Keys that must be given.
    required: frozenset[str]

    @property
    def needs_directory(self) -> bool:
        """Whether it keeps blocks in a directory that has to be named."""
        return any(self.options[key].get("format") == "directories" for key in self.required)

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes of the addresses at which it keeps blocks; empty where it has none."""
        return tuple(
            scheme for schema in self.options.values() for scheme in schema.get("schemes", ())
        )

    @property
    def needs_address(self) -> bool:
        """Whether it keeps blocks at an address that has to be named."""
        return any("schemes" in self.options[key] for key in self.required)


@dataclass(frozen=True)
class StoreName:
    """A store as it is configured: a kind of tier by one of its names."""

    #: The word of a backend and of a pipeline's stage.
    word: str
    #: Name of the class.
    store: str
    #: One line about it, and whether it is built.
    summary: str
    #: Keys that always have these values under this name; of a layer, defaults of the stage below.
    fixed: Mapping[str, Any]
    kind: Kind

    def described(self, value: Callable[[str], Any]) -> dict[str, Any]:
        """The description of such a tier for the core; ``value`` returns the setting of a key."""
        return {
            "kind": self.kind.word,
            **{key: plain(value(key)) for key in self.kind.defaults},
            **self.fixed,
        }


def _read() -> Iterator[StoreName]:
    for found in json.loads(tier_kinds()):
        options = found["options"]
        kind = Kind(
            found["names"][0]["word"],
            found["role"],
            found["memory"],
            found["instead"] or "",
            options.get("properties", {}),
            found["defaults"],
            frozenset(options.get("required", ())),
        )
        for name in found["names"]:
            yield StoreName(name["word"], name["class"], name["summary"], name["fixed"], kind)


#: Class name -> the store.
STORES: dict[str, StoreName] = {found.store: found for found in _read()}

#: Every kind, in order.
KINDS: tuple[Kind, ...] = tuple({found.kind.word: found.kind for found in STORES.values()}.values())

#: What the core calls a kind -> the kind.
KIND_OF_WORD: dict[str, Kind] = {kind.word: kind for kind in KINDS}

#: What an address begins with -> the store that keeps blocks there.
STORE_OF_SCHEME: dict[str, str] = {
    scheme: store for store, found in reversed(STORES.items()) for scheme in found.kind.schemes
}

#: The store that is used where none is named. Its keys stand at the top of a configuration and hold
#: for every stage of a pipeline that has them; those of other kinds are options of their store.
DEFAULT_STORE: str = next(iter(STORES))
COMMON: Kind = STORES[DEFAULT_STORE].kind

#: The store that puts several tiers together.
PIPELINE = "UcmPipelineStore"

#: Word of a backend or of a pipeline stage, in lower case -> class name of the store.
BACKEND_WORDS: dict[str, str] = {
    **{found.word: found.store for found in STORES.values()},
    "pipeline": PIPELINE,
}

#: Stages of the original that ucm has no store for; they parse so that the answer names them.
FOREIGN_STAGES: tuple[str, ...] = ("delegator", "dram", "yuanrong", "asu")

KNOWN_STORES: frozenset[str] = frozenset(BACKEND_WORDS.values())

BUILT_STORES: frozenset[str] = frozenset(
    {PIPELINE, *(name for name, found in STORES.items() if found.kind.role in ("medium", "python"))}
)

#: Stores that keep their blocks in segments, whatever ``layout`` says.
IN_SEGMENTS: frozenset[str] = frozenset(
    name for name, found in STORES.items() if found.fixed.get("layout") == "segment"
)


def why_not_alone(store: str) -> str:
    """Why this is no store by itself and what to write instead; empty where it is one."""
    found = STORES.get(store)
    if found is None or found.kind.role != "layer":
        return ""
    word = found.word.capitalize()
    return (
        f'{word} keeps nothing itself; write it before the stage it is for: "{word}|Pc", or'
        f' "Cache|{word}|Pc"'
    )


def instead_of(store: str) -> str:
    """What to write instead of a store that is not built yet; empty where nothing is known."""
    return STORES[store].kind.instead if store in STORES else ""


def needs_directory(store: str) -> bool:
    """Whether this store keeps its blocks in a directory that has to be named."""
    return store in STORES and STORES[store].kind.needs_directory


def schemes_of(store: str) -> tuple[str, ...]:
    """The schemes of this store's addresses; empty where it has none."""
    return STORES[store].kind.schemes if store in STORES else ()


def needs_address(store: str) -> bool:
    """Whether this store keeps its blocks at an address that has to be named."""
    return store in STORES and STORES[store].kind.needs_address


def own_keys(kind: Kind) -> dict[str, Any]:
    """The keys of a kind that do not stand at the top of a configuration, with their defaults."""
    return {key: default for key, default in kind.defaults.items() if key not in COMMON.defaults}


@functools.cache
def options_of(store: str) -> type[Section]:
    """The keys that this store has beside the common ones, as a section that checks them."""
    kind = STORES[store].kind
    return section_of(f"{store}Options", kind.options, own_keys(kind))


#: Key that only some stores have -> the first of them.
OPTION_OWNER: dict[str, str] = {
    key: name for name, found in reversed(STORES.items()) for key in own_keys(found.kind)
}


def option_keys(store: str, stages: tuple[str, ...] = ()) -> frozenset[str]:
    """Keys beside the common ones that ``store``, or one of its pipeline's ``stages``, takes."""
    return frozenset(
        key for name in (store, *stages) if name in STORES for key in own_keys(STORES[name].kind)
    )


def _leaves(schemas: Mapping[str, Schema], above: str = "") -> Iterator[tuple[str, Schema]]:
    for key, schema in schemas.items():
        if json_type(schema) == "object":
            yield from _leaves(schema["properties"], f"{above}{key}.")
        else:
            yield f"{above}{key}", schema


def _all_leaves() -> Iterator[tuple[str, str, Schema]]:
    """Every key of every kind: as it is written, as the model has it, and its schema."""
    for kind in KINDS:
        for key, schema in _leaves(kind.options):
            yield key, key if key.partition(".")[0] in COMMON.defaults else f"options.{key}", schema


#: Other spelling -> key of the model; of those in :data:`TIER_GIBIBYTES` the number counts GiB.
TIER_ALIASES: dict[str, str] = {}
TIER_GIBIBYTES: set[str] = set()
#: Environment name -> key of the model.
TIER_ENVIRONMENT: dict[str, str] = {}
#: Keys whose values are sizes or permission bits, and texts for those that have no default.
TIER_SIZES: set[str] = set()
TIER_MODES: set[str] = set()
TIER_UNSET: dict[str, str] = {}
for _key, _target, _schema in _all_leaves():
    _gib = _schema.get("aliases_gib", ())
    TIER_ALIASES |= dict.fromkeys((*_schema.get("aliases", ()), *_gib), _target)
    TIER_GIBIBYTES.update(_gib)
    TIER_ENVIRONMENT |= dict.fromkeys(_schema.get("env", ()), _target)
    if _schema.get("format") in ("size", "amount"):
        TIER_SIZES.add(_key)
    elif _schema.get("format") == "mode":
        TIER_MODES.add(_key)
    if "unset" in _schema:
        TIER_UNSET[_key] = _schema["unset"]


#: Other spelling -> key of the model, those of tiers included. Conversions of units are in
#: :data:`GIBIBYTES`.
ALIASES: dict[str, str] = {
    **TIER_ALIASES,
    "quarantine.max_per_minute": "breaker.damaged_per_minute",
    "scatter_gather_enable": "options.use_scatter_gather",
    "load_tokens_threshold": "min_hit_tokens",
    "persist_token_threshold": "min_dump_tokens",
    "sparse_type": "sparse.type",
    "ucm_sparse_method": "sparse.type",
    "ucm_sparse_module_path": "sparse.module_path",
    "metrics_config_path": "metrics.config_path",
    "log_level": "log.level",
    "log_file": "log.file",
    "log_format": "log.format",
    "module_path": "ucm_connector_module_path",
}

#: Spellings whose number counts GiB.
GIBIBYTES: frozenset[str] = frozenset(TIER_GIBIBYTES)

_IDENTITY = "nothing: the identity of blocks is computed from the model itself"
_LAYOUT = "nothing: sizes come from the KV layout that vLLM registers"
_COUNTS = (
    "nothing: streams and queues are sized by the engine; `staging_capacity` bounds their memory"
)
_STAGING = "`staging_capacity`: the host memory for transfers, allocated once at start"
_CAPACITY = (
    "`storage_capacity`: the space of a root is always bounded and the oldest use goes first"
)
_ROOT_FORMAT = "nothing: the layout of a root is fixed by its format"
_ALWAYS = "nothing: it is always on"
_VLLM = "the option of vLLM of that name, on vLLM's own command line"
_METRICS_FILE = "`metrics.config_path`: the metrics file with these sections"
_THREADS = "nothing: blocks are read and written by threads, `posix_data_trans_concurrency` of them"
_BOTH = (
    "nothing: with `storage_policy: tiered` a dump writes every directory, so that no block has to"
    " be moved down later, and a block that is read in a colder one is copied up"
)
_NOT_KEPT = "nothing: a damaged record stays where it is until the next dump replaces it"

#: Known key without meaning here -> what to write instead.
MEANINGLESS: dict[str, str] = {
    **dict.fromkeys(("enable_memory_pool", "preallocate_kv_cache"), _STAGING),
    **dict.fromkeys(("buffer_number", "stream_number", "cache_stream_number"), _COUNTS),
    **dict.fromkeys(("waiting_queue_depth", "running_queue_depth", "io_size"), _COUNTS),
    "use_scatter_gather": "nothing: how device memory is gathered is measured and chosen at start",
    "cpu_affinity_cores": "nothing: start vLLM under `taskset` or `numactl` to bind it to cores",
    **dict.fromkeys(
        ("device", "device_id"), "nothing: the device is the one vLLM gives the worker"
    ),
    "role": "nothing: the role is the one vLLM gives the connector",
    "local_rank_size": "nothing: ranks and their parts are taken from vLLM",
    "share_buffer_enable": "nothing: it is decided by whether the KV is replicated",
    **dict.fromkeys(("unique_id", "model", "model_name"), _IDENTITY),
    **dict.fromkeys(("tensor_size", "tensor_size_list", "shard_size", "kv_block_size"), _LAYOUT),
    **dict.fromkeys(("head_dim", "num_heads", "num_kv_heads", "num_layers"), _LAYOUT),
    "timeout_ms": "`deadlines.load_max_s` and `deadlines.dump_s`",
    "store_health": (
        "`deadlines`: a store that does not answer in time is switched off until it does"
    ),
    **dict.fromkeys(("data_dir_shard_bytes", "shard_data_dir", "temp_dump_dir"), _ROOT_FORMAT),
    **dict.fromkeys(("move_rate", "promote_hits", "promote_window"), _BOTH),
    **dict.fromkeys(("io_engine", "posix_io_engine"), _THREADS),
    "posix_open_concurrency": "`posix_data_trans_concurrency`",
    "posix_commit_concurrency": "`posix_data_trans_concurrency`",
    **dict.fromkeys(("posix_gc_enable", "posix_gc_recycle_percent"), _CAPACITY),
    **dict.fromkeys(("posix_gc_concurrency", "posix_gc_check_interval_sec"), _CAPACITY),
    **dict.fromkeys(("posix_gc_trigger_threshold_ratio", "posix_gc_shard_sample_ratio"), _CAPACITY),
    "posix_gc_max_recycle_count_per_shard": _CAPACITY,
    **dict.fromkeys(("recycle_enable", "recycle_threshold_ratio", "hotness_interval"), _CAPACITY),
    "audit_one_in": "nothing: what is stored is no longer compared with what is computed",
    **dict.fromkeys(("quarantine.enabled", "quarantine.max_records"), _NOT_KEPT),
    **dict.fromkeys(("quarantine.max_bytes", "quarantine.keep_s"), _NOT_KEPT),
    "compress_ratio": "nothing: compression is lossless, and what it gains is measured (`stats()`)",
    "data_type": "nothing: the type of the elements is taken from the KV layout",
    **dict.fromkeys(("decompress_thread_num", "compress_threads"), _THREADS),
    "compress_mode": "`codec`: off or zstd, for every block of a stage",
    **dict.fromkeys(("enable_event_sync", "use_request_async_load"), _ALWAYS),
    "use_consistency_manager": _ALWAYS,
    "enable_distributed": "nothing: any number of engines and hosts may share one root",
    **dict.fromkeys(("prometheus", "grafana"), _METRICS_FILE),
    "hit_ratio": "nothing: hits are never made up; `min_hit_tokens` declines short ones",
    "enable_record_traces": "`log.level: DEBUG`",
    "use_lite": "`enabled: false`",
    "use_inference_duration_monitor": "vLLM's own metrics",
    **dict.fromkeys(
        ("hybrid_linear_attention_layerwise", "hybrid_layerwise_prefetch_rows"), "`use_layerwise`"
    ),
    **dict.fromkeys(("enable_prefix_caching", "gpu_memory_utilization", "kv_cache_dtype"), _VLLM),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size"), _VLLM),
}

#: Key of the model that is read and checked, but does nothing yet -> what to write instead.
UNUSED: dict[str, str] = {
    "verify": "nothing: every record is verified when it is read, which cannot be switched off",
    "kv_connector": "`kv_connector` of vLLM's `--kv-transfer-config`; ours are all the same",
}

#: Words for a medium that other caches use -> word of the store that is meant.
MEANT_STORES: dict[str, str] = {
    **dict.fromkeys(("disk", "ssd", "nvme", "hdd", "local", "localdisk", "local_disk"), "posix"),
    **dict.fromkeys(
        ("file", "files", "filesystem", "file_system", "fs", "directory", "path"), "posix"
    ),
    **dict.fromkeys(("lustre", "ceph", "cephfs", "gpfs", "weka", "beegfs", "fuse"), "posix"),
    **dict.fromkeys(("nas", "share", "mount"), "nfs"),
    **dict.fromkeys(("memory", "mem", "ram", "dram", "cpu", "host", "shm"), "cache"),
    **dict.fromkeys(("bucket", "minio", "gcs", "azure", "blob", "oss", "objectstore"), "object"),
    **dict.fromkeys(("valkey", "keydb", "dragonfly", "kvrocks"), "redis"),
    **dict.fromkeys(("3fs", "hf3fs", "usrbio"), "ds3fs"),
    **dict.fromkeys(("none", "null", "off", "nothing"), "empty"),
}

#: Keys of other caches, and keys a user may expect -> the key that is meant.
MEANT_KEYS: dict[str, str] = {
    **dict.fromkeys(
        ("root", "root_dir", "dir", "directory", "cache_dir", "folder"), "storage_backends"
    ),
    **dict.fromkeys(("url", "redis_url", "remote_url", "bucket", "host"), "storage_backends"),
    **dict.fromkeys(("size", "max_size", "disk_size", "max_disk_size"), "storage_capacity"),
    **dict.fromkeys(("quota", "limit", "max_local_disk_size"), "storage_capacity"),
    **dict.fromkeys(("memory_size", "ram_size", "cpu_size", "max_local_cpu_size"), "cache_size"),
    **dict.fromkeys(("cpu_bytes_to_use", "dram_size"), "cache_size"),
    **dict.fromkeys(("compression", "compress"), "codec"),
    **dict.fromkeys(("encrypt", "encryption"), "encryption_key_file"),
    **dict.fromkeys(("timeout", "timeouts"), "deadlines"),
    **dict.fromkeys(("disable", "disabled"), "enabled"),
    "ttl": "expire_after",
}

#: Keys of other caches that no key replaces -> what to do instead.
INSTEAD: dict[str, str] = {
    "chunk_size": (
        "leave it out: a block has the tokens of vLLM's --block-size; with Blend write"
        " `blend: {chunk_size: 256}`"
    ),
    "save_decode_cache": "write `dump: all` (the default) to store answers too, or `dump: prompt`",
    "save_unfull_chunk": (
        "leave it out: full blocks are stored, and the rest of a prompt is computed"
    ),
    "skip_save": (
        'write `dump: none`, or in one request kv_transfer_params {"ucm": {"dump": false}}'
    ),
    "mode": "write `dump: none` to load only; with vLLM's kv_role kv_producer nothing is loaded",
    "load_mode": "leave it out: loads run beside the steps of other requests",
    "kv_layout": "leave it out: the layout is the one that vLLM registers",
    "dump_every": "write `min_dump_tokens` to store long prompts only",
}

#: Sparse attention: other spelling -> key, in the section of any algorithm that has that key.
SPARSE_ALIASES: dict[str, str] = {
    **dict.fromkeys(("init_window_sz", "init_window_size", "init_window"), "init_blocks"),
    **dict.fromkeys(("sink_token", "sink_tokens"), "init_tokens"),
    **dict.fromkeys(("local_window_sz", "local_window_size", "local_window"), "local_blocks"),
    **dict.fromkeys(("recent_token", "recent_tokens"), "local_tokens"),
    **dict.fromkeys(("sparse_ratio", "topk_ratio"), "ratio"),
    "topk": "topk_blocks",
    **dict.fromkeys(("hash_topk_tokens", "vllm_hash_attention_topk"), "topk_tokens"),
    "retrieval_stride": "stride",
    **dict.fromkeys(("seq_len_threshold", "gpu_seq_len_threshold"), "min_tokens"),
    **dict.fromkeys(("concurrency_threshold", "gpu_concurrency_threshold"), "min_concurrency"),
    **dict.fromkeys(("rollback_layers", "vllm_hash_attention_rollback_layers"), "dense_layers"),
    **dict.fromkeys(("skip_layers", "vllm_hash_attention_skip_layers"), "reuse_from"),
    "blk_repre_dim_prune_ratio": "prune_ratio",
    "blk_repre_inner_token_merge": "merge",
    **dict.fromkeys(("hash_reduction_head_num", "reduction_head_num"), "reduction_heads"),
    "min_blend_threshold": "min_hit_blocks",
}

_RATE = "`prefetch_ahead`: how many steps ahead blocks are brought"

#: Sparse attention: known key without meaning here -> what to write instead.
SPARSE_MEANINGLESS: dict[str, str] = {
    "top_k_ratio_per_layer": (
        "`ratio` for all layers, and `dense_layers` for those that need every block"
    ),
    "chunk_repre_method": "nothing: a block's score is that of its best token",
    "top_k_index_reuse": "`reuse_from`: the layers that take the choice of an earlier one",
    "must_select_blocks": (
        "`init_blocks` and `local_blocks`: the first and last blocks are always kept"
    ),
    "chunk_size": "nothing: blocks are vLLM's",
    "hash_weight": "`hash_weights_file`: learned hash weights",
    "is_mla": "nothing: the kind of attention is taken from the model",
    "model_name": "nothing: the model is the one that vLLM runs",
    "npu_seq_len_threshold": "`min_tokens`: requests below it are dense, on every device",
    "npu_concurrency_threshold": "`min_concurrency`, on every device",
    **dict.fromkeys(("num_prefetch_blocks", "prefetch_blocks"), _RATE),
}


#: Key that does nothing without another one -> that one, or several of which one is enough.
SPARSE_NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("select_stored", "eviction", "prefetch_enabled"), ("offload",)),
    **dict.fromkeys(("prefetch_ahead", "prefetch_workers"), ("offload",)),
    **dict.fromkeys(("max_pending_prefetch", "prefetch_cache_size"), ("offload",)),
    "retrieval_threads": ("lag",),
    "retrieval_ms": ("lag", "offload"),
}

#: Why the other one is needed.
SPARSE_WHY: dict[str, str] = {
    "offload": "`offload: true` beside it: without it every block stays on the device",
    "lag": "`lag` beside it: without it blocks are chosen in the step that uses them",
}

#: Environment name -> key of the model.
ENVIRONMENT: dict[str, str] = {
    **TIER_ENVIRONMENT,
    "UCM_STORAGE_BACKEND": "storage_backend",
    "UCM_BLOCK_SIZE": "block_size",
    "UCM_SPARSE_TYPE": "sparse.type",
    "ENABLE_SPARSE": "sparse.enabled",
    "VLLM_USE_REROPE": "rerope.enabled",
    "REROPE_WINDOW": "rerope.window",
    "TRAINING_LENGTH": "rerope.training_length",
    "PLATFORM": "platform",
    "UCM_LOG_LEVEL": "log.level",
    "UC_LOGGER_LEVEL": "log.level",
    "UCM_LOG_FORMAT": "log.format",
    "UCM_LOG_FILE": "log.file",
    "UCM_METRICS_ENABLE": "metrics.enabled",
    "UCM_ENABLE_METRICS": "metrics.enabled",
    "UCM_METRICS_PORT": "metrics.port",
    "UCM_DEBUG": "debug",
    "UCM_BLOCK_TRACE": "block_trace",
    "UCM_PROFILE": "profile.enabled",
    "UCM_PROFILE_OUTPUT": "profile.output",
}

#: Environment names that are read elsewhere: the file to read, the switch for everything, the
#: directory for what belongs to no root, and the keys of encryption and of tenants' tags.
CONFIG_FILE_VARIABLE = "UCM_CONFIG_FILE"
DISABLE_VARIABLE = "UCM_DISABLE"
STATE_VARIABLE = "UCM_STATE_DIR"
ENCRYPTION_KEY_VARIABLE = "UCM_ENCRYPTION_KEY"
TENANT_KEY_VARIABLE = "UCM_TENANT_KEY"
ELSEWHERE = (
    CONFIG_FILE_VARIABLE,
    DISABLE_VARIABLE,
    STATE_VARIABLE,
    ENCRYPTION_KEY_VARIABLE,
    TENANT_KEY_VARIABLE,
)

#: Environment names of the original without meaning here -> what to write instead.
MEANINGLESS_ENVIRONMENT: dict[str, str] = {
    "UCM_LOG_PATH": "UCM_LOG_FILE, which names the file itself",
    "UCM_LOG_MAX_FILES": "nothing: five files of 100 MiB are kept",
    "UCM_LOG_MAX_SIZE": "nothing: five files of 100 MiB are kept",
    "ENABLE_UCM_PATCH": "nothing: no patch is needed on this vLLM",
}


class PlatformRow(NamedTuple):
    """A platform as the core knows it (``crates/ucm-device/src/devices.rs``)."""

    name: str
    spellings: list[str]
    in_vllm: list[str]
    in_torch: str
    files: str


#: Every platform, in the order in which ``ucm.trans`` tries them.
PLATFORM_ROWS: tuple[PlatformRow, ...] = tuple(PlatformRow(*row) for row in platforms())

#: What PLATFORM may say -> platform of the model.
PLATFORMS: dict[str, str] = {
    word: row.name for row in PLATFORM_ROWS for word in (row.name, *row.spellings)
}


def parse_platform(value: object) -> str:
    """The platform that a word names."""
    name = PLATFORMS.get(value.strip().lower()) if isinstance(value, str) else None
    if name is None:
        raise ValueError(f'there is no platform "{value}"; known are {", ".join(PLATFORMS)}')
    return name


def without_effect(keys: Sequence[str], instead: str) -> str:
    """The warning about keys, as written, that do nothing; ``instead`` as in
    :data:`MEANINGLESS`."""
    quoted = ", ".join(f'"{key}"' for key in keys)
    if instead.startswith("nothing: "):
        return (
            f"{quoted}: without effect here, and nothing is needed instead:"
            f" {instead.removeprefix('nothing: ')}"
        )
    return f"{quoted}: without effect here; use {instead}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is spelled most like ``word``, if any is near."""
    by_folded = {candidate.lower(): candidate for candidate in reversed(list(known))}
    found = difflib.get_close_matches(word.lower(), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def meant_store(word: str) -> str | None:
    """Class name of the store that a word means without being its name: a scheme of its addresses,
    or a word of :data:`MEANT_STORES`, also as a class (``UcmS3Store``)."""
    text = word.strip().lower()
    if text.startswith("ucm"):
        text = text.removeprefix("ucm").removesuffix("store")
    return STORE_OF_SCHEME.get(text) or BACKEND_WORDS.get(MEANT_STORES.get(text, text))


def nearest_key(word: str, known: Iterable[str]) -> str | None:
    """The key that a word means, else the one spelled most like it; none that has no effect."""
    names = [name for name in known if name not in MEANINGLESS and name not in UNUSED]
    meant = MEANT_KEYS.get(word.lower())
    return meant if meant in names else nearest(word, names)


def _did_you_mean(near: str | None) -> str:
    return f'; did you mean "{near}"?' if near is not None else ""


def key_hint(word: str, known: Iterable[str]) -> str:
    """As :func:`hint`, for a key."""
    return _did_you_mean(nearest_key(word, known))


def hint(word: str, known: Iterable[str]) -> str:
    """``; did you mean "x"?`` or nothing."""
    return _did_you_mean(nearest(word, known))


def store_hint(word: str, known: Iterable[str]) -> str:
    """:func:`hint` for the name of a store: its meaning goes before its spelling."""
    meant, names = meant_store(word), tuple(known)
    spellings = [name for name, store in BACKEND_WORDS.items() if store == meant]
    found = next((name for name in (*spellings, meant) if name in names), None)
    return _did_you_mean(found or nearest(word, names))
