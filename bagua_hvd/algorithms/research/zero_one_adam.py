"""0/1 Adam: Adam whose variance is updated ever more rarely, with 1-bit momenta in between, and local steps at last.

Step t = 0, 1, ...; T_v are the steps that update v, T_u those after which the ranks are equal; t' is the last of T_u.

    m_i <- beta1 m_i + (1 - beta1) g_i          x_i <- x_i - gamma m_i / p          u_i <- u_i + gamma m_i
    t in T_u:   u = C_LP_S(u_i; sign_rms, e_i, f_k)
                m_i <- u / sum(gamma since t')          x_i <- x_t' - u / p         u_i <- 0
    t in T_v:   Adam's step with g = mean_i g_i (full_steps.py), v <- beta2 v + (1 - beta2) g^2

gamma is the learning rate by 1 - beta1^(t+1); p = sqrt(v) / sqrt(1 - beta2^T) + eps, where T counts the updates of v.

    T_v     the first K = full_steps steps, then K more at intervals of 2, of 4, ...; none from step variance_steps on
    T_u     all steps before that; then at intervals of 1 for local_scaler steps, of 2 for as many, ..., of max_interval

Wire: 2 N (n-1)/n bytes per rank in T_v, N/4 (n-1)/n in the rest of T_u, none in other steps.
State: 8 N bytes of u_i and x_t', and 4 (N + N/n) of errors.
Source: Lu et al., arXiv:2202.06009, algorithm 1; DeepSpeed's ZeroOneAdam until 0.19.  Differs: bias corrections; what
T_v sends makes m, too, as in DeepSpeed, instead of being sent once more in bits; the decoupled weight decay of local
steps acts when the ranks meet; m is 0 where v is; steps are bounded as in QAdam (qadam.py), and u by as many.

Limits: u has the momentum's unit, so all elements of a bucket move as far as those of small v can bear (see
onebit_adam.py). Where the ranks' data differ much, local steps cost.
"""
import numpy as np

from bagua_hvd.algorithms.averaging import mean
from bagua_hvd.algorithms.base import Safety, error_state, positive
from bagua_hvd.algorithms.full_steps import count, mean_of_gradients
from bagua_hvd.algorithms.qadam import QAdam
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.primitives import c_lp_s, sign_rms
from bagua_hvd.training.adam import FlatAdam
from bagua_hvd.training.buckets import Bucket
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Pending


