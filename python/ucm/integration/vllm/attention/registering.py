"""The entry to sparse attention, in every process of vLLM: paths behind the names of vLLM's
backends.

:func:`register` overrides each name with a path into this module, by vLLM's own
:func:`register_backend`. It runs before an engine has a configuration, and vLLM resolves the paths
in engines without ucm too. So this module imports only the standard library, vLLM and
:mod:`..early`; the rest of ucm, and the compiled core, are imported where our connector is
configured. Everywhere else, and after any error but a wrong configuration of ours, a path gives
vLLM's own class.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ucm.errors import ConfigError
from ucm.integration.vllm.early import extra_config, refuse, refuse_wrong

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

#: Names of vLLM's attention backends that have a block table and lengths for each row. FlashInfer
#: plans its kernels ahead from both, and sparse backends of vLLM's own choose tokens already.
OVERRIDDEN = (
    "CPU_ATTN",
    "FLASH_ATTN",
    "TRITON_ATTN",
    "CPU_MLA",
    "AMX_MLA",
    "TRITON_MLA",
    "FLASHMLA",
    "FLASH_ATTN_MLA",
    "CUTLASS_MLA",
)

#: Keys that name an algorithm, in lower case without punctuation; keys with "sparse" in them count
#: too. A unit test compares them with ``ucm.config``, which cannot be imported here.
ALGORITHMS = frozenset(
    {"esa", "gsa", "gsaondevice", "kvstarmultistep", "kvstar", "quest", "infllm", "auto"}
    | {"periodic", "random", "windows", "oracle", "blend", "rerope"}
)
#: Variables, and keys of the dictionary, that name a configuration file, which is not read here.
_FILES = ("UCM_CONFIG_FILE", "ucm_config_path")
_SPARSE_VARIABLES = ("UCM_SPARSE_TYPE", "ENABLE_SPARSE", "VLLM_USE_REROPE")
_TRUE = ("true", "1", "yes", "on")

_warned = False


def register() -> None:
    """Override names that are not overridden yet: the class of another plug-in stays."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in OVERRIDDEN:
        backend = AttentionBackendEnum.__members__.get(name)
        if backend is not None and not backend.is_overridden():
            register_backend(backend, f"{__name__}.{name}")


def __getattr__(name: str) -> type[AttentionBackend]:
    """The backend behind one of the names, in the engine whose configuration vLLM has set."""
    if name not in OVERRIDDEN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    own, vllm_config = vllms_own(name), _current_config()
    if (ours := extra_config(vllm_config)) is not None:
        refuse_wrong(ours)  # before the model is built
    try:
        if not _may_be_sparse(vllm_config):
            return own
        from ucm.integration.vllm.attention.backends import backend_for

        return backend_for(name, own, vllm_config)
    except ConfigError as error:
        refuse(error.message)
    except Exception as error:
        _warn(error)
        return own


def vllms_own(name: str) -> type[AttentionBackend]:
    """vLLM's class behind a name."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    found: type[AttentionBackend] = resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    return found


def _current_config() -> VllmConfig | None:
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def _may_be_sparse(vllm_config: Any) -> bool:
    """Whether our configuration has to be read: not without our connector, with ``UCM_DISABLE``, or
    where nothing names sparse attention or a file."""
    ours = extra_config(vllm_config)
    if ours is None or os.environ.get("UCM_DISABLE", "").strip().lower() in _TRUE:
        return False
    variables = (*_SPARSE_VARIABLES, *_FILES)
    return any(os.environ.get(name, "").strip() for name in variables) or _has_sparse_word(ours)


def _has_sparse_word(value: Any) -> bool:
    """Whether any key, at any depth, may be one of sparse attention or names a configuration
    file."""
    if isinstance(value, list | tuple):
        return any(map(_has_sparse_word, value))
    if not isinstance(value, Mapping):
        return False
    for key, inner in value.items():
        word = str(key).lower().replace("-", "").replace("_", "")
        named = "sparse" in word or "blend" in word or word in ALGORITHMS
        if named or key in _FILES or _has_sparse_word(inner):
            return True
    return False


def _warn(error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        logging.getLogger("ucm.vllm").warning(
            "sparse attention is not used, vLLM's own attention backends are: %s: %s",
            type(error).__name__,
            error,
        )
