"""The configuration itself: the keys, and their types, units, bounds and defaults; how it is shown.

A field's path here is the key a user writes (``deadlines.lookup_ms``). Values are checked when the
object is made and never change. Each value knows its origin (:meth:`UcmConfig.origin`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PrivateAttr,
    SecretStr,
    model_validator,
)

from ucm.config.fields import (
    HIDDEN,
    Capacity,
    Count,
    Flag,
    Milliseconds,
    Number,
    Port,
    Seconds,
    Section,
    Size,
    concealed,
    is_secret,
    no_flag,
    parse_capacity,
    plain,
    revealed,
    scheme_of,
    section_of,
    show_size,
    without_login,
    word,
)
from ucm.config.sparse import BUILT_IN, BlendConfig, Sections, algorithm_of, folded, keys_of
from ucm.config.words import (
    COMMON,
    DEFAULT_STORE,
    KNOWN_STORES,
    TIER_MODES,
    TIER_SIZES,
    TIER_UNSET,
    UNUSED,
    parse_platform,
)
from ucm.errors import ConfigError


def _verify_word(value: Any) -> Any:
    # YAML 1.1 reads a bare `on` as true and a bare `off` as false.
    if value is False or word(value) in ("off", "false", "no", "0"):
        raise ValueError(
            "verification cannot be switched off: a record that is not verified is never served"
        )
    return "on" if value is True or word(value) in ("true", "yes", "1", "paranoid") else word(value)


def _log_format(value: str | None) -> str | None:
    if value is not None:
        try:
            logging.Formatter(value)
        except ValueError as error:
            raise ValueError(f"it is no format of Python's logging: {error}") from None
    return value


class Deadlines(Section):
    """How long anything may wait. The unit is the end of the name."""

    lookup_ms: Milliseconds = 50
    load_min_ms: Milliseconds = 200
    load_max_s: Seconds = 30.0
    load_unknown_s: Seconds = 5.0
    dump_s: Seconds = 30.0
    probe_s: Seconds = 5.0
    shutdown_s: Seconds = 3.0

    @model_validator(mode="after")
    def _ordered(self) -> Deadlines:
        if self.load_min_ms > self.load_max_s * 1000:
            raise ValueError(
                f"load_min_ms ({self.load_min_ms} ms) is above load_max_s ({self.load_max_s:g} s);"
                " lower the first or raise the second"
            )
        return self


class BreakerConfig(Section):
    """When a store that fails, or has damaged records, is switched off, and for how long."""

    threshold: Annotated[Count, Field(le=1_000_000)] = 4
    window_s: Seconds = 60.0
    cool_down_s: Seconds = 10.0
    damaged_per_minute: Annotated[Count, Field(le=1_000_000)] = 16


DEADLINE_KEYS: tuple[str, ...] = tuple(Deadlines.model_fields)


class IdentityConfig(Section):
    """What the identity of stored blocks is made from."""

    weights: Annotated[str, Field(pattern=r"^(full|sampled|declared:.*\S.*)$", max_length=1024)] = (
        "full"
    )

    @property
    def declared(self) -> str | None:
        """The text that stands for the weights, when the user declares them."""
        return (
            self.weights.partition(":")[2].strip() if self.weights.startswith("declared:") else None
        )


class LogConfig(Section):
    """The logger ``ucm``."""

    level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
        BeforeValidator(lambda value: word(value).upper() if isinstance(value, str) else value),
    ] = "INFO"
    file: str | None = None
    format: Annotated[str | None, AfterValidator(_log_format)] = None


class MetricsConfig(Section):
    """Where metrics go."""

    enabled: Flag = True
    port: Port | None = None
    config_path: str | None = None


class ProfileConfig(Section):
    """A profile of ucm itself, as a Chrome trace."""

    enabled: Flag = False
    output: str = "ucm-profile.json"


class SparseConfig(Section):
    """Sparse attention: which algorithm, and the keys of each."""

    enabled: Flag = False
    type: str | None = None
    module_path: str | None = None
    config: Sections = Field(default_factory=dict)

    @property
    def blend(self) -> BlendConfig | None:
        """The keys of Blend where that is chosen, which is no block selection."""
        found = self.settings
        return found if isinstance(found, BlendConfig) else None

    @property
    def selects(self) -> bool:
        """Whether blocks are selected."""
        return self.enabled and self.blend is None

    @property
    def settings(self) -> Section | None:
        """The keys of the chosen algorithm; None without one, and for a user's own method."""
        if not self.enabled or self.type is None:
            return None
        if self.module_path is not None and folded(self.type) in BUILT_IN:
            return None  # a class of that name
        algorithm = algorithm_of(self.type)
        return None if algorithm is None else self.section(algorithm)

    def section(self, algorithm: str) -> Section:
        """The keys of an algorithm, its defaults where none are written."""
        return self.config[algorithm] if algorithm in self.config else keys_of(algorithm)()


