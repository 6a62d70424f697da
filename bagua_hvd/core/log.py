"""The logger `bagua_hvd`: messages of a job, from Python and from the core, through Python's logging.

If the script sets up logging, its handlers get the records, each with an attribute `rank`. Otherwise our own handler
writes them to stderr in Horovod's form:

    [2026-11-21 08:00:00.123456: W stall.c:72] [0]: text

HOROVOD_LOG_LEVEL sets the logger's level (default: WARNING, or the level that the script has set);
HOROVOD_LOG_HIDE_TIME=1 leaves out the time. Mistakes in the caller's own line are reported as Python warnings, which
name that line; messages of baguarun to its user go to its stderr.
"""
import logging
import os
import sys
from contextlib import suppress
from datetime import datetime

from bagua_hvd.core import variables

logger = logging.getLogger("bagua_hvd")

TRACE = 5
_LEVELS = {"TRACE": TRACE, "DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING,
           "ERROR": logging.ERROR, "FATAL": logging.CRITICAL}
logging.addLevelName(TRACE, "TRACE")


class _Handler(logging.Handler):
    """Writes to stderr, unless another handler takes the logger's records."""

    hide_time = False
    rank: int | None = None

    def emit(self, record):
        if logger.propagate and logging.getLogger().handlers or logger.handlers != [self]:
            return
        # The disk is full, or stderr is closed or missing: the next record may succeed.
        with suppress(OSError, ValueError, AttributeError):
            # One write, so that the lines stay together.
            sys.stderr.write(self.line(record) + "\n")
            sys.stderr.flush()

    def line(self, record):
        """The record in Horovod's form."""
        when = "" if self.hide_time else f"{datetime.fromtimestamp(record.created):%Y-%m-%d %H:%M:%S.%f}: "
        rank = "" if record.rank is None else f" [{record.rank}]:"
        level = "F" if record.levelno >= logging.CRITICAL else record.levelname[0]
        return f"[{when}{level} {record.filename}:{record.lineno}]{rank} {logging.Formatter().format(record)}"

    def add_rank(self, record):
        """A filter of the logger: sets the record's rank."""
        record.rank = self.rank
        return True


_handler = _Handler()
logger.addFilter(_handler.add_rank)
logger.addHandler(_handler)
if logger.level == logging.NOTSET:
    logger.setLevel(logging.WARNING)


def configure(rank: int | None) -> None:
    """Called when a job begins: sets the rank of all later records and reads the environment.

    Raises:
        ValueError: a malformed HOROVOD_LOG_LEVEL or HOROVOD_LOG_HIDE_TIME.
    """
    _handler.rank = rank
    _handler.hide_time = variables.read("HOROVOD_LOG_HIDE_TIME")
    level = variables.read("HOROVOD_LOG_LEVEL")
    if level is not None:
        logger.setLevel(_LEVELS[level])


def rank() -> int | None:
    """The rank in the records; None before the first init()."""
    return _handler.rank


def log_from(file: str, line: int, level: int, text: str) -> None:
    """Logs a record with the given origin: a file and a line of the core's sources."""
    if logger.isEnabledFor(level):
        logger.handle(logger.makeRecord(logger.name, level, file, line, text, (), None, os.path.basename(file)))
