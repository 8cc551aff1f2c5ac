"""Sparse attention inside vLLM: attention backends, a KV cache spec and hooks, all through vLLM's
own doors.

``registering`` overrides vLLM's attention backends by name where sparse attention is configured
(``configured``), with the classes that ``backends`` makes. Their implementations (``impls``) ask
the host of this process (``host``), which calls the method's hooks with a copy of the metadata
(``rewriting``). ``spec`` keeps KV that was computed under a selection out of vLLM's prefix cache;
the connector keeps it out of the store (``connector/sparse_scheduler.py``).
"""
