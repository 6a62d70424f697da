"""DiLoCo: many local steps, then an outer optimizer's step for one fragment of the model at a time, compressed.

theta: the outer weights, equal on all ranks. Fragment p of P is sent after the first (p+1) H/P local steps, and then
every H. x_i, theta, m and e_i are those of the fragment:

    step t:         Delta_i = theta - x_i           sent; training continues
                    e_i     = beta e_i              with error feedback: v_i = Delta_i + e_i, e_i = v_i - D(Q(v_i))
    step t + tau:   Delta   = (1/n) C_LP_S(Delta_i; Q, e_i)
                    m       = mu m + Delta
                    theta   = theta - eta (Delta + mu m)                Nesterov momentum
                    x_i     = alpha x_i + (1 - alpha) theta

n is the number of participating ranks, without those in join(). Ranks may come and go (elastic jobs): all have theta
and m. Values in flight are lost then, without harm: they are part of the next Delta_i.

With a quorum, a server runs the rounds, which do not wait for late ranks: quorum.py.

This is Streaming DiLoCo. P = 1, tau = 0, no Q: DiLoCo as first published. mu = 0, Q = topk with beta < 1: SparseLoCo.

Wire: 2 N (n-1)/n codes (top-k: N (n-1)) every H steps, N/P at a time.
Memory: 2 N elements (theta and m), equal on all ranks; N/P while a fragment is in flight; with error feedback N + N/n.
Source: Douillard et al., arXiv:2311.08105 and 2501.18512 (streaming); Sarfi et al. (SparseLoCo), arXiv:2508.15706.
Differs: the defaults suit trainings of a few hundred steps, too: outer steps are frequent, and do not go far beyond
the ranks' own progress (the papers' are H of 100 to 500 and mu = 0.9, after a warm-up); fragments are runs of whole
tensors of nearly equal size, not every P-th layer; 4-bit blocks with a float32 scale, not E3M0, and encoded again
for the allgather; top-k of a segment, not of 4,096 elements; its 2 bits are a sign and one of two magnitudes.
"""
import functools
import weakref
from contextlib import suppress
from typing import Any

import numpy as np

from bagua_hvd.algorithms.base import checked, error_state, fraction, not_negative, positive, valid_codec
from bagua_hvd.algorithms.fragments import Fragment, outer_step
from bagua_hvd.algorithms.full_steps import LocalSteps, Mean
from bagua_hvd.algorithms.quorum import QuorumRounds
from bagua_hvd.codecs import Codec, block
from bagua_hvd.core.operations import Posted
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import runtime
from bagua_hvd.primitives import ErrorState, c_fp_s, c_lp_s
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model

FOUR_BITS = block(4, stochastic=True)


