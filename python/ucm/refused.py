"""Names of the documents that ucm comes from and that it does not have, each with one sentence that
says why, or what to write instead.

An import of such a name fails with its sentence: of a module through a finder behind Python's own,
of anything in a module through that module's ``__getattr__``. ``docs/not-ours.md`` has the reasons
in full.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from typing import Any

_PATCH = "no patch is needed: the connector works through vLLM's own interfaces"
_STATE = "what a request needs is private to the connector and changes; write a store of your own"
_MEASURED = "selection works on block tables through an attention backend, without this function"
_CONNECTOR = "ucm.integration.vllm.ucm_connector"
_POSIX = "its name is UcmPosixStore, and its constructor sets it up"

#: Name -> why there is none.
REFUSED = {
    "ucm.sparse.blend.blend": "its parts are ucm.sparse.blend.chunks, tokens and rotation",
    "ucm.integration.vllm.patch": _PATCH,
    "ucm.integration.vllm.tier": "no tier of vLLM's OffloadingConnector: UCMConnector has tiers",
    "ucm.shared": "shared code has its place below its users: ucm.store, ucm.trans, ucm.logger",
    "ucm.sparse.utils": "its functions are in ucm.sparse.selection",
    "ucm.sparse.state.maybe_execute_sparse_attention_begin": _MEASURED,
    "ucm.sparse.state.maybe_execute_sparse_attention_finished": _MEASURED,
    "ucm.sparse.gsa.block_selection_kernel": _MEASURED,
    "ucm.sparse.gsa.modify_block_table": _MEASURED,
    "ucm.sparse.kvstar.multistep.ReqPerLayerState": _STATE,
    f"{_CONNECTOR}.RequestMeta": _STATE,
    f"{_CONNECTOR}.RequestDispatchMeta": _STATE,
    f"{_CONNECTOR}.ReqMeta": _STATE,
    f"{_CONNECTOR}.ReqState": _STATE,
    f"{_CONNECTOR}.UCMSchedulerMixin": "derive from UCMConnector; its two sides are no mixins",
    f"{_CONNECTOR}.UCMWorkerMixin": "derive from UCMConnector; its two sides are no mixins",
    f"{_CONNECTOR}.BlockHashCache": "keys are computed faster than a cache finds them: BlockHasher",
    "ucm.store.PosixStore": _POSIX,
    "ucm.store.posix.connector.PosixStore": _POSIX,
    "ucm.store.posix.cc": "the compiled store is in ucm._core; use UcmPosixStore",
    "ucm.store.redis": "ucm.store.factory_v1 makes it: create_connector('UcmRedisStore', config)",
    "ucm.store.object": "ucm.store.factory_v1 makes it: create_connector('UcmObjectStore', config)",
}


def sentence(name: str) -> str:
    """Why a name, or a module above it, is refused; empty where it is not."""
    while name:
        if name in REFUSED:
            return f"{name}: {REFUSED[name]} (docs/not-ours.md)"
        name = name.rpartition(".")[0]
    return ""


def refuse(module: str, name: str) -> AttributeError | ImportError:
    """What the ``__getattr__`` of a module raises for a name that it lacks: ImportError with the
    sentence of a refused one."""
    why = sentence(f"{module}.{name}") if f"{module}.{name}" in REFUSED else ""
    return (
        ImportError(why) if why else AttributeError(f"module {module!r} has no attribute {name!r}")
    )


def of_posix(name: str) -> Any:
    """The ``__getattr__`` of :mod:`ucm.store.posix.connector`."""
    raise refuse("ucm.store.posix.connector", name)


class _Finder:
    """Finds nothing; of a refused module it raises the sentence."""

    @staticmethod
    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        """As Python calls it for a module that no other finder has."""
        if name.startswith("ucm.") and (why := sentence(name)):
            raise ModuleNotFoundError(why)  # without a name, which `from … import` would hide
        return None


def install() -> None:
    """Add the finder, once."""
    if _Finder not in sys.meta_path:
        sys.meta_path.append(_Finder)
