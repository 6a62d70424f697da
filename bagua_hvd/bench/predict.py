"""What a training step would take: predicted from a model's size, a network and what an algorithm sends.

    python -m bagua_hvd.bench.predict --hosts 8 --rate 1gbit --delay 5 --parameters 110e6 --step-ms 200

The picture is coarse: buckets cross a link one after the other, each from when its last gradient is ready; a bucket is
agreed on in a round trip, and each of its rounds of messages waits for the latency once. Coding takes no time.
docs/results/tradeoff.md shows predictions beside measurements.
"""
import argparse
import functools
import math
import sys
from dataclasses import dataclass
from typing import NamedTuple

from bagua_hvd.bench import report

FRAMING = 1514 / 1448
BUCKET_NBYTES = 10 << 20
DDP_NBYTES = 25 << 20
BLOCK8, BLOCK4, ROTATED2 = (8 + 32 / 256) / 32, (4 + 32 / 256) / 32, (2 + 32 / 512) / 32        # of float32's bytes
GRADIENTS, STEP, HIDDEN = "while gradients come", "after the backward pass", "beside the training"
LATE = "until the next step's end"
EXACT, LAYERS = "gradient_allreduce", 50
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
# Of the menu: by name, the way with its defaults, and for Adam with gradients_untouched=True.
WAYS = {**{name: name for name in ("gradient_allreduce", "bytegrad", "rotated", "powersgd")},
        "onebit_adam": "onebit_adam, gradients_untouched", "diloco": "diloco, 8", "async": "async, at once"}
# How far their test losses were from that of full gradients, after as many steps: docs/results/quality.md, 4 ranks.
LOSSES = {"gradient_allreduce": "the reference", "bytegrad": "-5 to +1 %", "rotated": "-1 to +5 %",
          "powersgd": "-1 to +4 %", "onebit_adam": "-3 to +1 %", "diloco": "-5 to +14 %; not equivalent: images, sgd",
          "async": "-3 to +13 %; not equivalent: images, sgd"}
COLUMNS = ("algorithm", "ms per step", "speed", "MB sent per step and rank", "test loss on small tasks")


def bytes_per_s(rate: str) -> float:
    """Of a rate such as 10gbit; 0: "none". Raises ValueError."""
    if rate == "none":
        return 0.0
    if rate[-4:] not in UNITS:
        raise ValueError(f"{rate!r} is not a rate such as 100mbit, 1gbit or 10gbit")
    return float(rate[:-4]) * UNITS[rate[-4:]] / 8


@dataclass(eq=False)
class Profile:
    """Of one step on one rank; seconds. gradients: (name, shape, when it is ready), the first ready first."""

    model: str
    forward_s: float
    backward_s: float
    step_s: float
    gradients: list[tuple[str, tuple[int, ...], float]]

    @property
    def computing_s(self):
        return self.forward_s + self.backward_s + self.step_s

    @functools.cached_property
    def parameters(self):
        return sum(math.prod(shape) for _, shape, _ in self.gradients)


@dataclass(frozen=True)
class Network:
    """Seconds, bytes. latency_s: one way."""

    hosts: int
    bytes_per_s: float
    latency_s: float = 0.0


class Sends(NamedTuple):
    """Of one way to train: bytes a rank sends for `count` elements of n ranks, rounds of messages, when; every how many
    steps."""

    nbytes: float
    rounds: int
    when: str = GRADIENTS
    period: int = 1


def sends(way: str, n: int, count: float, thin: float = 0) -> Sends:
    """thin: rows and columns of all matrices. Raises KeyError: an unknown way."""
    part, log, ring = (n - 1) / n, max(1, math.ceil(math.log2(n))), min(2, n - 1)
    exact = 8 * count * part
    known = {
        "none": Sends(0, 0, HIDDEN),
        **{name: Sends(exact, 2 * log) for name in ("ddp", "gradient_allreduce", "gradient_allreduce, Adam")},
        "ddp, fp16 hook": Sends(exact / 2, 2 * log), "ddp, PowerSGD hook": Sends(8 * part * 4 * thin, 4 * log, STEP),
        "bytegrad": Sends(exact / 4, 2), "bytegrad, delay": Sends(exact / 4, 2, LATE),
        "gradient_allreduce, delay": Sends(exact, 2 * log, LATE),
        "doublesqueeze": Sends(exact / 32, 2), "topk": Sends(0.24 * count * (n - 1), 1),
        "powersgd": Sends(8 * part * 4 * thin, 4 * log),
        "qadam": Sends(exact / 4, 2, STEP), "qadam, gradients_untouched": Sends(exact / 4, 2),
        "onebit_adam": Sends(exact / 32, 2, STEP), "onebit_adam, gradients_untouched": Sends(exact / 32, 2),
        **{f"bytegrad, {codec}": Sends(exact * BLOCK8, 2) for codec in ("block(8)", "float8", "float8, Adam")},
        "rotated": Sends(exact * ROTATED2, 2),
        "bytegrad, block(4)": Sends(exact * BLOCK4, 2),
        "doublesqueeze, block(4)": Sends(exact * BLOCK4, 2), "topk, 10 %": Sends(0.8 * count * (n - 1), 1),
        "decentralized": Sends(exact, 2 * log), "decentralized, shift_one": Sends(4 * count, 1),
        "low_precision_decentralized": Sends(count * ring, 1, STEP), "choco": Sends(count / 8 * ring, 1, STEP),
        "local_sgd": Sends(exact, 2 * log, STEP, 4), "local_sgd, 2": Sends(exact, 2 * log, STEP, 2),
        "diloco, 16": Sends(exact, 2 * log, STEP, 16), "diloco, 8": Sends(exact, 2 * log, STEP, 8),
        # A quarter of the model in 4 bits every fourth step, or second, which may travel for one step.
        "streaming_diloco": Sends(exact * BLOCK4 / 4, 2, LATE, 4),
        "streaming_diloco, 8": Sends(exact * BLOCK4 / 4, 2, LATE, 2),
        **{name: Sends(0, 0, HIDDEN) for name in ("async", "async, at once")},
    }
    return known[way]


