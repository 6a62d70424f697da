"""How far this process' cores are from each other (native/laboratory/network/cores.c)."""
import ctypes
import os

from bagua_hvd.bench.network import LIBRARY


def round_trip_ns() -> int | None:
    """From the first core of this process to the last and back, through their caches; about 2 ms of both.

    None with a single core, or where threads cannot be started. 50 to 100 within a chip, 300 and more from one chip to
    another: by so much shared memory's collectives differ.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return None
    measured = ctypes.CDLL(str(LIBRARY)).cores_round_trip_ns(cores[0], cores[-1])
    return None if measured < 0 else int(measured)
