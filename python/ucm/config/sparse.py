"""Keys of the algorithms of sparse attention: those that all have, and the registry of the
sections.

A selector's own keys and defaults stand in its class, which registers them
(:func:`ucm.sparse.selector.register_selector`). Of ucm's own selectors this module knows the names
and the modules; a module is imported when its algorithm is first named. ``docs/sparse-keys.md``
says what each key means. Windows written in tokens become blocks where the block size is known: in
:mod:`ucm.sparse.policy`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    create_model,
    model_validator,
)

from ucm.config.fields import Count, Flag, Milliseconds, Number, Section, no_flag, word
from ucm.errors import ConfigError

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
    the last choice before it (the original's skip_layers)."""
    if isinstance(value, Mapping):
        try:
            return {int(layer): int(source) for layer, source in value.items()}
        except (TypeError, ValueError):
            raise ValueError("it maps layers to earlier layers, e.g. {3: 2}") from None
    flags = isinstance(value, list | tuple) and all(isinstance(item, bool) for item in value)
    if flags and len(value) <= MAX_LAYERS:
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


@dataclass(frozen=True, slots=True)
class Preset:
    """What is known for models whose name holds :attr:`name`."""

    name: str
    topk_tokens: int
    #: Requests with fewer tokens are dense.
    min_tokens: int
    #: Layers without selection.
    dense_layers: tuple[int, ...]


class AlgorithmConfig(Section):
    """Keys that every algorithm of block selection has."""

    #: Its name: for the log, and by which its selector is found.
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
    #: Settings known for some models, from the most to the least special name.
    presets: ClassVar[tuple[Preset, ...]] = ()
    #: Whether ``min_blocks`` is the least budget, and not the length from which blocks are chosen.
    min_blocks_is_budget: ClassVar[bool] = False

    @property
    def budget(self) -> tuple[str, Any]:
        """The one key that says how many blocks are chosen, and its value."""
        given = self._budgets()
        return given[0] if given else self.default_budget

    def _budgets(self) -> list[tuple[str, Any]]:
        names = ("ratio", "topk_blocks", "topk_tokens", "score_mass")
        return [(name, getattr(self, name)) for name in names if getattr(self, name) is not None]

    def window(self, which: Literal["init", "local"], block_size: int) -> int:
        """Blocks of a window, for blocks of ``block_size`` tokens; tokens are rounded up."""
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
            if not 0 <= source < layer or {source, layer} & dense or source in self.reuse_from:
                raise ValueError(
                    f"reuse_from: layer {layer} takes the choice of an earlier layer that makes"
                    f" one, and is none of dense_layers; it names layer {source}"
                )
        return self


class AutoConfig(AlgorithmConfig):
    """The algorithm that is known to be best for the model and the device."""

    algorithm: ClassVar[str] = "Auto"


class UncheckedConfig(AlgorithmConfig):
    """Keys of an algorithm whose class cannot be read here, because PyTorch is missing."""

    model_config = ConfigDict(extra="allow")


Threshold = Annotated[float, BeforeValidator(no_flag), Field(ge=0, allow_inf_nan=False)]


_Text = Annotated[str, Field(min_length=1)]
_Tokens = Annotated[tuple[int, ...], Field(min_length=1)]


class BlendLayer(Section):
    """What one check layer of Blend recomputes."""

    ratio: Share | None = None
    hkvd_threshold: Threshold | None = None


class BlendConfig(Section):
    """Keys of Blend, which is no block selection."""

    algorithm: ClassVar[str] = "Blend"

    select: Annotated[Literal["union", "query", "epic", "hkvd"], BeforeValidator(word)] = "union"
    ratio: Annotated[float, BeforeValidator(no_flag), Field(ge=0, le=1, allow_inf_nan=False)] = 0.15
    head_tokens: Number = 2
    question_tokens: Count = 64
    compute_meta: dict[str, BlendLayer] = Field(default_factory=dict)
    criterion: Annotated[Literal["k_l1", "k_l2", "k+v"], BeforeValidator(word)] = "k_l1"
    hkvd_threshold: Threshold | None = None
    separators: tuple[_Text | _Tokens, ...] = ()
    chunk_end_token_id: Number | None = None
    chunk_size: Count = 256
    chunk_alone: bool = False
    min_hit_blocks: Number = 16

    @model_validator(mode="before")
    @classmethod
    def _rule(cls, given: Any) -> Any:
        """Keys of one rule name it, as in the original, which has no other."""
        keys = [key for key in ("compute_meta", "criterion", "hkvd_threshold") if key in given]
        if keys and given.get("select", "hkvd") != "hkvd":
            raise ValueError(
                f"{', '.join(keys)} is of the rule hkvd; write select: hkvd, or leave it out"
            )
        return {**given, "select": "hkvd"} if keys else given


