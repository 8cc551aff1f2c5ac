"""ReRoPE: contexts longer than a model was trained for. ``rule`` is the formula in torch, also over
vLLM's pages on a CPU; ``triton_unified_attention_rerope`` is the kernel of a GPU. See
``docs/rerope.md``."""
