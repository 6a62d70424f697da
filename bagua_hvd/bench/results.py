"""What a rank leaves for the program that started it: a file with its times, or with the reason why there are none."""
import json
import os


class WrongResult(Exception):
    """A collective returned something else than its definition says."""


def describe(error):
    """An exception as one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, WrongResult):
        return f"WRONG RESULT: {text}"
    return text if isinstance(error, (ValueError, NotImplementedError)) else f"{type(error).__name__}: {text}"


def write(path, content):
    # Never half a file: the ranks may be killed at any time.
    with open(path + ".part", "w") as file:
        json.dump(content, file)
    os.rename(path + ".part", path)
