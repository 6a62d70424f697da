"""The logger `bagua_hvd`: what a job tells its owner, from Python and from the core, through the standard logging.

Whoever sets up logging gets the records, with `rank` as an attribute of each. Where nobody has, a handler of ours
writes them to stderr in Horovod's form:

    [2026-11-21 08:00:00.123456: W stall.c:72] [0]: text

HOROVOD_LOG_LEVEL is the logger's level (without it: WARNING, or what the script has set), HOROVOD_LOG_HIDE_TIME=1
leaves out the time. Sentences about what the caller's own line does wrong stay warnings of Python's, which name that
line; what baguarun says to who started it stays on its stderr.
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
    """Writes to stderr, unless somebody else handles the logger's records."""

    hide_time = False
    rank: int | None = None

    def emit(self, record):
        if logger.propagate and logging.getLogger().handlers or logger.handlers != [self]:
            return
        # A full disk, a closed file, none at all: the next record may fit.
        with suppress(OSError, ValueError, AttributeError):
            # In one piece, so that the lines stay together.
            sys.stderr.write(self.line(record) + "\n")
            sys.stderr.flush()

    def line(self, record):
        """The record in Horovod's form."""
        when = "" if self.hide_time else f"{datetime.fromtimestamp(record.created):%Y-%m-%d %H:%M:%S.%f}: "
        rank = "" if record.rank is None else f" [{record.rank}]:"
        level = "F" if record.levelno >= logging.CRITICAL else record.levelname[0]
        return f"[{when}{level} {record.filename}:{record.lineno}]{rank} {logging.Formatter().format(record)}"

    def add_rank(self, record):
        """A filter of the logger's."""
        record.rank = self.rank
        return True


_handler = _Handler()
logger.addFilter(_handler.add_rank)
logger.addHandler(_handler)
if logger.level == logging.NOTSET:
    logger.setLevel(logging.WARNING)


def configure(rank: int | None) -> None:
    """At the beginning of a job: its rank stands in all records that follow, and the environment is read.

    Raises:
        ValueError: a malformed HOROVOD_LOG_LEVEL or HOROVOD_LOG_HIDE_TIME.
    """
    _handler.rank = rank
    _handler.hide_time = variables.read("HOROVOD_LOG_HIDE_TIME")
    level = variables.read("HOROVOD_LOG_LEVEL")
    if level is not None:
        logger.setLevel(_LEVELS[level])


def rank() -> int | None:
    """Of the records; None before the first init()."""
    return _handler.rank


def log_from(file: str, line: int, level: int, text: str) -> None:
    """A record as if it came from there: a file and a line of the core's sources."""
    if logger.isEnabledFor(level):
        logger.handle(logger.makeRecord(logger.name, level, file, line, text, (), None, os.path.basename(file)))
