"""A folder for PYTHONPATH: `baguarun --as-horovod` makes every Python of the job run its sitecustomize.py."""
