"""``ucm mode``: the file of a root or of the state directory, and an engine that follows it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from cli_roots import Written
from click.testing import Result

import ucm.mode
from ucm.mode import MODE_NAME, Mode, ModeWatch, read_mode, strictest, write_mode

Run = Callable[..., Result]
Json = Callable[..., dict[str, Any]]
WORDS = [str(mode) for mode in Mode]


@pytest.mark.parametrize("word", WORDS)
def test_a_root_is_switched(word: str, root: Written, ucm_json: Json) -> None:
    root.fill("one", 1)
    assert ucm_json("mode", "--root", root.path)["mode"] == "read-write"
    written = ucm_json("mode", "--root", root.path, word)
    assert written["file"] == str(root.path / MODE_NAME)
    assert written["mode"] == ucm_json("mode", "--root", root.path)["mode"] == word
    assert ucm_json("inspect", root.path)["roots"][0]["foreign"] == 0
    assert not list(root.path.glob("*.tmp"))


def test_the_state_directory_is_made(
    tmp_path: Path, ucm: Run, ucm_json: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCM_STATE_DIR", str(tmp_path / "deep" / "state"))
    assert ucm("mode", "off").stdout.startswith("off  (")
    assert read_mode(str(tmp_path / "deep" / "state")) is Mode.OFF
    assert ucm_json("mode")["mode"] == "off"
    assert ucm_json("mode", "--state-dir", tmp_path / "other")["mode"] == "read-write"


def test_what_cannot_be_switched_is_refused(tmp_path: Path, root: Written, ucm: Run) -> None:
    done = ucm("mode", "--root", tmp_path, "off")
    assert done.exit_code == 2
    assert "is no root of ucm" in done.stderr
    assert "read-only" in ucm("mode", "--root", tmp_path, "readonly").stderr
    root.fill("one", 1)
    (root.path / MODE_NAME).write_text('{"mode": "fast"}')
    assert "is damaged" in ucm("mode", "--root", root.path).stderr
    assert ucm("mode", "--root", root.path, "off").exit_code == 0


@pytest.mark.parametrize(
    ("head", "page", "text"),
    [
        ("Connection: close", "Passerelle fermée".encode("latin-1"), "Passerelle ferm\ufffde"),
        ("Transfer-Encoding: chunked", b"64\r\nBad", "Bad Gateway"),  # and the connection ends
    ],
    ids=["Latin-1", "cut"],
)
def test_the_page_of_a_gateway_is_shown_as_far_as_it_can_be_read(
    ucm: Run, head: str, page: bytes, text: str
) -> None:
    class Gateway(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.1 502 Bad Gateway\r\n%s\r\n\r\n" % head.encode() + page)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        done = ucm("mode", "--url", f"http://127.0.0.1:{server.server_address[1]}")
        thread.join()
    assert done.exit_code == 2
    assert f"answers 502: {text}\n" in done.stderr


@pytest.mark.parametrize("one", Mode)
@pytest.mark.parametrize("other", Mode)
def test_an_engine_does_what_all_modes_allow(one: Mode, other: Mode) -> None:
    both = strictest([one, other])
    assert both.loads == (one.loads and other.loads)
    assert both.dumps == (one.dumps and other.dumps)
    assert strictest([]) is Mode.READ_WRITE


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until the thread of a watch has read once more."""
    monkeypatch.setattr(ucm.mode, "PERIOD_S", 0.001)
    monkeypatch.setattr(ucm.mode, "FIRST_S", 30)
    began = threading.Semaphore(0)

    def counted(directory: str) -> Mode:
        began.release()
        return read_mode(directory)

    monkeypatch.setattr(ucm.mode, "read_mode", counted)

    def wait() -> None:
        while began.acquire(blocking=False):
            pass
        for _ in range(2):  # the read that began first has ended when the next one begins
            assert began.acquire(timeout=30)

    return wait


def test_a_watch_follows_its_directories(tmp_path: Path, reads: Callable[[], None]) -> None:
    write_mode(str(tmp_path), Mode.READ_ONLY)
    watch = ModeWatch([str(tmp_path)])
    assert watch.now is Mode.READ_ONLY  # from the first request on
    for mode in (Mode.OFF, Mode.WRITE_ONLY, Mode.READ_WRITE):
        write_mode(str(tmp_path), mode)
        reads()
        assert watch.now is mode
    watch.close()


def test_a_directory_that_cannot_be_read_keeps_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucm.mode, "FIRST_S", 30)
    root = tmp_path / "root"
    root.mkdir()
    write_mode(str(root), Mode.READ_ONLY)
    watch = ModeWatch([str(root), str(tmp_path)])
    (root / MODE_NAME).write_text("{")
    watch.poll(str(root))
    assert watch.now is Mode.READ_ONLY
    root.rename(tmp_path / "unmounted")
    write_mode(str(tmp_path), Mode.WRITE_ONLY)
    watch.poll(str(tmp_path))
    assert watch.now is Mode.OFF  # both hold
    root.mkdir()
    watch.poll(str(root))
    assert watch.now is Mode.WRITE_ONLY  # there, and without a file
    watch.close()


def test_a_directory_that_hangs_stops_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, first = threading.Event(), threading.Event()

    def hanging(directory: str) -> Mode:
        first.set()
        hangs.wait()
        return Mode.READ_WRITE

    monkeypatch.setattr(ucm.mode, "FIRST_S", 0.01)
    monkeypatch.setattr(ucm.mode, "read_mode", hanging)
    watch = ModeWatch([str(tmp_path)])
    assert first.wait(30)
    assert watch.now is Mode.READ_WRITE
    watch.close()
    hangs.set()
