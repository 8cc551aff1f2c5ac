"""Builds the scheduler side or the worker side from vLLM's configuration and ours, or says why the
cache stays off.

One reason needs care: whether a request may continue from blocks that another request computed.
vLLM sets ``enable_prefix_caching`` to false where it may not, over the user's own setting and in
several places: while it makes the configuration, before it makes the scheduler, and in a worker
while it builds the layers. The flag alone does not distinguish these from a user's choice, with
which ucm still works. :func:`why_not_reusable` decides; ``tests/vllm_unit/test_prefix_reuse.py``
lists vLLM's assignments.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ucm import __version__
from ucm._core import run_threads_on
from ucm.config import UcmConfig
from ucm.config.words import DISABLE_VARIABLE
from ucm.errors import ConfigError
from ucm.integration.vllm.compat.versions import (
    announces_sleep,
    installed,
    kv_replicas,
    names_replicas,
    why_unserved,
)
from ucm.integration.vllm.connector.admission.admission import UNKNOWN_LOAD_S, Admission, RateMemory
from ucm.integration.vllm.connector.admission.rates import ComputeRate
from ucm.integration.vllm.connector.groups import (
    SERVED,
    WHOLE,
    Group,
    fails_whole,
    groups_of,
    reach_of,
)
from ucm.integration.vllm.connector.guard import IDLE, Background, logger
from ucm.integration.vllm.connector.identity.engine_identity import (
    LiveIdentity,
    attention_backends,
    block_tokens,
    engine_identity,
    identity_without_weights,
    layer_specs,
    spec_kind,
    transferable_groups,
    unidentifiable,
)
from ucm.integration.vllm.connector.identity.keys import AdapterDigests, ExtraKeys, Items
from ucm.integration.vllm.connector.identity.weights import ModelMemory, weight_source
from ucm.integration.vllm.connector.platforms import Platform, cores_here, platform_of, why_slower
from ucm.integration.vllm.connector.scheduler.events import block_events
from ucm.integration.vllm.connector.scheduler.readiness import Readiness, StoreSelection
from ucm.integration.vllm.connector.scheduler.scheduler import UCMConnectorScheduler
from ucm.integration.vllm.connector.stores import engine_stores
from ucm.integration.vllm.connector.worker.worker import Rank, RankPart, UCMConnectorWorker
from ucm.mode import ModeWatch, state_directory
from ucm.reasons import MissReason

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ucm.integration.vllm.connector.scheduler.blend import BlendPlanner
    from ucm.integration.vllm.connector.scheduler.sparse import SparseScheduler
    from ucm.integration.vllm.connector.worker.sparse import SparseWorker


def why_off(
    config: UcmConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    decides: bool = True,
) -> tuple[MissReason, str] | None:
    """Why this engine cannot be served, as a reason and as a sentence; None when it can.
    ``decides``: in the scheduler side, which decides by the flags of all processes whether requests
    may continue from stored blocks."""
    if not config.enabled:
        return MissReason.DISABLED, _switched_off(config, "enabled")
    if text := why_unserved(installed()):
        return MissReason.UNSUPPORTED, text
    if not config.enable_prefix_cache:
        return MissReason.DISABLED, _switched_off(config, "enable_prefix_cache")
    platform = _platform(config)
    text = platform if isinstance(platform, str) else _unsupported(vllm_config, kv_cache_config)
    if not text and isinstance(platform, Platform):
        text = unmapped(config, platform, vllm_config)
    if not text and decides:
        text = why_not_reusable(vllm_config, kv_cache_config)
    if text:
        return MissReason.UNSUPPORTED, text
    try:
        engine_identity(vllm_config, kv_cache_config, "")
    except Exception as error:
        return MissReason.IDENTITY_UNKNOWN, f"this engine has no identity: {error}"
    text = unidentifiable(vllm_config)
    return (MissReason.IDENTITY_UNKNOWN, text) if text else None


def _switched_off(config: UcmConfig, key: str) -> str:
    origin = config.origin(key)
    if origin.endswith(DISABLE_VARIABLE):
        return f"{DISABLE_VARIABLE} is set in the environment; unset it to use the cache"
    return f'"{key}" is false in {origin}; write true or leave it out to use the cache'


def unmapped(config: UcmConfig, platform: Platform, vllm_config: VllmConfig) -> str:
    """Why copies could access memory of a device that is unmapped."""
    sleeps = getattr(vllm_config.model_config, "enable_sleep_mode", False)
    if not sleeps or platform.device == "cpu":
        return ""
    if not announces_sleep():
        return (
            "sleep mode unmaps the KV, and this version of vLLM does not notify connectors before:"
            " nothing is claimed or stored; start without enable_sleep_mode, or update vLLM"
        )
    if config.sparse.selects:
        return (
            "sleep mode with sparse attention is not supported yet: nothing is claimed or stored;"
            " start without enable_sleep_mode, or set ENABLE_SPARSE=false"
        )
    return ""


def _platform(config: UcmConfig) -> Platform | str:
    from vllm.platforms import current_platform

    return platform_of(config.platform, current_platform)


def _served_platform(config: UcmConfig) -> Platform:
    """The platform of an engine that :func:`why_off` found to be served."""
    platform = _platform(config)
    if isinstance(platform, str):
        raise ConfigError(platform)
    return platform


#: What to do about KV that is not served, by the kind of its spec.
_INSTEAD = {
    "SlidingWindowMLASpec": "start vLLM with --disable-hybrid-kv-cache-manager, if it can then",
    "HiddenStateCacheSpec": "start vLLM with another speculative method than extract_hidden_states",
    "HiSparseHotSpec": "start vLLM without HiSparse",
    "HiSparseResidentSpec": "start vLLM without HiSparse",
}
#: The same for the others: they are the model's own.
_NOTHING_TO_DO = "vLLM's own prefix cache goes on as it does without ucm"


def _unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    nothing = "not cached: nothing is claimed or stored"
    groups, refused = kv_cache_config.kv_cache_groups, set[str]()
    specs = [spec for group in groups for spec in layer_specs(group.kv_cache_spec)]
    for spec in specs:
        kind = spec_kind(spec)
        if kind not in SERVED or not getattr(spec, "prefix_cacheable", True):
            refused.add(kind)
    if refused:
        remedies = dict.fromkeys(_INSTEAD.get(kind, _NOTHING_TO_DO) for kind in sorted(refused))
        return f"KV of kind {', '.join(sorted(refused))} is {nothing}; {'; '.join(remedies)}"
    states = [spec for spec in specs if spec_kind(spec) == "MambaSpec"]
    if states and (problem := _states_elsewhere(vllm_config, specs, states)):
        why, instead = problem
        return f"KV of kind MambaSpec {why} is {nothing}; start vLLM {instead}"
    parallel = vllm_config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        instead = "start vLLM with --prefill-context-parallel-size 1"
        return f"with prefill context parallelism KV is {nothing}; {instead}"
    if len(groups) > 1 and getattr(parallel, "decode_context_parallel_size", 1) > 1:
        instead = "start vLLM with --decode-context-parallel-size 1"
        return f"with decode context parallelism KV of {len(groups)} groups is {nothing}; {instead}"
    return ""


def _states_elsewhere(
    vllm_config: VllmConfig, specs: list[Any], states: list[Any]
) -> tuple[str, str] | None:
    """Why states (of Mamba, linear attention) may lie elsewhere than at the ends of full blocks,
    where a hit needs them, and how to start vLLM; None when they do not."""
    modes = {spec.mamba_cache_mode for spec in states}
    if "all" in modes:
        return 'with mamba_cache_mode "all"', "with --mamba-cache-mode align"
    if modes != {"align"}:
        return "without vLLM's own prefix caching", "with --enable-prefix-caching"
    if vllm_config.speculative_config is not None:
        return "with speculative decoding", "without --speculative-config"
    unit = getattr(vllm_config.cache_config, "prefix_match_unit", None)
    unit = unit or math.gcd(*(spec.block_size for spec in specs))
    largest = max(spec.block_size for spec in states)
    if largest > unit:
        why = f"with hits inside of its blocks (every {unit} tokens)"
        return why, f"with --prefix-match-unit {largest}"
    return None


def _multi_connector(vllm_config: VllmConfig) -> Any | None:
    """The configuration of the MultiConnector that ours is one of, None outside of one. Inside, our
    configuration is a copy, and only the workers' process shows the outer one."""
    from vllm.config import get_current_vllm_config_or_none

    engine, own = get_current_vllm_config_or_none(), vllm_config.kv_transfer_config
    outer = None if engine is None else engine.kv_transfer_config
    if outer is None or own is None or outer.kv_connector == own.kv_connector:
        return None
    return outer


