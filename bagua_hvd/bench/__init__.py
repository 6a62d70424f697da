"""`python -m bagua_hvd.bench`: latency and bandwidth of the collectives, beside torch's gloo and MPI.

    __main__     the command line, and the order of events
    rounds       starts the ranks: the backends in turn, fresh processes for each round
    rank         what one rank does: cases, clock, and the check of every result
    results      the files in which ranks leave their times
    negotiation  what agreeing on an operation costs, over the number of ranks
    world        `python -m bagua_hvd.bench.world`: start-up, descriptors and memory of large worlds
    train        `python -m bagua_hvd.bench.train`: what communication adds to a training step
    collectives  records of collectives and training steps; the tables of docs/performance.md
    algorithms   `python -m bagua_hvd.bench.algorithms`: steps per second with each algorithm
    codecs       `python -m bagua_hvd.bench.codecs`: encoding and decoding beside memcpy
    profiles     when the gradients of real models are ready
    emulated     ranks that sleep instead of computing, and communicate in earnest
    laboratory   `python -m bagua_hvd.bench.laboratory`: time per step of every algorithm on a network
    predict      the same, computed
    tradeoff     `python -m bagua_hvd.bench.tradeoff`: what each algorithm buys, as tables, pictures and a map
    model        what the core's simulator predicts for more hosts, and beside such files
    backends     the same collectives through bagua_hvd, torch.distributed and mpi4py
    hosts        several hosts on this machine: network namespaces with shaped links
    network      what joins them where delays are wanted, too: a process that carries packets
    plain        what plain TCP gets through these links
    ceiling      what the machine itself gives: memcpy, loopback TCP
    records      what was measured, a line of JSON for each run; the generated parts of the documentation
    report       medians, bandwidths, table, JSON, plot

Only `rank`, `train`, `algorithms`, `backends`, `profiles` and `emulated` import torch, in the processes that measure.
"""
