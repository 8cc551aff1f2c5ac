"""``ucm pd-proxy`` as a user starts it."""

from __future__ import annotations

import importlib.util
import re
import signal
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from ends_with_us import Group

from ucm.cli import main
from ucm.pd import Settings
from ucm.pd.toy_proxy_server import arguments

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "pd-proxy.md").read_text()


def run(*given: str) -> Result:
    return CliRunner().invoke(main, ["pd-proxy", *given])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((), "give --prefill and --decode, at least one server of each, or --mixed"),
        (("--prefill", "a:1"), "give --prefill and --decode"),
        (("--decode", "a:1"), "give --prefill and --decode"),
        (("--mixed", "a:1", "--decode", "b:1"), "--mixed replaces --prefill and --decode"),
        (("--mixed", "ftp://a"), "'ftp://a' is no address of a server; write http://host:port"),
        (("--mixed", "http://a/v1/"), "write it without /v1"),
        (("--mixed", "a:1", "--max-body", "much"), "--max-body"),
        (("--mixed", "a:1", "--tries", "0"), "--tries"),
        (("--mixed", "a:1", "--retry-for", "0"), "--retry-for"),
    ],
)
def test_what_a_user_can_mend(given: tuple[str, ...], text: str) -> None:
    result = run(*given)
    assert result.exit_code == 2
    assert text in result.output


def test_every_option_is_documented() -> None:
    text = run("--help").output
    for one in fields(Settings):
        option = f"--{one.name.replace('_', '-')}"
        assert option in text
        assert f"`{option}`" in PAGE, option


@pytest.mark.skipif(not importlib.util.find_spec("starlette"), reason="the extra is not installed")
def test_an_address_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("--mixed", "a:1", "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 2
    assert "in use" in result.output


def test_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['httpx'] = None\n"
        "from ucm.cli import main; main(['pd-proxy', '--mixed', 'a:1'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == "Error: ucm pd-proxy needs httpx: pip install 'ucm-kv[pd]'\n"


@pytest.mark.skipif(not importlib.util.find_spec("starlette"), reason="the extra is not installed")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_it_starts_and_ends(end: signal.Signals) -> None:
    """The toy's options, a real process, and what it logs."""
    command = [sys.executable, "-m", "ucm.pd.toy_proxy_server", "--port", "0"]
    command += ["--prefiller-ports", "1", "--decoder-host", "localhost", "--decoder-port", "2"]
    with Group(command, stderr=subprocess.PIPE, text=True) as group:
        process = group.process
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"ucm \S+: pd-proxy on http://127\.0\.0\.1:(\d+); (.*)$", line)
        assert found, line + process.stderr.read()
        assert found[2] == "prefill: http://localhost:1; decode: http://localhost:2"
        down = process.stderr.readline() + process.stderr.readline()
        assert "the decode server http://localhost:2 does not answer: ConnectError" in down
        with socket.create_connection(("127.0.0.1", int(found[1]))) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 503 ")
        process.send_signal(end)
        assert process.wait(60) in (0, -signal.SIGTERM)
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("", "--prefill http://localhost:8100 --decode http://localhost:8200"),
        (
            "--prefiller-hosts a b --prefiller-ports 1 2 --decoder-host c --decoder-port 3 --foo 9",
            "--prefill http://a:1 --prefill http://b:2 --decode http://c:3 --foo 9",
        ),
        (
            "--pd-disaggregation --prefiller-ports 1 --worker-hosts w",
            "--prefill http://localhost:1 --decode http://localhost:8200",
        ),
        (
            "--worker-hosts a b --worker-ports 1 2 --host 0.0.0.0",
            "--mixed http://a:1 --mixed http://b:2 --host 0.0.0.0",
        ),
    ],
)
def test_options_of_toy_proxies(given: str, meant: str) -> None:
    assert arguments(given.split()) == meant.split()


def test_lists_of_toy_proxies_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--decoder-hosts", "a", "b", "--decoder-ports", "1"])
    assert "have different lengths" in capsys.readouterr().err
