"""The interface of an algorithm of block selection: the representation of a block's keys, and its
score for a query.

A selector is pure: it holds settings and constants, never a request's state, and returns the same
for the same tensors on every rank, in every batch and after every restart. Windows, budgets and
steps are :mod:`ucm.sparse.policy`'s, memory is :mod:`ucm.sparse.rep_store`'s. Keys are those of the
cache, with their rotary position.

Shapes: ``m`` blocks to encode, ``n`` blocks of one request, ``b`` tokens of a block, ``h`` KV heads
of this rank, ``g`` query heads for each of them, ``d`` head size, ``w`` queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from ucm.config.sparse import AlgorithmConfig, keys_of, register_keys
from ucm.errors import ConfigError
from ucm.sparse.kernels import kernels_for
from ucm.sparse.retrieval import Kept

#: How the scores of several heads, or of several ranks, become one.
Combine = Literal["sum", "max"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of one rank's keys. Latent attention has one KV head: latent and rotary part."""

    block_size: int
    kv_heads: int
    head_dim: int
    #: Size of the rotary part at the end of a latent key; 0: no latent attention.
    rope_dim: int = 0
    #: Factor of q·k in attention; None: 1/sqrt(head_dim).
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "kv_heads", "head_dim"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} of sparse attention must be at least 1, got {value}")
        if not 0 <= self.rope_dim < self.head_dim:
            raise ConfigError(
                f"rope_dim must lie within the {self.head_dim} of a latent key, got {self.rope_dim}"
            )
        if self.rope_dim and self.kv_heads != 1:
            raise ConfigError(f"latent attention has one KV head, got {self.kv_heads}")

    @property
    def softmax_scale(self) -> float:
        """Factor of q·k in attention."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of some requests."""

    #: ``[r, N]``: rows of the representations, and physical blocks, of each.
    reps: Tensor
    table: Tensor
    #: ``[r]``, int32: number of blocks and of tokens of each.
    blocks: Tensor
    tokens: Tensor
    #: Most blocks of each between the windows; on a GPU a tensor there, int32.
    budgets: Sequence[int] | Tensor


