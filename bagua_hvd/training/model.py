"""One optimizer's training as its algorithm sees it: gradients, weights, optimizer state, step, and its times."""
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

from bagua_hvd.core import variables
from bagua_hvd.job.process_sets import ProcessSet, global_process_set
from bagua_hvd.job.runtime import runtime
from bagua_hvd.training.adam import Adam
from bagua_hvd.training.buckets import Bucket, Member, Weights
from bagua_hvd.training.source import Source
from bagua_hvd.training.state import State


class StepTimes(NamedTuple):
    """Times of one step, in ns since the end of the previous one.

    Attributes:
        step: its end. waited: how long training waited for communication. backward: when the first wait began, and so
            when the last gradient was ready. ready: by gradient, when it was ready.
    """

    step: int
    waited: int
    backward: int
    ready: dict[int, int]


class Timing:
    """Times of each step on this rank from now on, recorded by the Reducer for tuning/."""

    def __init__(self) -> None:
        self.steps: list[StepTimes] = []
        self._begins(perf_counter_ns())

    def _begins(self, now: int) -> None:
        self._began, self._waited, self._backward = now, 0, 0
        self._ready: dict[int, int] = {}

    def ready(self, index: int) -> None:
        """Records that gradient `index` is ready; a later call replaces an earlier one."""
        self._ready[index] = perf_counter_ns() - self._began

    def waited(self, since: int) -> None:
        """Records that training has waited for gradients from `since` (perf_counter_ns()) until now."""
        self._backward = self._backward or since - self._began
        self._waited += perf_counter_ns() - since

    def stepped(self) -> None:
        """The weights have been updated."""
        now = perf_counter_ns()
        if self._backward:              # else no wait was recorded
            self.steps.append(StepTimes(now - self._began, self._waited, self._backward, self._ready))
        self._begins(now)


NOT_DECLARED = "{name} reads {what} without declaring it: set {remedy} in its class"

_models: weakref.WeakSet["Model"] = weakref.WeakSet()


def any_asynchronous() -> bool:
    """Whether an optimizer of this process has an asynchronous algorithm: its ranks step independently."""
    return any(model._algorithm.asynchronous for model in list(_models))


def weights_broadcast(process_set: ProcessSet) -> None:
    """Called on all ranks of a set, in the same step, when they have received one rank's weights.

    The first time, drops the state of the weights that the ranks began with. Later, and after loading, the state comes
    from equal weights, and is valid. Weights of an earlier step cannot be told from those of the last one: their state
    must be loaded, too (docs/checkpoints.md).
    """
    for model in list(_models):
        if model._initial_weights_differ and (process_set is global_process_set or model.group is process_set):
            model._initial_weights_differ = False
            for bucket in model.weights:
                bucket.state.drop(shared=True)


