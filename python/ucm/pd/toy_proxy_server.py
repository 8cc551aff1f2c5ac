"""``python -m ucm.pd.toy_proxy_server``: ``ucm pd-proxy`` with the options of the toy proxies of
vLLM and of the original.

Hosts and ports are lists of equal length. With the original's
``--worker-hosts`` and without ``--pd-disaggregation``, servers have both roles. Any other option is
one of ``ucm pd-proxy``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

ROLES = {"prefiller": "prefill", "decoder": "decode", "worker": "mixed"}
#: Ports where no option names one, as in vLLM's toy proxy.
PORTS = {"prefiller": 8100, "decoder": 8200}


def arguments(given: Sequence[str]) -> list[str]:
    """The arguments of ``ucm pd-proxy`` for those of a toy proxy."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--pd-disaggregation", action="store_true", help="has no effect")
    for role in ROLES:
        name = "work" if role == "worker" else role
        parser.add_argument(f"--{role}-hosts", f"--{name}-host", nargs="+")
        parser.add_argument(f"--{role}-ports", f"--{name}-port", nargs="+", type=int)
    known, others = parser.parse_known_args(given)
    wanted = vars(known)
    mixed = wanted["worker_hosts"] or wanted["worker_ports"]
    found = []
    for role in ["worker"] if mixed and not known.pd_disaggregation else ["prefiller", "decoder"]:
        hosts, ports = wanted[f"{role}_hosts"], wanted[f"{role}_ports"]
        hosts = hosts or ["localhost"] * len(ports or [0])
        ports = ports or [PORTS.get(role, 8100)]
        if len(hosts) != len(ports):
            parser.error(f"--{role}-hosts and --{role}-ports have different lengths")
        for host, port in zip(hosts, ports, strict=True):
            found += [f"--{ROLES[role]}", f"http://{host}:{port}"]
    return [*found, *others]


def main() -> None:
    """Runs the proxy."""
    from ucm.cli import main as command_line  # with click: not before it is needed

    command_line(["pd-proxy", *arguments(sys.argv[1:])], prog_name="ucm")


if __name__ == "__main__":
    main()