@functools.cache
def _buckets(profile: Profile, nbytes: int) -> list[tuple[int, float]]:
    """(elements, seconds until the last gradient of it is there)."""
    found: list[tuple[int, float]] = []
    count, moment = 0, 0.0
    for _, shape, ready in profile.gradients:
        size = math.prod(shape)
        if count and 4 * (count + size) > nbytes:
            found.append((count, moment))
            count = 0
        count, moment = count + size, ready
    return [*found, (count, moment)]


@functools.cache
def thin(profile: Profile) -> int:
    """Rows and columns of all its matrices."""
    return sum(shape[0] + math.prod(shape[1:]) for _, shape, _ in profile.gradients if len(shape) > 1)


def step_s(way: str, profile: Profile, network: Network) -> float:
    """Seconds of a step."""
    n, total = network.hosts, profile.parameters
    said = sends(way, n, total, thin(profile))
    if said.when == HIDDEN:
        return profile.computing_s
    wait = (said.rounds + 2) * network.latency_s
    if said.when == LATE:
        travels = said.nbytes * FRAMING / network.bytes_per_s + wait
        return profile.computing_s + max(0, travels - profile.computing_s) / said.period
    if said.when == STEP:
        return profile.computing_s + (said.nbytes * FRAMING / network.bytes_per_s + wait) / said.period
    free = 0.0
    done = profile.backward_s
    for count, ready in _buckets(profile, DDP_NBYTES if way.startswith("ddp") else BUCKET_NBYTES):
        free = max(free, ready) + said.nbytes * count / total * FRAMING / network.bytes_per_s
        done = max(done, free + wait)
    return profile.forward_s + done + profile.step_s


def even_profile(parameters: float, computing_s: float, layers: int = LAYERS) -> Profile:
    """Of a model of equal square layers, whose backward pass takes 60 % of the time of a step."""
    width = math.isqrt(round(parameters / layers))
    return Profile(f"{layers} layers", 0.3 * computing_s, 0.6 * computing_s, 0.1 * computing_s,
                   [(f"layer{i}", (width, width), 0.6 * computing_s * (i + 1) / layers) for i in range(layers)])


def _lines(profile: Profile, network: Network):
    exact = step_s(EXACT, profile, network)
    for name, way in WAYS.items():
        seconds = step_s(way, profile, network)
        said = sends(way, network.hosts, profile.parameters, thin(profile))
        mb = f"{said.nbytes / said.period / 1e6:.2f}" if said.nbytes else "by the clock"
        yield name, f"{1e3 * seconds:.1f}", f"{exact / seconds:.2f}x", mb, LOSSES[name]


def main(arguments: list[str] | None = None) -> int:
    """The program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bagua_hvd.bench.predict", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="with one rank each; default 4")
    parser.add_argument("--rate", default="1gbit", help="of each host's link; default 1gbit")
    parser.add_argument("--delay", type=float, default=0.0, metavar="MS", help="from host to host, one way; default 0")
    parser.add_argument("--parameters", type=float, default=25e6, help="of the model; default 25e6")
    parser.add_argument("--step-ms", type=float, default=100.0, help="a step without communication; default 100")
    options = parser.parse_args(arguments)
    if options.hosts < 2 or options.parameters < 1 or options.step_ms <= 0 or options.delay < 0:
        parser.error("--hosts wants 2 or more, --parameters and --step-ms more than 0, --delay 0 or more")
    try:
        network = Network(options.hosts, bytes_per_s(options.rate), options.delay / 1e3)
    except ValueError as error:
        parser.error(f"--rate: {error}")
    print(report.table(COLUMNS, list(_lines(even_profile(options.parameters, options.step_ms / 1e3), network)), left=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
