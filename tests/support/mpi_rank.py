"""One rank of a job started by mpiexec: every collective over transport "mpi", compared with NumPy.

    python mpi_rank.py HOSTS PART...

HOSTS: a letter for each rank, its host: ranks with the same letter share memory. PART: a function `part_PART`.
Prints "rank 0: fine" and so on.
"""
import os
import sys
import time

import numpy as np

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job import basics as hvd
from bagua_hvd.job.engines import detect
from values import make, reduced
from world import result, view

COUNTS = [0, 1, 3, 1000, 65_536, 65_537, 1_000_003]     # around the transport's message size
SIXTY_FOUR_MIB = 1 << 24                                # in float32


def post(kind, name, array, dtype, out=None, **more):
    """Posts a collective, and waits for it."""
    operation = hvd.context().post(kind, name, [view(array, dtype, out)], blocking=True, **more)
    operation.wait()
    return operation


def inputs_of(dtype, count):
    return [make(dtype, count, rank, hvd.size()) for rank in range(hvd.size())]


def check_sum(count, name):
    inputs = inputs_of("float32", count)
    out = np.empty_like(inputs[0])
    post(native.ALLREDUCE, name, inputs[hvd.rank()], "float32", out, op=native.OP_SUM)
    np.testing.assert_array_equal(out, reduced("float32", native.OP_SUM, inputs))


def part_allreduce():
    for dtype in ("float32", "float64", "float16", "bfloat16", "int64", "bool"):
        for op in (native.OP_SUM, native.OP_MIN, native.OP_MAX):
            for count in COUNTS:
                inputs = inputs_of(dtype, count)
                out = np.empty_like(inputs[0])
                post(native.ALLREDUCE, f"allreduce.{dtype}.{op}.{count}", inputs[hvd.rank()], dtype, out, op=op)
                np.testing.assert_array_equal(out, reduced(dtype, op, inputs))


def part_gather():
    rows = [0, 70_000, 3, 12_345]
    inputs = [make("float32", 3 * rows[rank], rank, hvd.size()).reshape(-1, 3) for rank in range(hvd.size())]
    out = result(post(native.ALLGATHER, "allgather", inputs[hvd.rank()], "float32"), 0, "float32", (3,))
    np.testing.assert_array_equal(out, np.concatenate(inputs))


def part_broadcast():
    for root in range(hvd.size()):
        for count in COUNTS:
            inputs = inputs_of("int32", count)
            out = np.empty_like(inputs[0])
            post(native.BROADCAST, f"broadcast.{root}.{count}", inputs[hvd.rank()], "int32", out, root_rank=root)
            np.testing.assert_array_equal(out, inputs[root])


def part_reducescatter():
    for rows in (0, 1, hvd.size() + 1, 200_011):
        inputs = [array.reshape(-1, 2) for array in inputs_of("float32", 2 * rows)]
        out = result(post(native.REDUCESCATTER, f"reducescatter.{rows}", inputs[hvd.rank()], "float32",
                          op=native.OP_SUM), 0, "float32", (2,))
        expected = np.array_split(reduced("float32", native.OP_SUM, inputs), hvd.size())[hvd.rank()]
        np.testing.assert_array_equal(out, expected)


def part_alltoall():
    n, mine = hvd.size(), hvd.rank()
    splits = [[(rank + other) % 3 * 40_001 for other in range(n)] for rank in range(n)]
    inputs = [make("float32", sum(splits[rank]), rank, n) for rank in range(n)]
    operation = post(native.ALLTOALL, "alltoall", inputs[mine], "float32", splits=splits[mine])
    expected = [np.split(inputs[rank], np.cumsum(splits[rank])[:-1])[mine] for rank in range(n)]
    np.testing.assert_array_equal(result(operation, 0, "float32"), np.concatenate(expected))


