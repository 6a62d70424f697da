"""Predicts the time of a training step from a model's size, a network and what an algorithm sends.

    python -m bagua_hvd.bench.predict --hosts 8 --rate 1gbit --delay 5 --parameters 110e6 --step-ms 200

The picture is coarse: buckets cross a link one after the other, each from when its last gradient is ready; a bucket is
agreed on in a round trip, and each of its rounds of messages waits for the latency once. Coding takes no time.
docs/results/tradeoff.md shows predictions beside measurements.
"""
import argparse
import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bagua_hvd.bench import report

FRAMING = 1514 / 1448
BUCKET_NBYTES = 10 << 20
ROTATED2, BLOCK4 = (2 + 32 / 512) / 32, (4 + 32 / 256) / 32       # of float32's bytes
GRADIENTS, HIDDEN = "while gradients come", "beside the training"
LATE = "until the next step's end"
EXACT, LAYERS = "gradient_allreduce", 50
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
# Differences of the test loss from full gradients after equally many steps: docs/results/quality.md, 4 ranks.
LOSSES = {"gradient_allreduce": "the reference", "bytegrad": "-5 to +1 %", "rotated": "-1 to +5 %",
          "powersgd": "-1 to +4 %", "onebit_adam": "-3 to +1 %", "diloco": "-3 to +15 %",
          "async": "-3 to +13 %; not equivalent: images, sgd"}
COLUMNS = ("algorithm", "ms per step", "speed", "MB sent per step and rank", "test loss on small tasks")


def bytes_per_s(rate: str) -> float:
    """Bytes per second of a rate such as 10gbit; 0 for "none". Raises ValueError."""
    if rate == "none":
        return 0.0
    if rate[-4:] not in UNITS:
        raise ValueError(f"{rate!r} is not a rate such as 100mbit, 1gbit or 10gbit")
    return float(rate[:-4]) * UNITS[rate[-4:]] / 8


@dataclass(eq=False)
class Profile:
    """Times of one step on one rank, in seconds. gradients: (name, shape, time when it is ready), by that time."""

    model: str
    forward_s: float
    backward_s: float
    step_s: float
    gradients: list[tuple[str, tuple[int, ...], float]]

    @property
    def computing_s(self) -> float:
        return self.forward_s + self.backward_s + self.step_s

    @functools.cached_property
    def parameters(self) -> int:
        return sum(math.prod(shape) for _, shape, _ in self.gradients)


@dataclass(frozen=True)
class Network:
    """Seconds, bytes. latency_s: one way."""

    hosts: int
    bytes_per_s: float
    latency_s: float = 0.0


class Sends(NamedTuple):
    """Communication of an algorithm: bytes that a rank sends for `count` elements of n ranks, rounds of messages, when
    they are sent, and every how many steps."""

    nbytes: float
    rounds: int
    when: str = GRADIENTS
    period: int = 1


def sends(name: str, n: int, count: float, thin: float = 0) -> Sends:
    """The Sends of an algorithm in LOSSES with its defaults; for Adam with gradients_untouched=True.

    Args:
        thin: total rows and columns of all matrices.
    Raises:
        KeyError: another algorithm.
    """
    log = max(1, math.ceil(math.log2(n)))
    exact = 8 * count * (n - 1) / n
    return {
        "gradient_allreduce": Sends(exact, 2 * log),
        "bytegrad": Sends(exact / 4, 2),
        "rotated": Sends(exact * ROTATED2, 2),
        "powersgd": Sends(8 * (n - 1) / n * 4 * thin, 4 * log),
        "onebit_adam": Sends(exact / 32, 2),
        # A quarter of the model in 4 bits every second step; it may take one step to arrive.
        "diloco": Sends(exact * BLOCK4 / 4, 2, LATE, 2),
        "async": Sends(0, 0, HIDDEN),
    }[name]


@functools.cache
def _buckets(profile: Profile, nbytes: int) -> list[tuple[int, float]]:
    """(elements, seconds until the last gradient of the bucket is ready)."""
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
    """Total rows and columns of all matrices."""
    return sum(shape[0] + math.prod(shape[1:]) for _, shape, _ in profile.gradients if len(shape) > 1)


def step_s(said: Sends, profile: Profile, network: Network, bucket_nbytes: int = BUCKET_NBYTES) -> float:
    """Predicted seconds of a step."""
    if said.when == HIDDEN:
        return profile.computing_s
    wait = (said.rounds + 2) * network.latency_s
    if said.when == LATE:
        in_flight = said.nbytes * FRAMING / network.bytes_per_s + wait
        return profile.computing_s + max(0, in_flight - profile.computing_s) / said.period
    free = 0.0
    done = profile.backward_s
    for count, ready in _buckets(profile, bucket_nbytes):
        free = max(free, ready) + said.nbytes * count / profile.parameters * FRAMING / network.bytes_per_s
        done = max(done, free + wait)
    return profile.forward_s + done + profile.step_s


def even_profile(parameters: float, computing_s: float, layers: int = LAYERS) -> Profile:
    """The Profile of a model of equal square layers, whose backward pass takes 60 % of a step."""
    width = math.isqrt(round(parameters / layers))
    return Profile(f"{layers} layers", 0.3 * computing_s, 0.6 * computing_s, 0.1 * computing_s,
                   [(f"layer{i}", (width, width), 0.6 * computing_s * (i + 1) / layers) for i in range(layers)])


def _lines(profile: Profile, network: Network) -> Iterator[tuple[str, ...]]:
    found = {name: sends(name, network.hosts, profile.parameters, thin(profile)) for name in LOSSES}
    exact = step_s(found[EXACT], profile, network)
    for name, said in found.items():
        seconds = step_s(said, profile, network)
        mb = f"{said.nbytes / said.period / 1e6:.2f}" if said.nbytes else "by the clock"
        yield name, f"{1e3 * seconds:.1f}", f"{exact / seconds:.2f}x", mb, LOSSES[name]


def main(arguments: list[str] | None = None) -> int:
    """The program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bagua_hvd.bench.predict", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts, with one rank each; default 4")
    parser.add_argument("--rate", default="1gbit", help="bandwidth of each host's link; default 1gbit")
    parser.add_argument("--delay", type=float, default=0.0, metavar="MS",
                        help="latency in ms between hosts, one way; default 0")
    parser.add_argument("--parameters", type=float, default=25e6, help="parameters of the model; default 25e6")
    parser.add_argument("--step-ms", type=float, default=100.0, help="a step without communication; default 100")
    options = parser.parse_args(arguments)
    if not (options.hosts >= 2 and LAYERS <= options.parameters < math.inf and 0 < options.step_ms < math.inf
            and 0 <= options.delay < math.inf):
        parser.error(f"expected --hosts 2 or more, --parameters {LAYERS} or more, --step-ms more than 0, --delay 0 or "
                     "more")
    try:
        network = Network(options.hosts, bytes_per_s(options.rate), options.delay / 1e3)
        if not network.bytes_per_s > 0:
            raise ValueError(f"{options.rate!r} is not a rate above 0")
    except ValueError as error:
        parser.error(f"--rate: {error}")
    print(report.table(COLUMNS, list(_lines(even_profile(options.parameters, options.step_ms / 1e3), network)), left=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
