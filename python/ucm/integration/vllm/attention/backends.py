"""Our attention backends, derived from vLLM's: one for each name, made when it is first selected.

:func:`backend_for` gives vLLM's own class where the engine that is being built has no sparse
attention, and else a class derived from it with another implementation, metadata builder and KV
cache spec. It keeps the name, packs the same bytes, and passes through where nothing is selected.
:mod:`.registering` is the only caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.attention.configured import sparse_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

#: Made so far, by the name of the backend; for the engine whose configuration stands beside it.
_made: dict[str, tuple[VllmConfig, type[AttentionBackend]]] = {}


def backend_for(
    name: str, own: type[AttentionBackend], vllm_config: VllmConfig
) -> type[AttentionBackend]:
    """The backend of this name in an engine with this configuration; ``own`` is vLLM's."""
    if sparse_config(vllm_config) is None:
        return own
    if name not in _made or _made[name][0] is not vllm_config:
        _made[name] = vllm_config, derive(own, vllm_config)
    return _made[name][1]


def derive(base: type[AttentionBackend], vllm_config: VllmConfig) -> type[AttentionBackend]:
    """A backend that selects blocks, over any backend whose metadata has a block table and lengths,
    in an engine with this configuration."""
    from vllm.v1.attention.backend import AttentionCGSupport

    from ucm.integration.vllm.attention.impls import derive_impl
    from ucm.integration.vllm.attention.spec import customize_spec

    impl = derive_impl(base.get_impl_cls(), latent=base.is_mla())
    builder_base = base.get_builder_cls()

    def get_cudagraph_support(
        cls: type, vllm_config: Any, kv_cache_spec: Any
    ) -> AttentionCGSupport:
        """Blocks are chosen in Python between the kernels: graphs are captured around attention,
        not over it."""
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
        },
    )

    def spec_of(cls: type, spec: Any) -> Any:
        """vLLM's spec for this backend, as one whose manager knows which tokens are exact."""
        del cls
        return customize_spec(base.customize_spec(spec), vllm_config)

    made: type[AttentionBackend] = type(
        f"Sparse{base.__name__}",
        (base,),
        {
            "__module__": __name__,
            "__doc__": f"{base.__name__} with rows that attend to selected blocks.",
            "ucm_packs_like": base,
            "get_impl_cls": staticmethod(lambda: impl),
            "get_builder_cls": staticmethod(lambda: builder),
            "customize_spec": classmethod(spec_of),
        },
    )
    return made
