"""One rank of run(): `python -m bagua_hvd.runner.run_task FOLDER` calls the function that lies in the folder.

The folder is the caller's and private to its user; on another host it is one of the same content, which the environment
variable BAGUA_HVD_RUN_FOLDER names.

    function          two pickles: the caller's sys.path (None: keep the own one); (func, args, kwargs)
    result.<rank>     the pickled result; whole, or not there
    error.<rank>      pickled (time in ns, text), when there can be no result; the exit code is 1 then
"""
import os
import pickle
import sys
import time
import traceback

from bagua_hvd.common.elastic_worker import RemovedFromJob
from bagua_hvd.runner.common.util.env import get_env_rank_and_size

FUNCTION = "function"
FOLDER_VARIABLE = "BAGUA_HVD_RUN_FOLDER"


def result_path(folder, rank):
    """Where the rank leaves its result."""
    return os.path.join(folder, f"result.{rank}")


def error_path(folder, rank):
    """Where the rank leaves why there is no result."""
    return os.path.join(folder, f"error.{rank}")


class _Failure(Exception):
    """Why there is no result: a sentence; the cause has the traceback."""


def _load(folder):
    with open(os.path.join(folder, FUNCTION), "rb") as file:
        path = pickle.load(file)
        if path is not None:
            sys.path[:] = path
        try:
            return pickle.load(file)
        except BaseException as error:
            raise _Failure("the function cannot be loaded") from error


def _call(function, args, kwargs):
    try:
        return function(*args, **kwargs)
    except RemovedFromJob:
        raise                           # an elastic job goes on without this process
    except BaseException as error:      # sys.exit() leaves no result either
        raise _Failure("User function raise error") from error


def _store(result, path):
    part = path + ".part"
    try:
        import cloudpickle  # late: where the caller's sys.path has it

        with open(part, "wb") as file:
            cloudpickle.dump(result, file)
    except BaseException as error:
        raise _Failure("the result cannot be pickled and stored") from error
    os.replace(part, path)


def _describe(failure):
    error = failure.__cause__
    # Without the frame of this file that called.
    error.with_traceback(error.__traceback__.tb_next)
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    return f"{failure}: {summary}\n" + "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _report(text, path):
    sys.stderr.write(text)
    sys.stderr.flush()
    with open(path, "wb") as file:
        pickle.dump((time.time_ns(), text), file)


def main():
    """Ends the process with 0 or 1, by way of its exit handlers: hvd.shutdown() is one."""
    folder = sys.argv.pop()     # a function that parses sys.argv finds it empty
    folder = os.environ.pop(FOLDER_VARIABLE, folder)
    try:
        result = _call(*_load(folder))
        _store(result, result_path(folder, _rank()))
    except _Failure as failure:
        _report(_describe(failure), error_path(folder, _rank()))
        sys.exit(1)


def _rank():
    """The rank now: in an elastic job it may have changed since the start."""
    return get_env_rank_and_size()[0]


if __name__ == "__main__":
    main()