class Model:
    """One optimizer's weights and gradients on one rank.

    Args:
        name: of its weights; the same on all ranks.
        source: the front end's Source. group: the ProcessSet that communicates.
        algorithm: the one that sees it.
    Attributes:
        step: optimizer steps done before this one, t in the formulas.
        gradients: Buckets, in the order in which they are expected to fill. Sparse gradients are in none.
        weights: one Weights bucket for each dtype and device.
        state: state that belongs to no bucket.
        missed: by weight, the number of steps in which it was frozen since Adam's variance is (training/adam.py). Kept
            by index and not in the bucket, which may change with a checkpoint.
        delay: the number of steps from sending a gradient to applying it, 0 or 1.
        late: with delay=1: by index of each bucket of gradients, its DelayedGradients, in flight or arrived.
        pending: work that an algorithm has begun in this step; {} at the beginning of the next.
        window: how often gradients were communicated earlier in this step.
        continues: whether the gradients being communicated are those of an earlier window of this step, plus what
            another backward pass has added to them.
        hook: the running method of the algorithm, None outside of steps. "communicate": until synchronize() returns.
        scaled: whether something multiplies the gradients until just before the step (loss scaling, clipping).
        cut_by_user: whether the user has grouped the gradients, or the buckets are fixed by other settings.
        timing: None, or the Timing in which the Reducer records events.
        may_be_scaled: whether communication_begins() has anything to do: False after a step without loss scaling.
        step_pending: whether the gradients were unscaled, and no step was made since: it was skipped, or is next.
    """

    def __init__(self, name: str, source: Source, group: ProcessSet, algorithm: Any) -> None:
        self.name = name
        self.source = source
        self.group = group
        self.step = 0
        self.gradients: list[Bucket] = []
        self.weights: list[Weights] = []
        self.state = State(name)
        self.missed: Counter[int] = Counter()
        self.delay = 0
        self.late = State("gradients on their way")
        self.pending: dict[str, Any] = {}
        self.hook: str | None = None
        self.window = 0
        self.continues = False
        self.cut_by_user = False
        self.timing: Timing | None = None
        self._algorithm = algorithm
        _models.add(self)
        self._place: tuple[int, int] | None = None
        self._scratch: dict[str, Any] = {}
        self._scratch_inits: int | None = None
        self.scaled = self.step_pending = False
        self._loss_scale: float | None = None     # of state in the gradients' unit; None: none has been seen
        self.may_be_scaled = True
        self._undo_seen = False                 # loss scaling, or gradients that were not applied
        self._made_a_step = False               # since creation or loading: a loss scale would have been seen
        self._initial_weights_differ = True     # the ranks have not been given equal weights yet
        # Restore the state of buckets from before this step; None: the step cannot be skipped.
        self._snapshots: list[Callable[[], None]] | None = None

    def rename(self, name: str) -> None:
        """Changes the name, and those of its weights."""
        self.name = name
        for place, bucket in enumerate(self.weights):
            bucket.name = f"{name}.{place}"

    @property
    def scratch(self) -> dict[str, Any]:
        """A dict of an algorithm's state that is not in checkpoints.

        Empty after each init(): it may hold operations, which end with the connections.
        """
        if self._scratch_inits != runtime.inits:
            self._scratch, self._scratch_inits = {}, runtime.inits
        return self._scratch

    def add(self, members: dict[int, Member]) -> None:
        """Adds members, by index, with their weights in new buckets. BAGUA_FUSION=0: a bucket for each."""
        by_kind: dict[Any, dict[int, Member]] = {}
        fused = variables.read("BAGUA_FUSION")
        for index, member in members.items():
            by_kind.setdefault((member.dtype, member.device, fused or index), {})[index] = member
        for kind in by_kind.values():
            self.weights.append(Weights(f"{self.name}.{len(self.weights)}", kind, model=self))

    def check_weight_access(self) -> None:
        """Raises ValueError if the algorithm has not declared that it reads weights in the current hook."""
        if self.hook is not None and self.hook not in self._algorithm.uses_weights:
            raise ValueError(NOT_DECLARED.format(name=type(self._algorithm).__name__, what=f"weights in {self.hook}()",
                                                 remedy=f"uses_weights = ({self.hook!r},)"))

    def adam(self) -> Adam:
        """The optimizer as an Adam.

        Raises:
            ValueError: it is not an Adam, it has an unsupported option, or the algorithm has not declared it.
        """
        name = type(self._algorithm).__name__
        if not self._algorithm.uses_adam:
            raise ValueError(NOT_DECLARED.format(name=name, what="the optimizer's Adam", remedy="uses_adam = True"))
        try:
            return self.source.adam()
        except ValueError as error:
            raise ValueError(f"{name} cannot serve this optimizer: {error}") from None

    # Under loss scaling, gradients are multiplied until just before the step, and so is their state: when the scale
    # changes, the state is rescaled. A step with gradients that are not finite is skipped: the values sent are lost, so
    # the earlier state is restored. In memory, state has the unit of the last communication.
    #
    # With delay=1, the skipped step is the one after that with gradients that are not finite. So the loss is detected
    # in the values that have arrived: delayed_arrived().

    def communication_begins(self) -> None:
        """Gradients are about to be communicated, for the first time in this step or once more."""
        self._follow_scale()
        if self._snapshots is None:
            self._snapshots = [bucket.state.snapshot() for bucket in self.gradients]

    def _follow_scale(self) -> None:
        """Rescales the state of gradients to their current unit."""
        scale = self.source.loss_scale()
        if scale is None:
            return
        states = self._states_of_gradients()
        if not any(any(state.kinds()) for state in states):
            self._loss_scale = None         # the first step was skipped, and left no state
            return
        before = self._loss_scale or 1.0
        if scale != before:
            self.skipped()      # the scale is updated after the step, if one is made
            for state in states:
                state.scale(scale / before)
        self._loss_scale = scale

    @property
    def remembers_gradients(self) -> bool:
        """Whether any state has the gradients' unit."""
        return any(state.has_scaled for state in self._states_of_gradients())

    def _states_of_gradients(self) -> list[State]:
        return [*(bucket.state for bucket in self.gradients), self.late]

    def on_unscale(self) -> None:
        """Called when loss scaling unscales the gradients: next, the step is made or skipped.

        Raises:
            ValueError: the state from a checkpoint is of gradients with another scale.
        """
        scale = self.source.loss_scale() if self.remembers_gradients else None
        if scale is not None:
            self._check_scale(scale)
            self._loss_scale = scale
        self.step_pending = self._undo_seen = self.may_be_scaled = True

    def _check_scale(self, scale: float) -> None:
        if self._loss_scale not in (None, scale) and not self._made_a_step:
            raise ValueError(
                f"the state of {self.name} that depends on gradients was saved at a loss scale of "
                f"{self._loss_scale:g}, and this training begins with {scale:g}: load the GradScaler's state_dict, too"
            )

    def step_begins(self) -> None:
        """The optimizer is about to step. ValueError: see on_unscale()."""
        if self.may_be_scaled and not self.step_pending and self.remembers_gradients:
            self._check_scale(1.0)

    def stepped(self) -> None:
        """The step has been made."""
        self.step += 1
        self.step_pending, self._made_a_step = False, True
        self.may_be_scaled = self._undo_seen or self._loss_scale is not None
        if not self.delay:
            self._snapshots = None

    def skipped(self) -> None:
        """Called when no step can follow any more: if the gradients were unscaled, their step was skipped."""
        if self.step_pending:
            self.window = 0
            if not self.delay:
                self._restore()
        self.step_pending = False

    def delayed_arrived(self) -> None:
        """With delay=1: the results of the previous step have arrived. If they are not finite, restores the state."""
        if any(bucket.state.has_scaled for bucket in self.gradients) and not all(
                late.finite() for late in self.late.values()):
            self._restore()
        self._snapshots = None

    def undo(self) -> None:
        """Gradients of this step are not applied as sent: restores their state from before it, or drops this rank's."""
        if self._snapshots is None:
            for bucket in self.gradients:
                bucket.state.drop(shared=False)
        self._restore()
        self.step_pending = False

    def discarded(self) -> None:
        """Gradients were zeroed or replaced after they were communicated in this step, which may happen again."""
        self.undo()
        self._undo_seen = self.may_be_scaled = True

    def _restore(self) -> None:
        for restore in self._snapshots or ():
            restore()
        self._snapshots = None

    def _states(self) -> list[State]:
        return [self.state, *(bucket.state for bucket in [*self.gradients, *self.weights]), self.late]

    def kinds_of_state(self) -> tuple[bool, bool]:
        """(whether this rank has rank-local state, whether it has any state)."""
        kinds = [state.kinds() for state in self._states()]
        return any(own for own, _ in kinds), any(kept for _, kept in kinds)

    def settle(self) -> None:
        """Drops rank-local state after a change of this rank's number, or of the number of ranks."""
        place = self.group.rank(), self.group.size()
        if self._place not in (None, place):
            self.drop_state(shared=False)
        self._place = place

    def drop_state(self, shared: bool) -> None:
        """Drops rank-local state; with shared=True all state."""
        self._snapshots = None
        for state in self._states():
            state.drop(shared)

    def state_dict(self, own: bool = True) -> dict[str, Any]:
        """The state for a checkpoint of this rank: dicts, lists, numbers and bytes. Members identify buckets.

        own: include rank-local state.
        """
        self._follow_scale()    # as in a GradScaler that is saved now, too
        rank, size = self._place or (self.group.rank(), self.group.size())      # known after shutdown(), too
        gradients, weights = ([[list(bucket.members), bucket.state.state_dict(own)] for bucket in buckets]
                              for buckets in (self.gradients, self.weights))
        return {"step": self.step, "rank": rank, "size": size, "loss_scale": self._loss_scale,
                "missed": dict(self.missed), "model": self.state.state_dict(own), "gradients": gradients,
                "weights": weights, "late": self.late.state_dict(own)}

    def load_state_dict(self, state: dict[str, Any], place: Callable[[int], int]) -> None:
        """Loads a state_dict(). Ignores rank-local state of another rank, or of another number of ranks.

        place: function from a member's index in the state to its index here.
        """
        self.step = state["step"]
        self._initial_weights_differ = self._initial_weights_differ and self.step == 0
        self._loss_scale = state["loss_scale"]
        self._snapshots, self.step_pending, self._made_a_step = None, False, False
        self.may_be_scaled = True
        self._place = self.group.rank(), self.group.size()
        own = (state["rank"], state["size"]) == self._place
        gradients, weights = ([(tuple(map(place, indices)), kept) for indices, kept in state[what]]
                              for what in ("gradients", "weights"))
        self._restore_weights([indices for indices, _ in weights])
        self.missed = Counter({place(index): steps for index, steps in state.get("missed", {}).items()})
        self.state.load_state_dict(state["model"], own)
        for buckets, saved in ((self.gradients, dict(gradients)), (self.weights, dict(weights))):
            for bucket in buckets:
                bucket.state.load_state_dict(saved.pop(tuple(bucket.members), {}), own)
            if any(kept.get("shared") or own and kept.get("own") for kept in saved.values()):
                warnings.warn(f"the buckets of {self.name} differ from those in the checkpoint: the algorithm's state "
                              "of these buckets is reinitialized", stacklevel=2)
        same = [tuple(bucket.members) for bucket in self.gradients] == [indices for indices, _ in gradients]
        self.late.load_state_dict(state["late"] if same else {}, own)

    def _restore_weights(self, plan: Sequence[Sequence[int]]) -> None:
        """Rebuilds the buckets of weights by members' indices; other members follow in further buckets."""
        members = {index: member for bucket in self.weights for index, member in bucket.members.items()}
        if plan == [tuple(bucket.members) for bucket in self.weights]:
            return
        self.weights = []
        for indices in plan:
            self.add({index: members.pop(index) for index in indices})
        self.add(members)


def is_of(state: dict[str, Any], algorithm: Any, group: ProcessSet) -> bool:
    """Whether a checkpoint's state is of this algorithm; rank 0 warns of another algorithm's."""
    saved, runs = state.get("algorithm"), type(algorithm).__name__
    if saved not in (None, runs) and group.rank() == 0:
        warnings.warn(f"the checkpoint holds the state of {saved}, this optimizer runs {runs}, which starts without "
                      "state", stacklevel=2)
    return saved == runs


def with_own(shared: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any] | None:
    """Merges two Model.state_dict()s: shared state from one, rank-local state from the other.

    Returns:
        The state; None if the two are of different steps or buckets.
    """
    def merged(of_all: Any, own: Any) -> Any:
        return {**of_all, **({"own": own["own"]} if "own" in own else {})}

    state = {**shared, "rank": mine["rank"], "size": mine["size"], "model": merged(shared["model"], mine["model"])}
    for what in ("gradients", "weights"):
        if [indices for indices, _ in shared[what]] != [indices for indices, _ in mine[what]]:
            return None
        state[what] = [[indices, merged(of_all, own)]
                       for (indices, of_all), (_, own) in zip(shared[what], mine[what], strict=True)]
    return state if mine["step"] == shared["step"] else None
