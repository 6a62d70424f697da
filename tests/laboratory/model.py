"""Simulates a step's communication on 8 to 4,096 hosts, with the core's simulator of all ranks' schedules.

    python -m tests.laboratory.model                         # ResNet-50, 100 Mbit/s to 10 Gbit/s
    python -m tests.laboratory.model --check FILES...        # of bench --hosts --json: measured and simulated times
    python -m tests.laboratory.model --negotiation FILE      # of bench --negotiation --json: rank 0's coordination

Each host has one rank, one link and one core. The options set the core's own costs; without them only links and latency
count. Overlap with the backward pass is not subtracted.
"""
import argparse
import json
import sys
from dataclasses import replace

from bagua_hvd.bench import report
from bagua_hvd.bench.predict import bytes_per_s
from bagua_hvd.bench.rank import resnet50_counts
from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from tests.laboratory.simulation import Network, Operation, operations

MIB = 1 << 20
GRADIENT_NBYTES = 4 * sum(resnet50_counts())
GRADIENTS = len(resnet50_counts())
# Buckets of the optimizer's default size.
BUCKETS = -(-GRADIENT_NBYTES // (10 * MIB))
ALGORITHMS = {
    "gradient_allreduce": Operation(native.ALLREDUCE, 0),
    "bytegrad": Operation(native.C_LP_S, 0, codec=native.lib.BHVD_CODEC_MINMAX_UINT8),
    "doublesqueeze": Operation(native.C_LP_S, 0, codec=native.lib.BHVD_CODEC_SIGN),
    "decentralized": Operation(native.D_FP_S, 0),
    "low_precision_decentralized": Operation(native.D_LP_S, 0, codec=native.lib.BHVD_CODEC_MINMAX_UINT8),
}
RATES = ("100mbit", "1gbit", "10gbit")
# Rank 0 is a bottleneck if it coordinates for more than this share of the time; steps per second.
BOTTLENECK, STEPS = 0.1, 10
FANOUT = 16                     # native/core/negotiation/relay.h


def seconds(algorithm: str, hosts: int, nbytes: list[int], network: Network) -> float | None:
    """The time until all hosts have completed buckets of these sizes, posted together.

    If the simulator cannot run their steps together, they run one after the other; None if it cannot run a single one.
    """
    posted = [replace(ALGORITHMS[algorithm], nbytes=each) for each in nbytes]
    try:
        return max(operations(hosts, posted, network))
    except HorovodInternalError:
        if len(posted) == 1:
            return None
    singly = [seconds(algorithm, hosts, [each], network) for each in nbytes]
    return None if None in singly else sum(each for each in singly if each)


def step(algorithm: str, hosts: int, network: Network) -> float | None:
    """The gradients of ResNet-50, in buckets of equal size."""
    counts = [GRADIENT_NBYTES // 4 // BUCKETS + (i < GRADIENT_NBYTES // 4 % BUCKETS) for i in range(BUCKETS)]
    return seconds(algorithm, hosts, [4 * count for count in counts], network)


def prediction_cells(hosts, latency_s, costs):
    """The table of predictions: milliseconds of communication in a step of ResNet-50."""
    def cell(algorithm, count, rate):
        found = step(algorithm, count, replace(costs, latency_s=latency_s, bytes_per_s=bytes_per_s(rate)))
        return "-" if found is None else f"{found * 1e3:.0f}"

    return [(str(count), rate, *(cell(algorithm, count, rate) for algorithm in ALGORITHMS))
            for rate in RATES for count in hosts]


def check_cells(files, latency_s, costs):
    """The table of measured and simulated times, from the benchmark's files. ValueError: a file without hosts."""
    lines = []
    for file in files:
        with open(file) as stream:
            content = json.load(stream)
        options = content["options"]
        if not options["hosts"] or options["np"] != options["hosts"]:
            raise ValueError(f"{file}: measured without --hosts, or with several ranks a host")
        algorithm = options["algorithm"] or "gradient_allreduce"
        network = replace(costs, latency_s=latency_s, bytes_per_s=bytes_per_s(options["rate"]))
        for row in content["rows"]:
            if row["op"] != "allreduce" or not row["backend"].startswith("bagua") or algorithm not in ALGORITHMS:
                continue
            # The minimum counts: other programs can only add time.
            measured = row["min_us"] * 1e-3
            simulated = 1e3 * (seconds(algorithm, options["hosts"], [row["nbytes"]], network) or 0)
            lines.append((algorithm, str(options["hosts"]), options["rate"], str(row["nbytes"]), f"{measured:.2f}",
                          f"{simulated:.2f}", f"{100 * (simulated / measured - 1):+.0f} %"))
    return lines


def coordinator_cost(file):
    """Rank 0's seconds, (per tensor and rank, per message and child), with the most ranks in `--negotiation's FILE`."""
    with open(file) as stream:
        rows = json.load(stream)["rows"]
    most = max(row["ranks"] for row in rows)
    cost = {row["names"]: row["coordinator_ns"] * 1e-9 for row in rows if row["ranks"] == most}
    return cost["cached"], cost["single"] - cost["cached"]


def star_limit(tensor_s, message_s, messages):
    """The number of ranks at which rank 0 of a star coordinates BOTTLENECK of its time, by messages a step and rank."""
    return int(BOTTLENECK / STEPS / (tensor_s * GRADIENTS + message_s * messages))


def tree_limit(tensor_s, message_s, messages):
    """The same for a tree, by messages a step from each of rank 0's children."""
    return max(0, int((BOTTLENECK / STEPS - message_s * messages * FANOUT) / (tensor_s * GRADIENTS)))


def main(arguments=None):
    """Runs the program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.laboratory.model", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", type=int, default=[1 << exponent for exponent in range(3, 13)])
    parser.add_argument("--latency", type=float, default=0.05, metavar="MS", help="one way; default 0.05")
    parser.add_argument("--message", type=float, default=0, metavar="US", help="of a core, for a message, at both ends")
    parser.add_argument("--encode", type=float, default=0, metavar="NS", help="of a core, for a byte of values")
    parser.add_argument("--decode", type=float, default=0, metavar="NS")
    parser.add_argument("--reduce", type=float, default=0, metavar="NS")
    parser.add_argument("--check", nargs="+", metavar="FILE", help="of bench --hosts --json")
    parser.add_argument("--negotiation", metavar="FILE", help="of bench --negotiation --json")
    options = parser.parse_args(arguments)
    costs = Network(0, 1, message_s=options.message * 1e-6, encode_s_per_byte=options.encode * 1e-9,
                    decode_s_per_byte=options.decode * 1e-9, reduce_s_per_byte=options.reduce * 1e-9)
    try:
        if options.check:
            print(report.table(("algorithm", "hosts", "rate", "bytes", "measured ms", "simulated ms", "error"),
                               check_cells(options.check, options.latency * 1e-3, costs), left=1))
        elif options.negotiation:
            tensor_s, message_s = coordinator_cost(options.negotiation)
            limits = (f"with {messages} messages a step at {star_limit(tensor_s, message_s, messages)} ranks in a star,"
                      f" {tree_limit(tensor_s, message_s, messages)} in a tree" for messages in (1, BUCKETS, GRADIENTS))
            print(f"Rank 0 coordinates {BOTTLENECK:.0%} of its time, at {STEPS} steps a second of {GRADIENTS} "
                  f"gradients, {', '.join(limits)}.")
        else:
            print(report.table(("hosts", "rate", *ALGORITHMS),
                               prediction_cells(options.hosts, options.latency * 1e-3, costs), left=0))
    except (OSError, ValueError, KeyError) as error:
        print(f"model: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