class ReropeAlgorithmConfig(Section):
    """ReRoPE named as an algorithm; its keys stand in the section ``rerope``."""

    algorithm: ClassVar[str] = "ReRoPE"


# The registry
# --------------------------------------------------------------------------------------------------

#: Algorithm of ucm's own -> the module that registers it.
_MODULES: dict[str, str] = {
    "ESA": "ucm.sparse.selectors.mean_k",
    "GSA": "ucm.sparse.selectors.mean_k",
    "GSAOnDevice": "ucm.sparse.selectors.hash",
    "KVStarMultiStep": "ucm.sparse.selectors.kvstar",
    "Quest": "ucm.sparse.selectors.quest",
    "InfLLM": "ucm.sparse.selectors.infllm",
    "Periodic": "ucm.sparse.selectors.periodic",
    "Random": "ucm.sparse.selectors.periodic",
    "Windows": "ucm.sparse.selectors.periodic",
    "Oracle": "ucm.sparse.selectors.oracle",
}

#: Algorithm -> class of its keys, as far as it was named or registered.
_SECTIONS: dict[str, type[Section]] = {
    cls.algorithm: cls for cls in (AutoConfig, BlendConfig, ReropeAlgorithmConfig)
}

#: Spelling in lower case without punctuation -> algorithm.
_SPELLINGS: dict[str, str] = {
    name.lower(): name for name in (*_MODULES, "Auto", "Blend", "ReRoPE")
} | {"kvstar": "KVStarMultiStep"}

#: The spellings that also name a section at the top of a configuration: those of ucm's own.
BUILT_IN: frozenset[str] = frozenset(_SPELLINGS)


def algorithms() -> tuple[str, ...]:
    """The names of all algorithms, ucm's own first."""
    return tuple(dict.fromkeys(_SPELLINGS.values()))


def folded(name: str) -> str:
    """A name in the form in which spellings are compared."""
    return name.lower().replace("-", "").replace("_", "")


def algorithm_of(name: str) -> str | None:
    """The algorithm of that name, however it is spelled; None when there is none."""
    return _SPELLINGS.get(folded(name))


def chooses_blocks(algorithm: str) -> bool:
    """Whether an algorithm is one of block selection: Blend and ReRoPE are not."""
    return algorithm not in (BlendConfig.algorithm, ReropeAlgorithmConfig.algorithm)


def keys_of(algorithm: str) -> type[Section]:
    """Class of the keys of an algorithm, one of :func:`algorithms`. Where PyTorch is missing, which
    selectors need, keys are taken as they are (:class:`UncheckedConfig`)."""
    if algorithm not in _SECTIONS:
        try:
            importlib.import_module(_MODULES[algorithm])
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            return _named(UncheckedConfig, algorithm)
    return _SECTIONS[algorithm]


def register_keys(
    algorithm: str, keys: type[AlgorithmConfig] | None = None, aliases: Sequence[str] = ()
) -> type[AlgorithmConfig]:
    """Make the section of a selector known to the configuration, under its name and ``aliases``;
    returns its class. ``keys``: class of its keys; None: those that all have, or those of the
    selector of that name that it replaces. Raises :class:`~ucm.errors.ConfigError` for a name that
    means another algorithm."""
    for name in (algorithm, *aliases):
        if algorithm_of(name) not in (None, algorithm):
            raise ConfigError(
                f'the sparse algorithm "{algorithm}" cannot be registered: "{name}" means'
                f" {algorithm_of(name)}"
            )
    if algorithm in _MODULES:  # what is replaced must not register itself later
        importlib.import_module(_MODULES[algorithm])
    replaced = cast("type[AlgorithmConfig]", _SECTIONS.get(algorithm, AlgorithmConfig))
    section = _named(replaced if keys is None else keys, algorithm)
    _SECTIONS[algorithm] = section
    _SPELLINGS.update({folded(name): algorithm for name in (algorithm, *aliases)})
    return section


def _named(keys: type[AlgorithmConfig], algorithm: str) -> type[AlgorithmConfig]:
    """The class, or one derived from it, by whose name the algorithm is found."""
    if keys.algorithm == algorithm:
        return keys
    section = create_model(f"{algorithm}Config", __base__=keys, __doc__=keys.__doc__)
    section.algorithm = algorithm
    return section


def _sections(value: Any) -> Any:
    """Keys by algorithm, as the section of each."""
    if not isinstance(value, Mapping):
        return value
    fields: dict[str, Any] = {name: (keys_of(name), ...) for name in value}
    return dict(create_model("Sections", __base__=Section, **fields)(**value))


#: The sections that were written, by algorithm.
Sections = Annotated[dict[str, SerializeAsAny[Section]], BeforeValidator(_sections)]
