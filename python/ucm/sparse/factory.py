"""Methods of sparse attention by name: ours, and those that users register."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ucm.config.loading import config_of
from ucm.config.sparse import AlgorithmConfig, algorithm_of, algorithms, chooses_blocks
from ucm.config.words import hint
from ucm.errors import ConfigError, UnknownConnectorError
from ucm.sparse.base import UcmSparseBase, UcmSparseRole

#: Name -> module and class of the method, of those that are more than an algorithm.
_METHODS: dict[str, tuple[str, str]] = {
    name: ("ucm.sparse.names", name) for name in ("ESA", "GSA", "GSAOnDevice", "KVStarMultiStep")
}


class UcmSparseFactory:
    """Makes methods. A user's own one is registered, and then named like ours."""

    @classmethod
    def register_sparse_method(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a subclass of :class:`~ucm.sparse.base.UcmSparseBase`: ``class_name`` in the
        module ``module_path``, imported on first use. Raises :class:`~ucm.errors.ConfigError` for a
        name that is taken."""
        known = ".".join(_METHODS[name]) if name in _METHODS else "a selector"
        if known != f"{module_path}.{class_name}" and (name in _METHODS or name in algorithms()):
            raise ConfigError(f'a sparse method "{name}" is registered already: {known}')
        _METHODS[name] = (module_path, class_name)

    @classmethod
    def method_class(cls, name: str) -> type[UcmSparseBase]:
        """The class of that name, however it is spelled. Raises
        :class:`~ucm.errors.UnknownConnectorError`."""
        known = name if name in _METHODS else algorithm_of(name)
        if known is None or not (known in _METHODS or chooses_blocks(known)):
            names = dict.fromkeys((*filter(chooses_blocks, algorithms()), *_METHODS))
            raise UnknownConnectorError(
                f'no sparse method is named "{name}"{hint(name, names)} (known: {", ".join(names)})'
            )
        if known not in _METHODS:  # an algorithm and nothing else
            from ucm.sparse.method import method_for  # it needs torch

            return method_for(known)
        module, wanted = _METHODS[known]
        found = getattr(importlib.import_module(module), wanted, None)
        if not (isinstance(found, type) and issubclass(found, UcmSparseBase)):
            raise ConfigError(f"{module}.{wanted} is no subclass of ucm.sparse.base.UcmSparseBase")
        return found

    @classmethod
    def create_sparse_method(
        cls,
        name: Any,
        role: UcmSparseRole = UcmSparseRole.WORKER,
        config: Mapping[str, Any] | AlgorithmConfig | Any = None,
    ) -> UcmSparseBase:
        """A method by its name: ``create_sparse_method("GSA", role, {"sparse_ratio": 0.3})``.

        ``config`` holds the keys of the algorithm, or is vLLM's ``VllmConfig``. The original's
        form, with vLLM's configuration first, is understood as well. Raises
        :class:`~ucm.errors.ConfigError`.
        """
        if not isinstance(name, str):
            found = cls.create_configured(name, role)
            if found is None:
                raise ConfigError(
                    "this configuration names no sparse method: write `ucm_sparse_config`"
                )
            return found
        made: UcmSparseBase = cls.method_class(name)(config, role)
        return made

    @classmethod
    def create_configured(cls, vllm_config: Any, role: UcmSparseRole) -> UcmSparseBase | None:
        """The method that vLLM's configuration names; None where it names none."""
        config = config_of(vllm_config)
        if not config.enabled or not config.sparse.enabled or config.sparse.type is None:
            return None
        return cls.method_class(config.sparse.type)(vllm_config, role)
