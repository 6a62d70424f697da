"""What allreduces between hosts would take: the core simulates all ranks' schedules (native/run/simulator.h).

    python -m bagua_hvd.bench.simulator --hosts 2 4 --rate 100mbit 1gbit --latency 0 5 20 --sizes 4 65536 1048576

Times are one operation's, agreed on first. For measured ones: `python -m bagua_hvd.bench --hosts 2 --rate 1gbit`.
"""
import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bagua_hvd.bench import report
from bagua_hvd.core import native

PATHS = ("chosen", "ring", "doubling", "halving")
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


@dataclass(frozen=True)
class Network:
    """Hosts with one rank and one line each. Seconds, bytes.

    latency_s: one way. slow_rank: -1, none, or one whose line has the slow_ figures. message_s and the costs per byte:
    of a host's one core; 0 where the wire is what counts.
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


def bytes_per_s(rate: str) -> float:
    """Of a rate such as 10gbit."""
    return float(rate[:-4]) * UNITS[rate[-4:]] / 8


def allreduces(hosts: int, nbytes: Sequence[int], network: Network, path: str = "chosen", element: int = 4,
               agrees: bool = True) -> list[float]:
    """When each host is done with allreduces of so many bytes, posted at once; seconds.

    Args:
        path: one of PATHS. element: bytes; agrees: they are negotiated first, all in one message.
    Raises:
        ValueError: a value out of range. HorovodInternalError: more steps than the simulator takes (a ring of more
            than 1,000 hosts), or no memory.
    """
    lines = native.ffi.new("struct bhvd_network *", asdict(network))
    error = native.ffi.new("struct bhvd_error *")
    seconds = native.ffi.new("double[]", hosts)
    name = native.ffi.NULL if path == "chosen" else path.encode()
    status = native.lib.bhvd_simulate_allreduces(hosts, name, list(nbytes), len(nbytes), element, agrees, lines,
                                                 seconds, error)
    native.check(status, error)
    return list(seconds)


def main(arguments=None):
    """The program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bagua_hvd.bench.simulator", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rate", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--latency", nargs="+", type=float, default=[0, 5, 20], metavar="MS", help="one way")
    parser.add_argument("--sizes", nargs="+", type=int, default=[4, 1 << 16, 1 << 20, 1 << 24], help="bytes")
    parser.add_argument("--message", type=float, default=0, metavar="US", help="of a core, for a message, at both ends")
    parser.add_argument("--path", choices=PATHS, default="chosen")
    options = parser.parse_args(arguments)
    lines = []
    for hosts in options.hosts:
        for rate in options.rate:
            for latency in options.latency:
                network = Network(latency * 1e-3, bytes_per_s(rate), message_s=options.message * 1e-6)
                times = (max(allreduces(hosts, [nbytes], network, options.path)) for nbytes in options.sizes)
                lines.append((str(hosts), rate, f"{latency:g}", *(f"{time * 1e3:.3f}" for time in times)))
    columns = "hosts", "rate", "latency ms", *(f"{nbytes} B, ms" for nbytes in options.sizes)
    print(report.table(columns, lines, left=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
