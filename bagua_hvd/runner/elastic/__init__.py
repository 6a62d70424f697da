"""Elastic jobs, on the launcher's side: hosts come and go, workers fail, the job continues.

    discovery.py     which hosts there are, which of them are blacklisted
    driver.py        the rules: which workers to start and stop, when to hold a rendezvous, who gets which rank
    placement.py     ranks for the members of a rendezvous
    run.py           carries out the driver's decisions, and combines these: `baguarun --min-np ...`
    settings.py      the flags
    worker.py, constants.py     names that other code imports, under Horovod's path
"""
