"""Keys at another position than they were computed at, by the layer's own rotary embedding.

A rotary embedding reads pairs of channels as complex numbers and multiplies each by a factor of the
token's position, ``f(p)``, which includes the scale of YaRN. A key of position ``old`` becomes the
key of position ``new`` by ``f(new) / f(old)``. The scale cancels out, so it is applied once. The
factors are not recomputed from a formula: the embedding rotates ones, and the result is read. So
every scaling rule, and every rounding of an embedding's table, is that of the layer.

Layers that share an embedding share the factors: :meth:`Rotation.factors` once for the tokens of a
request, :meth:`Rotation.turn` in each layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ucm.errors import InvalidInputError, UnsupportedError

#: Largest difference of a turned key from a rotated one, as a share of the largest element, by the
#: element type: several roundings of the type.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
#: Tokens of the check of an embedding.
_CHECKED = 16


class Rotation:
    """Turns keys by the difference of two positions, as one rotary embedding rotates."""

    def __init__(
        self,
        rotary: Any,
        head_size: int,
        positions: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        latent: bool = False,
    ) -> None:
        """``rotary``: a layer's ``rotary_emb``, called as vLLM's models call it:
        ``rotary(positions [t], query, key)`` with tensors ``[t, heads * head_size]`` of ``dtype``
        on ``device``, which it may change in place; of ``latent`` attention they are ``[t, heads,
        head_size]``. ``positions``: tokens of the longest request. Raises
        :class:`~ucm.errors.UnsupportedError` for an embedding that does not multiply pairs of
        channels by factors of the position.
        """
        self._rotary, self._size, self._limit = rotary, head_size, positions
        self._dtype, self._device = dtype, torch.device(device)
        self._shape = (-1, 1, head_size) if latent else (-1, head_size)
        rotated = getattr(rotary, "rotary_dim", None)
        if not isinstance(rotated, int) or not 0 < rotated <= head_size or rotated % 2:
            raise self._unsupported("it has no even rotary_dim")
        neox, half = getattr(rotary, "is_neox_style", True), rotated // 2
        self._pairs = half
        #: Where the two channels of each pair are: slices, which are views of keys.
        self._real = slice(half) if neox else slice(0, rotated, 2)
        self._imaginary = slice(half, rotated) if neox else slice(1, rotated, 2)
        self._check()

    def factors(self, old: Tensor, new: Tensor) -> Tensor:
        """The factors that turn keys of tokens from positions ``old [t]`` to ``new [t]``: complex64
        ``[t, pairs]``. Raises :class:`~ucm.errors.InvalidInputError` for positions outside the
        longest request."""
        if old.dim() != 1 or old.shape != new.shape:
            raise InvalidInputError(
                "old and new positions are two rows of equal length",
                context={"old": tuple(old.shape), "new": tuple(new.shape)},
            )
        both = torch.cat([new, old]).to(self._device, torch.int64)
        if len(both) and not 0 <= int(both.min()) <= int(both.max()) < self._limit:
            raise InvalidInputError(
                f"positions lie in 0..{self._limit - 1}",
                context={"least": int(both.min()), "largest": int(both.max())},
            )
        if not len(both):
            return torch.empty(0, self._pairs, dtype=torch.complex64, device=self._device)
        ones = torch.zeros(len(both), self._size, dtype=self._dtype, device=self._device)
        ones[:, self._real] = 1
        rotated = self._rotate(both, ones).double()
        rotated = torch.complex(rotated[:, self._real], rotated[:, self._imaginary])
        at_new, at_old = rotated.split(len(old))
        return (at_new / at_old).to(torch.complex64)

    def turn(self, keys: Tensor, factors: Tensor) -> Tensor:
        """``keys [t, heads, d]`` turned by ``factors [t, pairs]``: a new tensor of their type. The
        embedding's channels are the last ``head_size`` of ``d`` (latent keys have others before
        them)."""
        turned = keys.clone()
        before, part = (each[..., keys.shape[-1] - self._size :] for each in (keys, turned))
        real, imaginary = before[..., self._real].float(), before[..., self._imaginary].float()
        cosine, sine = factors.real[:, None], factors.imag[:, None]
        part[..., self._real] = real * cosine - imaginary * sine
        part[..., self._imaginary] = real * sine + imaginary * cosine
        return turned

    def _rotate(self, positions: Tensor, keys: Tensor) -> Tensor:
        """Keys ``[t, head_size]`` at these positions."""
        given = keys.clone().view(self._shape)
        _, rotated = self._rotary(positions, torch.zeros_like(given), given)
        found: Tensor = rotated.reshape(keys.shape)
        return found

    def _check(self) -> None:
        """Compare turned keys with those that the embedding rotates to the new position."""
        last = self._limit - 1
        new = torch.linspace(0, last, _CHECKED, device=self._device).long()
        old, generator = new.flip(0), torch.Generator().manual_seed(0)
        keys = torch.randn(_CHECKED, self._size, generator=generator)
        keys = keys.to(self._device, self._dtype)
        try:
            fresh, cached = self._rotate(new, keys).float(), self._rotate(old, keys)
        except (RuntimeError, TypeError, ValueError) as error:
            raise self._unsupported(f"it cannot be called as a model calls it ({error})") from error
        turned = self.turn(cached[:, None], self.factors(old, new))[:, 0]
        off = (turned.float() - fresh).abs().max()
        if not off <= _TOLERANCE.get(self._dtype, 0) * fresh.abs().max():
            raise self._unsupported(f"turned keys differ from its own by up to {float(off):.2g}")

    def _unsupported(self, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"keys of this rotary embedding cannot be turned to another position: {why}",
            context={"class": type(self._rotary).__name__, "head_size": self._size},
        )
