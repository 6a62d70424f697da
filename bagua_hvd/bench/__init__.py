"""Benchmarks for a user's own cluster.

    python -m bagua_hvd.bench           collectives, beside gloo and MPI; also in a job: baguarun -np 4 python -m ...
    python -m bagua_hvd.bench.train     time that communication adds to a training step
    python -m bagua_hvd.bench.predict   time of a training step on another network
"""
