"""Tags of tenants: what stands in a record's header for the ``cache_salt`` of the request that
wrote it.

The salt itself is part of the block keys, so tenants with different salts never share a block. The
tag only says whose a record is, so that records can be counted by tenant. With a key it is
HMAC-SHA256 of the salt: who reads the store cannot test guesses of a salt against it. Without one
it is SHA-256 of the salt.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from typing import Any

from ucm.config.fields import read_secret
from ucm.config.words import TENANT_KEY_VARIABLE
from ucm.errors import ConfigError

#: Bytes of a tag.
TAG = 32
#: Fewest bytes of a key.
LEAST_KEY = 16
#: Most bytes that are read of a file that holds a key.
_MOST_KEY = 4096
#: Tells these digests from others of the same bytes.
_FOR = b"UCMTENANT"


class TenantTags:
    """Makes the tag of a request."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key

    @classmethod
    def configured(
        cls, key_file: str | None, environ: Mapping[str, str] = os.environ
    ) -> TenantTags:
        """With the key of this file, else of ``UCM_TENANT_KEY``, else without one.

        Raises :class:`~ucm.errors.ConfigError` for a file that cannot be read or that other users
        may read, and for a key that is too short.
        """
        key = environ.get(TENANT_KEY_VARIABLE, "").strip().encode("utf-8", "surrogateescape")
        origin = f"environment {TENANT_KEY_VARIABLE}"
        if key_file is not None:
            origin = f"tenant_key_file {key_file}"
            try:
                key = read_secret(key_file, "tenant_key_file", _MOST_KEY).strip()
            except OSError as error:
                raise ConfigError(f"{origin} cannot be read: {error.strerror}") from error
        elif not key:
            return cls()
        if len(key) < LEAST_KEY:
            raise ConfigError(
                f"{origin} holds a key of {len(key)} bytes, at least {LEAST_KEY} are needed; "
                "make one with: openssl rand -hex 32"
            )
        return cls(key)

    def of(self, request: Any) -> bytes:
        """The tag of this request, empty where it has no salt."""
        salt = getattr(request, "cache_salt", None)
        if not salt:
            return b""
        return self.of_salt(str(salt))

    def of_salt(self, salt: str) -> bytes:
        """The tag of this salt."""
        message = _FOR + salt.encode("utf-8", "surrogatepass")
        if self._key is None:
            return hashlib.sha256(message).digest()
        return hmac.digest(self._key, message, "sha256")
