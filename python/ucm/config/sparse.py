"""Keys of the algorithms of sparse attention: one typed section each, and the spellings of the
original and of the seeds.

What a key means is said once, in ``docs/sparse.md``; defaults differ by algorithm and stand here.
Sizes of windows may be written in tokens, and become blocks (rounded up) where the block size is
known: in :mod:`ucm.sparse.config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from ucm.config.fields import Count, Flag, Milliseconds, Number, Section, no_flag, word

#: Most layers that a list of layers may name.
MAX_LAYERS = 1024

Share = Annotated[float, BeforeValidator(no_flag), Field(gt=0, le=1, allow_inf_nan=False)]


def _layers(value: Any) -> Any:
    """A list of layers: numbers, and ranges as text ("0-6, 61")."""
    parts = value if isinstance(value, list | tuple | set | frozenset) else str(value).split(",")
    found: set[int] = set()
    for part in parts:
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", str(part))
        if match is None:
            if str(part).strip() == "" and len(parts) == 1:
                continue
            raise ValueError(
                f'it names layers from 0 on, as [0, 1, 61] or "0-6,61"; "{part}" is neither'
            )
        first = int(match[1])
        last = int(match[2] or first)
        if not first <= last < MAX_LAYERS:
            raise ValueError(f'"{part}" is no range of layers below {MAX_LAYERS}')
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def _sources(value: Any) -> Any:
    """Layer to the layer whose choice it takes: a mapping, or a list with true where a layer takes
    that of the last one before it that chose (the original's skip_layers)."""
    if isinstance(value, Mapping):
        try:
            return {int(layer): int(source) for layer, source in value.items()}
        except (TypeError, ValueError):
            raise ValueError("it maps layers to earlier layers, e.g. {3: 2}") from None
    if (
        isinstance(value, list | tuple)
        and all(isinstance(item, bool) for item in value)
        and len(value) <= MAX_LAYERS
    ):
        found, last = {}, None
        for layer, skipped in enumerate(value):
            if not skipped:
                last = layer
            elif last is not None:
                found[layer] = last
            else:
                raise ValueError(f"layer {layer} comes before every layer that chooses")
        return found
    raise ValueError(
        "it maps layers to earlier layers, e.g. {3: 2}, or lists true for each layer that takes a"
        " choice over"
    )


Layers = Annotated[tuple[int, ...], BeforeValidator(_layers)]
Sources = Annotated[dict[int, int], BeforeValidator(_sources)]


class AlgorithmConfig(Section):
    """Keys that every algorithm of block selection has."""

    #: Words for the log; the class of the algorithm is found by it.
    algorithm: ClassVar[str] = ""

    init_blocks: Number = 1
    init_tokens: Number | None = None
    local_blocks: Count = 2
    local_tokens: Count | None = None
    ratio: Share | None = None
    topk_blocks: Count | None = None
    topk_tokens: Count | None = None
    score_mass: Share | None = None
    k_min: Number = 0
    k_max: Count | None = None
    windows_inside: Flag = False
    min_blocks: Number = 0
    min_tokens: Number | None = None
    min_concurrency: Count = 1
    stride: Count = 1
    lag: Annotated[Number, Field(le=1024)] = 0
    dense_layers: Layers | None = None
    reuse_from: Sources = Field(default_factory=dict)
    heads: Annotated[Literal["shared", "kv"], BeforeValidator(word)] = "shared"
    shared_selection: Flag = False
    attention_kernel: Annotated[Literal["auto", "vllm"], BeforeValidator(word)] = "auto"
    retrieval_threads: Annotated[Count, Field(le=64)] = 2
    retrieval_ms: Milliseconds = 200
    measure_recall: Flag = False
    offload: Flag = False
    select_stored: Flag = True
    eviction: Annotated[Literal["lru", "score", "hybrid"], BeforeValidator(word)] = "hybrid"
    prefetch_enabled: Flag = True
    prefetch_ahead: Annotated[Number, Field(le=64)] = 2
    prefetch_workers: Annotated[Count, Field(le=64)] = 4
    max_pending_prefetch: Annotated[Count, Field(le=65536)] = 64
    prefetch_cache_size: Annotated[Count, Field(le=1 << 24)] = 1000

    #: Budget of this algorithm where none is written: a key of those above, and its value.
    default_budget: ClassVar[tuple[str, Any]] = ("ratio", 0.3)

    @property
    def budget(self) -> tuple[str, Any]:
        """The one key that says how many blocks are chosen, and its value."""
        given = self._budgets()
        return given[0] if given else self.default_budget

    def _budgets(self) -> list[tuple[str, Any]]:
        names = ("ratio", "topk_blocks", "topk_tokens", "score_mass")
        return [(name, getattr(self, name)) for name in names if getattr(self, name) is not None]

    def window(self, which: Literal["init", "local"], block_size: int) -> int:
        """Blocks of a window, for blocks of so many tokens; what is written in tokens is rounded
        up."""
        blocks, tokens = f"{which}_blocks", f"{which}_tokens"
        size: int | None = getattr(self, tokens)
        if size is None or blocks in self.model_fields_set:
            return int(getattr(self, blocks))
        return -(-size // block_size)

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmConfig:
        for which in ("init", "local"):
            if {f"{which}_blocks", f"{which}_tokens"} <= self.model_fields_set:
                raise ValueError(
                    f"{which}_blocks and {which}_tokens are one window; write one of them"
                )
        budgets = self._budgets()
        if len(budgets) > 1:
            raise ValueError(
                f"{' and '.join(name for name, _ in budgets)} are budgets, of which one is written"
            )
        if self.k_max is not None and self.k_max < self.k_min:
            raise ValueError(f"k_max ({self.k_max}) lies below k_min ({self.k_min})")
        dense = set(self.dense_layers or ())
        for layer, source in self.reuse_from.items():
            if (
                not 0 <= source < layer
                or source in self.reuse_from
                or source in dense
                or layer in dense
            ):
                raise ValueError(
                    f"reuse_from: layer {layer} takes the choice of an earlier layer that makes"
                    f" one, and is none of dense_layers; it names layer {source}"
                )
        return self


class EsaConfig(AlgorithmConfig):
    """Means of keys, a new choice every 16 steps."""

    algorithm: ClassVar[str] = "ESA"

    stride: Count = 16
    min_blocks: Number = 4
    pool: Annotated[Literal["mean", "max", "norm"], BeforeValidator(word)] = "mean"
    score: Annotated[Literal["dot_mean", "dot_max", "key_max", "l2"], BeforeValidator(word)] = (
        "dot_mean"
    )
    rep_dtype: Annotated[Literal["bf16", "fp16", "int8"], BeforeValidator(word)] = "bf16"


class GsaConfig(EsaConfig):
    """Means of keys with larger windows, a new choice in every step."""

    algorithm: ClassVar[str] = "GSA"

    init_blocks: Number = 4
    local_blocks: Count = 8
    stride: Count = 1
    min_blocks: Number = 4


class GsaOnDeviceConfig(AlgorithmConfig):
    """Sign codes of keys, compared by their Hamming distance."""

    algorithm: ClassVar[str] = "GSAOnDevice"
    default_budget: ClassVar[tuple[str, Any]] = ("topk_tokens", 4096)

    init_tokens: Number | None = 64
    local_tokens: Count | None = 512
    windows_inside: Flag = True
    hash_bits: Annotated[Count, Field(le=4096, multiple_of=8)] | None = None
    hash_seed: Annotated[Number, Field(le=2**63 - 1)] = 0
    hash_weights_file: str | None = None
    reduction_heads: Annotated[Count, Field(le=128)] = 1


class KVStarConfig(AlgorithmConfig):
    """Merged and pruned keys, scored by the attention that they would get."""

    algorithm: ClassVar[str] = "KVStarMultiStep"

    init_blocks: Number = 2
    local_blocks: Count = 4
    stride: Count = 8
    prune_ratio: Share = 0.5
    merge: Annotated[Count, Field(le=4096)] = 4
    group: Annotated[Count, Field(le=64)] = 1
    average_heads: Flag = False
    score_scale: (
        Annotated[float, BeforeValidator(no_flag), Field(gt=0, allow_inf_nan=False)] | None
    ) = None


class QuestConfig(AlgorithmConfig):
    """Bounds of keys, by channel."""

    algorithm: ClassVar[str] = "Quest"


class InfLLMConfig(AlgorithmConfig):
    """A few representative keys of each block."""

    algorithm: ClassVar[str] = "InfLLM"

    rep_tokens: Annotated[Count, Field(le=256)] = 4


class PeriodicConfig(AlgorithmConfig):
    """Blocks at equal distances, whatever the query is."""

    algorithm: ClassVar[str] = "Periodic"


class RandomConfig(AlgorithmConfig):
    """Control: blocks drawn by lot."""

    algorithm: ClassVar[str] = "Random"

    seed: Annotated[Number, Field(le=2**63 - 1)] = 0


class WindowsConfig(AlgorithmConfig):
    """Control: the windows and nothing else."""

    algorithm: ClassVar[str] = "Windows"
    default_budget: ClassVar[tuple[str, Any]] = ("topk_blocks", 0)


class OracleConfig(AlgorithmConfig):
    """Control: the true attention mass of each block, from all keys."""

    algorithm: ClassVar[str] = "Oracle"


class AutoConfig(AlgorithmConfig):
    """The algorithm that is known to be best for the model and the device; only keys that all
    have."""

    algorithm: ClassVar[str] = "Auto"


class BlendLayer(Section):
    """What one check layer of Blend recomputes."""

    ratio: Share | None = None
    hkvd_threshold: (
        Annotated[float, BeforeValidator(no_flag), Field(ge=0, allow_inf_nan=False)] | None
    ) = None


class BlendConfig(Section):
    """Keys of Blend, which is no block selection."""

    algorithm: ClassVar[str] = "Blend"

    compute_meta: dict[str, BlendLayer] = Field(default_factory=dict)
    chunk_end_token_id: Number | None = None
    min_hit_blocks: Number = 16
    criterion: Annotated[Literal["k_l1", "k_l2", "k+v"], BeforeValidator(word)] = "k_l1"
    hkvd_threshold: (
        Annotated[float, BeforeValidator(no_flag), Field(ge=0, allow_inf_nan=False)] | None
    ) = None


class ReropeAlgorithmConfig(Section):
    """ReRoPE named as an algorithm; its keys stand in the section ``rerope``."""

    algorithm: ClassVar[str] = "ReRoPE"


class AlgorithmSections(Section):
    """The sections that were written, by algorithm."""

    ESA: EsaConfig | None = None
    GSA: GsaConfig | None = None
    GSAOnDevice: GsaOnDeviceConfig | None = None
    KVStarMultiStep: KVStarConfig | None = None
    Quest: QuestConfig | None = None
    InfLLM: InfLLMConfig | None = None
    Periodic: PeriodicConfig | None = None
    Random: RandomConfig | None = None
    Windows: WindowsConfig | None = None
    Oracle: OracleConfig | None = None
    Auto: AutoConfig | None = None
    Blend: BlendConfig | None = None
    ReRoPE: ReropeAlgorithmConfig | None = None


#: Class of each algorithm's keys.
ALGORITHMS: dict[str, type[Section]] = {
    cls.algorithm: cls
    for cls in (
        EsaConfig,
        GsaConfig,
        GsaOnDeviceConfig,
        KVStarConfig,
        QuestConfig,
        InfLLMConfig,
        PeriodicConfig,
        RandomConfig,
        WindowsConfig,
        OracleConfig,
        AutoConfig,
        BlendConfig,
        ReropeAlgorithmConfig,
    )
}
