"""Stores by name: which class a name stands for, the first of several that answers, and why a
directory cannot be used, with the cure where only its owner can mend that: a file system that is
read-only, a directory without permission, a file in its place.

Nothing is imported before it is needed. There is one registry for the interfaces V1 and V0: a store
registered with one factory can be created by the other, behind an adapter where needed.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import pwd
import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ucm.config.words import (
    BUILT_STORES,
    KNOWN_STORES,
    MEANINGLESS,
    OPTION_OWNER,
    PIPELINE,
    hint,
    instead_of,
    option_keys,
    store_hint,
    why_not_alone,
)
from ucm.errors import ConfigError, UcmError, UnknownConnectorError
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1
from ucm.store.v0 import UcmKVStoreBase, V0OverV1, V1OverV0, with_v0_words

logger = logging.getLogger("ucm.store")

#: The core's error of one operation on a file: its path, and the system's number.
_FAILED = re.compile(r"\[path=([^\]]+)\][^;]*\(os error (\d+)\)")
#: The file that makes a directory a store's root.
ROOT_MARKER = "ucm-root.json"
#: Errors that no retry mends.
LASTING = (errno.EROFS, errno.EACCES, errno.ENOTDIR)
#: A store of either interface.
StoreClass = type[UcmKVStoreBaseV1] | type[UcmKVStoreBase]


class UcmConnectorFactoryV1:
    """Stores by name. Users register their own before the engine starts, or name their module in
    the configuration."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Let ``name`` stand for ``class_name`` of ``module_path``, which is imported when first
        used. The same registration may be repeated. Raises :class:`~ucm.errors.ConfigError` when
        the name stands for another class already, or is empty."""
        texts: list[object] = [name, module_path, class_name]
        for what, text in zip(("name", "module path", "class name"), texts, strict=True):
            if not isinstance(text, str) or not text.strip():
                raise ConfigError(
                    f"the {what} of a store is a text that is not empty, got {text!r}"
                )
        with cls._lock:
            before = cls._registry.setdefault(name, (module_path, class_name))
        if before != (module_path, class_name):
            raise ConfigError(
                f"the store {name} is registered already as {before[1]} of {before[0]}; choose"
                " another name"
            )

    @classmethod
    def registered(cls) -> tuple[str, ...]:
        """The names that can be created, sorted."""
        with cls._lock:
            return tuple(sorted(cls._registry))

    @classmethod
    def resolve(cls, name: str, module_path: str | None = None) -> StoreClass:
        """The class a name stands for, imported and checked but not constructed; with
        ``module_path`` the class ``name`` of that module. Raises
        :class:`~ucm.errors.UnknownConnectorError` for an unknown name, module or class, and
        :class:`~ucm.errors.ConfigError` for a class that is no store."""
        if module_path is not None:
            module, class_name = module_path, name
        else:
            with cls._lock:
                entry = cls._registry.get(name)
            if entry is None:
                raise UnknownConnectorError(cls._unknown(name))
            module, class_name = entry
        try:
            imported = importlib.import_module(module)
        except ImportError as error:
            raise UnknownConnectorError(
                f"the module {module} of the store {name} cannot be imported: {error}; it must be"
                " on the Python path of every vLLM process"
            ) from error
        found = getattr(imported, class_name, None)
        if found is None:
            raise UnknownConnectorError(
                f"the module {module} has no class"
                f" {class_name}{hint(class_name, _classes(imported))}"
            )
        if not (isinstance(found, type) and issubclass(found, UcmKVStoreBaseV1 | UcmKVStoreBase)):
            raise ConfigError(
                f"{class_name} of {module} is no store: derive it from"
                " ucm.store.ucmstore_v1.UcmKVStoreBaseV1"
            )
        if missing := sorted(found.__abstractmethods__):
            raise ConfigError(
                f"the store {class_name} of {module} does not define {', '.join(missing)}"
            )
        return found

    @classmethod
    def create_connector(
        cls, connector_name: str, config: Mapping[str, Any], module_path: str | None = None
    ) -> UcmKVStoreBaseV1:
        """As :meth:`make`. Its counters are served where ``UCM_METRICS_PORT`` is set."""
        store = cls.make(connector_name, config, module_path)
        if os.environ.get("UCM_METRICS_PORT"):
            _serve(store)
        return store

    @classmethod
    def make(
        cls, connector_name: str, config: Mapping[str, Any], module_path: str | None = None
    ) -> UcmKVStoreBaseV1:
        """A store by name, or of the class of that name in ``module_path``. Raises as
        :meth:`resolve`, and what its constructor raises; errors that are not ours get the store's
        name. A V0 store is put behind :class:`~ucm.store.v0.V1OverV0`; its sizes have V0's names
        too."""
        store_class = cls.resolve(connector_name, module_path)
        with named_errors(connector_name):
            if issubclass(store_class, UcmKVStoreBaseV1):
                return store_class(config)
            return V1OverV0(store_class(with_v0_words(config)), config)

    @classmethod
    def _unknown(cls, name: str) -> str:
        if name in KNOWN_STORES - BUILT_STORES:
            return why_not_alone(name) or f"{name} is not built yet; {instead_of(name)}"
        names = cls.registered()
        return (
            f"no store is registered as {name!r}{store_hint(str(name), names)} (registered:"
            f" {', '.join(names) or 'none'}; your own: UcmConnectorFactoryV1.register_connector, or"
            " ucm_connector_module_path in the configuration)"
        )


def _serve(store: UcmKVStoreBaseV1) -> None:
    try:
        from ucm.metrics.serving import watch
    except ModuleNotFoundError as error:
        text = "UCM_METRICS_PORT needs %s: pip install 'ucm-kv[metrics]'"
        logger.warning(text, error.name)
    else:
        watch(store)


@contextlib.contextmanager
def named_errors(store: str) -> Iterator[None]:
    """Our own errors as they are; any other becomes a ConfigError that names the store."""
    try:
        yield
    except UcmError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the store {store} could not be made: {type(error).__name__}: {error}"
        ) from error


def _classes(module: Any) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, type)]


def why_unavailable(store: UcmKVStoreBaseV1) -> str:
    """Why a store that was just opened cannot be used, with the cure where only the owner of a
    directory can mend it; empty when it can."""
    try:
        if store.healthy():
            return ""
        why = store.trouble() or "it says that it is unhealthy"
        cure = remedy(why)
        return f"{why}: {cure}" if cure else why
    except Exception as error:
        return f"its healthy() failed: {error}"


def remedy(trouble: str) -> str:
    """The cause and the cure of what the core reports of a store, a sentence for each directory;
    empty where the store may recover by itself."""
    found = [(path, int(number)) for path, number in _FAILED.findall(trouble)]
    texts = [cause_and_cure(path, number) for path, number in found if number in LASTING]
    return "; ".join(dict.fromkeys(texts))


def why_unusable(root: str) -> str:
    """Makes a directory if it is missing, and a file in it that is removed again. Returns why that
    fails, with the cure where there is one; empty if it does not. A root that is complete is only
    read: one on a read-only file system serves."""
    private = os.path.join(root, f".{uuid.uuid4().hex}.tmp")
    try:
        if os.path.exists(os.path.join(root, ROOT_MARKER)):
            os.listdir(root)
            return ""
        os.makedirs(root, exist_ok=True)
        os.close(os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(private)
    except OSError as error:
        if error.errno in LASTING:
            return cause_and_cure(root, error.errno)
        return f"{root} cannot be used: {error.strerror}"
    return ""


def cause_and_cure(path: str, number: int) -> str:
    """A sentence for one of :data:`LASTING` on a path: the cause, a colon, what to do."""
    if path.endswith((".tmp", ROOT_MARKER)):  # the root's own files
        path = os.path.dirname(path)
    there = _nearest(path)
    if number == errno.ENOTDIR:
        return f"{there} is a file, not a directory: remove it, or choose another directory"
    if number == errno.EROFS:
        mount = _mount_of(there)
        return (
            f"{path} is on a file system that is mounted read-only at {mount}: mount it for"
            " writing (in a container: the volume without :ro), or choose another directory"
        )
    return (
        f"{path} may not be used by {_user(os.geteuid())}: {there} {_owned(there)}; change its"
        " owner or mode, run the engine as its owner, or choose another directory"
    )


def _nearest(path: str) -> str:
    """The longest part of a path that exists and is reachable; a file where a directory should
    be."""
    there = os.path.abspath(path)
    while not os.path.exists(there) and os.path.dirname(there) != there:
        there = os.path.dirname(there)
    return there


def _mount_of(path: str) -> str:
    there = os.path.realpath(path)
    while not os.path.ismount(there):
        there = os.path.dirname(there)
    return there


def _owned(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return f"belongs to {_user(status.st_uid)} with mode {status.st_mode & 0o7777:04o}"


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return f"user {number}"


def select_storage(config: Mapping[str, Any]) -> UcmKVStoreBaseV1:
    """The first of ``ucm_connectors`` that can be opened and answers; the log says why not those
    before it.

    ``config`` holds that list (or one entry at its top); every ``ucm_connector_config`` is what the
    store's constructor takes, with its sizes in bytes. Where none answers, it is the first one that
    could be opened: it retries by itself and answers with misses until then. Raises
    :class:`~ucm.errors.ConfigError` when none could be. The connector chooses by the same rule, but
    for all processes of an engine together.
    """
    entries = config.get("ucm_connectors") or ([config] if config.get("ucm_connector_name") else [])
    entries = [entries] if isinstance(entries, Mapping) else list(entries)
    if not entries:
        raise ConfigError(
            "no store is configured: write ucm_connectors, a list of names and configurations"
        )
    waiting: UcmKVStoreBaseV1 | None = None
    whys: list[str] = []
    for entry in entries:
        name = entry.get("ucm_connector_name", "")
        try:
            store = UcmConnectorFactoryV1.create_connector(
                name,
                entry.get("ucm_connector_config") or {},
                entry.get("ucm_connector_module_path"),
            )
        except UcmError as error:
            whys.append(f"{name} cannot be opened: {error}")
            continue
        why = why_unavailable(store)
        if not why:
            if whys:
                logger.warning("of %d stores %s is used; %s", len(entries), name, "; ".join(whys))
            if waiting is not None:
                waiting.close()
            return store
        whys.append(f"{name} is not available: {why}")
        if waiting is None:
            waiting = store
        else:
            store.close()
    if waiting is None:
        raise ConfigError("; ".join(whys))
    logger.warning("no store is available, the first is retried: %s", "; ".join(whys))
    return waiting


# Every store of the core; the others of one tier have a class made from their kind.
for _name in BUILT_STORES:
    UcmConnectorFactoryV1.register_connector(_name, "ucm.store.presets", _name)


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
    """V0 stores by name, of the same registry."""

    register_connector = UcmConnectorFactoryV1.register_connector
    registered = UcmConnectorFactoryV1.registered

    @classmethod
    def create_connector(
        cls, connector_name: Any, config: Any, module_path: str | None = None
    ) -> UcmKVStoreBase:
        """A store of the V0 interface: a user's own as it is, any V1 store behind
        :class:`V0OverV1`. Also in the form of document 001, ``(ucm_config, local_rank)``: the first
        of its ``ucm_connectors``, on that device.

        ``config`` may have the original's keys: ``kv_block_size`` and ``io_size`` (bytes), ``role``
        scheduler or worker, ``device``. Raises as the V1 factory's :meth:`create_connector`.
        """
        if not isinstance(connector_name, str):
            connector_name, config, module_path = _first_store(connector_name, config)
        found = UcmConnectorFactoryV1.resolve(connector_name, module_path)
        if not issubclass(found, UcmKVStoreBaseV1):
            with named_errors(connector_name):
                return found(config)
        ours = _in_our_words(connector_name, config)
        return V0OverV1(UcmConnectorFactoryV1.create_connector(connector_name, ours, module_path))


def _first_store(config: Any, local_rank: Any) -> tuple[str, dict[str, Any], str | None]:
    if not isinstance(config, Mapping) or not isinstance(local_rank, int):
        raise ConfigError(
            "a store is made from (connector_name, config), or from (ucm_config, local_rank): a"
            " dictionary with ucm_connectors and a number"
        )
    entries = config.get("ucm_connectors") or [config]
    first = entries[0] if isinstance(entries, list | tuple) else entries
    name, own = first.get("ucm_connector_name"), first.get("ucm_connector_config") or {}
    if not name:
        raise ConfigError("ucm_config names no store: write ucm_connectors, or ucm_connector_name")
    return name, {"device_id": local_rank, **own}, first.get("ucm_connector_module_path")


def _in_our_words(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as a V1 store reads it; keys without meaning are left out, with one
    warning."""
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
