"""The words a user may write: other spellings, environment names, and keys that mean nothing here.

Three classes of keys: *meant* (fields of the model and their other spellings), *known but without
meaning here* (one warning that names what to write instead), *unknown* (an error with the nearest
known key).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from ucm.config.stores import (
    BACKEND_WORDS,
    STORE_OF_SCHEME,
    TIER_ALIASES,
    TIER_ENVIRONMENT,
    TIER_GIBIBYTES,
)

#: Other spelling -> key of the model, those of tiers included. Conversions of units are in
#: :data:`GIBIBYTES`.
ALIASES: dict[str, str] = {
    **TIER_ALIASES,
    "scatter_gather_enable": "options.use_scatter_gather",
    "load_tokens_threshold": "min_hit_tokens",
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
GIBIBYTES: frozenset[str] = TIER_GIBIBYTES

_IDENTITY = "nothing: the identity of blocks is computed from the model itself"
_LAYOUT = "nothing: sizes come from the KV layout that vLLM registers"
_COUNTS = (
    "nothing: streams and queues are sized by the engine; `staging_capacity` bounds their memory"
)
_STAGING = "`staging_capacity`: the host memory for transfers, allocated once at start"
_CAPACITY = (
    "`storage_capacity`: the space of a root is always bounded and the oldest use goes first"
)
_ALWAYS = "nothing: it is always on"
_VLLM = "the option of vLLM of that name, on vLLM's own command line"
_EXPORTED = "vLLM's own `/metrics`, which has ours too"
_THREADS = "nothing: blocks are read and written by threads, `posix_data_trans_concurrency` of them"
_NO_PROFILE = "nothing: profiling is not built yet, and nothing is recorded"

#: Known key without meaning here -> what to write instead.
MEANINGLESS: dict[str, str] = {
    "enable_memory_pool": _STAGING,
    "preallocate_kv_cache": _STAGING,
    "buffer_number": _COUNTS,
    "stream_number": _COUNTS,
    "cache_stream_number": _COUNTS,
    "waiting_queue_depth": _COUNTS,
    "running_queue_depth": _COUNTS,
    "io_size": _COUNTS,
    "use_scatter_gather": "nothing: how device memory is gathered is measured and chosen at start",
    "cpu_affinity_cores": "nothing: start vLLM under `taskset` or `numactl` to bind it to cores",
    "device": "nothing: the device is the one vLLM gives the worker",
    "device_id": "nothing: the device is the one vLLM gives the worker",
    "role": "nothing: the role is the one vLLM gives the connector",
    "local_rank_size": "nothing: ranks and their parts are taken from vLLM",
    "share_buffer_enable": "nothing: it is decided by whether the KV is replicated",
    "unique_id": _IDENTITY,
    "model": _IDENTITY,
    "model_name": _IDENTITY,
    "tensor_size": _LAYOUT,
    "tensor_size_list": _LAYOUT,
    "shard_size": _LAYOUT,
    "kv_block_size": _LAYOUT,
    "head_dim": _LAYOUT,
    "num_heads": _LAYOUT,
    "num_kv_heads": _LAYOUT,
    "num_layers": _LAYOUT,
    "timeout_ms": "`deadlines.load_max_s` and `deadlines.dump_s`",
    "store_health": (
        "`deadlines`: a store that does not answer in time is switched off until it does"
    ),
    "data_dir_shard_bytes": "nothing: the layout of a root is fixed by its format",
    "shard_data_dir": "nothing: the layout of a root is fixed by its format",
    "temp_dump_dir": "nothing: the layout of a root is fixed by its format",
    "io_engine": _THREADS,
    "posix_io_engine": _THREADS,
    "posix_open_concurrency": "`posix_data_trans_concurrency`",
    "posix_commit_concurrency": "`posix_data_trans_concurrency`",
    "posix_gc_enable": _CAPACITY,
    "posix_gc_recycle_percent": _CAPACITY,
    "posix_gc_concurrency": _CAPACITY,
    "posix_gc_check_interval_sec": _CAPACITY,
    "posix_gc_trigger_threshold_ratio": _CAPACITY,
    "posix_gc_max_recycle_count_per_shard": _CAPACITY,
    "posix_gc_shard_sample_ratio": _CAPACITY,
    "recycle_enable": _CAPACITY,
    "recycle_threshold_ratio": _CAPACITY,
    "hotness_interval": _CAPACITY,
    "compress_ratio": "nothing: compression is lossless, and what it gains is measured (`stats()`)",
    "data_type": "nothing: the type of the elements is taken from the KV layout",
    "decompress_thread_num": _THREADS,
    "compress_threads": _THREADS,
    "compress_mode": "`codec`: off, lz4 or zstd, for every block of a stage",
    "enable_event_sync": _ALWAYS,
    "use_request_async_load": _ALWAYS,
    "use_consistency_manager": _ALWAYS,
    "enable_distributed": "nothing: any number of engines and hosts may share one root",
    "prometheus": _EXPORTED,
    "grafana": _EXPORTED,
    "hit_ratio": "nothing: hits are never made up; `min_hit_tokens` declines short ones",
    "persist_token_threshold": "`min_hit_tokens`: short hits are declined when loading",
    "enable_record_traces": "`log.level: DEBUG`",
    "use_lite": "`enabled: false`",
    "use_inference_duration_monitor": "vLLM's own metrics",
    "hybrid_linear_attention_layerwise": "`use_layerwise`",
    "hybrid_layerwise_prefetch_rows": "`use_layerwise`",
    "enable_prefix_caching": _VLLM,
    "gpu_memory_utilization": _VLLM,
    "kv_cache_dtype": _VLLM,
    "tensor_parallel_size": _VLLM,
    "pipeline_parallel_size": _VLLM,
}

#: Key of the model that is read and checked, but does nothing yet -> what to write instead, as
#: above.
UNUSED: dict[str, str] = {
    "kv_connector": "`kv_connector` of vLLM's `--kv-transfer-config`; ours are all the same",
    "metrics.port": _EXPORTED,
    "metrics.config_path": _EXPORTED,
    "profile.enabled": _NO_PROFILE,
    "profile.output": _NO_PROFILE,
}

#: Words for a medium that other caches use, or that name its make -> word of the store that is
#: meant.
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
    "chunk_size": "block_size",
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
    "UCM_PROFILE": "profile.enabled",
    "UCM_PROFILE_OUTPUT": "profile.output",
}

#: Environment names that are read elsewhere: the file to read, the switch for everything, the
#: directory for what belongs to no root, and secrets, which no configuration shows: keys of the
#: store's encryption and of tenants' tags.
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

#: What PLATFORM may say -> platform of the model.
PLATFORMS: dict[str, str] = {
    "cuda": "cuda",
    "ascend": "ascend",
    "musa": "musa",
    "maca": "maca",
    "hip": "hip",
    "simu": "host",
    "host": "host",
    "cpu": "host",
}


def without_effect(keys: Sequence[str], instead: str) -> str:
    """The warning about keys, as they were written, that do nothing; ``instead`` as in
    :data:`MEANINGLESS`."""
    quoted = ", ".join(f'"{key}"' for key in keys)
    if instead.startswith("nothing: "):
        return (
            f"{quoted}: without effect here, and nothing is needed instead:"
            f" {instead.removeprefix('nothing: ')}"
        )
    return f"{quoted}: without effect here; use {instead}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that looks most like ``word``, if any is near."""
    by_folded: dict[str, str] = {}
    for candidate in known:
        by_folded.setdefault(candidate.lower(), candidate)
    found = difflib.get_close_matches(word.lower(), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def meant_store(word: str) -> str | None:
    """Class name of the store that a word means which is none of its names: a scheme of its
    addresses, or a word of :data:`MEANT_STORES`, also as a class (``UcmS3Store``)."""
    text = word.strip().lower()
    if text.startswith("ucm"):
        text = text.removeprefix("ucm").removesuffix("store")
    return STORE_OF_SCHEME.get(text) or BACKEND_WORDS.get(MEANT_STORES.get(text, text))


def nearest_key(word: str, known: Iterable[str]) -> str | None:
    """The key that a word means, else the one spelled most like it; none that has no effect."""
    names = [name for name in known if name not in MEANINGLESS and name not in UNUSED]
    meant = MEANT_KEYS.get(word.lower())
    return meant if meant in names else nearest(word, names)


def key_hint(word: str, known: Iterable[str]) -> str:
    """As :func:`hint`, for a key."""
    near = nearest_key(word, known)
    return f'; did you mean "{near}"?' if near is not None else ""


def hint(word: str, known: Iterable[str]) -> str:
    """``; did you mean "x"?`` or nothing."""
    near = nearest(word, known)
    return f'; did you mean "{near}"?' if near is not None else ""


def store_hint(word: str, known: Iterable[str]) -> str:
    """:func:`hint` for the name of a store: its meaning goes before its spelling."""
    meant, names = meant_store(word), tuple(known)
    spellings = [name for name, store in BACKEND_WORDS.items() if store == meant]
    found = next((name for name in (*spellings, meant) if name in names), None)
    return f'; did you mean "{found}"?' if found is not None else hint(word, names)
