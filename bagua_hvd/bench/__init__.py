"""What a user measures on her own cluster.

    python -m bagua_hvd.bench           collectives beside gloo and MPI; in a job, too: baguarun -np 4 python -m ...
    python -m bagua_hvd.bench.train     what communication adds to a training step
    python -m bagua_hvd.bench.predict   what a step would take on another network
"""
