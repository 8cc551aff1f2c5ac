"""The logger: exact formats, no duplicate handler, rotation of the file."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path

import pytest

from ucm.logger import init_logger

NAME = "ucm_test_logger"


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for name in list(logging.Logger.manager.loggerDict):
        if name == NAME or name.startswith(f"{NAME}."):
            logger = logging.getLogger(name)
            for handler in list(logger.handlers):
                logger.removeHandler(handler)
                handler.close()
            logger.setLevel(logging.NOTSET)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_console_format(capsys: pytest.CaptureFixture[str]) -> None:
    init_logger(NAME).info("hello %s", "there")
    (line,) = lines(capsys)
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(rf"\[{stamp}\] \[INFO\] \[{NAME}\] hello there", line)


def test_defaults_are_those_of_the_seed() -> None:
    logger = init_logger()
    assert (logger.name, logger.level) == ("ucm", logging.INFO)


def test_called_again_it_says_everything_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "ucm.log"
    for _ in range(3):
        logger = init_logger(NAME, "info", str(file))
    logger.info("once")
    assert len(lines(capsys)) == 1
    assert len(file.read_text().splitlines()) == 1


@pytest.mark.parametrize("names", [(NAME, f"{NAME}.part"), (f"{NAME}.part", NAME)])
def test_a_part_and_the_whole_say_everything_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, names: tuple[str, str]
) -> None:
    for name in names:
        init_logger(name)
    logging.getLogger(f"{NAME}.part").info("once")
    assert len(lines(capsys)) == 1


def test_a_part_follows_the_level_of_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    part = init_logger(f"{NAME}.part")
    init_logger(NAME, "DEBUG")
    part.debug("seen")
    init_logger(f"{NAME}.later").debug("seen as well")
    assert len(lines(capsys)) == 2
    init_logger(f"{NAME}.part", "ERROR").warning("not seen")
    assert lines(capsys) == []


def test_level_changes_by_calling_again(capsys: pytest.CaptureFixture[str]) -> None:
    init_logger(NAME, "WARNING").info("not seen")
    init_logger(NAME, "debug").debug("seen")
    assert len(lines(capsys)) == 1


def test_file_format_and_rotation(tmp_path: Path) -> None:
    file = tmp_path / "deeper" / "ucm.log"
    logger = init_logger(NAME, log_file=str(file))
    logger.warning("kept")
    assert re.search(
        rf"\[WARNING\] \[{NAME}\] \[test_logger\.py:\d+\] kept$", file.read_text().strip()
    )
    (rotating,) = (
        handler for handler in logger.handlers if isinstance(handler, RotatingFileHandler)
    )
    assert (rotating.maxBytes, rotating.backupCount) == (100 * 1024 * 1024, 5)


def test_log_format_replaces_both(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "ucm.log"
    init_logger(NAME, log_file=str(file), log_format="%(levelname)s/%(message)s").info("x")
    assert lines(capsys) == ["INFO/x"]
    assert file.read_text() == "INFO/x\n"


def test_a_file_that_cannot_be_opened_stops_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "plain").write_text("")
    logger = init_logger(NAME, log_file=str(tmp_path / "plain" / "ucm.log"))
    logger.info("goes on")
    said, goes_on = lines(capsys)
    assert "cannot be opened" in said
    assert goes_on.endswith("goes on")


def test_unknown_level_and_broken_format() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        init_logger(NAME, "LOUD")
    with pytest.raises(ValueError, match="format"):
        init_logger(NAME, log_format="%(nonsense")
    assert logging.getLogger(NAME).handlers == []


def test_the_logger_of_the_original_is_set_up_once_and_left_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import ucm.logger

    before, handlers = logging.getLogger("ucm").level, list(logging.getLogger("ucm").handlers)
    try:
        init_logger("ucm", "DEBUG")
        assert ucm.logger.ucm_logger is logging.getLogger("ucm")
        assert ucm.logger.ucm_logger.level == logging.DEBUG
        ucm.logger.ucm_logger.debug("told")
        assert len(lines(capsys)) == 1
        logging.getLogger("ucm").handlers.clear()
        ucm.logger.ucm_logger.info("told again")
        assert len(lines(capsys)) == 1
        with pytest.raises(AttributeError):
            _ = ucm.logger.no_such_logger
    finally:
        logging.getLogger("ucm").handlers[:] = handlers
        logging.getLogger("ucm").setLevel(before)
