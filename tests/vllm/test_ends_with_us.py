"""A server of a test, and what it started itself, end with pytest, whatever ends that."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
#: A server with a child, as vLLM has its engine's process; it ignores requests to end.
SERVER = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), child.pid, flush=True)
signal.pause()
"""
#: Stands for pytest.
STARTED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from served import Server
log = Path(sys.argv[2])
server = Server(["server_with_a_child"], dict(os.environ), 1, log)
while not log.read_text().endswith("\\n"):
    pass
print(log.read_text(), end="", flush=True)
sys.stdin.read()
"""


def test_a_server_and_its_children_end_with_a_killed_pytest(tmp_path: Path) -> None:
    (tmp_path / "server_with_a_child.py").write_text(SERVER)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        [sys.executable, "-c", STARTED, str(HERE), str(tmp_path / "log")],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as pytest_like:
        assert pytest_like.stdout is not None
        pids = [int(word) for word in pytest_like.stdout.readline().split()]
        assert len(pids) == 2
        ends = [os.pidfd_open(pid) for pid in pids]
        pytest_like.send_signal(signal.SIGKILL)
        ended = [bool(select.select([end], [], [], 60)[0]) for end in ends]
        for end, is_over in zip(ends, ended, strict=True):
            if not is_over:
                signal.pidfd_send_signal(end, signal.SIGKILL)
            os.close(end)
        assert all(ended), "it goes on without pytest"