class ReropeConfig(Section):
    """Positions beyond the trained length."""

    enabled: Flag = False
    window: Count = 32768
    training_length: Count = 32768
    log_scale: Flag = False


if TYPE_CHECKING:

    class _TierKeys(Section):
        """Those that are read here by name."""

        storage_backends: tuple[str, ...] = ()
        storage_policy: str = ""
        tiers: tuple[tuple[str, str], ...] = ()
        layout: str = ""
        codec: str = ""

else:
    _TierKeys = section_of("_TierKeys", COMMON.options, COMMON.defaults)


class StoreSettings(_TierKeys):
    """Keys of every store of ucm: those of the default kind of tier, and those of the engine."""

    #: None: for two steps of the engine (``ucm_store::builder``).
    staging_capacity: Annotated[Size, Field(ge=1 << 20)] | None = None
    transfer: Annotated[Literal["auto", "dma", "sm", "staging"], BeforeValidator(word)] = "auto"
    verify: Annotated[Literal["on"], BeforeValidator(_verify_word)] = "on"
    encryption_key_file: str | None = None
    tenant_quota: Annotated[Capacity, BeforeValidator(parse_capacity)] | None = None


#: Sections of the keys of tiers.
_TIER_SECTIONS: tuple[str, ...] = tuple(
    key for key, default in COMMON.defaults.items() if isinstance(default, dict)
)
#: Sections that every store of ucm has.
STORE_SECTIONS: tuple[str, ...] = ("deadlines", "breaker", *_TIER_SECTIONS)


class Stage(StoreSettings):
    """One stage of a pipeline, topmost first."""

    store: str
    write_policy: Annotated[Literal["through", "back", "never"], BeforeValidator(word)] = "through"
    options: dict[str, Any] = Field(default_factory=dict, repr=False)

    @model_validator(mode="after")
    def _one_key_for_all(self) -> Stage:
        if self.encryption_key_file is not None:
            raise ValueError(
                "encryption_key_file stands beside the pipeline, not in a stage: every stage below"
                " memory is encrypted"
            )
        if self.tenant_quota is not None:
            raise ValueError(
                "tenant_quota stands beside the pipeline, not in a stage: it holds in every one"
                " below memory"
            )
        return self

    def written(self) -> dict[str, Any]:
        """The stage as in a configuration: given keys, and those of its store alone."""
        given = {
            key: plain(getattr(self, key))
            for key in self.model_fields_set - {"store", "options", *UNUSED}
        }
        options = {key: plain(value) for key, value in self.options.items()}
        return {"type": self.store, **given, **options}


