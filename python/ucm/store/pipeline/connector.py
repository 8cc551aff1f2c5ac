"""A name of the original; see :mod:`ucm.store.presets`."""

from ucm.store.presets import UcmPipelineStore

__all__ = ["UcmPipelineStore"]