class ZeroOneAdam(QAdam):
    """Adam with rare updates of its variance, 1-bit momenta, and local steps; optimizers as for QAdam.

    Args:
        variance_steps: the step from which on v is frozen, and ranks may step by themselves: about where the learning
            rate's warm-up ends. At least full_steps.
        full_steps: updates of v at each interval, 1 or more.
        local_scaler: steps until the interval of local steps doubles. max_interval: the largest, H; 1: no local steps.
        hierarchical: full precision within hosts, codes between them.
        bounded: no element makes a longer step than any of Adam's own. False: as published.
    """

    safety = Safety.E3
    models_differ = True
    uses_weights = ("step",)
    codec = sign_rms

    def __init__(self, variance_steps: int = 1000, full_steps: int = 16, local_scaler: int = 1000,
                 max_interval: int = 16, hierarchical: bool = True, bounded: bool = True) -> None:
        super().__init__(hierarchical, bounded=bounded)
        self.variance_steps = positive("variance_steps", variance_steps)
        self.full_steps = positive("full_steps", full_steps)
        self.local_scaler = positive("local_scaler", local_scaler)
        self.max_interval = positive("max_interval", max_interval)
        if self.variance_steps < self.full_steps:
            raise ValueError(f"variance_steps={variance_steps}: expected at least full_steps={full_steps}")

    def prepare(self, model: Model) -> None:
        model.adam()

    def updates(self, t: int) -> int:
        """How many of the steps 0 ... t - 1 are in T_v."""
        return count(min(t, self.variance_steps), self.full_steps)

    def updates_variance(self, t: int) -> bool:
        """Whether t is in T_v."""
        return self.updates(t + 1) > self.updates(t)

    def synchronizes(self, t: int) -> bool:
        """Whether t is in T_u."""
        local = t - self.variance_steps
        if local < 0:
            return True
        interval = min(self.max_interval, 1 << min(local // self.local_scaler, 30))
        return (local + 1) % interval == 0

    def gradients_travel(self, model: Model) -> bool:
        return self.updates_variance(model.step)

    def communicate(self, bucket: Bucket, group: ProcessSet) -> Pending:
        return mean_of_gradients(bucket, group)

    def step(self, model: Model) -> bool:
        t = model.step
        if t < self.full_steps:
            return False            # Adam's own
        if self.updates_variance(t):
            for bucket in model.gradients:
                self._with_variance(bucket, t)
            return True
        if not self.synchronizes(t - 1) and any(
                "x" not in bucket.state and not bucket.state.loaded("x") for bucket in model.gradients):
            mean(model.weights, model.group)        # ranks have come or gone between two meetings
        begun = [self._begin_local(bucket, t) for bucket in model.gradients]
        for bucket, (adam, x, p, operation) in zip(model.gradients, begun, strict=True):
            if operation is not None:
                operation.wait()
                self._meet(bucket, adam, x, p)
            adam.save(x)
        return True

    def _begun(self, bucket: Bucket, t: int, variance: bool) -> tuple[FlatAdam, np.ndarray, np.ndarray]:
        """(Adam's state with this step's m_i, and v if `variance`; x_i before the step; p)."""
        adam = FlatAdam(bucket)
        x = adam.weights()
        adam.moments(bucket.flat(bucket.gradients), x, variance)
        return adam, x, adam.denominator(t - self.updates(t + variance))

    def _with_variance(self, bucket: Bucket, t: int) -> None:
        adam, x, p = self._begun(bucket, t, variance=True)
        u = adam.direction(p, x)
        for member, part in adam.members:
            x[part] -= member.lr * u[part]
        adam.save(x, variance=True)

    def _begin_local(self, bucket: Bucket, t: int) -> tuple[FlatAdam, np.ndarray, np.ndarray, Pending | None]:
        """(Adam's state with m_i, x_i after the rank's own step, p, the operation if the ranks meet)."""
        adam, x, p = self._begun(bucket, t, variance=False)
        adam.m[adam.v == 0] = 0
        for member, part in adam.members if self.bounded else ():
            longest = (1 - member.beta1 ** (member.step + 1)) * member.longest_step * p[part]
            np.clip(adam.m[part], -longest, longest, out=adam.m[part])
        state, count = bucket.state, len(adam.members)
        if self.synchronizes(t - 1) or "x" not in state and not state.loaded("x"):
            state["x"], state["u"], state["gamma"] = x.copy(), np.zeros_like(x), np.zeros((2, count))
        state.keep("x", lambda: np.empty_like(x))
        u = state.keep("u", lambda: np.empty_like(x))
        gamma = state.keep("gamma", lambda: np.empty((2, count)))     # sums of gamma, and of learning rates
        for place, (member, part) in enumerate(adam.members):
            step = member.lr / (1 - member.beta1 ** (member.step + 1))
            gamma[:, place] += step, member.lr
            u[part] += step * adam.m[part]
            x[part] -= step * adam.m[part] / p[part]
        if not self.synchronizes(t):
            return adam, x, p, None
        group = bucket.model.group
        error = error_state(bucket, group, self.hierarchical, scaled=False)
        operation = c_lp_s(u, group, codec=self.codec, name=bucket.name, hierarchical=self.hierarchical, error=error)
        return adam, x, p, operation

    def _meet(self, bucket: Bucket, adam: FlatAdam, x: np.ndarray, p: np.ndarray) -> None:
        """u is there: m and x become what they are on all ranks."""
        u, gamma = bucket.state["u"], bucket.state["gamma"]
        u[adam.v == 0] = 0
        x[:] = bucket.state["x"]
        for place, (member, part) in enumerate(adam.members):
            if self.bounded:
                longest = gamma[1, place] * member.longest_step * p[part]
                np.clip(u[part], -longest, longest, out=u[part])
            adam.m[part] = u[part] / gamma[0, place]
            decay = gamma[1, place] * member.weight_decay if member.decoupled else 0
            x[part] -= u[part] / p[part] + decay * x[part]