class UcmConfig(StoreSettings):
    """The whole configuration, checked. ``str()`` of it is :meth:`describe`."""

    enabled: Flag = True
    ucm_connector_name: str = DEFAULT_STORE
    ucm_connector_module_path: str | None = None
    ucm_connector_config: Annotated[dict[str, Any], BeforeValidator(concealed)] = Field(
        default_factory=dict, repr=False
    )
    store_pipeline: tuple[Stage, ...] = ()
    options: dict[str, Any] = Field(default_factory=dict, repr=False)
    kv_connector: Literal["UCMConnector", "UCMDirectConnector", "UCMBlendConnector"] = (
        "UCMConnector"
    )
    use_layerwise: Flag = False
    block_size: Annotated[Size, Field(ge=1)] | None = None
    hash_method: Annotated[Literal["sha256", "blake3", "md5"], BeforeValidator(word)] = "sha256"
    min_hit_tokens: Number = 0
    admission: Annotated[Literal["measured", "always", "never"], BeforeValidator(word)] = "measured"
    admission_share: Annotated[float, BeforeValidator(no_flag), Field(gt=0, le=1)] = 0.8
    tenant_key_file: str | None = None
    dump: Annotated[Literal["all", "prompt", "none"], BeforeValidator(word)] = "all"
    min_dump_tokens: Number = 0
    hold_share: Annotated[float, BeforeValidator(no_flag), Field(ge=0, le=1)] = 0.125
    window_records: Annotated[Literal["all", "boundaries"], BeforeValidator(word)] = "all"
    consumer_dump: Flag = False
    pd_wait_ms: Annotated[Number, Field(le=3_600_000)] = 2000
    on_reset: Annotated[Literal["keep", "forget"], BeforeValidator(word)] = "keep"
    enable_prefix_cache: Flag = True
    require_store: Flag = False
    load_only_first_rank: Flag = False
    platform: Annotated[str, BeforeValidator(parse_platform)] | None = None
    debug: Flag = False
    block_trace: str | None = None
    deadlines: Deadlines = Deadlines()
    breaker: BreakerConfig = BreakerConfig()
    identity: IdentityConfig = IdentityConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
    profile: ProfileConfig = ProfileConfig()
    sparse: SparseConfig = SparseConfig()
    rerope: ReropeConfig = ReropeConfig()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _warnings: tuple[str, ...] = PrivateAttr(default=())
    _problems: tuple[str, ...] = PrivateAttr(default=())
    _alternatives: tuple[UcmConfig, ...] = PrivateAttr(default=())

    def with_findings(
        self,
        *,
        origins: dict[str, str],
        warnings: tuple[str, ...] = (),
        problems: tuple[str, ...] = (),
        alternatives: tuple[UcmConfig, ...] = (),
    ) -> UcmConfig:
        """This configuration with what the loader found out about it."""
        config = self.model_copy()
        config._origins, config._warnings, config._problems = dict(origins), warnings, problems
        config._alternatives = alternatives
        return config

    @property
    def origins(self) -> dict[str, str]:
        """The origin of each value that was set."""
        return dict(self._origins)

    @property
    def alternatives(self) -> tuple[UcmConfig, ...]:
        """The further entries of ``ucm_connectors``, in order: each is used when those before it
        are not available. Only what concerns the store is taken from them."""
        return self._alternatives

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was read but does nothing, one sentence each, with what to write instead."""
        return self._warnings

    @property
    def problems(self) -> tuple[str, ...]:
        """Why this configuration cannot run in this version, one sentence each."""
        return self._problems

    @property
    def user_store(self) -> bool:
        """Whether the store is a user's own class rather than one of ucm's."""
        path = self.ucm_connector_module_path
        return path is not None or self.ucm_connector_name not in KNOWN_STORES

    @property
    def root(self) -> str | None:
        """The first of :attr:`roots`, None where there is none."""
        return next(iter(self.roots), None)

    @property
    def roots(self) -> list[str]:
        """The directories that blocks are kept in, as far as they are configured here."""
        of_stages = [root for stage in self.store_pipeline for root in stage.storage_backends]
        return [root for root in (*of_stages, *self.storage_backends) if not scheme_of(root)]

    def origin(self, key: str) -> str:
        """The origin of the value of ``key`` (dotted); ``default`` when it was not set."""
        return self._origins.get(key, "default")

    def store_config(self) -> dict[str, Any]:
        """What the store's constructor gets, before the connector adds sizes, identity and part.

        One of ucm's stores gets every key it has. A user's own store gets its
        ``ucm_connector_config`` as written, its secrets readable, and those keys of ucm's stores
        that were set outside it.
        """
        keys = [key for key in StoreSettings.model_fields if key not in STORE_SECTIONS]
        common = {key: plain(getattr(self, key)) for key in keys}
        sections = {name: getattr(self, name).model_dump() for name in STORE_SECTIONS}
        if not self.user_store:
            stages = [stage.written() for stage in self.store_pipeline]
            return {
                **{key: value for key, value in common.items() if key not in UNUSED},
                **{key: plain(value) for key, value in self.options.items()},
                **({"store_pipeline": stages} if stages else {}),
                **sections,
            }
        config = dict(self.ucm_connector_config)
        config |= {key: value for key, value in common.items() if self.origin(key) != "default"}
        config |= {
            name: keys
            for name, keys in sections.items()
            if any(self.origin(f"{name}.{key}") != "default" for key in keys)
        }
        return dict(revealed(config))

    def describe(self) -> list[str]:
        """The effective configuration, one line per key with its origin, secrets hidden; of the
        alternatives, what differs."""
        lines = describe_lines(self, self._origins)
        for number, other in enumerate(self._alternatives, 2):
            differing = [ln for ln in describe_lines(other, other._origins) if ln not in lines]
            lines += [f"alternative {number}: {line}" for line in differing]
        return lines

    def require_built(self) -> None:
        """Raise :class:`~ucm.errors.ConfigError` if this version lacks something named."""
        if self.enabled and self._problems:
            raise ConfigError("; ".join(self._problems))

    def __str__(self) -> str:
        return "\n".join(self.describe())


#: Keys whose numbers are bytes.
SIZES = TIER_SIZES | {"staging_capacity"}

#: Where the sections of sparse algorithms stand; of these only what was written or has a default is
#: shown.
SPARSE_SECTIONS = "sparse.config."

#: What a default of "nothing given" means, for keys where that says more than `null`.
DEFAULT_TEXT: dict[str, str] = {
    **TIER_UNSET,
    "block_size": "vLLM's",
    "staging_capacity": "for two steps of the engine",
    "platform": "the one vLLM runs on",
    "log.format": "built in",
    **dict.fromkeys(
        (
            *("ucm_connector_module_path", "sparse.module_path", "store_pipeline", "metrics.port"),
            *("metrics.config_path", "sparse.type", "log.file"),
            *("block_trace", "tenant_key_file", "encryption_key_file", "tenant_quota"),
        ),
        "none",
    ),
}


def show(name: str, value: Any) -> str:
    """A value as text, with what must not be printed replaced by ``<hidden>``."""
    return json.dumps(_shown(name, value), ensure_ascii=False, default=str)


def _shown(name: str, value: Any) -> Any:
    if isinstance(value, SecretStr) or (value is not None and is_secret(name)):
        return HIDDEN
    if isinstance(value, Capacity):
        return str(value)
    if name in SIZES and isinstance(value, int):
        return show_size(value)
    if name in TIER_MODES and isinstance(value, int):
        return f"{value:04o}"
    if isinstance(value, BaseModel):
        # Inside a list (stages): only what was written, the rest is default.
        given = [key for key in type(value).model_fields if key in value.model_fields_set]
        return {key: _shown(key, getattr(value, key)) for key in given}
    if isinstance(value, Mapping):
        return {str(key): _shown(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(name, item) for item in value]
    if isinstance(value, str):
        return without_login(value)
    return value


def flatten(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf, in the order of the model."""
    for key in type(model).model_fields:
        value = getattr(model, key)
        if isinstance(value, BaseModel):
            yield from flatten(value, f"{prefix}{key}.")
        elif f"{prefix}{key}." == SPARSE_SECTIONS:
            for name, section in value.items():
                yield from flatten(section, f"{SPARSE_SECTIONS}{name}.")
        elif value is not None or not prefix.startswith(SPARSE_SECTIONS):
            yield f"{prefix}{key}", value


def describe_lines(model: BaseModel, origins: Mapping[str, str]) -> list[str]:
    """``key = value  (origin)`` for every leaf."""
    lines = []
    for key, value in flatten(model):
        if key in {"options", "ucm_connector_config"} and isinstance(value, Mapping):
            for name, item in value.items():
                origin = origins.get(f"{key}.{name}", origins.get(key, "default"))
                shown = name if key == "options" else f"{key}.{name}"
                lines.append(f"{shown} = {show(name, item)}  ({origin})")
            continue
        unset = value is None or value == ()
        text = DEFAULT_TEXT[key] if unset and key in DEFAULT_TEXT else show(key, value)
        lines.append(f"{key} = {text}  ({origins.get(key, 'default')})")
    return lines
