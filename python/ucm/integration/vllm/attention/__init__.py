"""Sparse attention and ReRoPE inside vLLM: attention backends, a KV cache spec and hooks, all
through vLLM's own doors.

``registering`` overrides vLLM's attention backends by name. Where sparse attention is configured
(``setup``) a name gives the classes that ``backends`` makes. Their implementations call the host of
this process (``host``), which calls the method's hooks with a copy of the metadata (``tables``).
``spec`` keeps KV that was computed under a selection out of vLLM's prefix cache; the connector
keeps it out of the store. ``plan`` is what the scheduler side reports of a step,
``representations`` are those of blocks that were loaded, ``offload`` has the blocks that left the
device. Each file imports only those before it in this order: plan, tables, representations,
offload, host, setup, spec, rerope, backends. ``registering`` imports none of them until it has to.
``rerope`` has the backends of ReRoPE, and ``rerope_models`` the model classes that leave keys
unrotated, which vLLM imports by name.
"""
