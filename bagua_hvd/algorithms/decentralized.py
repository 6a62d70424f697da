"""Decentralized SGD (D-PSGD): averages weights with peers; gradients are not communicated.

    x_i' = sum_j W_ij x_i^t                     while the backward pass computes g_i(x_i^t)
    x_i^(t+1) = x_i' - step(g_i(x_i^t))         the user's optimizer

every communication_interval steps, starting with the first; in the others x_i' = x_i^t. W by peer_selection_mode:

    all         W_ij = 1 / n
    shift_one   rank i and its peer of this round: W_ii = W_ip = 1/2. Even n: pairs of lower and upper half, shifted by
                one in every round; n/2 rounds cover all such pairs. Odd n: a round robin of n rounds, in each of
                which one rank is idle (native/primitive/peers.c). hierarchical: hosts are the peers, each with the
                mean of its ranks, weighted by their number: W_ip = s_p / (s_i + s_p), s ranks on a host.
    exponential i and i xor 2^k, k = 0, 1, ... ceil(log2 n) - 1, repeated; a rank without such a peer is idle. If n is
                a power of two, all ranks have the global mean after log2 n rounds.
    random      each round draws a pairing of a round robin, equal on all ranks: all peers are equally likely.
    ring        i - 1, i and i + 1: 1/3 each, in every round; with two ranks, 2/3 for the other one.

Wire per communication: all, 2 N (n-1)/n elements, as a ring; in pairs, N elements to one peer, whatever n; ring 2 N.
Memory: N elements. Optimizer state, batch-norm statistics and models differ between ranks: hvd.consensus averages
them.
Source: Lian et al., arXiv:1705.09056; BAGUA, arXiv:2107.01499; exponential: Ying et al., arXiv:2110.13363. Differs:
the averaging overlaps the backward pass, but not the forward pass, so it includes changes of weights between two steps
(clamping, loading).
"""
from random import Random

from bagua_hvd.algorithms.exchange import Steps, exchange
from bagua_hvd.algorithms.full_steps import LocalSteps, Mean
from bagua_hvd.job.process_sets import ProcessSet, registered_id
from bagua_hvd.job.runtime import context
from bagua_hvd.primitives import d_fp_s
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Pending

MODES = ("all", "shift_one", "exponential", "random", "ring")


def round_of(mode: str, peers: int, number: int) -> tuple[str, int]:
    """The d_fp_s topology of a mode's communication `number` with `peers` ranks or hosts, and the round in it.

    Rounds are few so that names repeat: a request that repeats under its name needs no negotiation.
    """
    if mode == "random":
        return "round_robin", Random(number).randrange(peers - 1 + peers % 2)
    if mode == "ring":
        return mode, 0
    if mode == "exponential":
        return mode, number % max((peers - 1).bit_length(), 1)
    return mode, number % (peers // 2 if peers % 2 == 0 else peers)


@exchange
def pairing(bucket: Bucket, group: ProcessSet, mode: str, round: int, hierarchical: bool) -> Steps:
    """The average with this round's peer, or with both neighbours."""
    x = bucket.read()
    peers = context().process_set_hosts(registered_id(group)) if hierarchical else group.size()
    topology, round = round_of(mode, peers, round)
    yield d_fp_s(x, group, topology=topology, round=round, hierarchical=hierarchical, name=f"{bucket.name}.{round}")
    return x


class Decentralized(LocalSteps):
    """Averages weights with peers instead of gradients over all ranks.

    Args:
        hierarchical: with peers: hosts are the peers, each with the mean of its ranks. With "all" it only changes the
            path of the bytes.
        peer_selection_mode: "all", "shift_one", "exponential", "random" or "ring".
        communication_interval, warmup_steps, full_steps: see LocalSteps.
    """

    uses_weights = ("backward_begins", "before_step")

    def __init__(self, hierarchical: bool = True, peer_selection_mode: str = "all", communication_interval: int = 1,
                 warmup_steps: float = 0, full_steps: int | None = None) -> None:
        super().__init__(communication_interval, warmup_steps, full_steps)
        if peer_selection_mode not in MODES:
            raise ValueError(f"peer_selection_mode={peer_selection_mode!r}: expected one of {', '.join(MODES)}")
        self.hierarchical = hierarchical
        self.peer_selection_mode = peer_selection_mode

    def prepare(self, model: Model) -> None:
        if self.peer_selection_mode != "all" and model.group.size() < 2:
            raise ValueError(
                f"peer_selection_mode={self.peer_selection_mode!r} needs two ranks or more: one has no peer")

    def backward_begins(self, model: Model) -> None:
        if self.begins_interval(model):
            communications = (model.step - self.warmup_steps) // self.communication_interval
            model.pending["averages"] = [self._begin(bucket, model.group, communications) for bucket in model.weights]

    def _begin(self, bucket: Bucket, group: ProcessSet, round: int) -> Pending:
        if self.peer_selection_mode == "all":
            return Mean(bucket, group)
        return pairing(bucket, group, self.peer_selection_mode, round, self.hierarchical)

    def before_step(self, model: Model) -> None:
        for bucket, average in zip(model.weights, model.pending.get("averages", ()), strict=False):
            bucket.write(average.wait())
