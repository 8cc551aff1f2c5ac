"""ucm keeps the KV cache of large language models outside the accelerator and gives it back.

Importing this package is light on purpose: it loads neither vLLM nor torch, nor any accelerator's
library.
"""

from __future__ import annotations

from ucm.errors import UcmError
from ucm.refused import install

install()

__version__ = "0.1.0"

__all__ = ["UcmError", "__version__"]