class DiLoCo(LocalSteps):
    """Local steps, with an outer Nesterov SGD over the ranks in the background, one fragment at a time.

    Args:
        communication_interval: H, inner steps between two outer steps of a fragment, 1 or more.
        fragments: P, 1 to H; None: 4, or H if that is less.
        overlap_steps: tau, inner steps that a fragment may be in flight before training blocks on it, 0 <= tau < H;
            None: 1, or 0 if H is 1.
        mixing: alpha, the share of a rank's own weights that stays when a fragment arrives, 0 <= alpha < 1.
        outer_lr: eta. outer_momentum: mu, 0 <= mu < 1.
        codec: Q, from bagua_hvd.codecs; None: full precision. Default: 4 bits, stochastic rounding.
        error_feedback: whether encoding errors are sent later; for biased codecs (topk).
        error_decay: beta, 0 < beta <= 1: factor on the residual in each round.
        warmup_steps: initial steps with averaged gradients.
        hierarchical: full precision within hosts, codes between them.
        full_steps: see LocalSteps. With a quorum there are none.
        quorum: number of ranks that an outer step waits for, or their share if below 1; None: all. With a quorum, ranks
            may make different numbers of steps, and may come and go; see quorum.py.
        grace_s: seconds that it then waits for the others.
    """

    uses_weights = ("before_step", "after_step")

    def __init__(self, communication_interval: int = 8, fragments: int | None = None, overlap_steps: int | None = None,
                 mixing: float = 0.0, outer_lr: float = 0.7, outer_momentum: float = 0.5,
                 codec: Codec | None = FOUR_BITS, error_feedback: bool = False, error_decay: float = 1.0,
                 warmup_steps: float = 0, hierarchical: bool = True, full_steps: int | None = None,
                 quorum: float | None = None, grace_s: float = 1.0) -> None:
        super().__init__(communication_interval, warmup_steps, 0 if quorum and full_steps is None else full_steps)
        interval = self.communication_interval
        self.fragments = min(4, interval) if fragments is None else positive("fragments", fragments)
        self.overlap_steps = (min(1, interval - 1) if overlap_steps is None
                              else not_negative("overlap_steps", overlap_steps))
        if max(self.fragments, self.overlap_steps + 1) > interval:
            raise ValueError(f"fragments={self.fragments}, overlap_steps={self.overlap_steps}: with "
                             f"communication_interval={interval}, expected fragments <= {interval} and overlap_steps < "
                             f"{interval}")
        if error_feedback and codec is None:
            raise ValueError("error_feedback=True: there is no error without a codec")
        if quorum is not None:
            _check_quorum(quorum, grace_s, self.full_steps, error_feedback)
        self.quorum = quorum
        self.grace_s = grace_s
        self.asynchronous = quorum is not None      # ranks step at their own pace
        self._models: weakref.WeakSet[Model] = weakref.WeakSet()
        self.mixing = fraction("mixing", mixing)
        self.outer_lr = checked("outer_lr", outer_lr, lambda lr: lr > 0, "a number above 0")
        self.outer_momentum = fraction("outer_momentum", outer_momentum)
        self.codec = None if codec is None else valid_codec(codec)
        self.error_feedback = error_feedback
        self.error_decay = checked("error_decay", error_decay, lambda decay: 0 < decay <= 1, "0 < error_decay <= 1")
        self.hierarchical = hierarchical

    @property
    def runs_alone(self) -> bool:
        return self.outer_momentum > 0 or self.outer_lr != 1 or self.mixing > 0 or self.quorum is not None

    def prepare(self, model: Model) -> None:
        self._models.add(model)

    def abort(self) -> None:
        """With a quorum: this rank takes part in no round until resume(); the others do not wait for it."""
        for model in self._models:
            if "rounds" in model.scratch:
                model.scratch["rounds"].leave()

    def resume(self) -> None:
        """This rank takes part again from its next step on, with the others' theta. Call it on all ranks."""
        for model in self._models:
            model.scratch.pop("rounds", None)

    def before_step(self, model: Model) -> None:
        if model.step < self.warmup_steps:
            return
        if any("theta" not in bucket.state for bucket in model.weights):
            model.scratch.pop("rounds", None)       # their theta is gone
        # Ranks may start with different weights: theta is their mean, which is bit-equal on all ranks.
        for bucket in model.weights:
            bucket.state.keep("theta", functools.partial(self._theta, bucket, model.group), shared=True)
        if self.quorum is not None and "rounds" not in model.scratch:
            model.scratch["rounds"] = QuorumRounds(self, model)

    def _theta(self, bucket: Bucket, group: ProcessSet) -> np.ndarray:
        return bucket.read() if bucket.state.loaded("theta") else Mean(bucket, group).wait().copy()

    def after_step(self, model: Model) -> None:
        if "rounds" in model.scratch:
            model.scratch["rounds"].advance()
        if self.quorum is not None:
            return
        local = model.step + 1 - self.warmup_steps
        begun = [local - (p + 1) * self.communication_interval // self.fragments for p in range(self.fragments)]
        for act, behind in ((self._send, 0), (self._arrived, self.overlap_steps)):
            for p, since in enumerate(begun):
                if since >= behind and (since - behind) % self.communication_interval == 0:
                    for bucket in model.weights:
                        if fragment := Fragment.of(bucket, p, self.fragments):
                            act(fragment)

    def _send(self, fragment: Fragment) -> None:
        # Created before the error state, so that a checkpoint waits for the sum before it reads the errors.
        on_its_way, x, group = _sum_in_flight(fragment), fragment.x, fragment.bucket.model.group
        delta = fragment.outer()[0] - x.read()
        if self.codec is None:
            operation = c_fp_s(delta, group, average=False, name=x.name)
        else:
            exchange = "allgather" if self.codec.sparse else "scatter_gather"
            operation = c_lp_s(delta, group, self.codec, self._error(fragment), average=False, exchange=exchange,
                               seed=x.seed(fragment.bucket.step), name=x.name, hierarchical=self.hierarchical)
        on_its_way.begin(delta, operation, group, x.name)

    def _error(self, fragment: Fragment) -> ErrorState | None:
        if not self.error_feedback:
            return None
        bucket = fragment.bucket
        error = error_state(bucket, bucket.model.group, self.hierarchical, False, f"error.{fragment.p}",
                            fragment.x.count)
        if self.error_decay != 1:
            error.scale(self.error_decay)
        return error

    def _arrived(self, fragment: Fragment) -> None:
        delta = _sum_in_flight(fragment).take()
        if delta is None:
            error = self._error(fragment)
            if error is not None:           # the sum was lost, and the residual is part of the next Delta_i as well
                error.scale(0)
            return
        fragment.stop_frozen()
        theta, m = fragment.outer()
        outer_step(theta, m, delta, self.outer_lr, self.outer_momentum)
        fragment.x.write(self.mixing * fragment.x.read() + (1 - self.mixing) * theta if self.mixing else theta)


class SumInFlight:
    """A sum over the ranks, in flight or complete, and the number of ranks in it. Checkpoints wait for it.

    Ranks may be some steps apart, so shutdown() and join() also wait: others may need this rank's part.
    """

    def __init__(self, count: int, dtype: np.dtype) -> None:
        self.count = count
        self._dtype = dtype
        self._delta: np.ndarray | None = None
        self._ranks: np.ndarray = np.ones(1, np.float32)
        self._operations: list[Posted] = []
        self._inits = 0                     # runtime.inits when it was sent

    def begin(self, delta: np.ndarray, operation: Posted, group: ProcessSet, name: str) -> None:
        """delta: this rank's values, which `operation` replaces by the sum."""
        self._delta, self._inits = delta, runtime.inits
        self._ranks[0] = 1
        self._operations = [operation, c_fp_s(self._ranks, group, average=False, name=f"{name}.ranks")]
        runtime.track(self)

    def finished(self) -> bool:
        """Whether wait_all() would return at once."""
        return all(operation.done() for operation in self._operations)

    def wait_all(self) -> None:
        """Blocks until it is complete. Failures are raised to callers that use the result."""
        for operation in self._operations:
            with suppress(Exception):
                operation.wait()
        runtime.in_flight.discard(self)

    def _here(self) -> np.ndarray | None:
        """The sum; None: nothing was sent, or the connections were lost, and the sum with them, on all ranks."""
        self.wait_all()
        if self._operations and self._inits != runtime.inits:
            self._delta, self._operations = None, []
        for operation in self._operations:
            operation.wait()
        return self._delta

    def take(self) -> np.ndarray | None:
        """Returns the mean and forgets it; None if there is none.

        Raises:
            HorovodInternalError: a rank was lost.
        """
        total = self._here()
        self._delta, self._operations = None, []
        return None if total is None else total / self._ranks[0]

    def state_dict(self) -> dict[str, Any]:
        total = self._here()
        return {} if total is None else {"data": total.tobytes(), "ranks": float(self._ranks[0])}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Returns False, and changes nothing, when the state is of another size."""
        if state:
            if len(state["data"]) != self.count * self._dtype.itemsize:
                return False
            self._delta = np.frombuffer(state["data"], self._dtype).copy()
            self._ranks[0] = state["ranks"]
        return True


def _check_quorum(quorum: float, grace_s: float, full_steps: int, error_feedback: bool) -> None:
    if checked("quorum", quorum, lambda part: part > 0, "an integer of 1 or more, or a part of the ranks") >= 1:
        positive("quorum", quorum)
    checked("grace_s", grace_s, lambda seconds: 0 <= seconds < float("inf"), "seconds, 0 or more")
    if full_steps:
        raise ValueError(f"full_steps={full_steps}: these need all ranks, so leave them out with a quorum")
    if error_feedback:
        raise ValueError("error_feedback=True: with a quorum, no rank knows what others have lost, so leave it out")


def _sum_in_flight(fragment: Fragment) -> SumInFlight:
    theta, _ = fragment.outer()

    def make() -> SumInFlight:
        for sent in list(runtime.in_flight):        # a dropped one may still use the name
            sent.wait_all()
        return SumInFlight(theta.size, theta.dtype)

    return fragment.bucket.state.keep(f"travelling.{fragment.p}", make, shared=True,
                                      fits=lambda kept: kept.count == theta.size)
