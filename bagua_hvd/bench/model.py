"""A cost model of communication between hosts: fitted to the benchmark's files, checked against others, extrapolated.

    time = alpha hops + gamma added + max(beta sent, delta coded) + tau tensors n + phi messages m

    alpha   seconds a hop: one message, from its posting to its arrival; an operation is agreed on in two hops for each
            level of the negotiation's tree, a star up to STAR_RANKS hosts; m: rank 0's children in it
    beta    seconds a byte on a host's link: known, from its rate and what Ethernet, IP and TCP add to a packet
    gamma   seconds a byte received and added (its way through the kernel included)
    delta   seconds a byte encoded or decoded by minmax_uint8, while other segments are on the wire
    tau     the coordinator's seconds a tensor and rank (bench --negotiation, names "cached")
    phi     the coordinator's seconds a message and child ("single", less tau); a message of C_LP_S costs as much

Hosts that are namespaces of one machine share its cores, so what a core does (alpha, gamma, delta) is multiplied by
max(1, hosts / cores) when measurements are fitted or checked; real hosts have cores of their own. One rank a host.
Files of at most FIT_HOSTS hosts are fitted; larger ones are predictions, hence a check. The best of the samples counts:
what other programs take of the machine only ever adds. For the same reason the sum of the relative errors is made
small, not of their squares: a few disturbed measurements move it little.

    python -m bagua_hvd.bench.model --fit FILES... [--negotiation FILE] [--predict HOSTS...] [--json FILE]
"""
import argparse
import json
import sys

import numpy as np

from bagua_hvd.bench import report, simulator
from bagua_hvd.bench.rank import resnet50_counts