def _only_stores(outer: Any | None, vllm_config: VllmConfig) -> str:
    """Why nothing may be loaded; empty when it may. vLLM reads the role, and the policy for failed
    loads, where *its* connector is configured.

    With steps that overlap (async scheduling, pipelines) the step under way may still write a freed
    request's blocks: vLLM holds them back until that step has ended, but only for consumers."""
    transfer: Any = outer or vllm_config.kv_transfer_config
    beside = f'beside "kv_connector": "{transfer.kv_connector}"'
    if not transfer.is_kv_consumer and getattr(vllm_config, "max_concurrent_batches", 2) > 1:
        return (
            "steps overlap, and vLLM gives blocks to a load that a step may still write, unless it "
            f'is a consumer too; write "kv_role": "kv_both" {beside}'
        )
    # Outside of a MultiConnector the scheduler side sets the policy.
    if outer is None or getattr(outer, "kv_load_failure_policy", "recompute") == "recompute":
        return ""
    return (
        "vLLM would end a request with an error when a block of its load is refused; "
        f'write "kv_load_failure_policy": "recompute" {beside}'
    )


def _admission(config: UcmConfig, vllm_config: VllmConfig) -> Admission:
    deadlines, overlap = config.deadlines, max(1, getattr(vllm_config, "max_concurrent_batches", 2))
    step, least_s = step_tokens(vllm_config), deadlines.load_min_ms / 1000
    compute_rate = ComputeRate(least_s, deadlines.load_max_s, step, overlap)
    configured = config.origin("deadlines.load_unknown_s") != "default"
    unknown_load_s = deadlines.load_unknown_s if configured else UNKNOWN_LOAD_S
    mode, share = config.admission, config.admission_share
    return Admission(mode, share, compute_rate, unknown_load_s=unknown_load_s)


