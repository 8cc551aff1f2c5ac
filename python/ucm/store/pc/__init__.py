"""The prefix cache store: blocks in segments, prefixes loaded as one."""

from ucm.store.pc.connector import UcmPcStore

__all__ = ["UcmPcStore"]
