"""Several stores as one, the fastest on top."""

from ucm.store.pipeline.connector import UcmPipelineStore

__all__ = ["UcmPipelineStore"]
