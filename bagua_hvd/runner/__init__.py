"""Starting jobs: `baguarun` (launch.py) and what it is made of. Imports no framework.

    launch.py        the command line: flags, their checks, exit codes
    local.py         a job on this host: rank plan -> environments, rendezvous, output -> supervisor
    supervisor.py    runs processes to their end: output, first failure, signals
    processes.py     one process and its whole session; the guard that outlives a killed launcher
    output.py        bytes of a worker -> prefixed lines
    rendezvous.py    the native meeting point of the ranks
    startup/         what every Python of a `--as-horovod` job runs first
    common/util/     hosts and rank plans, and helpers under Horovod's names
"""