def _warn_of_few_cores(vllm_config: VllmConfig) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if text := why_slower(vllm_config.parallel_config.local_world_size, cores_here(), os.environ):
        logger.warning("%s", text)


def _warn_of_copies(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Each tensor rank holds all KV of latent attention, without context parallelism."""
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    kinds = {spec_kind(spec) for group in groups for spec in layer_specs(group.kv_cache_spec)}
    ranks = parallel.tensor_parallel_size // parallel.decode_context_parallel_size
    if ranks > 1 and kinds == {"MLAAttentionSpec"} and not names_replicas(kv_cache_config):
        text = "this version of vLLM does not report that %d tensor ranks hold the same KV"
        logger.warning(f"{text}, so each of them stores it", ranks)


def _say_one_group(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Without its hybrid manager vLLM keeps all KV of layers with windows or chunks."""
    if not getattr(vllm_config.scheduler_config, "disable_hybrid_kv_cache_manager", False):
        return
    groups, names = kv_cache_config.kv_cache_groups, ("sliding_window", "attention_chunk_size")
    specs = [spec for group in groups for spec in layer_specs(group.kv_cache_spec)]
    whole = [spec for spec in specs if reach_of(spec) == WHOLE]
    if any(getattr(spec, name, None) for spec in whole for name in names):
        logger.info(
            "vLLM's hybrid KV cache manager is off (by --disable-hybrid-kv-cache-manager, another"
            " connector without SupportsHMA, or the model), so all layers are in one KV group, and"
            " no blocks are shared with engines in which it is on"
        )


def make_scheduler(
    config: UcmConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    sparse: SparseScheduler | None = None,
    blend: BlendPlanner | None = None,
) -> UCMConnectorScheduler:
    """The scheduler side of a supported engine; waits a few seconds at most for the weights'
    digest."""
    _warn_of_few_cores(vllm_config)
    _warn_of_copies(vllm_config, kv_cache_config)
    _say_one_group(vllm_config, kv_cache_config)
    tokens = block_tokens(vllm_config, kv_cache_config)
    own = engine_identity(vllm_config, kv_cache_config, "")
    root = config.root or state_directory()
    identity = LiveIdentity(own, weight_source(vllm_config), config.identity.weights, root)
    adapters = AdapterDigests(root)
    background = Background("ucm-lookup")
    items = Items(lambda job: background.submit(job, IDLE))
    extra = ExtraKeys.for_engine(vllm_config, tokens, adapters, items)
    admission = _admission(config, vllm_config)
    beside = None if sparse is None else sparse.break_even
    rates = RateMemory(root, admission, background, beside=beside)
    parallel = vllm_config.parallel_config
    world = parallel.world_size
    platform = _served_platform(config)
    origin = "configured" if config.platform else "what vLLM runs on"
    text = "ucm %s in vLLM %s: the KV lies on %s (%s)"
    logger.info(text, __version__, installed(), platform.word, origin)
    stores = engine_stores(config, parallel, platform.word, step_tokens(vllm_config))
    readiness = Readiness(
        own_identity=identity_without_weights(own),
        identity=identity,
        selection=StoreSelection(stores, world, background, config.deadlines.probe_s),
        world=world,
        open_allowance=config.deadlines.probe_s,
        why_not_reusable=partial(why_not_reusable, vllm_config, kv_cache_config),
    )
    if not caches_prefixes(vllm_config):
        logger.info(
            "enable_prefix_caching is off, as you chose: vLLM keeps no prefixes, ucm stores and"
            " loads them"
        )
    if (state := identity.wait()).kind == "pending":
        logger.info(
            "the weights are still being hashed; requests are computed as usual until that is done"
        )
    elif state.kind != "known":
        readiness.off(state.reason, MissReason.IDENTITY_UNKNOWN)
    followed = [root for one in (config, *config.alternatives) for root in one.roots]
    mode = ModeWatch(list(dict.fromkeys([*followed, *filter(None, [state_directory()])])))
    groups = _groups(config, vllm_config, kv_cache_config)
    return UCMConnectorScheduler(
        config,
        readiness,
        admission,
        extra,
        background,
        tokens,
        step_tokens=step_tokens(vllm_config),
        rates=rates,
        groups=groups,
        sparse=sparse,
        blend=blend,
        events=block_events(vllm_config, kv_cache_config, groups, time.monotonic),
        mode=mode,
        closers=(mode.close, rates.close, identity.close, adapters.close, background.close),
    )


def _groups(
    config: UcmConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> tuple[Group, ...]:
    ranks = getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1)
    drafts = getattr(vllm_config, "speculative_config", None)
    drafting = drafts is not None and drafts.use_eagle_block_drop()
    return groups_of(kv_cache_config, ranks, config.window_records, drafting)


def _layers(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[Any]:
    """The attention layers whose KV is stored."""
    layers = vllm_config.compilation_config.static_forward_context
    groups = transferable_groups(kv_cache_config)
    return [layers[name] for group in groups for name in group.layer_names]


def _leave_the_bound_core() -> None:
    """Let the core's threads run beside the model: vLLM binds the main thread of a rank on a CPU to
    a processor that it computes on, and new threads inherit that."""
    from vllm.platforms import current_platform

    made_by = multiprocessing.parent_process()
    if made_by is None or made_by.pid is None or not current_platform.is_cpu():
        return
    try:
        run_threads_on(sorted(os.sched_getaffinity(made_by.pid) | os.sched_getaffinity(0)))
    except Exception as error:  # they are slower
        logger.debug("the threads of the store stay where vLLM bound this rank: %r", error)


def step_tokens(vllm_config: VllmConfig) -> int:
    """Most tokens that a step of the engine computes."""
    return int(getattr(vllm_config.scheduler_config, "max_num_batched_tokens", None) or 0)


def make_worker(
    config: UcmConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    sparse: SparseWorker | None = None,
) -> UCMConnectorWorker:
    """The worker side of this rank. Raises :class:`~ucm.errors.ConfigError` for keys that this
    engine's KV rules out."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    pipeline, tensor = get_pp_group().rank_in_group, get_tp_group().rank_in_group
    platform, outer = _served_platform(config), _multi_connector(vllm_config)
    _leave_the_bound_core()
    replicas = kv_replicas(kv_cache_config)
    if config.load_only_first_rank and replicas < vllm_config.parallel_config.tensor_parallel_size:
        raise ConfigError(
            "load_only_first_rank: the ranks of this model hold different KV, remove the key"
        )
    parallel = vllm_config.parallel_config
    groups = _groups(config, vllm_config, kv_cache_config)
    parts = [
        RankPart(
            group,
            (group.number, pipeline, tensor // replicas),
            kv_cache_config.kv_cache_groups[group.table].layer_names,
        )
        for group in groups
    ]
    # A pipeline rank may have no layers of a group, or of none at all, which it reports.
    first, *rest = [part for part in parts if part.layers] or parts[:1]
    rank = Rank(
        number=pipeline * parallel.tensor_parallel_size + tensor,
        part=first.part,
        group=first.group,
        rest=rest,
        fails_whole=fails_whole(groups),
        writer=tensor % replicas == 0,
        layers=first.layers,
        block_tokens=first.group.tokens,
        identity=lambda: identity_without_weights(
            engine_identity(vllm_config, kv_cache_config, "")
        ),
        num_blocks=kv_cache_config.num_blocks,
        wanted_block_size=config.block_size,
        only_stores=_only_stores(outer, vllm_config),
        beside=outer is not None,
        zeroes=bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", len(groups) > 1)),
        prefix_caching=caches_prefixes(vllm_config),
    )
    return UCMConnectorWorker(
        rank,
        platform,
        engine_stores(config, parallel, platform.word, step_tokens(vllm_config)),
        memory=ModelMemory(
            lambda: _layers(vllm_config, kv_cache_config), lambda: weight_source(vllm_config)
        ),
        sparse=sparse,
        shutdown_allowance=config.deadlines.shutdown_s,
    )


#: Backends whose results depend, in vLLM's batch-invariant mode, on where a prompt begins.
NOT_BATCH_INVARIANT = frozenset({"FLASHINFER", "TRITON_MLA"})


def why_not_reusable(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, workers_cache_prefixes: bool = True
) -> str:
    """Why nothing may be loaded, and storing is of no use; empty where a request may continue.
    ``workers_cache_prefixes``: whether ``enable_prefix_caching`` is still true in every worker."""
    model = vllm_config.model_config
    if not _is_causal(vllm_config, kv_cache_config):
        return (
            "this model attends to later tokens, so a block depends on more than the tokens"
            " before it"
        )
    if not getattr(model, "is_prefix_caching_supported", True):
        return (
            f"vLLM computes each prompt of this engine whole ({_pooling_kind(model)}) and supports"
            " no prefix caching for it: nothing is claimed or stored"
        )
    if backends := _varying_backends(vllm_config, kv_cache_config):
        return (
            f"with VLLM_BATCH_INVARIANT the attention backend {', '.join(backends)} gives other"
            " values when a prompt continues from stored blocks: nothing is claimed or stored;"
            " choose another --attention-backend"
        )
    if caches_prefixes(vllm_config):
        if workers_cache_prefixes:
            return ""
        return (
            "a worker switched prefix caching off while it built the model, so its layers cannot"
            " continue from stored blocks: nothing is claimed or stored"
        )
    if not getattr(vllm_config.scheduler_config, "enable_chunked_prefill", True):
        return (
            "prefix caching and chunked prefill are both off, as vLLM has it where a prompt must be"
            " computed whole (MLA on a CPU without AMX): nothing is claimed or stored; if you"
            " switched both off, leave one of them on"
        )
    return ""


def caches_prefixes(vllm_config: VllmConfig) -> bool:
    """What ``enable_prefix_caching`` is now, in this process."""
    return bool(vllm_config.cache_config.enable_prefix_caching)


def _is_causal(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    attention, hf = (
        getattr(vllm_config, "attention_config", None),
        vllm_config.model_config.hf_config,
    )
    if getattr(attention, "use_non_causal", False) or not getattr(hf, "is_causal", True):
        return False
    return not any(
        getattr(spec, "non_causal", False)
        for group in kv_cache_config.kv_cache_groups
        for spec in layer_specs(group.kv_cache_spec)
    )


def _pooling_kind(model: Any) -> str:
    """The facts of a model by which vLLM decides that prefixes cannot be cached."""
    attention = str(getattr(model, "attn_type", "unknown"))
    pooler = getattr(model, "pooler_config", None)
    if pooler is None:
        return f"attention {attention}"
    kinds = (getattr(pooler, name, None) for name in ("seq_pooling_type", "tok_pooling_type"))
    named = "/".join(str(kind) for kind in kinds if kind) or "by default"
    return f"attention {attention}, pooling {named}"


def _varying_backends(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[str]:
    import vllm.envs

    if not getattr(vllm.envs, "VLLM_BATCH_INVARIANT", False):
        return []
    groups = transferable_groups(kv_cache_config)
    used = {name for names in attention_backends(vllm_config, groups) for name in names}
    return sorted(used & NOT_BATCH_INVARIANT)
