"""What a configuration may not combine, and what this version has not got: each refused with a
sentence. A part that is built removes its line here."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence

from ucm.config.fields import scheme_of, without_login
from ucm.config.model import Stage, StoreSettings, UcmConfig
from ucm.config.sparse import algorithms
from ucm.config.words import (
    BUILT_STORES,
    COMMON,
    IN_SEGMENTS,
    KNOWN_STORES,
    STORE_OF_SCHEME,
    STORES,
    hint,
    instead_of,
    meant_store,
    needs_address,
    needs_directory,
    schemes_of,
    why_not_alone,
)

#: Most directories side by side.
MAX_ROOTS = 16
#: Most stages of one pipeline; those that only stand before another do not count.
MAX_STAGES = 4
#: Seconds that a file system has to resolve a directory's path.
ANSWER_S = 2.0


def is_stage(store: str) -> bool:
    """Whether the core can make a stage of this store."""
    return store in STORES and STORES[store].kind.role in ("medium", "layer")


def is_layer(stage: Stage) -> bool:
    """Whether it keeps nothing and stands before the stage below it."""
    return is_stage(stage.store) and STORES[stage.store].kind.role == "layer"


def word_of(store: str) -> str:
    """The word of a stage as it stands in ``store_pipeline``."""
    return STORES[store].word.capitalize() if store in STORES else store


def media(stages: Sequence[Stage]) -> list[Stage]:
    """The stages that keep blocks."""
    return [stage for stage in stages if not is_layer(stage)]


def with_codecs(stages: Sequence[Stage], settings: StoreSettings) -> list[Stage]:
    """The stages that keep blocks, each with what the word before it stands for: ``Compress`` for a
    codec. The codec is that of the stage, else of the word, else what is written beside the
    pipeline; else the word's default."""
    kept: list[Stage] = []
    words: list[Stage] = []
    for stage in stages:
        if is_layer(stage):
            words.append(stage)
            continue
        update = {}
        for word in words:
            for key, meant in STORES[word.store].fixed.items():
                said = [getattr(of, key) for of in (stage, word) if key in of.model_fields_set]
                every = (*said, getattr(settings, key))
                update[key] = next((one for one in every if one != COMMON.defaults[key]), meant)
        kept.append(stage.model_copy(update=update))
        words = []
    return kept


def _is_memory(stage: Stage) -> bool:
    return is_stage(stage.store) and STORES[stage.store].kind.memory


def _is_file(stage: Stage) -> bool:
    return is_stage(stage.store) and needs_directory(stage.store)


def _needs_place(stage: Stage) -> bool:
    """Whether it keeps blocks in a directory or at an address that must be named."""
    return _is_file(stage) or (is_stage(stage.store) and needs_address(stage.store))


def _with_addresses(
    stages: Sequence[Stage], common: Sequence[str]
) -> tuple[Sequence[Stage], Sequence[str]]:
    """Stages whose address is optional (Mooncake) get those of their scheme; and the rest."""
    given: set[str] = set()
    placed = []
    for stage in stages:
        if is_stage(stage.store) and not _needs_place(stage) and not stage.storage_backends:
            own = tuple(place for place in common if scheme_of(place) in schemes_of(stage.store))
            given.update(own)
            stage = stage.model_copy(update={"storage_backends": own}) if own else stage
        placed.append(stage)
    return placed, [place for place in common if place not in given]


def with_roots(stages: Sequence[Stage], common: Sequence[str]) -> tuple[Stage, ...]:
    """The stages with the places written beside the pipeline: one for each stage that needs one and
    has none of its own, and all of them for one such stage alone."""
    stages, common = _with_addresses(stages, common)
    without = [
        number
        for number, stage in enumerate(stages)
        if _needs_place(stage) and not stage.storage_backends
    ]
    shares = [tuple(common)] if len(without) == 1 and common else [(root,) for root in common]
    if len(without) != len(shares):
        return tuple(stages)
    given = dict(zip(without, shares, strict=True))
    return tuple(
        stage.model_copy(update={"storage_backends": given[number]}) if number in given else stage
        for number, stage in enumerate(stages)
    )


