"""Predicts the time of allreduces between hosts: the core simulates all ranks' schedules (native/simulation)."""
from collections.abc import Sequence
from typing import NamedTuple

from bagua_hvd.core import native


class Network(NamedTuple):
    """Hosts with one rank and one line each. Seconds one way, bytes."""

    latency_s: float
    bytes_per_s: float


def allreduces(hosts: int, nbytes: Sequence[int], network: Network) -> list[float]:
    """Returns the time in seconds at which each host finishes float32 allreduces of `nbytes` bytes, posted together.

    Times include negotiation, in one message.

    Raises:
        ValueError: a value out of range. HorovodInternalError: more steps than the simulator takes (a ring of more
            than 1,000 hosts), or no memory.
    """
    seconds = native.ffi.new("double[]", hosts)
    posted = native.ffi.new("struct bhvd_simulated[]", [
        {"kind": native.ALLREDUCE, "dtype": native.FLOAT32, "nbytes": each} for each in nbytes])
    lines = native.ffi.new("struct bhvd_network *", {**network._asdict(), "slow_rank": -1})
    native.call(native.lib.bhvd_simulate, hosts, native.ffi.NULL, posted, len(nbytes), True, lines, seconds)
    return list(seconds)
