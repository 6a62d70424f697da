"""Elastic jobs, as the launcher sees them: hosts come and go, workers fail, the job goes on.

    discovery.py     which hosts there are, which of them are blacklisted
    driver.py        the rules: which workers to start and stop, when ranks meet anew, who gets which rank
    placement.py     ranks for the members of a meeting
    crew.py          what the driver acts through: processes, their output, messages
    reach.py         how hosts are connected
    run.py           puts these together: `baguarun --min-np ...`
    settings.py      the flags
    worker.py, constants.py     what others import, under Horovod's names
"""
