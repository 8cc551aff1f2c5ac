"""A name of the original; see :mod:`ucm.store.presets`."""

from ucm.store.presets import PrefixTask, UcmPcStore

__all__ = ["PrefixTask", "UcmPcStore"]
