"""Our attention backends, derived from vLLM's: one for each name, made when it is first selected.

:func:`backend_for` returns vLLM's own class where the engine that is being built has neither ReRoPE
(whose backends are in :mod:`.rerope`) nor sparse attention, and else a class derived from it with
another implementation, metadata builder and KV cache spec. It keeps the name and packs the same
bytes. :mod:`.registering` is the only caller.

The implementations call the host of this process before and after they compute a layer, by vLLM's
own kernels, except for rows that choose on a CPU. Without a host, in a profiling run, or in a layer
that the host does not serve, they only call vLLM's own code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ucm.integration.vllm.attention import rerope
from ucm.integration.vllm.attention.host import LayerCall, SparseHost, active_host
from ucm.integration.vllm.attention.setup import blend_config, sparse_config
from ucm.integration.vllm.attention.tables import HeadRows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend


#: Backends by name, with the configuration of their engine.
_made: dict[str, tuple[VllmConfig, type[AttentionBackend]]] = {}


def backend_for(
    name: str, own: type[AttentionBackend], vllm_config: VllmConfig
) -> type[AttentionBackend]:
    """The backend of this name in an engine with this configuration; ``own`` is vLLM's. Raises
    :class:`~ucm.errors.ConfigError` where the engine cannot compute by ReRoPE and is to."""
    by_rule = False
    if rerope.rule_of(vllm_config) is not None:
        rerope.refuse_unsupported(vllm_config)
        by_rule = name in rerope.SERVED
    blends = blend_config(vllm_config) is not None and not own.is_mla()
    if not by_rule and not blends and sparse_config(vllm_config) is None:
        return own
    if name not in _made or _made[name][0] is not vllm_config:
        if by_rule:
            made = rerope.derive(own)
        else:
            made = (derive_for_blend if blends else derive)(own, vllm_config)
        _made[name] = vllm_config, made
    return _made[name][1]


def derive_for_blend(
    base: type[AttentionBackend], vllm_config: VllmConfig
) -> type[AttentionBackend]:
    """A backend that computes as vLLM's, and whose attention a question can have for its own; its
    KV cache spec has a manager that knows the exact tokens."""
    impl = type(
        f"Blend{base.get_impl_cls().__name__}",
        (AsksApart, base.get_impl_cls()),
        {"__module__": __name__, "__doc__": f"{base.get_impl_cls().__name__}, as it is."},
    )
    made: type[AttentionBackend] = type(
        f"Blend{base.__name__}",
        (base,),
        {
            "__module__": __name__,
            "__doc__": f"{base.__name__} with an exact part of a request's KV.",
            "ucm_packs_like": base,
            "get_impl_cls": staticmethod(lambda: impl),
            "customize_spec": _spec_of(base, vllm_config),
        },
    )
    return made


class OwnAttention(ABC):
    """Attention, and its metadata, of layers that are called outside of a step."""

    @abstractmethod
    def attend(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, output: Tensor
    ) -> None:
        """Attention of a layer into ``output [t, heads, d]``, from ``query [t, heads, d]`` and
        ``key`` and ``value [t, kv heads, d]`` of the same tokens."""


class AsksApart:
    """An implementation of vLLM's that leaves attention to an :class:`OwnAttention`."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a layer."""
        given = (layer, query, key, value, kv_cache)
        if isinstance(attn_metadata, OwnAttention):
            attn_metadata.attend(*given, output)
            return output
        compute = super().forward  # type: ignore[misc]
        result: Tensor = compute(*given, attn_metadata, output, *args, **kwargs)
        return result


def derive(base: type[AttentionBackend], vllm_config: VllmConfig) -> type[AttentionBackend]:
    """A backend that selects blocks, over any backend whose metadata has a block table and lengths,
    in an engine with this configuration."""
    from vllm.v1.attention.backend import AttentionCGSupport

    impl = derive_impl(base.get_impl_cls(), latent=base.is_mla())
    builder_base = base.get_builder_cls()

    def get_cudagraph_support(
        cls: type, vllm_config: Any, kv_cache_spec: Any
    ) -> AttentionCGSupport:
        """Blocks are chosen in Python between the kernels: graphs are captured around attention."""
        del cls, vllm_config, kv_cache_spec
        return AttentionCGSupport.NEVER

    builder = type(
        f"Sparse{builder_base.__name__}",
        (builder_base,),
        {
            "__module__": __name__,
            "__doc__": f"{builder_base.__name__}, around which no full graph is captured.",
            "_cudagraph_support": AttentionCGSupport.NEVER,
            "get_cudagraph_support": classmethod(get_cudagraph_support),
            # An option of older versions: a prefix that rows share is attended to once, but rows
            # that select have block tables of their own.
            "use_cascade_attention": staticmethod(lambda *_args, **_kwargs: False),
        },
    )

    made: type[AttentionBackend] = type(
        f"Sparse{base.__name__}",
        (base,),
        {
            "__module__": __name__,
            "__doc__": f"{base.__name__} with rows that attend to selected blocks.",
            "ucm_packs_like": base,
            "get_impl_cls": staticmethod(lambda: impl),
            "get_builder_cls": staticmethod(lambda: builder),
            "customize_spec": _spec_of(base, vllm_config),
        },
    )
    return made


def _spec_of(base: type[AttentionBackend], vllm_config: VllmConfig) -> Any:
    """The method ``customize_spec`` of a backend over ``base``: vLLM's spec, with a manager that
    knows the exact tokens."""
    from ucm.integration.vllm.attention.spec import customize_spec

    def spec_of(cls: type, spec: Any) -> Any:
        del cls
        return customize_spec(base.customize_spec(spec), vllm_config)

    return classmethod(spec_of)


