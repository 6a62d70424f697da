"""One rank of run(): `python -m bagua_hvd.runner.run_task FOLDER` calls the function that lies in the folder.

The folder is the caller's and private to its user; on another host it is one of the same content, which the environment
variable BAGUA_HVD_RUN_FOLDER names.

    function          two pickles: the caller's sys.path (None: keep the own one); (func, args, kwargs)
    result.<rank>     the pickled result; whole, or not there
    error.<process>   pickled (host, time in ns, text), when there can be no result; the exit code is 1 then. process:
                      the rank; in an elastic job, where others may have the rank later, the worker's number
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
    """Of the file in which the rank leaves its result."""
    return f"result.{rank}"


def error_name(process):
    """Of the file in which the process leaves why there is no result."""
    return f"error.{process}"


class Failure(Exception):
    """Why there is no result: a sentence; the cause has the traceback."""


def call(file):
    """Calls the function in a binary file, see FUNCTION, and returns what it does. Failure: it raises."""
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
        raise                           # an elastic job goes on without this process
    except BaseException as error:      # sys.exit() leaves no result either
        raise Failure("User function raise error") from error


def write(result, file):
    """Pickles a result into a binary file. Failure: it cannot be."""
    try:
        import cloudpickle  # late: where the caller's sys.path has it

        cloudpickle.dump(result, file)
        file.flush()
    except BaseException as error:
        raise Failure("the result cannot be pickled and stored") from error


def say(failure):
    """Writes to stderr why there is no result, and returns the text."""
    error = failure.__cause__
    # Without the frame of this file that called.
    error.with_traceback(error.__traceback__.tb_next)
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    text = f"{failure}: {summary}\n" + "".join(traceback.format_exception(type(error), error, error.__traceback__))
    sys.stderr.write(text)
    sys.stderr.flush()
    return text


def main():
    """Ends the process with 0 or 1, by way of its exit handlers: hvd.shutdown() is one."""
    folder = sys.argv.pop()     # a function that parses sys.argv finds it empty
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
    """The rank now: in an elastic job it may have changed since the start."""
    return get_env_rank_and_size()[0]


if __name__ == "__main__":
    main()
