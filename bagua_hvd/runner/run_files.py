"""Files for run() and its ranks: in a folder of the caller's, and in one on each other host.

See run_task.py for their names. The ssh connection sends the function to other hosts, and brings back the files of
their ranks.
"""
import os
import pickle
import sys

from bagua_hvd.runner import run_task
from bagua_hvd.runner.job import WorkerFailed


def write_function(file, python, func, args, kwargs):
    """Writes run_task.FUNCTION into a binary file.

    Args:
        python: the Python of the ranks.
    Raises:
        Exceptions of cloudpickle: the function or its arguments cannot be pickled.
    """
    import cloudpickle

    # In these folders another Python would find packages built for this one.
    path = [entry for entry in sys.path if isinstance(entry, str)] if python == sys.executable else None
    pickle.dump(path, file)
    cloudpickle.dump((func, args, kwargs), file)


class Files:
    """The folder of one run().

    Args:
        folder: private to this user, with run_task.FUNCTION.
    """

    def __init__(self, folder):
        self._folder = folder

    def send(self, host):
        """Sends the function to a RemoteHost, for the ranks that are started there later."""
        host.put(run_task.FUNCTION, self.function)

    @property
    def function(self):
        """The bytes of run_task.FUNCTION."""
        with open(os.path.join(self._folder, run_task.FUNCTION), "rb") as file:
            return file.read()

    def receive(self, host, processes):
        """Copies the files of ended processes from a RemoteHost.

        Args:
            processes: [(rank, name), ...], see run_task.py.
        Raises:
            ConnectionError: the host was lost. OSError: the folder cannot be written.
        """
        names = [name for rank, process in processes
                 for name in (run_task.result_name(rank), run_task.error_name(process))]
        futures = [(name, host.get(name)) for name in names]
        for name, future in futures:
            content = future.result()
            if content is not None:
                with open(os.path.join(self._folder, name), "wb") as file:
                    file.write(content)

    def result(self, rank):
        """The function's result. RuntimeError: there is no such file, or it cannot be unpickled."""
        path = os.path.join(self._folder, run_task.result_name(rank))
        try:
            with open(path, "rb") as file:
                os.unlink(path)     # its disk space is free once it is read
                return unpickled(file, rank)
        except FileNotFoundError:
            raise no_result(rank) from None

    def explained(self, error, size):
        """The WorkerFailed with the text of the process that was the first to report an error.

        It may not be the first to end: its exit handlers take time, and a collective fails the others meanwhile. A
        process that ended without a report had no such delay: it stays the first. So does a worker of an elastic job,
        whose errors the others survive. Clocks of two hosts differ, so between hosts the ranks' reports about each
        other decide.

        Args:
            size: of the job; None: it is elastic.
        """
        own = self._report(error.process)
        if own is None:
            return error
        if size is None:
            return with_report(error.rank, error.exit_code, own[2])
        reports = {rank: report for rank in range(size) if (report := self._report(rank)) is not None}
        first = error.because_of if error.because_of in reports else error.rank
        of_host = [rank for rank in reports if reports[rank][0] == reports[first][0]]
        first = min(of_host, key=lambda rank: reports[rank][1])
        return with_report(first, error.exit_code if first == error.rank else 1, reports[first][2])

    def _report(self, process):
        """(host, time, text); None: there is no complete report."""
        try:
            with open(os.path.join(self._folder, run_task.error_name(process)), "rb") as file:
                return pickle.load(file)
        except (OSError, EOFError, pickle.UnpicklingError):
            return None


def with_report(rank, exit_code, text):
    """The WorkerFailed of a rank that reported an error."""
    return WorkerFailed(rank, exit_code, f"\n\nRank {rank}: {text}")


def no_result(rank):
    """The RuntimeError of a rank that ended with 0 and left no result."""
    return RuntimeError(f"Process name: {rank}, Exit code: 0: the process ended before the function returned, so "
                        "there is no result")


def unpickled(file, rank):
    """The result in a binary file. RuntimeError: it cannot be unpickled here."""
    try:
        return pickle.load(file)
    except Exception as error:
        raise RuntimeError(f"the result of rank {rank} cannot be unpickled: {type(error).__name__}: {error}") from error