def pipeline_problems(stages: Sequence[Stage], settings: StoreSettings) -> Iterator[str]:
    """Why these stages make no pipeline, one sentence each; ``settings`` stand beside them."""
    unknown = [stage for stage in stages if not is_stage(stage.store)]
    for stage in unknown:
        if stage.store in KNOWN_STORES:
            instead = instead_of(stage.store) or "leave it out"
            yield f"{stage.store} as a stage of a pipeline is not built yet; {instead}"
        else:
            known = [word_of(store) for store in STORES if is_stage(store)]
            yield (
                f'"{stage.store}" is no stage that ucm has{_stage_hint(stage.store, known)} '
                f"(stages: {', '.join(known)}, and Empty at the end)"
            )
    if unknown:
        return
    yield from _order(stages)
    yield from _codecs(stages, settings)
    yield from _policies(media(stages))
    yield from _roots(stages, settings)


def _stage_hint(word: str, known: Sequence[str]) -> str:
    meant = meant_store(word)
    stage = word_of(meant) if meant is not None else ""
    return f'; did you mean "{stage}"?' if stage in known else hint(word, known)


def _order(stages: Sequence[Stage]) -> Iterator[str]:
    kept = media(stages)
    if len(kept) > MAX_STAGES:
        yield f"a pipeline of {len(kept)} stages is too long; {MAX_STAGES} are the most"
    caches = [number for number, stage in enumerate(kept) if _is_memory(stage)]
    if len(caches) > 1:
        yield (
            "a pipeline with two Cache stages keeps blocks in memory twice; write one Cache of"
            " their sizes together"
        )
    elif caches and caches[0] > 0:
        above = word_of(kept[caches[0] - 1].store)
        yield (
            f"Cache stands below {above}; memory is faster than any file, so write it first:"
            f" Cache|{above}"
        )


def _codecs(stages: Sequence[Stage], settings: StoreSettings) -> Iterator[str]:
    for stage, below in zip(stages, [*stages[1:], None], strict=True):
        if not is_layer(stage):
            continue
        if "write_policy" in stage.model_fields_set:
            yield "write_policy of Compress: it keeps nothing; write it in the stage below"
        if below is None:
            yield (
                "Compress is the last stage; write below it the stage it compresses for:"
                " Compress|Pc"
            )
        elif is_layer(below):
            yield "Compress stands twice before one stage; once is enough"
        elif _is_memory(below):
            yield (
                "Compress stands before Cache; memory is faster than any codec, so write it below:"
                " Cache|Compress|Pc"
            )
        elif "codec" not in STORES[below.store].kind.options:
            yield (
                f"Compress stands before {word_of(below.store)}, which has no codec; leave"
                " Compress out"
            )
        elif any("codec" in of.model_fields_set and of.codec == "off" for of in (stage, below)):
            yield (
                f"Compress stands before {word_of(below.store)} with codec: off; leave one of the"
                " two out"
            )
    for stage in with_codecs(stages, settings):
        of_stage = stage.codec if "codec" in stage.model_fields_set else settings.codec
        layout = stage.layout if "layout" in stage.model_fields_set else settings.layout
        if "codec" in STORES[stage.store].kind.options:
            yield from codec_problems(stage.store, of_stage, layout)
        elif "codec" in stage.model_fields_set and stage.codec != "off":
            yield (
                f"codec: {stage.codec} of {word_of(stage.store)}, which has none; write it in a"
                " stage of segments"
            )


def codec_problems(store: str, codec: str, layout: str | None) -> Iterator[str]:
    """Why this store cannot have this codec."""
    if codec != "off" and layout == "file" and store not in IN_SEGMENTS:
        yield (
            f"{word_of(store)} has codec: {codec} and layout: file; compressed blocks live in"
            " segments only, as the lengths of block files are fixed: write layout: segment, or"
            " leave the codec (or Compress) out"
        )


