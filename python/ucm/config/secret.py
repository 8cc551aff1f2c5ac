"""Secrets in a configuration: values that no text shows, and the one function that takes them out
again.

A password is a :class:`pydantic.SecretStr`, an address with a login an
:class:`~ucm.config.sizes.Address`. Both show asterisks in ``str``, ``repr``, logs and dumps, and
stay what they are until :func:`revealed`, which is called where a configuration leaves ucm's
Python: for the core, and for a store of the user's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

from ucm.config.sizes import Address, has_login

#: Names of keys whose values are never shown.
_SECRET_NAME = re.compile(
    r"secret|passw|passphrase|credential|private_?key|access_?key|api_?key|(^|[_.-])(auth|token|key)$|auth_?token",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a key of this name holds something that must not be printed."""
    return _SECRET_NAME.search(name) is not None


def parse_secret(value: Any) -> SecretStr:
    """A text that is never shown."""
    if isinstance(value, SecretStr):
        return value
    if not isinstance(value, str):
        raise ValueError("a text is expected; put a number in quotes")
    return SecretStr(value)


def concealed(value: Any, name: str = "") -> Any:
    """A value as written, with every text in it that is a secret, by its key's name or as a login
    in an address, in a form that shows none."""
    return _concealed(value, is_secret(name))


def _concealed(value: Any, secret: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _concealed(item, secret or is_secret(str(key))) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_concealed(item, secret) for item in value)
    if isinstance(value, Address) or not isinstance(value, str):
        return value
    if secret:
        return SecretStr(value)
    return Address(value) if has_login(value) else value


def revealed(value: Any) -> Any:
    """The same value with its secrets as they were written. What it returns must not be kept or
    shown."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Address):
        return value.written
    if isinstance(value, Mapping):
        return {key: revealed(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(revealed(item) for item in value)
    return value


def for_core(description: Mapping[str, Any]) -> str:
    """A description of a store or of a place, as the core reads it."""
    return json.dumps(revealed(description), ensure_ascii=False)
