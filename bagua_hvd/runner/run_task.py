"""One rank of run(): `python -m bagua_hvd.runner.run_task FOLDER` calls the function stored in the folder.

The folder is the caller's and private to its user. Other hosts have a folder with the same content, named by the
environment variable BAGUA_HVD_RUN_FOLDER.

    function          two pickles: the caller's sys.path (None: keep one's own); (func, args, kwargs)
    result.<rank>     the pickled result; complete, or missing
    error.<process>   pickled (host, time in ns, text), if there is no result; the exit code is then 1. process: the
                      rank; in an elastic job, where others may have the rank later, the worker's number
"""
import os
import pickle
import sys
import time
import traceback

from bagua_hvd.core import variables
from bagua_hvd.job.elastic_worker import WORKER, RemovedFromJob
from bagua_hvd.job.env import get_env_rank_and_size

FUNCTION = "function"
FOLDER_VARIABLE = "BAGUA_HVD_RUN_FOLDER"


def result_name(rank):
    """Name of the file with the rank's result."""
    return f"result.{rank}"


def error_name(process):
    """Name of the file that says why the process has no result."""
    return f"error.{process}"


class Failure(Exception):
    """A sentence that says why there is no result; the cause has the traceback."""


def call(file):
    """Calls the function in a binary file, see FUNCTION, and returns its result. Failure: it raises."""
    path = pickle.load(file)
    if path is not None:
        sys.path[:] = path
    try:
        function, args, kwargs = pickle.load(file)
    except BaseException as error:
        raise Failure("the function cannot be loaded") from error
    try:
        return function(*args, **kwargs)
    except RemovedFromJob:
        raise                           # an elastic job continues without this process
    except BaseException as error:      # sys.exit() gives no result either
        raise Failure("User function raise error") from error


def write(result, file):
    """Pickles a result into a binary file. Failure: that is impossible."""
    try:
        import cloudpickle  # late: it is found through the caller's sys.path

        cloudpickle.dump(result, file)
        file.flush()
    except BaseException as error:
        raise Failure("the result cannot be pickled and stored") from error


def say(failure):
    """Writes the reason for the missing result to stderr, and returns the text."""
    error = failure.__cause__
    # Without this file's frame.
    error.with_traceback(error.__traceback__.tb_next)
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    text = f"{failure}: {summary}\n" + "".join(traceback.format_exception(type(error), error, error.__traceback__))
    sys.stderr.write(text)
    sys.stderr.flush()
    return text


def main():
    """Ends the process with 0 or 1, through its exit handlers: hvd.shutdown() is one."""
    folder = sys.argv.pop()     # so a function that parses sys.argv finds it empty
    folder = variables.read(FOLDER_VARIABLE) or folder
    os.environ.pop(FOLDER_VARIABLE, None)
    try:
        with open(os.path.join(folder, FUNCTION), "rb") as file:
            result = call(file)
        path = os.path.join(folder, result_name(_rank()))
        with open(path + ".part", "wb") as file:
            write(result, file)
        os.replace(path + ".part", path)
    except Failure as failure:
        process = variables.read(WORKER) if variables.given(WORKER) else _rank()
        with open(os.path.join(folder, error_name(process)), "wb") as file:
            pickle.dump((variables.read("HOROVOD_HOSTNAME"), time.time_ns(), say(failure)), file)
        sys.exit(1)


def _rank():
    """The present rank: in an elastic job it may have changed since the start."""
    return get_env_rank_and_size()[0]


if __name__ == "__main__":
    main()
