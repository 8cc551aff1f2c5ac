"""Blend: KV of chunks computed at other positions, in another context, is turned to its new
position and used; the tokens that matter most are computed again. ``docs/blend.md`` has the rules.
"""