def _policies(stages: Sequence[Stage]) -> Iterator[str]:
    names = [word_of(stage.store) for stage in stages]
    for number, stage in enumerate(stages):
        if stage.write_policy != "back":
            continue
        if number == 0:
            yield (
                f"write_policy: back of {names[0]}, the top stage: there is none above it that"
                " could give blocks up"
            )
        elif not _is_memory(stages[number - 1]):
            yield (
                f"write_policy: back of {names[number]}: only Cache gives blocks up to the stage"
                f" below it, and {names[number - 1]} stands there; write through"
            )
    if all(stage.write_policy != "through" for stage in stages):
        yield "no stage of the pipeline has write_policy: through, so no block would ever be stored"


def place_problems(store: str, places: Sequence[str]) -> Iterator[str]:
    """Why this store cannot keep blocks at these places."""
    schemes = schemes_of(store)
    if needs_address(store) and not places:
        yield (
            f"{store} is given no address to keep blocks at; write storage_backends:"
            f" {schemes[0]}://... (kv_connector_extra_config or file), or set UCM_STORAGE_PATH"
        )
    for place in places:
        scheme = scheme_of(place)
        if scheme in schemes or not (scheme or schemes):
            continue
        wanted = " or ".join(f"{known}://..." for known in schemes) or "a local directory"
        owner = STORE_OF_SCHEME.get(scheme)
        instead = f", or name {owner}, which takes it" if owner else ""
        yield f"{without_login(place)} is no place for {store}; give {wanted}{instead}"


def _roots(stages: Sequence[Stage], settings: StoreSettings) -> Iterator[str]:
    seen: dict[str, str] = {}
    stages, common = _with_addresses(stages, settings.storage_backends)
    stages_placed = with_roots(stages, common)
    placed = [stage for stage in stages_placed if _needs_place(stage) or stage.storage_backends]
    missing = [word_of(stage.store) for stage in placed if not stage.storage_backends]
    own = all(stage.storage_backends for stage in stages if _needs_place(stage))
    if own and common:
        yield (
            f"storage_backends names {_shown(common)} beside a pipeline whose stages all have a "
            "directory of their own; leave one of the two out"
        )
    if missing:
        given = len(common)
        yield (
            f"the pipeline has {len(missing)} stages without a directory ({', '.join(missing)}) and"
            f" storage_backends names {given or 'none'}; give each its own (path: /some/directory"
            " in the stage), or name in storage_backends as many as there are such stages, top"
            " first"
        )
    for stage in placed:
        if stage.storage_backends:
            yield from place_problems(stage.store, stage.storage_backends)
        if _is_file(stage):
            yield from root_problems(settings, stage.storage_backends, stage)
    # Several addresses are nodes of one cluster, named by the first.
    roots = [
        root
        for stage in placed
        for root in stage.storage_backends[: None if _is_file(stage) else 1]
    ]
    for root in roots:
        real = real_path(root) if len(roots) > 1 and not scheme_of(root) else root
        if real in seen:
            yield (
                f"two stages of the pipeline have the same directory {without_login(root)}; give"
                " each its own"
            )
        seen[real] = root


def root_problems(
    settings: StoreSettings, roots: Sequence[str], stage: Stage | None = None
) -> Iterator[str]:
    """What is wrong with the directories of a store, or of a stage of a pipeline."""
    if len(roots) > MAX_ROOTS:
        yield f"storage_backends names {len(roots)} directories; {MAX_ROOTS} are the most"
    said, policy = (
        getattr(stage if stage is not None and key in stage.model_fields_set else settings, key)
        for key in ("tiers", "storage_policy")
    )
    if not said or (
        stage is not None and "tiers" not in stage.model_fields_set and len(roots) == 1
    ):
        return
    if policy != "tiered":
        yield (
            f"tiers says how fast directories are, and storage_policy is {policy}; write"
            " storage_policy: tiered, or leave tiers out"
        )
    for directory, heat in said:
        if directory not in roots:
            yield (
                f"tiers calls {directory} {heat}, which is none of the directories"
                f" ({', '.join(roots)}); name one of these, or add it to storage_backends"
            )


