"""Jobs whose ranks another engine started: mpirun, srun, torchrun, or only torch's variables. Used by init().

    detect.py           which engine, and this process's rank, from the environment
    join.py             rank 0 hosts the rendezvous and sends the others its address and the job's secret, through
    exchange_file.py        a file in a private folder: ranks of one host, or with a common home
    mpi_library.py          MPI's own broadcast, by a library that is found there
    exchange_store.py       torch's store, torchrun's or rank 0's
"""
