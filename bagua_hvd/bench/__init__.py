"""`python -m bagua_hvd.bench`: latency and bandwidth of the collectives, beside torch's gloo and MPI.

    __main__     the command line, and the order of events
    rounds       starts the ranks: the backends in turn, fresh processes for each round
    rank         what one rank does: cases, clock, and the check of every result
    results      the files in which ranks leave their times
    negotiation  what agreeing on an operation costs, over the number of ranks
    world        `python -m bagua_hvd.bench.world`: start-up, descriptors and memory of large worlds
    train        `python -m bagua_hvd.bench.train`: what communication adds to a training step
    algorithms   `python -m bagua_hvd.bench.algorithms`: steps per second with each algorithm
    codecs       `python -m bagua_hvd.bench.codecs`: encoding and decoding beside memcpy
    model        a cost model fitted to such files, and what it predicts for more hosts
    backends     the same collectives through bagua_hvd, torch.distributed and mpi4py
    hosts        several hosts on this machine: network namespaces with shaped links
    ceiling      what the machine itself gives: memcpy, loopback TCP
    report       medians, bandwidths, table, JSON, plot

Only `rank`, `train`, `algorithms` and `backends` import torch, only in the processes that measure.
"""
