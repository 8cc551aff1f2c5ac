"""Which hits are worth loading, by measured speeds.

:mod:`.compute_rate` measures how fast this engine computes prompts, :mod:`.load_rate` how fast a
tier loads, :mod:`.admission` compares the two for each hit, and :mod:`.rate_memory` keeps both
across restarts.
"""
