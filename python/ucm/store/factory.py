"""Stores by name for programs written against the V0 interface of the original.

There is one registry for both interfaces: what is registered here can be created by the V1 factory
and the other way round, with an adapter in between where the class is of the other kind.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ucm.config.stores import KNOWN_STORES, OPTION_OWNER, PIPELINE, option_keys
from ucm.config.words import MEANINGLESS
from ucm.errors import ConfigError, UcmError
from ucm.store.factory_v1 import UcmConnectorFactoryV1
from ucm.store.ucmstore import UcmKVStoreBase
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1
from ucm.store.v0_over_v1 import V0OverV1

logger = logging.getLogger("ucm.store")

#: Keys of the original's V0 stores -> ours.
_WORDS = {
    "kv_block_size": "block_size",
    "device": "device_id",
    "storage_path": "storage_backends",
    "path": "storage_backends",
    "use_direct": "io_direct",
}
#: Keys that mean nothing to the connector, but something to a store that is made by hand.
_OF_STORES = frozenset({"device_id", "tensor_size", "tensor_size_list", "shard_size"})


class UcmConnectorFactory:
    """V0 stores by name."""

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """As :meth:`ucm.store.factory_v1.UcmConnectorFactoryV1.register_connector`, into the same
        registry."""
        UcmConnectorFactoryV1.register_connector(name, module_path, class_name)

    @classmethod
    def registered(cls) -> tuple[str, ...]:
        """The names that can be created, sorted."""
        return UcmConnectorFactoryV1.registered()

    @classmethod
    def create_connector(
        cls, connector_name: str, config: Mapping[str, Any], module_path: str | None = None
    ) -> UcmKVStoreBase:
        """A store of the V0 interface: a user's own as it is, any V1 store behind
        :class:`V0OverV1`.

        ``config`` may be written in the original's words: ``kv_block_size`` and ``io_size``
        (bytes), ``role`` scheduler or worker, ``device``. Raises as the V1 factory's
        :meth:`create_connector`.
        """
        found = UcmConnectorFactoryV1.resolve(connector_name, module_path)
        if not issubclass(found, UcmKVStoreBaseV1):
            try:
                return found(config)
            except UcmError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"the store {connector_name} could not be made: {type(error).__name__}: {error}"
                ) from error
        return V0OverV1(
            UcmConnectorFactoryV1.create_connector(
                connector_name, _in_our_words(connector_name, config), module_path
            )
        )


def _in_our_words(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as a V1 store reads it; what has no meaning for a store of ours is left
    out, with one line."""
    ours: dict[str, Any] = {}
    ignored = []
    for key, value in config.items():
        if key == "io_size":
            ours |= {"tensor_size": value, "shard_size": value}
        elif key == "role":
            if value not in ("scheduler", "worker"):
                raise ConfigError(f"role is scheduler or worker, got {value!r}")
            if value == "scheduler":
                ours["device_id"] = -1
        elif key in _WORDS:
            ours.setdefault(_WORDS[key], value)
        elif name in KNOWN_STORES and (
            _meaningless(name, key) or (key == "storage_capacity" and value == 0)
        ):
            # a capacity of 0 was no limit; here there always is one, the default
            ignored.append(key)
        else:
            ours[key] = value
    if "block_size" in ours and "shard_size" not in ours:
        ours |= {"shard_size": ours["block_size"]}
        if not ours.get("tensor_size_list"):
            ours.setdefault("tensor_size", ours["block_size"])
    if ignored:
        logger.warning("%s: without effect here: %s", name, ", ".join(ignored))
    return ours


def _meaningless(name: str, key: str) -> bool:
    # a key of another store of ours
    others = name != PIPELINE and key in OPTION_OWNER and key not in option_keys(name)
    return key not in _OF_STORES and (key in MEANINGLESS or others)
