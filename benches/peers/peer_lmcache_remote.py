"""LMCache's L2 adapters for the servers of ``make bench-remote``; the directory of a round is the
server's address."""

from __future__ import annotations

import os
import socket
from typing import Any

from peer import UnavailableError
from peer_lmcache import LMCacheL2

#: Requests at once, as many as the stores of ucm have.
AT_ONCE = 16


class LMCacheRemote(LMCacheL2):
    """Option ``type``: resp, s3 or mooncake_store; ``bucket`` of s3."""

    def _spec(self, directory: str, direct: bool) -> dict[str, Any]:
        host, _, port = directory.partition(":")
        self.threads = f"{AT_ONCE}"
        match self.options["type"]:
            case "resp":
                return {"type": "resp", "host": host, "port": int(port), "num_workers": AT_ONCE}
            case "s3":
                return self._s3(port)
            case "mooncake_store":
                return {
                    "type": "mooncake_store",
                    "num_workers": AT_ONCE,
                    "local_hostname": host,
                    "metadata_server": "P2PHANDSHAKE",
                    "protocol": "tcp",
                    "master_server_addr": directory,
                }
            case other:
                raise UnavailableError(f"there is no adapter {other}")

    def _s3(self, port: str) -> dict[str, Any]:
        """It signs for, and connects to, a host that has the bucket's name in front."""
        at = f"{self.options['bucket']}.localhost"
        try:
            socket.getaddrinfo(at, port)
        except OSError:
            text = f"it addresses a bucket by the name of a host alone, and {at} is none here"
            raise UnavailableError(text) from None
        return {
            "type": "s3",
            "s3_endpoint": f"{at}:{port}",
            "s3_region": "us-east-1",
            "disable_tls": True,
            "s3_num_io_threads": AT_ONCE,
            "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
            "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
        }
