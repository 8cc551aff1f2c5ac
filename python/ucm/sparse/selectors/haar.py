"""Random directions for hash codes, the same on every rank, in every process and after every
restart.

A direction matrix is made of square blocks, each drawn from the Haar measure (a random rotation):
QR of a Gaussian matrix with the signs of R's diagonal moved into Q. Directions within a block are
orthogonal, so they say different things; more blocks side by side give any number of bits, whatever
the head size. The numbers come from a counter-based generator keyed by seed, layer and block, and
nothing else.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ucm.errors import ConfigError


def directions(
    size: int, bits: int, *, seed: int, layer: int, part: int = 0
) -> npt.NDArray[np.float64]:
    """``bits`` directions in ``size`` dimensions, ``[size, bits]``, each of length 1. ``part``
    tells the matrices of one layer apart."""
    blocks = [
        _rotation(size, (seed, (layer << 32) | (part << 16) | block))
        for block in range(-(-bits // size))
    ]
    return np.concatenate(blocks, axis=1)[:, :bits]


def _rotation(size: int, key: tuple[int, int]) -> npt.NDArray[np.float64]:
    q, r = np.linalg.qr(_gaussian(size * size, key).reshape(size, size))
    signs = np.where(np.diag(r) < 0, -1.0, 1.0)
    return np.asarray(q * signs)


def _gaussian(count: int, key: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Normal deviates from the raw words of the generator (Box and Muller), which no version of
    NumPy may change."""
    raw = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(2 * count)
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(
        np.sqrt(-2.0 * np.log(uniform[:count])) * np.cos(2.0 * np.pi * uniform[count:])
    )


def load_directions(path: str) -> tuple[dict[str, npt.NDArray[np.float64]], str]:
    """Learned directions from an ``.npz``, by name, and a name for all of them. Raises
    :class:`~ucm.errors.ConfigError`."""
    try:
        data = Path(path).read_bytes()
        with np.load(path, allow_pickle=False) as file:
            found = {name: np.asarray(file[name], dtype=np.float64) for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"hash_weights_file {path} cannot be read as an .npz of arrays: {error}"
        ) from None
    return found, "learned." + hashlib.sha256(data).hexdigest()[:16]
