"""Results that a rank leaves for the program that started it: a file with its times, or with an error."""
import json
import os
import sys
from collections.abc import Callable

# Seconds per call, one number for each sample: by Case.key; by backend and Case.key, for each round.
Times = dict[str, list[float]]
Results = dict[str, dict[str, list[list[float]]]]
Others = dict[str, list[float | None]]          # by backend: cores that other programs used in each round


class WrongResult(Exception):
    """The result of a collective is wrong."""


def describe(error: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, WrongResult):
        return f"WRONG RESULT: {text}"
    return text if isinstance(error, (ValueError, NotImplementedError)) else f"{type(error).__name__}: {text}"


def _write(path, content):
    # Never an incomplete file: the ranks may be killed at any time.
    with open(path + ".part", "w") as file:
        json.dump(content, file)
    os.rename(path + ".part", path)


def leave(folder: str, rank: int, work: Callable[[], object]) -> int:
    """Writes work()'s result, or its error, to the rank's file. Returns the exit code."""
    try:
        _write(os.path.join(folder, f"rank{rank}.json"), work())
        return 0
    except Exception as error:
        _write(os.path.join(folder, f"rank{rank}.error"), f"rank {rank}: {describe(error)}")
        print(describe(error), file=sys.stderr, flush=True)
        return 1