def _shown(places: Sequence[str]) -> str:
    return ", ".join(map(without_login, places))


def real_path(path: str) -> str:
    """The path without links, or as written where the file system does not answer in time."""
    found: list[str] = []
    resolving = threading.Thread(
        target=lambda: found.append(os.path.realpath(path)), name="ucm-realpath", daemon=True
    )
    resolving.start()
    resolving.join(ANSWER_S)
    return found[0] if found else path


def problems_of(config: UcmConfig) -> list[str]:
    """Why the configuration cannot run, one sentence each."""
    return [*_store_problems(config), *_connector_problems(config)]


def _store_problems(config: UcmConfig) -> Iterator[str]:
    if config.user_store:
        if config.encryption_key_file is not None:
            yield (
                "encryption_key_file is for ucm's own stores: a store of your own has to encrypt by"
                " itself; leave the key out, or put it into its ucm_connector_config"
            )
        if config.tenant_quota is not None:
            yield (
                "tenant_quota is for ucm's own stores: a store of your own has to bound its tenants"
                " by itself; leave the key out"
            )
        return
    name = config.ucm_connector_name
    options = [config.options] if name == "UcmFakeStore" else []
    options += [one.options for one in config.store_pipeline if one.store == "UcmFakeStore"]
    if not all(option.get("allow_wrong_tokens") for option in options):
        yield (
            "UcmFakeStore loads nothing, so the engine would answer with wrong tokens; it is for"
            " tests: write allow_wrong_tokens: true there, and use UcmPosixStore everywhere else"
        )
    if why := why_not_alone(name):
        yield why
    elif name not in BUILT_STORES:
        stages = "|".join(stage.store for stage in config.store_pipeline)
        what = f"{name} ({stages})" if stages else name
        instead = instead_of(name) or "use UcmPosixStore (storage_backend: posix) on a directory"
        yield f"{what} is not built yet; {instead}"
    elif config.store_pipeline:
        yield from pipeline_problems(config.store_pipeline, config)
    elif not needs_directory(name):
        if schemes_of(name):
            yield from place_problems(name, config.storage_backends)
    elif why := next(place_problems(name, config.storage_backends), ""):
        yield why
    elif not config.storage_backends:
        yield (
            "no directory is given to keep blocks in; write storage_backends: /some/directory "
            "(kv_connector_extra_config or file), or set UCM_STORAGE_PATH"
        )
    else:
        yield from root_problems(config, config.storage_backends)
        yield from codec_problems(name, config.codec, config.layout)


def _connector_problems(config: UcmConfig) -> Iterator[str]:
    if config.use_layerwise:
        yield "use_layerwise: true is not built yet; leave it out, blocks are then moved whole"
    if config.sparse.enabled:
        yield from _sparse_problems(config)
    if config.rerope.enabled and config.sparse.enabled:
        yield (
            "rerope and sparse attention or Blend do not work together: these read rotated keys,"
            " and with rerope the cache has unrotated ones; leave out one of the two"
        )
    if config.rerope.enabled and config.rerope.log_scale and config.rerope.training_length < 2:
        yield "rerope.log_scale: rerope.training_length is 1; write the length of the training"


def _sparse_problems(config: UcmConfig) -> Iterator[str]:
    if config.sparse.type is None:
        known = ", ".join(algorithms())
        yield f"sparse.enabled: true names no algorithm; write sparse.type: one of {known}"
    elif config.sparse.type == "ReRoPE":
        yield (
            "sparse.type: ReRoPE chooses no blocks; write rerope: {window: ..., training_length:"
            " ...} instead, or set VLLM_USE_REROPE=true"
        )
    elif config.dump == "none" and getattr(config.sparse.settings, "offload", False):
        yield (
            "dump: none stores nothing, and offload needs stored blocks; leave out dump, or offload"
        )
