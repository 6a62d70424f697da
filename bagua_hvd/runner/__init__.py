"""Starts jobs: `baguarun` (launch.py), `run` (run_function.py), and their parts. Imports no framework.

    launch.py        the command line: its checks, exit codes; flags.py: the flags
    run_function.py  the Python API: a function on every rank, its results in a list; function_task.py is one such rank
    mpi_run.py       both over mpirun
    job.py           a job of fixed size, and what it shares with those of changing size
    ssh/             other hosts
    elastic/         jobs that grow and shrink
    spawner.py       starts processes on this host and on others
    supervisor.py    runs processes to their end: output, first failure, signals
    processes.py     one process and its whole session; the guard that outlives a killed launcher
    output.py        bytes of a worker -> prefixed lines
    reports.py       reports of ranks in their stderr: causes of failures, a live table of the ranks
    quorum_server.py a server for outer steps with a quorum
    startup/         code that runs first in every Python of a `--as-horovod` job
    common/util/     hosts and rank plans, and helpers under Horovod's names
"""


def __getattr__(name):
    # Imported late: every rank of run() imports this package, and none needs the launcher.
    if name in ("run", "_HorovodArgs"):
        from bagua_hvd.runner import run_function

        return getattr(run_function, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
