"""How the keys of an algorithm of sparse attention may be spelled, and reading them into a
layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ucm.config.layer import Layer
from ucm.config.sparse import UncheckedConfig, keys_of
from ucm.config.words import hint
from ucm.errors import ConfigError

#: Other spelling -> key, in the section of any algorithm that has that key.
ALIASES: dict[str, str] = {
    "init_window_sz": "init_blocks",
    "init_window_size": "init_blocks",
    "init_window": "init_blocks",
    "sink_token": "init_tokens",
    "sink_tokens": "init_tokens",
    "local_window_sz": "local_blocks",
    "local_window_size": "local_blocks",
    "local_window": "local_blocks",
    "recent_token": "local_tokens",
    "recent_tokens": "local_tokens",
    "sparse_ratio": "ratio",
    "topk_ratio": "ratio",
    "topk": "topk_blocks",
    "hash_topk_tokens": "topk_tokens",
    "vllm_hash_attention_topk": "topk_tokens",
    "retrieval_stride": "stride",
    "seq_len_threshold": "min_tokens",
    "gpu_seq_len_threshold": "min_tokens",
    "concurrency_threshold": "min_concurrency",
    "gpu_concurrency_threshold": "min_concurrency",
    "rollback_layers": "dense_layers",
    "vllm_hash_attention_rollback_layers": "dense_layers",
    "skip_layers": "reuse_from",
    "vllm_hash_attention_skip_layers": "reuse_from",
    "blk_repre_dim_prune_ratio": "prune_ratio",
    "blk_repre_inner_token_merge": "merge",
    "hash_reduction_head_num": "reduction_heads",
    "reduction_head_num": "reduction_heads",
    "min_blend_threshold": "min_hit_blocks",
}

_RATE = "`prefetch_ahead`: how many steps ahead blocks are brought"

#: Known key without meaning here -> what to write instead.
MEANINGLESS: dict[str, str] = {
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
    "num_prefetch_blocks": _RATE,
    "prefetch_blocks": _RATE,
}


#: Key that does nothing without another one -> that one, or several of which one is enough.
NEEDS: dict[str, tuple[str, ...]] = {
    "select_stored": ("offload",),
    "eviction": ("offload",),
    "prefetch_enabled": ("offload",),
    "prefetch_ahead": ("offload",),
    "prefetch_workers": ("offload",),
    "max_pending_prefetch": ("offload",),
    "prefetch_cache_size": ("offload",),
    "retrieval_threads": ("lag",),
    "retrieval_ms": ("lag", "offload"),
}

#: Why the other one is needed.
WHY: dict[str, str] = {
    "offload": "`offload: true` beside it: without it every block stays on the device",
    "lag": "`lag` beside it: without it blocks are chosen in the step that uses them",
}


def read_algorithm(layer: Layer, algorithm: str, keys: Mapping[Any, Any], written: str) -> None:
    """Put the keys of an algorithm's section, which stands at ``written``, into a layer.

    Raises :class:`~ucm.errors.ConfigError` for a key that the algorithm has not got, with the
    nearest one it has.
    """
    section = keys_of(algorithm)
    known, unchecked = section.model_fields, issubclass(section, UncheckedConfig)
    if unchecked and keys:
        layer.warnings.append(
            f'the keys of "{written}" in {layer.source} are not checked: PyTorch is not installed'
        )
    for key, value in keys.items():
        inner = f"{written}.{key}"
        name = ALIASES.get(str(key), str(key))
        if name in known or unchecked:
            if value is not None:  # `key:` with nothing behind it says nothing
                layer.put(f"sparse.config.{algorithm}.{name}", value, inner)
        elif key in MEANINGLESS:
            layer.ignore(MEANINGLESS[key], inner)
        else:
            spellings = [*known, *(alias for alias, meant in ALIASES.items() if meant in known)]
            raise ConfigError(
                f'unknown key "{inner}" in {layer.source}{hint(str(key), spellings)} (sparse'
                f" algorithm {algorithm})",
                context={"key": inner},
            )
    # A section without keys is written all the same.
    layer.put(f"sparse.config.{algorithm}", {}, written)
