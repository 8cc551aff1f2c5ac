"""The logger of ucm: one console handler, an optional rotating file, never the same handler
twice; and sizes as people read them."""

from __future__ import annotations

import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from typing import TypeVar

CONSOLE_FORMAT = "[%(asctime)s] [%(levelname)s] [%(name)s] %(message)s"
FILE_FORMAT = "[%(asctime)s] [%(levelname)s] [%(name)s] [%(filename)s:%(lineno)d] %(message)s"

#: A log file is rotated at this many bytes, and this many old ones are kept.
MAX_FILE_BYTES = 100 * 1024 * 1024
BACKUP_COUNT = 5

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

H = TypeVar("H", bound=logging.Handler)


class _Console(logging.Handler):
    """Our console handler; a class of its own so that it is found again."""

    def emit(self, record: logging.LogRecord) -> None:
        # sys.stderr is read each time, since a test or a daemon may replace it.
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _File(RotatingFileHandler):
    """Our file handler."""


def init_logger(
    name: str = "ucm",
    level: str = "INFO",
    log_file: str | None = None,
    *,
    log_format: str | None = None,
) -> logging.Logger:
    """The logger ``name``, ready to use; calling it again changes what differs and adds nothing
    twice.

    ``level`` is a name of :mod:`logging` in any case; with the default, a logger below one that is
    set up follows that one's level. ``log_file`` also writes to that file, rotated at 100 MiB with
    five old files kept; one that cannot be opened is a warning. ``log_format`` replaces both
    formats. Raises :class:`ValueError` for an unknown level or a broken format.
    """
    number = logging.getLevelNamesMapping().get(level.strip().upper())
    if number is None:
        raise ValueError(
            f"unknown log level {level!r}: write DEBUG, INFO, WARNING, ERROR or CRITICAL"
        )
    console_format = logging.Formatter(log_format or CONSOLE_FORMAT)
    logger = logging.getLogger(name)
    console = _reached(logger, _Console)
    if console is None:
        console = _Console()
        logger.addHandler(console)
    follows = console not in logger.handlers and number == logging.INFO
    logger.setLevel(logging.NOTSET if follows else number)
    if console in logger.handlers or log_format:
        console.setFormatter(console_format)
    _free_below(logger)
    if log_file:
        path = os.path.abspath(os.path.expanduser(log_file))
        _add_file(logger, path, logging.Formatter(log_format or FILE_FORMAT))
    return logger


def in_units(count: float) -> str:
    """Bytes in the largest binary unit: ``1.5 GiB``."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    digits = 0 if unit == 0 or count >= 100 else 1
    return f"{count:.{digits}f} {_UNITS[unit]}"


def __getattr__(name: str) -> logging.Logger:
    """``ucm_logger``, the logger of the original: set up on first use, unless it already is."""
    if name != "ucm_logger":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    logger = logging.getLogger("ucm")
    return logger if _reached(logger, _Console) is not None else init_logger()


def _reached(logger: logging.Logger, kind: type[H], path: str | None = None) -> H | None:
    """Our handler of that kind (and file) that records of this logger already reach."""
    here: logging.Logger | None = logger
    while here is not None:
        for handler in here.handlers:
            same_file = path is None or getattr(handler, "baseFilename", None) == path
            if isinstance(handler, kind) and same_file:
                return handler
        here = here.parent if here.propagate else None
    return None


def _free_below(logger: logging.Logger) -> None:
    """Loggers below follow this one: no console handler and no level of their own."""
    for name, other in list(logging.Logger.manager.loggerDict.items()):
        if not isinstance(other, logging.Logger) or not name.startswith(f"{logger.name}."):
            continue
        if not other.propagate:
            continue
        for handler in [one for one in other.handlers if isinstance(one, _Console)]:
            other.removeHandler(handler)
            other.setLevel(logging.NOTSET)


def _add_file(logger: logging.Logger, path: str, formatter: logging.Formatter) -> None:
    if (present := _reached(logger, _File, path)) is not None:
        present.setFormatter(formatter)
        return
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        added = _File(path, maxBytes=MAX_FILE_BYTES, backupCount=BACKUP_COUNT, encoding="utf-8")
    except OSError as error:
        text = "the log file %s cannot be opened (%s); logging goes on without it"
        logger.warning(text, path, error.strerror)
        return
    added.setFormatter(formatter)
    logger.addHandler(added)