class BlockSelector:
    """An algorithm, with defaults. A subclass sets :attr:`name` and defines :meth:`rep_shape`,
    :meth:`encode` and :meth:`score`. Keys of its own stand in a class ``Keys`` in it, derived from
    :class:`~ucm.config.sparse.AlgorithmConfig`; :func:`register_selector` registers it."""

    #: Its name in logs, statistics and signatures; that of its registration where it has none.
    name: str = ""
    #: Number of a request's latest queries for a score.
    queries: int = 1
    combine: Combine = "sum"  # how the scores of heads, and of ranks, become one
    #: Whether scores are integers, which add up the same in any order.
    exact: bool = False
    #: Whether :meth:`encode` encodes each token alone.
    token_wise: bool = False

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._given: dict[str, Any] = {}  # values of its own keys

    def signature(self) -> str:
        """Everything that shapes the bytes of a representation, as text: name, shape of the keys,
        and :meth:`settings`. Representations with another one are foreign."""
        g = self.geometry
        shape = f"b{g.block_size}h{g.kv_heads}d{g.head_dim}r{g.rope_dim}"
        settings = (f"{key}={value}" for key, value in sorted(self.settings().items()))
        return ":".join([self.name, shape, *settings])

    def settings(self) -> dict[str, Any]:
        """Settings that shape the bytes of a representation; by default all keys of its own."""
        return self._given

    def rep_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of one block's representation; begins with ``b`` where
        :attr:`token_wise`. A subclass defines it."""
        raise NotImplementedError

    def encode(self, layer: int, keys: Tensor) -> Tensor:
        """Representations ``[m, *rep]`` of whole blocks ``keys [m, b, h, d]``, each independent of
        the others. A subclass defines it."""
        raise NotImplementedError

    def encode_tokens(self, layer: int, keys: Tensor, reps: Tensor, slots: Tensor) -> None:
        """Encode single tokens ``keys [t, h, d]`` into ``reps [n, *rep]``, where
        :attr:`token_wise`: into ``slots [t]`` (block times block size plus place), on the device of
        ``reps``. By default as blocks of one token."""
        reps.flatten(0, 1)[slots] = self.encode(layer, keys[:, None])[:, 0].to(reps.device)

    def score(self, layer: int, query: Tensor, reps: Tensor) -> Tensor:
        """The score of each block of one request, ``[h, n]`` (float32, or int32 where exact):
        higher is better. A subclass defines it.

        ``query [w, h*g, d]`` are its latest queries, the newest last, fewer than :attr:`queries` at
        its beginning; ``reps [n, *rep]`` the representations of its candidates, in logical order.
        One request at a time, so that a score cannot depend on the batch.
        """
        raise NotImplementedError

    def weights(self, scores: Tensor) -> Tensor:
        """Estimates of attention mass, float64, not negative, in the shape of ``scores [..., n]``,
        for budgets by mass; they need not add up to 1. By default softmax over the blocks."""
        return torch.softmax(scores.double(), dim=-1)

    def fused_scores(
        self,
        layer: int,
        query: Tensor,
        reps: Tensor,
        table: Tensor,
        blocks: Tensor,
        *,
        init: int,
        local: int,
        apart: bool,
    ) -> Tensor | None:
        """:meth:`score` of several requests by a kernel, with the heads joined unless they are kept
        ``apart``: ``[r, h or 1, N]``. None: no kernel serves these tensors.

        ``query [r, h*g, d]`` are the latest queries, ``reps`` all representations of the layer,
        ``table [r, N]`` the rows of each request in them, of which ``blocks [r]`` count. The first
        ``init`` and the last ``local`` are windows: their representations are not read, and their
        scores, like those beyond, mean nothing.
        """
        del layer
        if (kernels := kernels_for(query, reps)) is None:
            return None
        how = {"over_heads": "apart" if apart else "sum", "init": init, "local": local}
        return self.kernel_scores(kernels, query, reps, table, blocks, **how)

    def kernel_scores(
        self,
        kernels: ModuleType,
        query: Tensor,
        reps: Tensor,
        table: Tensor,
        blocks: Tensor,
        **how: Any,
    ) -> Tensor | None:
        """:meth:`fused_scores` by one of ``kernels``, with the keywords ``how``, if it has one."""
        del kernels, query, reps, table, blocks, how
        return None

    def fused_select(
        self,
        layer: int,
        query: Tensor,
        reps: Tensor,
        of: Candidates,
        *,
        init: int,
        local: int,
        apart: bool,
        into: Kept,
    ) -> Kept | None:
        """The windows of each request and the best blocks between them by :meth:`fused_scores`, all
        by kernels; written to ``into``. None: there is no kernel for these tensors."""
        kernels, size = kernels_for(query), self.geometry.block_size
        how: dict[str, Any] = {"init": init, "local": local}
        scores = self.fused_scores(layer, query, reps, of.reps, of.blocks, apart=apart, **how)
        if kernels is None or scores is None:
            return None
        found: Kept = kernels.select_blocks(
            scores, of.table, of.tokens, size, of.budgets, into=into, **how
        )
        return found

    def grouped(self, query: Tensor) -> Tensor:
        """``query [w, h*g, d]`` as ``[w, h, g, d]`` in float32."""
        w, heads, dim = query.shape
        kv = self.geometry.kv_heads
        if heads % kv or dim != self.geometry.head_dim:
            raise ConfigError(
                f"a query of {heads} heads of size {dim} does not fit {kv} KV heads of size"
                f" {self.geometry.head_dim}"
            )
        return query.float().view(w, kv, heads // kv, dim)


def rep_bytes(selector: BlockSelector) -> int:
    """Bytes of one block's representation in one layer."""
    shape, dtype = selector.rep_shape()
    return int(math.prod(shape) * dtype.itemsize)


# The registry
# --------------------------------------------------------------------------------------------------

#: Algorithm -> its maker, and the key of the configuration for each of its options.
_SELECTORS: dict[str, tuple[Callable[..., BlockSelector], Mapping[str, str]]] = {}


def register_selector(
    algorithm: str,
    make: Callable[..., BlockSelector],
    options: Mapping[str, str] | None = None,
    *,
    keys: type[AlgorithmConfig] | None = None,
    aliases: Sequence[str] = (),
) -> None:
    """Register a selector by name, for methods and for the configuration, which then has a section
    of that name.

    ``make(geometry, **options)`` makes one. ``keys`` is the class of its section, which adds keys
    and defaults to those of :class:`~ucm.config.sparse.AlgorithmConfig`; None: ``make.Keys``, else
    the keys of the selector that it replaces, else those that all have. The options are the keys
    that ``keys`` adds; ``options`` maps options to other keys. ``aliases`` are further spellings of
    the name. Raises :class:`~ucm.errors.ConfigError` for a name that means another algorithm.
    """
    own: type[AlgorithmConfig] | None = getattr(make, "Keys", None) if keys is None else keys
    register_keys(algorithm, own, aliases)
    if options is None:
        added = () if own is None else own.model_fields.keys() - AlgorithmConfig.model_fields.keys()
        options = {key: key for key in added}
    _SELECTORS[algorithm] = (make, options)


def make_selector(settings: AlgorithmConfig, geometry: Geometry) -> BlockSelector:
    """The selector of an algorithm. Raises :class:`~ucm.errors.ConfigError` where settings and
    shape do not fit."""
    keys_of(settings.algorithm)  # imports its module, which registers it
    if settings.algorithm not in _SELECTORS:
        raise ConfigError(f"no selector is known for the sparse algorithm {settings.algorithm}")
    make, options = _SELECTORS[settings.algorithm]
    given: dict[str, Any] = {option: getattr(settings, key) for option, key in options.items()}
    selector = make(geometry, **given)
    selector._given = given
    if not selector.name:
        selector.name = settings.algorithm
    return selector
