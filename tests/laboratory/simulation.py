"""The core's simulator of all ranks' schedules (native/simulation), with all that it can simulate.

bagua_hvd.tuning.network has what the tuner uses of it.
"""
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bagua_hvd.core import native

PATHS = ("chosen", "ring", "doubling", "halving")


@dataclass(frozen=True)
class Network:
    """Hosts with one rank and one line each. Seconds, bytes.

    latency_s: one way. slow_rank: the rank whose line has the slow_ figures; -1: none. message_s and the costs per
    byte: of a host's one core; 0 if only the network counts.
    """

    latency_s: float
    bytes_per_s: float
    slow_rank: int = -1
    slow_latency_s: float = 0.0
    slow_bytes_per_s: float = 0.0
    message_s: float = 0.0
    load_s_per_byte: float = 0.0
    reduce_s_per_byte: float = 0.0
    scale_s_per_byte: float = 0.0
    store_s_per_byte: float = 0.0
    copy_s_per_byte: float = 0.0
    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0


@dataclass(frozen=True)
class Operation:
    """An operation of one tensor; see struct bhvd_simulated.

    kind: native.ALLREDUCE, C_LP_S, D_FP_S or D_LP_S. codec, exchange, topology: the core's numbers. round: for D_FP_S.
    """

    kind: int
    nbytes: int
    dtype: int = native.FLOAT32
    codec: int = 0
    codec_parameter: float = 0.0
    exchange: int = 0
    topology: int = 0
    round: int = 0


_DTYPES = {1: native.UINT8, 2: native.FLOAT16, 4: native.FLOAT32, 8: native.FLOAT64}


def operations(hosts: int, posted: Sequence[Operation], network: Network, path: str = "chosen",
               agrees: bool = True) -> list[float]:
    """Returns the time in seconds at which each host finishes operations that were posted together.

    Args:
        path: for allreduces, one of PATHS. agrees: they are negotiated first, all in one message.
    Raises:
        ValueError: a value out of range. HorovodInternalError: more steps than the simulator takes (a ring, or C_LP_S,
            of more than 1,000 hosts), or no memory.
    """
    array = native.ffi.new("struct bhvd_simulated[]", [asdict(operation) for operation in posted])
    seconds = native.ffi.new("double[]", hosts)
    name = native.ffi.NULL if path == "chosen" else path.encode()
    lines = native.ffi.new("struct bhvd_network *", asdict(network))
    native.call(native.lib.bhvd_simulate, hosts, name, array, len(posted), agrees, lines, seconds)
    return list(seconds)


def allreduces(hosts: int, nbytes: Sequence[int], network: Network, path: str = "chosen", element: int = 4,
               agrees: bool = True) -> list[float]:
    """operations() for allreduces of `nbytes` bytes each, in elements of `element` bytes: 1, 2, 4 or 8."""
    posted = [Operation(native.ALLREDUCE, each, _DTYPES[element]) for each in nbytes]
    return operations(hosts, posted, network, path, agrees)
