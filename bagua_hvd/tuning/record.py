"""The record of decisions: a line in the log, a table in a file, Horovod's table, and hvd.statistics().plans."""
import json
import os
from typing import Any, NamedTuple

from bagua_hvd.core import variables
from bagua_hvd.core.log import logger
from bagua_hvd.job.runtime import runtime
from bagua_hvd.tuning.network import Measured

HOROVOD_HEADER = "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms," \
                 "tensor_fusion_threshold,score"


class Decision(NamedTuple):
    """The decision of one window.

    Attributes:
        model: its name. step: steps made. effective: the first step by another plan. why: see Verdict; "first": the
            first decision with this network; "refused": of the plan `refused`, whose codes would lose too much.
        plan, before: the plan from then on, and in the window. measured_us: of a step in it; before_us: before the plan
            on trial. predicted_us: by `plan`. others: predictions for every plan, corrected by measurements;
            uncorrected: without that. bucket_bytes: in the window.
        error_ppm: of the codes, or with `refused` of those; 0: not known. nbytes: of all gradients. network: as
            measured.
    """

    model: str
    step: int
    effective: int
    why: str
    plan: str
    before: str
    measured_us: int
    before_us: int
    predicted_us: int
    error_ppm: int
    nbytes: int
    network: Measured
    others: dict[str, int]
    uncorrected: dict[str, int]
    bucket_bytes: int | None
    seen: float = 0.0
    refused: str = ""

    def sentence(self) -> str:
        """A message for users; "" if there is none."""
        measured, predicted = f"{self.measured_us / 1000:.4g}", f"{self.predicted_us / 1000:.4g}"
        others = {plan: us for plan, us in self.others.items() if plan != self.before}
        best = min(others, key=lambda plan: others[plan]) if others else ""
        known = {
            "first": f"{self.plan} measured {measured} ms a step" +
                     (f"; {best} predicted {others[best] / 1000:.4g}" if best else ""),
            "gain": f"{self.plan} predicted {predicted} ms a step, {self.before} measured {measured}: "
                    f"from step {self.effective} on",
            "confirmed": f"{self.plan} measured {measured} ms a step; before {self.before_us / 1000:.4g}",
            "disappointed": f"{self.before} measured {measured} ms a step, {self.plan} {self.before_us / 1000:.4g}: "
                            f"back to {self.plan} from step {self.effective} on",
            "losses": f"codes of {self.before} lose {self.error_ppm / 1e4:.3g} % of the gradients: back to {self.plan} "
                      f"from step {self.effective} on; {self.before} is not tried again",
            "refused": f"codes of {self.refused} would lose {self.error_ppm / 1e4:.3g} % of the gradients: "
                       f"{self.refused} is not tried",
        }
        return f"{self.network.describe(self.seen)}: {known[self.why]}" if self.why else ""


_begun: set[str] = set()      # files that this process has begun: records of several optimizers share them


class Record:
    """Writes decisions. file: gets a line of JSON for each window; None: BAGUA_AUTO_LOG, if that is set."""

    def __init__(self, file: str | None = None) -> None:
        self._file = file or variables.read("BAGUA_AUTO_LOG")
        self._table = variables.read("HOROVOD_AUTOTUNE_LOG")

    def write(self, decision: Decision, first: bool) -> None:
        """first: whether this is the first rank; only that one logs and writes files."""
        plan = {"plan": decision.plan, "step": decision.step, "measured_ms": decision.measured_us / 1000,
                "predicted_ms": decision.predicted_us / 1000, "network": decision.network.describe(decision.seen)}
        sentence = decision.sentence()
        known = runtime.plans.get(decision.model, {})
        runtime.plans[decision.model] = {**plan, "why": sentence or known.get("why", "")}
        if not first:
            return
        if sentence:
            logger.log(30 if decision.why == "losses" else 20, "auto: %s", sentence)
        if self._file:
            self._append(self._file, json.dumps(self._row(decision)))
        if self._table:
            self._append(self._table, self._horovod_row(decision), HOROVOD_HEADER)

    def _append(self, path: str, line: str, header: str | None = None) -> None:
        resolved = os.path.realpath(path)
        begun = resolved in _begun
        try:
            with open(path, "a" if begun else "w") as file:
                if header and not begun:
                    file.write(header + "\n")
                file.write(line + "\n")
            _begun.add(resolved)
        except OSError as error:
            logger.warning("auto: %s cannot be written (%s)", os.path.abspath(path), error.strerror)

    @staticmethod
    def _row(decision: Decision) -> dict[str, Any]:
        measured, used = decision.network.network(), decision.network.network(decision.seen)
        return {**decision._asdict(), "network": {
            "ranks": decision.network.ranks.ranks, "hosts": decision.network.ranks.hosts,
            "mbit_per_s": round(used.bytes_per_s * 8e-6, 3),
            "measured_mbit_per_s": round(measured.bytes_per_s * 8e-6, 3), "latency_ms": round(used.latency_s * 1e3, 4),
            "free_mib": decision.network.free_mib,
        }}

    @staticmethod
    def _horovod_row(decision: Decision) -> str:
        levels = int(1 < decision.network.ranks.hosts < decision.network.ranks.ranks)
        size = decision.bucket_bytes or variables.read("BAGUA_DEFAULT_BUCKET_SIZE")
        cache = int(variables.read("HOROVOD_CACHE_CAPACITY") > 0)
        return f"{levels},{levels},0,{cache},0,{size / variables.MIB:g},{decision.nbytes / decision.measured_us:.6g}"