def part_primitives():
    n = hvd.size()
    inputs = [np.random.default_rng(rank).standard_normal(300_001).astype(np.float32) for rank in range(n)]
    out = np.empty_like(inputs[0])
    post(native.C_LP_S, "c_lp_s", inputs[hvd.rank()], "float32", out, op=native.OP_AVERAGE,
         codec=native.lib.BHVD_CODEC_MINMAX_UINT8)
    # Each of the two encodings has an error of at most half a step of 255.
    step = max(np.ptp(array) for array in inputs) / 255
    np.testing.assert_allclose(out, np.mean(inputs, axis=0), rtol=0, atol=1.01 * step)


def part_big():
    check_sum(SIXTY_FOUR_MIB, "big")
    check_sum(SIXTY_FOUR_MIB + 1, "big and odd")


def part_many():
    """2000 small operations, and many in flight at once that end in any order."""
    for i in range(2000):
        check_sum(1 + i % 5, f"many.{i % 7}")
    counts = [1, 100_000, 7, 65_536, 300_001] * 20
    inputs = [inputs_of("float32", count) for count in counts]
    outs = [np.empty_like(arrays[0]) for arrays in inputs]
    posted = [hvd.context().post(native.ALLREDUCE, f"at once.{i}", [view(arrays[hvd.rank()], "float32", outs[i])],
                                 op=native.OP_SUM) for i, arrays in enumerate(inputs)]
    for operation, arrays, out in zip(posted, inputs, outs, strict=True):
        operation.wait()
        np.testing.assert_array_equal(out, reduced("float32", native.OP_SUM, arrays))


def part_again():
    """Joins further jobs after the first; a rank leaves while the others still read its data."""
    for life in range(5):
        hvd.shutdown()
        assert not hvd.mpi_enabled()
        hvd.init()
        check_sum(COUNTS[-1], f"again.{life}")
        given = make("float32", COUNTS[-1], 0, 3)
        out = given if hvd.rank() == 0 else np.empty_like(given)
        post(native.BROADCAST, "last", out, "float32", "in place", root_rank=0)
        np.testing.assert_array_equal(out, make("float32", COUNTS[-1], 0, 3))


def part_facts():
    assert hvd.mpi_built() and hvd.mpi_enabled() and hvd.mpi_threads_supported()


def part_standard():
    """The process has one MPI, the one with the standard ABI."""
    with open("/proc/self/maps") as file:
        names = {os.path.basename(line.split()[-1]) for line in file if "/libmpi" in line}
    assert [name for name in names if name.startswith("libmpi_abi.so")] == list(names) != [], names


def part_mpi4py():
    """The script uses MPI on its own thread while ours runs."""
    from threading import Thread

    from mpi4py import MPI

    assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (hvd.rank(), hvd.size())
    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
    sums = []

    def use_mpi():
        mine = np.full(100_000, 1.0 + hvd.rank())
        for _ in range(50):
            total = np.empty_like(mine)
            MPI.COMM_WORLD.Allreduce(mine, total)
            sums.append(total)

    thread = Thread(target=use_mpi)
    thread.start()
    for i in range(50):
        check_sum(100_000, f"beside.{i}")
    thread.join()
    expected = np.full(100_000, hvd.size() * (hvd.size() + 1) / 2)
    assert len(sums) == 50 and all(np.array_equal(total, expected) for total in sums)


def part_lost():
    """Rank 1 dies without a goodbye during an operation of the others; they get an error, and can end."""
    check_sum(1000, "before")
    if hvd.rank() == 1:
        os._exit(0)
    try:
        while True:
            check_sum(COUNTS[-1], "lost")
    except HorovodInternalError as error:
        assert "rank 1 was lost" in str(error), error


def part_killed():
    """Rank 1 is killed; the launcher ends the job."""
    check_sum(1000, "before")
    if hvd.rank() == 1:
        os.kill(os.getpid(), 9)
    time.sleep(600)


if __name__ == "__main__":
    os.environ["BAGUA_HVD_HOST_ID"] = f"{os.getppid()}.{sys.argv[1][detect().rank]}"
    if "mpi4py_first" in sys.argv:
        from mpi4py import MPI  # noqa: F401  initializes MPI
    hvd.init()
    for part in sys.argv[2:]:
        if part != "mpi4py_first":
            globals()[f"part_{part}"]()
    sys.stdout.write(f"rank {detect().rank}: fine\n")
    sys.stdout.flush()
