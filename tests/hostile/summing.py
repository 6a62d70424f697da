"""A rank that adds until the file TEST_STOP exists, and checks every sum; twice, with a new rendezvous in between."""
import os
import sys

import numpy as np

from bagua_hvd.core import native, vectors
from bagua_hvd.job import basics


def add(context, name, values, op=native.OP_SUM):
    context.post(native.ALLREDUCE, name, [vectors.array_view(values)], op=op, blocking=True).wait()
    return values


def add_until_stopped(file):
    size, sums, stopped = basics.size(), 0, False
    while not stopped:
        values = np.full(1000 + sums % 7, basics.rank() + sums, np.int64)
        assert (add(basics.context(), "sum", values) == size * sums + size * (size - 1) // 2).all()
        stopped = add(basics.context(), "stop", np.array([os.path.exists(file)], np.uint8), native.OP_MAX)[0]
        sums += 1
    return sums


for stop in ("first", "second"):
    basics.init()
    sys.stdout.write(f"up {stop} {os.getpid()}\n")
    sys.stdout.flush()
    count = add_until_stopped(os.path.join(os.environ["TEST_STOP"], stop))
    sys.stdout.write(f"right {stop}\n" if count else "no sums\n")
    sys.stdout.flush()
    basics.shutdown()
