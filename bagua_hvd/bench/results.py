"""Results that a rank leaves for the program that started it: a file with its times, or with an error."""
import json
import os
import sys


class WrongResult(Exception):
    """The result of a collective is wrong."""


def describe(error):
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


def leave(folder, rank, work):
    """Writes work()'s result, or its error, to the rank's file. Returns the exit code."""
    try:
        _write(os.path.join(folder, f"rank{rank}.json"), work())
        return 0
    except Exception as error:
        _write(os.path.join(folder, f"rank{rank}.error"), f"rank {rank}: {describe(error)}")
        print(describe(error), file=sys.stderr, flush=True)
        return 1
