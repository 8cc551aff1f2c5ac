"""The scheduler side: what is looked up, loaded and dumped. It touches no tensor.

:mod:`.scheduler` answers vLLM's calls. It keeps one :class:`~.request_tracker.RequestTracker` per
request, looks its prefix up (:mod:`.lookup`), decides about hits (:mod:`.hit_policy`) and plans
dumps (:mod:`.dump_planner`), once :mod:`.readiness` says that identity, weights and stores are
known.
"""
