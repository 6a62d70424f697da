"""A folder for PYTHONPATH: its sitecustomize.py is what `baguarun --as-horovod` runs in every Python of the job."""