FIT_HOSTS = 2
MIB = 1 << 20
GRADIENT_NBYTES = 4 * sum(resnet50_counts())
GRADIENTS = len(resnet50_counts())
# Buckets of the optimizer's default size.
BUCKETS = -(-GRADIENT_NBYTES // (10 * MIB))
ALGORITHMS = ("gradient_allreduce", "bytegrad", "doublesqueeze", "decentralized")
# A rank 0 that coordinates for longer than this part of a step is a bottleneck; steps a second.
BOTTLENECK, STEPS = 0.1, 10
RATES = ("100mbit", "1gbit", "10gbit")
FRAMING = 1514 / 1448           # bytes of a full Ethernet frame, and of the data in it
STAR_RANKS, FANOUT = 64, 16     # native/core/tree.h
ITERATIONS = 50                 # of the fit; it settles in about ten


def allreduce_work(hosts, nbytes):
    """(hops, bytes sent, bytes added) of the path that native/collective/allreduce_links.c chooses."""
    rounds = hosts.bit_length() - 1
    power = 1 << rounds
    folds, part = int(power < hosts), (power - 1) / power
    doubling = rounds + 2 * folds, (rounds + 2 * folds) * nbytes, (rounds + folds) * nbytes
    halving = 2 * rounds + 2 * folds, (2 * part + 2 * folds) * nbytes, (part + folds) * nbytes
    ring = 2 * (hosts - 1), 2 * (hosts - 1) / hosts * nbytes, (hosts - 1) / hosts * nbytes
    # The ring adds while the wire is busy.
    costs = {doubling: _select_ns(*doubling), halving: _select_ns(*halving), ring: _select_ns(*ring[:2], 0)}
    return min(costs, key=costs.__getitem__)


def _select_ns(hops, sent, added):
    return 27000 * hops + 0.9 * sent + 0.04 * added


def work(algorithm, hosts, nbytes):
    """(hops, bytes sent, added, coded, messages) of a rank in one operation over nbytes of float32; two hops agree."""
    part = (hosts - 1) / hosts
    if algorithm in ("bytegrad", "doublesqueeze"):
        code = nbytes / (4 if algorithm == "bytegrad" else 32)
        # Every rank encodes and decodes all once, and its chunk as the owner: decoded from all, encoded once.
        return 2 + 2, 2 * part * code, part * code * 2, nbytes * (3 + 1 / hosts), 2 * (hosts - 1)
    if algorithm == "decentralized":
        return 2 + 1, nbytes, nbytes, 0.0, 1
    hops, sent, added = allreduce_work(hosts, nbytes)
    return 2 + hops, sent, added, 0.0, hops


def beta(rate):
    """Seconds a byte of data takes on a link of a rate such as 10gbit."""
    return FRAMING / simulator.bytes_per_s(rate)


def tree(hosts):
    """(levels of ranks below rank 0, rank 0's children) in negotiation, with a rank on each host."""
    if hosts <= STAR_RANKS:
        return 1, hosts
    levels, reached = 0, 1
    while reached < hosts:
        levels += 1
        reached += FANOUT**levels
    return levels, FANOUT


class Model:
    """The fitted numbers."""

    def __init__(self, alpha, gamma, delta, tau=0.0, phi=0.0):
        self.alpha, self.gamma, self.delta, self.tau, self.phi = alpha, gamma, delta, tau, phi

    def seconds(self, algorithm, hosts, rate, nbytes, crowd=1.0):
        """One operation. crowd: hosts a core that they share."""
        hops, sent, added, coded, messages = work(algorithm, hosts, nbytes)
        by_cores = self.alpha * (hops + 2 * (tree(hosts)[0] - 1)) + self.gamma * added
        if coded:
            by_cores += self.phi * messages
        return crowd * by_cores + max(beta(rate) * sent, crowd * self.delta * coded)

    def negotiation(self, hosts, buckets=BUCKETS, tensors=GRADIENTS):
        """The coordinator's seconds a step: every bucket's tensors are announced in one message."""
        return self.tau * tensors * hosts + self.phi * buckets * tree(hosts)[1]

    def step(self, algorithm, hosts, rate):
        """The communication of one step, nothing of it hidden behind the backward pass."""
        return BUCKETS * self.seconds(algorithm, hosts, rate, GRADIENT_NBYTES / BUCKETS) + self.negotiation(hosts)

    def star_limit(self, messages):
        """Ranks at which rank 0 of a star coordinates BOTTLENECK of its time, each in so many messages a step."""
        return int(BOTTLENECK / STEPS / (self.tau * GRADIENTS + self.phi * messages))

    def tree_limit(self, messages):
        """The same in a tree, with so many messages a step from each of rank 0's children."""
        return max(0, int((BOTTLENECK / STEPS - self.phi * messages * FANOUT) / (self.tau * GRADIENTS)))


def _least_absolute(matrix, of_link, seconds):
    """Makes the sum of the relative errors small, x >= 0, by least squares weighted anew again and again.

    Args:
        matrix: columns alpha, gamma, delta. of_link: seconds on the wire, in each line the coding or they count.
    Raises:
        ValueError: SciPy is missing.
    """
    try:
        from scipy.optimize import nnls
    except ImportError:
        raise ValueError("the fit needs SciPy: pip install 'bagua_hvd[model]'") from None
    weights, codes, coding = 1 / seconds, matrix[:, 2] > 0, matrix[:, 2] > 0
    for _ in range(ITERATIONS):
        counted = matrix * np.stack([np.ones_like(coding), np.ones_like(coding), coding], 1)
        link = np.where(coding, 0.0, of_link)
        solution, _ = nnls(counted * weights[:, None], (seconds - link) * weights)
        errors = np.abs(counted @ solution + link - seconds) / seconds
        weights = 1 / seconds / np.sqrt(np.maximum(errors, 1e-6))
        coding = codes & (matrix[:, 2] * solution[2] > of_link)
        if not coding.any():
            coding = codes & (of_link == of_link[codes].min())      # a slow link hides it all: the fastest tells most
    return solution


def measurements(files):
    """[(algorithm, hosts, rate, nbytes, seconds, crowd, operation)] of the benchmark's files that have hosts."""
    found = []
    for file in files:
        with open(file) as stream:
            content = json.load(stream)
        options = content["options"]
        if not options["hosts"] or options["np"] != options["hosts"]:
            raise ValueError(f"{file}: measured without --hosts, or with several ranks a host")
        crowd = max(1.0, options["hosts"] / content["machine"]["cores"])
        for row in content["rows"]:
            if row["op"] in ("allreduce", "many") and row["backend"].startswith("bagua"):
                found.append((options["algorithm"] or "gradient_allreduce", options["hosts"], options["rate"],
                              row["nbytes"], row["min_us"] * 1e-6, crowd, row["op"]))
    return found


def coordinator_cost(file):
    """(tau, phi) from `bench --negotiation --json FILE`: those of the largest number of ranks."""
    with open(file) as stream:
        rows = json.load(stream)["rows"]
    most = max(row["ranks"] for row in rows)
    cost = {row["names"]: row["coordinator_ns"] * 1e-9 for row in rows if row["ranks"] == most}
    return cost["cached"], cost["single"] - cost["cached"]


def fit(measured, tau=0.0, phi=0.0):
    """The Model that fits what was measured with at most FIT_HOSTS hosts. Raises ValueError: too little of it."""
    used = [m for m in measured if m[1] <= FIT_HOSTS and m[6] == "allreduce"]
    algorithms = {m[0] for m in used}
    if len(used) < 3 or not {"gradient_allreduce", "bytegrad"} <= algorithms:
        raise ValueError(f"the fit needs allreduces with {FIT_HOSTS} hosts, without --algorithm and with bytegrad")
    matrix, of_link = np.zeros((len(used), 3)), np.zeros(len(used))
    for index, (algorithm, hosts, rate, nbytes, _, crowd, _) in enumerate(used):
        hops, sent, added, coded, _ = work(algorithm, hosts, nbytes)
        matrix[index] = crowd * hops, crowd * added, crowd * coded
        of_link[index] = beta(rate) * sent
    seconds = np.array([m[4] for m in used])
    alpha, gamma, delta = _least_absolute(matrix, of_link, seconds)
    return Model(alpha, gamma, delta, tau, phi)


def check_cells(model, measured):
    """The table of predicted beside measured."""
    lines = []
    for algorithm, hosts, rate, nbytes, seconds, crowd, op in measured:
        predicted = model.seconds(algorithm, hosts, rate, nbytes, crowd)
        lines.append((f"{algorithm}{' (161 tensors)' if op == 'many' else ''}", str(hosts), rate, str(nbytes),
                      f"{seconds * 1e3:.2f}", f"{predicted * 1e3:.2f}", f"{100 * (predicted / seconds - 1):+.0f} %",
                      "fitted" if hosts <= FIT_HOSTS and op == "allreduce" else "predicted"))
    return lines


def prediction_cells(model, hosts):
    """The table of predictions: milliseconds of communication a step of ResNet-50."""
    return [(str(count), rate, *(f"{model.step(algorithm, count, rate) * 1e3:.0f}" for algorithm in ALGORITHMS),
             f"{model.negotiation(count) * 1e3:.2f}")
            for rate in RATES for count in hosts]


def main(arguments=None):
    """The program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bagua_hvd.bench.model", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", nargs="+", required=True, metavar="FILE", help="of bench --hosts --json")
    parser.add_argument("--negotiation", metavar="FILE", help="of bench --negotiation --json")
    parser.add_argument("--predict", nargs="*", type=int, metavar="HOSTS", help="default 8 to 4096")
    parser.add_argument("--json", metavar="FILE", help="also write the fitted numbers to this file")
    options = parser.parse_args(arguments)
    try:
        measured = measurements(options.fit)
        model = fit(measured, *(coordinator_cost(options.negotiation) if options.negotiation else ()))
    except (OSError, ValueError, KeyError) as error:
        print(f"model: error: {error}", file=sys.stderr)
        return 1
    print(f"alpha {model.alpha * 1e6:.3g} us, gamma {model.gamma * 1e9:.3g} ns/byte, "
          f"delta {model.delta * 1e9:.3g} ns/byte, tau {model.tau * 1e9:.3g} ns, phi {model.phi * 1e9:.3g} ns")
    print("\n" + report.table(("operation", "hosts", "rate", "bytes", "measured ms", "model ms", "error", ""),
                              check_cells(model, measured), left=1))
    hosts = options.predict or [1 << exponent for exponent in range(3, 13)]
    print("\n" + report.table(("hosts", "rate", *ALGORITHMS, "rank 0 coordinates"), prediction_cells(model, hosts),
                              left=0))
    if model.tau:
        print(f"\nRank 0 coordinates {BOTTLENECK:.0%} of its time, at {STEPS} steps a second of {GRADIENTS} gradients, "
              + ", ".join(f"with {messages} messages a step at {model.star_limit(messages)} ranks in a star, "
                          f"{model.tree_limit(messages)} in a tree" for messages in (1, BUCKETS, GRADIENTS)) + ".")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(vars(model), file, indent=1)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
