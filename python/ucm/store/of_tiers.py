"""The classes of stores of one tier that need no code of their own: one for each name of the
registry that has none.

A class is made when it is asked for, from the kind of tier that goes by its name.
"""

from __future__ import annotations

from ucm.config.stores import STORES
from ucm.store.posix.connector import UcmPosixStore


def __getattr__(name: str) -> type[UcmPosixStore]:
    if name not in STORES or STORES[name].kind.role != "medium":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    members = {
        "__doc__": f"{name}: {STORES[name].summary}.",
        "__module__": __name__,
        "store_name": name,
    }
    made = type(name, (UcmPosixStore,), members)
    globals()[name] = made  # the next use does not come here
    return made