def derive_impl(base: type, *, latent: bool) -> type:
    """The implementation over ``base``, of a backend with latent attention or of another one."""
    return type(
        f"Sparse{base.__name__}",
        (_Latent if latent else _Grouped, base),
        {"__module__": __name__, "__doc__": f"{base.__name__} over selected blocks."},
    )


class _Grouped:
    """Multi-head and grouped-query attention: one call computes all rows of a layer."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Write keys and values to the cache, and pass keys to the host: a CPU packs its pages, so
        this is the place to read keys."""
        write = super().do_kv_cache_update  # type: ignore[misc]
        write(layer, key, value, kv_cache, slot_mapping, *args, **kwargs)
        if (host := active_host()) is not None:
            host.keys_written(layer.layer_name, key, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a layer, over the blocks that the method kept."""
        compute = super().forward  # type: ignore[misc]
        host = active_host()
        call = None if host is None else host.begin_layer(self, layer.layer_name, attn_metadata)
        if host is None or call is None:
            given = (query, key, value, kv_cache, attn_metadata, output)
            result: Tensor = compute(layer, *given, *args, **kwargs)
            return result
        q, k, v, out = host.attention_begin(call, query, key, value, output)
        if (written := host.to_rewrite(call)) is not None and k is not None and v is not None:
            slots = written.slots
            self.do_kv_cache_update(layer, k[: len(slots)], v[: len(slots)], kv_cache, slots)

        def by_vllm(queries: Tensor, metadata: Any, found: Tensor) -> None:
            compute(layer, queries, k, v, kv_cache, metadata, found, *args, **kwargs)

        if host.attend_by_own_kernel(call, q, out, by_vllm):
            return output
        if host.heads_chose_apart(call):
            rows = HeadRows.of(attn_metadata.query_start_loc, *call.made.block_table.shape[:2])
            metadata = host.metadata_of_heads(self, call, rows)
            parts, pages = torch.empty_like(rows.split(q)), kv_cache.flatten(0, 1)[:, None]
            compute(layer, rows.split(q), k, v, pages, metadata, parts, *args, **kwargs)
            rows.join(parts, out)
        else:
            host.compute(self, call, lambda metadata: by_vllm(q, metadata, out))
        host.attention_finished(call, q, k, v, out)
        if out is not output:
            output.copy_(out)
        return output


class _Latent:
    """Multi-head latent attention: two calls, for prompts and single tokens, over one key."""

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Write latent keys to the cache, and pass them to the host."""
        write = super().do_kv_cache_update  # type: ignore[misc]
        write(kv_c_normed, k_pe, kv_cache, slot_mapping, *args, **kwargs)
        host = active_host()
        if host is not None and (name := host.name_of(self)) is not None:
            host.latent_keys_written(name, kv_c_normed, k_pe, slot_mapping)

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> Any:
        """Rows of one token, over the blocks that the method kept."""
        compute, cache = super().forward_mqa, kv_c_and_k_pe_cache  # type: ignore[misc]
        host, call = active_host(), None
        if host is not None:
            call = host.begin_layer(self, layer.layer_name, attn_metadata, phase="decode")
        if host is None or call is None:
            return compute(q, cache, attn_metadata, layer)
        query, key, value, out = host.latent_attention_begin(call, q)
        self._rewrite(host, call, 0, (key, value), cache, layer._k_scale)
        found, lse = host.compute(self, call, lambda made: compute(query, cache, made, layer))
        if out is not None:  # the kernel makes its output by itself
            found = out.copy_(found.reshape(out.shape)).reshape(found.shape)
        host.attention_finished(call, query, key, value, found)
        return found, lse

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        k_scale: Tensor,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Rows of a prompt."""
        compute, cache = super().forward_mha, kv_c_and_k_pe_cache  # type: ignore[misc]
        host = active_host()
        name = None if host is None else host.name_of(self)
        call: LayerCall | None = None
        if host is not None and name is not None and host.hooked:
            call = host.begin_layer(self, name, attn_metadata, phase="prefill")
        if host is None or call is None:
            given = (q, kv_c_normed, k_pe, cache, attn_metadata, k_scale, output)
            compute(*given, *args, **kwargs)
            return
        query, key, value, out = host.latent_prompt_begin(call, q, kv_c_normed, k_pe, output)
        begin = attn_metadata.num_decode_tokens
        self._rewrite(host, call, begin, (key, value), cache, k_scale)

        def run(metadata: Any) -> None:
            compute(query, key, value, cache, metadata, k_scale, out, *args, **kwargs)

        host.compute(self, call, run)
        host.attention_finished(call, query, key, value, out)
        if out is not output:
            output.copy_(out)

    def _rewrite(
        self,
        host: SparseHost,
        call: LayerCall,
        begin: int,
        changed: tuple[Any, Any],
        cache: Tensor,
        scale: Tensor,
    ) -> None:
        """Write the latent keys of the step again, where a hook may have changed those from token
        ``begin`` on."""
        if (written := host.to_rewrite(call)) is None:
            return
        latent, rope = (
            torch.cat([whole[:begin], part, whole[begin + len(part) :]])
            for whole, part in zip(written.keys, changed, strict=True)
        )
        kind = self.kv_cache_dtype  # type: ignore[attr-defined]
        self.do_kv_cache_update(latent, rope, cache, written.slots, kind, scale)
