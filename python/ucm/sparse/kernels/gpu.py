"""Sparse retrieval on a GPU, in Triton: the functions of :mod:`ucm.sparse.retrieval` for tensors of a GPU.

They take the same tensors, mean the same and return new tensors on the same GPU, without waiting for it. What a table
or a length says is not looked at before a launch: ids must lie within the representations. Threads and instruction sets
of a CPU are no arguments here.
"""

from __future__ import annotations

from ucm.sparse.kernels.dot import dot_scores, quest_scores
from ucm.sparse.kernels.encode import hash_encode, hash_encode_query, scatter_codes
from ucm.sparse.kernels.hamming import hamming_scores
from ucm.sparse.kernels.select import select_blocks

__all__ = [
    "dot_scores",
    "hamming_scores",
    "hash_encode",
    "hash_encode_query",
    "quest_scores",
    "scatter_codes",
    "select_blocks",
]
