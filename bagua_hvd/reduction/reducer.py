"""The core of DistributedOptimizer: gradient ready -> bucket full -> algorithm -> synchronize.

A front end numbers its gradients 0, 1, ..., calls gradient_ready() for each that the backward pass has accumulated, and
synchronize() before anyone reads them. Buckets are posted as they fill, in any order: ranks match them by name. At
synchronize() the front end supplies zeros for missing gradients, and an incomplete window of accumulation is sent as it
is. So ranks may use different parameters, and every rank posts every bucket once in a window.

A window ends with synchronize(), usually with its last backward pass; most steps have one. A backward pass between that
and the step begins another window: its gradients are added to reduced ones, which are equal on all ranks, so the mean
stays correct. The buckets of such a window have other names. So ranks that disagree on the number of windows wait, and
the stall check names them; one rank's second window never matches another's next step.

Sparse gradients are not known before the first backward pass, and then only on the ranks that used them. So the first
synchronize() begins with a small allreduce to exchange them, and nothing is posted before: buckets always have the same
members on all ranks.

With delay=1 synchronize() waits for the operations of the previous window, gives gradients their results, and sends a
copy of the replaced values (window.py). Nothing is posted in the backward pass then, and each operation has
at least a step's time. A separate thread advances multi-phase operations, since this one may be computing, or saving a
checkpoint that the other ranks do not save.

This file has the steps, the agreement of the ranks and the checkpoint; reduction/window.py places, posts and waits.
Both run on the thread of the backward pass, without locks.
"""
import functools
import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter_ns
from typing import Any

from bagua_hvd.algorithms.base import Algorithm, communication
from bagua_hvd.collectives.objects import extremes
from bagua_hvd.core import variables
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.operations import counted
from bagua_hvd.job.process_sets import ProcessSet, registered_id
from bagua_hvd.job.runtime import runtime
from bagua_hvd.job.statistics import Account
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.reduction.agreement import agree, fingerprint, number_of, reducers
from bagua_hvd.reduction.weight import Weight, check_weighable
from bagua_hvd.reduction.window import DelayedWindow, Layout, Window
from bagua_hvd.training import variance
from bagua_hvd.training.buckets import Member
from bagua_hvd.training.model import Model, is_of, with_own
from bagua_hvd.training.source import Source

TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally. (Gradient of {name}.)"
)

GROWS = (
    "{name} is used both within a reentrant checkpoint and outside of it, and its gradient was already being "
    "communicated when the checkpoint added to it: pass use_reentrant=False to torch.utils.checkpoint"
)

AGAIN_BEFORE_STEP = (
    "with delay=1 gradients are sent once a step, and this is the second backward pass of a step: run all passes but "
    "the last within no_sync(), or set backward_passes_per_step. Passes whose gradients are not applied need "
    "no_sync(), too"
)

# Phases of a step, in this order: the observer has been told of it; the algorithm has; before_step() has been called.
_IDLE, _OBSERVED, _BEGUN, _PREPARED = range(4)
_clock = itertools.count(1)


class Reducer:
    """Communicates the gradients of one optimizer.

    Args:
        members: gradient i is members[i]; the same on all ranks, parameters in forward order.
        group: includes this rank.
        passes: backward passes in a window, after which gradients are communicated.
        groups: None, or lists of indices that share a bucket.
        prescale_factor, postscale_factor: see Bucket.
        delay: 1: gradients become the average of the previous window.
    Raises:
        ValueError: the algorithm cannot serve this model.
    Attributes:
        model: the Model that the algorithm sees.
        pending: gradients have been computed and not yet synchronized.
        synchronized: all gradients have been communicated since the last backward pass, and no step has used them.
        accumulating: backward passes only add to the gradients; see no_sync().
        following: numbers of the group's later optimizers whose windows have as many passes and end in the same
            backward pass. Once the ranks have agreed: the union over the ranks.
        key: by which ranks match it, see agreement.py.
        numbered: the number that it has now; None: it takes a new one when it is used.
        touched_at, stepped_at: when a backward pass last touched it, and when it last stepped; from one counter.
        observer: None, or an object that is notified of steps: step_begins() at the first gradient of a step, before
            any communication; weights_change() after all of it; step_ended() when the weights have been updated.
            Exceptions of the first two end the step.
        synchronizations: how often synchronize() made the caller wait; hvd.statistics() has the time.
    """

    def __init__(self, source: Source, members: Sequence[Member], algorithm: Algorithm, group: ProcessSet,
                 passes: int = 1, groups: Any = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                 delay: Any = 0) -> None:
        self.algorithm = algorithm
        self.group = group
        self.synchronizations = 0
        self.observer: Any = None
        self.following: set[int] = set()
        self.touched_at = self.stepped_at = 0
        self._account = Account(type(algorithm).__name__)
        # The other hooks do nothing, and are not called.
        self._own_hooks = algorithm.overrides("communicates_gradients", "backward_begins", "before_step", "after_step",
                                              "bucket_bytes")
        self.accumulating = False
        self._source = source
        self.passes = passes
        # Gradients in the order of readiness; None: the ranks have agreed on an order.
        self._ready: list[int] | None = []
        self._warned_about: set[str] = set()
        self._overlaps = variables.read("BAGUA_OVERLAP") and not delay
        self._late: DelayedWindow | None = None     # with delay=1: the previous window
        self._agreed: tuple[int, int] | None = None     # runtime.changes and group.removals when the ranks last agreed
        self._dtypes_are_new = False    # the ranks have agreed, and the first window after that is not posted yet
        self._weight: Weight | None = None      # of the next window
        self._posted_weight: Weight | None = None       # the last one, though reset() may have dropped it
        self.model = Model("weights", source, group, algorithm)
        self._step_ends()
        self.model.delay = delay
        self.model.cut_by_user = groups is not None or bool(delay) or not variables.read("BAGUA_FUSION")
        self._layout = Layout(self.model, prescale_factor, postscale_factor)
        self._new_window = functools.partial(
            DelayedWindow if delay else Window, self.model, self._layout,
            functools.cache(functools.partial(communication, algorithm)), self._account)
        self.key = (type(algorithm).__name__, algorithm.average, prescale_factor, postscale_factor, delay,
                    fingerprint(members))
        reducers.add(self)
        self.renumber(number_of(self) if runtime.shared_numbers is None else None)
        self.add(members, groups)
        algorithm.prepare(self.model)

    @property
    def buckets(self) -> Any:
        """The model's buckets of gradients."""
        return self.model.gradients

    @property
    def shapes(self) -> list:
        """The shapes of all members."""
        return [list(member.shape) for member in self._layout.members]

    @property
    def untouched(self) -> bool:
        """Whether no backward pass has made a gradient ready since they were last communicated and used."""
        return not (self.pending or self.synchronized or self.accumulating)

    @property
    def agreed(self) -> bool:
        """Whether the ranks have agreed (see _agree()) since ranks last came or went, or numbers changed."""
        return self._agreed == (runtime.changes, self.group.removals)

    @property
    def number(self) -> Any:
        """The optimizer's number; a new one when the numbers of its set have restarted: see optimizer_number()."""
        id, options = self.group.process_set_id, runtime.options
        if options is not None and id is not None and (
                self.numbered is None or self._removals != self.group.removals or
                (self._numbered_in != runtime.inits and not options.elastic)):
            self.renumber(number_of(self))
        return self.numbered

    def touched(self) -> None:
        """Called after a backward pass that touched it, on this rank or on others."""
        self.touched_at = next(_clock)

    def renumber(self, number: int | None) -> None:
        """Changes the optimizer's number, by which ranks match its operations. Not while anything is pending.

        None: to a new one when it is used.
        """
        # The name does not depend on members: ranks with different models must get an error, not wait.
        self.numbered, self._numbered_in, self._removals = number, runtime.inits, self.group.removals
        self._agreed = None
        self._layout.rename(f"gradients.{number}")
        self.model.rename(f"weights.{number}")

    def add(self, members: Sequence[Member], groups: Any = None) -> None:
        """Adds gradients, numbered after the existing ones, in new buckets. Not while anything is pending.

        All gradients must then be communicated again, unless the caller sets `synchronized`.
        """
        self._layout.add(members, groups)
        self._agreed = None
        self._source.discard()
        self._begin_window()

    def reduce_added(self, first: int) -> None:
        """Reduces the gradients from `first` on in full precision: no hook has seen their first pass. Collective."""
        buckets = [bucket for bucket in self.buckets if any(index >= first for index in bucket.members)]
        try:
            for bucket in buckets:
                for index in bucket.members:
                    bucket.place(index, self._source.prepare(index))
            for operation in [c_fp_s(bucket, self.group, average=self.algorithm.average) for bucket in buckets]:
                operation.wait()
            self._source.finish()
        finally:
            self._source.discard()
            for bucket in buckets:
                bucket.clear()

    def set_passes(self, passes: int) -> None:
        """Sets the backward passes of a window; counting restarts."""
        self.passes = self._window.passes_left = passes

    def reset(self) -> None:
        """Forgets pending gradients: the next backward pass begins a step. Operations in flight go on unobserved."""
        self._weight = None
        self._step_ends()
        self._begin_window()
        self._source.discard()

    def _step_ends(self):
        self._phase = _IDLE
        self.model.window = 0
        self._cleared = False       # gradients have been zeroed since they were communicated in it

    def _begin_window(self):
        self.pending = False
        self.synchronized = False
        if not self.model.delay:
            self._clear_buckets()
        self._window = self._new_window(self.passes)
        self.model.hook = None

    def _clear_buckets(self):
        for bucket in self.model.gradients:
            bucket.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, gradients accumulate locally: nothing is posted, and no window of accumulation advances."""
        outer, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = outer

    def set_weight(self, weight: Any) -> None:
        """Makes the next window a weighted average, with `weight` for this rank; collective.

        ValueError: the algorithm does not average gradients. A wrong weight fails the window, on all ranks.
        """
        check_weighable(self.algorithm)
        self._weight = self._posted_weight = Weight(weight, f"gradients.{self.number}.weight", self.group,
                                                    self._posted_weight)

    def gradient_ready(self, index: int, whole: bool = True) -> None:
        """A backward pass has accumulated gradient `index`.

        Args:
            whole: this pass adds nothing more to it. If False, it is sent when the window ends.
        Raises:
            AssertionError: it was already ready in the last pass of this window, and may be in flight.
        """
        window = self._window
        if window.ready[index]:
            sentence = TOO_MANY_PASSES if whole else GROWS
            raise AssertionError(sentence.format(name=self._layout.members[index].name))
        if not self.pending or self._phase == _IDLE:
            self.mark_pending()
        if self.accumulating:
            return
        if self.model.timing is not None:
            self.model.timing.ready(index)
        last_pass = window.passes_left <= 1 and whole
        window.ready[index] = last_pass
        if not self.agreed:
            if self._ready is not None:
                self._ready.append(index)
            return
        if window.communicates is None and self._overlaps:
            self._begin()
        if last_pass and window.communicates:
            if self._weight is not None:
                self._weigh(self._weight)
            window.place(index)

    def mark_pending(self) -> None:
        """A backward pass has accumulated a gradient, or one to be added next; or this rank has none in this step."""
        if self._phase == _IDLE:
            if self.observer is not None:
                self.observer.step_begins()
            self._phase = _OBSERVED
        self.synchronized = self._window.overflow_known = False
        self.pending = self.pending or not self.accumulating

    def pass_ended(self) -> bool:
        """Called after a backward pass with ready gradients. Returns whether the window has ended, too.

        For front ends with windows of several passes, or without a better sign of when to call synchronize().
        """
        self.touched()
        if not self.pending or self.accumulating:
            return False
        self._window.passes_left = max(0, self._window.passes_left - 1)
        return self._window.passes_left == 0

    def _begin(self):
        """Starts the communication of a window, and that of the step in its first window."""
        if self._phase == _IDLE:
            self.mark_pending()
        if self.model.step_pending:
            if self.model.delay:
                self._step_ends()
            self.model.skipped()
        if self.model.delay and self.model.window:
            raise ValueError(AGAIN_BEFORE_STEP)
        self.model.continues = self.model.window > 0 and not self._cleared and self._source.holds_reduced()
        if self.model.window and not self.model.continues:
            self.model.discarded()
        if self.model.may_be_scaled:
            self.model.communication_begins()
        self._source.factor = 1.0
        begins = self._phase < _BEGUN
        if begins:
            self.model.pending = {}
        sends = "communicates_gradients" not in self._own_hooks or self.algorithm.communicates_gradients(self.model)
        self._window.communicates = sends
        if begins:
            if "backward_begins" in self._own_hooks:
                self._call("backward_begins")
            self._phase = _BEGUN
        self.model.hook = "communicate"
        if self.model.window and sends:
            self._layout.name_buckets(".again")

    def _call(self, hook):
        """Calls a hook of the algorithm; its operations count for the algorithm, see hvd.statistics()."""
        self.model.hook = hook
        return counted(self._account.byte_counter, getattr(self.algorithm, hook), self.model)

    def _weigh(self, weight):
        """Gives this window its weight, unless a gradient has been placed in it: then the weight is the next one's."""
        if any(self._window.placed):
            return
        self._weight = None
        try:
            self._source.factor = weight.factor()
        except BaseException:
            self.reset()
            raise

    def _agree(self):
        """Brings gradients, step and state to what the ranks agree on: see agree().

        Perhaps only some ranks have loaded a checkpoint, and ranks of an elastic job come and go. A rank in join()
        contributes nothing: then the agreement is repeated in the next step, until all have taken part. So all ranks
        agree in the same step, and none waits for one that has agreed before.
        """
        model, layout = self.model, self._layout
        registered_id(self.group)       # else it has been removed
        own = self.number       # a new one, if numbers have changed
        self._account.renew()
        model.window = 0        # new ranks know of no earlier window
        had_state = model.kinds_of_state()[0]
        model.settle()
        settled = self._ready is None or model.kinds_of_state()[1]
        sparse, order, following, complete = counted(
            self._account.byte_counter, agree, layout, model, layout.order(None if settled else self._ready),
            {number - own for number in self.following})
        self.following = {number + own for number in following}
        for index, sparse_dim in sparse.items():
            self._set_sparse(index, sparse_dim)
        layout.arrange(order, layout.limit)
        self._ready = None
        if had_state and not model.kinds_of_state()[0]:
            self._warn_once("the set of ranks changed: per-rank state", "is reset")
        self._dtypes_are_new = True
        if complete:
            self._agreed = runtime.changes, self.group.removals
            counted(self._account.byte_counter, self.algorithm.agreed, model)
            self._resize()

    def _check_dtypes(self):
        """After the first communication, since compression may change dtypes."""
        self._dtypes_are_new = False
        for bucket in self.model.gradients:
            if not self.algorithm.takes(bucket.dtype):
                self._warn_once(f"buckets such as {bucket.name}",
                                "are sent by gradient_allreduce because of their dtype")

    def _set_sparse(self, index, sparse_dim):
        if self._source.bypasses_buckets(index, sparse_dim) and self._layout.bucket_of[index] is not None:
            if self.algorithm.dense_only or self.model.delay:
                name = self._layout.members[index].name
                what = "delay=1" if self.model.delay else type(self.algorithm).__name__
                raise ValueError(
                    f"the gradient of {name} is sparse, which {what} cannot "
                    "serve: pass sparse_as_dense=True to DistributedOptimizer"
                )
            self._warn_once("sparse gradients", "are gathered")
            self._layout.remove(index)

    def _warn_once(self, what, how):
        """Warns once, on the first rank, of what the chosen algorithm does not handle."""
        if self.algorithm.relaxed and how not in self._warned_about:
            self._warned_about.add(how)
            if self.group.rank() == 0:
                warnings.warn(f"{type(self.algorithm).__name__}: {what} {how}", stacklevel=2)

    def agree(self) -> None:
        """Agrees with the other ranks unless they have agreed. synchronize() raises the errors."""
        if not self.agreed and not self.accumulating and self._window.failure is None:
            try:
                self.arrive()
                self._agree()
            except Exception as error:
                self._window.failure = error

    def post(self) -> None:
        """Posts the remaining buckets, missing gradients as zeros. synchronize() must follow, and raises the errors."""
        window = self._window
        if self.synchronized or self.accumulating or window.failure is not None or window.sent:
            return
        try:
            if self._late is not None:
                self.arrive()
            if not self.agreed:
                self._agree()
            if window.communicates is None:
                self._begin()
            if self._weight is not None and window.communicates:
                self._weigh(self._weight)
            window.post_rest()
            if self._dtypes_are_new and window.communicates:
                self._check_dtypes()
            if isinstance(window, DelayedWindow):
                self._late = window
        except Exception as error:
            self._window.failure = error        # not `window`, after a reset()

    def arrive(self) -> None:
        """With delay=1: waits for the window in flight, which then is state of the model. Else does nothing.

        A window that fails, or is in flight at shutdown, is lost on all ranks, which start again with zeros.
        """
        if self._late is None:
            return
        self._late.wait_all()
        failure = self._late.wait()
        self._clear_buckets()
        lost = self._late.inits != runtime.inits
        self._late = None
        if failure is None and not lost:
            self.model.delayed_arrived()
            return
        self.model.late.drop(shared=True)
        if failure is not None and not lost and runtime.context is not None:
            raise failure

    def synchronize(self) -> None:
        """Posts the remaining buckets and blocks until all gradients are reduced. Does nothing if they already are.

        Raises:
            RuntimeError: within no_sync().
            HorovodInternalError: ranks disagreed, or one was lost. ValueError: a gradient cannot be communicated. Then
            gradients are unspecified, nothing is pending, and unless a rank was lost, the next step can continue.
        """
        if self.synchronized:
            return
        if self.accumulating:
            raise RuntimeError(
                "within no_sync() gradients accumulate locally and are not communicated: call step(), synchronize() "
                "and GradScaler's unscale_() outside of it"
            )
        started = perf_counter_ns()
        done = False
        try:
            self.post()
            failure = self._window.failure
            if self._window is not self._late:
                failed = self._window.wait()
                failure = failure or failed
            if failure is not None:
                raise failure
            self._source.finish()
            done = True
        finally:
            if self.model.window:
                self._layout.name_buckets()
            if done:
                self.model.window += 1
                self._cleared = False
                self._begin_window()
            else:
                self._clear_buckets()
                self.model.late.drop(shared=True)
                self.reset()
            self.synchronizations += 1
            self._add_exposed_time(started)
            if self.model.timing is not None:
                self.model.timing.waited(started)
        self.synchronized = True

    def gradients_will_change(self) -> None:
        """Called before gradients are changed ahead of the step: drops what was computed from the unchanged ones."""
        if not self.model.scaled:
            self.model.scaled = True
            made = [self.model.pending.pop(bucket.name, None) for bucket in self.buckets]
            if any(entry is not None for entry in made):
                self.model.undo()

    def agree_on_overflow(self, local: Any) -> bool:
        """Whether any rank has gradients that are not finite, in steps that do not communicate them; collective.

        All ranks must skip a step together, since communication follows it, unless that is asynchronous.

        Args:
            local: function without arguments that returns whether this rank's are not finite. In steps that communicate
                gradients, and on a second call in a step, it is not called, and the result is False.
        """
        if (self._window.overflow_known or self.algorithm.asynchronous
                or self.algorithm.communicates_gradients(self.model)):
            return False
        self._window.overflow_known = True
        return bool(extremes([int(local())], f"{self._layout.name}.overflow", self.group)[0][0])

    def before_step(self) -> None:
        """Lets the algorithm write the weights, once a step: gradients are complete, the optimizer is about to step."""
        if self._phase != _BEGUN:
            return
        self._phase = _PREPARED
        self.model.step_begins()
        started = perf_counter_ns()
        try:
            if "before_step" in self._own_hooks:
                self._call("before_step")
            if self.algorithm.shares_variance:
                variance.share(self.model, self.algorithm.full_step(self.model))
            if self.observer is not None:
                self.observer.weights_change()
        except BaseException:
            self.reset()
            raise
        finally:
            self._add_exposed_time(started)

    def step(self) -> Any:
        """Lets the algorithm update the weights, after before_step(). False: the optimizer must do it."""
        self.before_step()
        try:
            return self.algorithm.replaces_step and self._call("step")
        finally:
            self.model.hook = None

    def stepped(self) -> None:
        """The weights have been updated."""
        self.synchronized = False
        self.stepped_at = next(_clock)
        self._step_ends()
        if self.model.timing is not None:
            self.model.timing.stepped()
        started = perf_counter_ns()
        if "after_step" in self._own_hooks:
            self._call("after_step")
        self.model.hook = None
        self.model.stepped()
        runtime.steps += 1
        self._account.record.steps += 1
        self._add_exposed_time(started)
        self._resize()
        if self.observer is not None:
            self.observer.step_ended()

    def _resize(self):
        """Rebuilds the buckets if the algorithm wants another size."""
        if "bucket_bytes" in self._own_hooks and not self.model.cut_by_user:
            limit = self.algorithm.bucket_bytes(self.model)
            if limit != self._layout.limit:
                self._layout.arrange(self._layout.bucketed(), limit)

    def _add_exposed_time(self, started):
        """Counts the time since `started` as waiting of the caller."""
        self._account.record.exposed_ms += (perf_counter_ns() - started) / 1e6

    def cleared(self) -> None:
        """The gradients have been zeroed: they are no longer those that were communicated."""
        self.synchronized = False
        self._cleared = True
        self.model.source.cleared()

    def state_dict(self) -> Any:
        """The algorithm's state on this rank, {} when it has none. Raises: see arrive()."""
        self.arrive()
        return self._state_dict() if self.model.kinds_of_state()[1] or self.algorithm.counts_steps else {}

    def shared_state_dict(self) -> Any:
        """The step, the buckets, and the state that is equal on all ranks. Raises: see arrive()."""
        self.arrive()
        return self._state_dict(own=False)

    def _state_dict(self, own=True):
        # State is stored by bucket, and buckets do not hold sparse gradients.
        sparse = {i: self._source.sparse_dim(i) for i, bucket in enumerate(self._layout.bucket_of) if bucket is None}
        return {"algorithm": type(self.algorithm).__name__, "state": self.model.state_dict(own), "sparse": sparse,
                "bucket_bytes": self._layout.limit}

    def agree_again(self) -> None:
        """Makes the ranks agree again in the next step; call it on all ranks."""
        self._agreed = None

    def adopt(self, shared: Any, place: Any) -> None:
        """Loads the shared_state_dict() of another rank, and forgets pending gradients; collective.

        Rank-local state is kept if it fits on all ranks; else it is dropped on all ranks.

        place: see load_state_dict().
        """
        mine = self.state_dict()
        state = with_own(shared["state"], mine["state"]) if mine else None
        self.reset()
        self.load_state_dict({**shared, "state": state or shared["state"]}, place)
        # A fixed name, since numbers may still differ: see share_numbers().
        if extremes([int(state is not None)], "optimizer_state.own", self.group)[0][1] == 0:
            self.model.drop_state(shared=False)

    def load_state_dict(self, state: Any, place: Any = lambda index: index) -> None:
        """Loads a state_dict(); call it on all ranks. A state of another algorithm is ignored: see is_of().

        place: function from a gradient's index in the state to its index here.
        """
        if self.algorithm.relaxed or self.model.delay:      # others keep nothing, so only some ranks may load
            self.agree_again()
        if self.model.delay:
            with suppress(HorovodInternalError):        # it is of the abandoned training
                self.arrive()
            self.model.late.drop(shared=True)
        if is_of(state, self.algorithm, self.group):
            for index, sparse_dim in state["sparse"].items():
                self._set_sparse(place(index), sparse_dim)
            plan = [list(map(place, indices)) for indices, _ in state["state"]["gradients"]]
            if self._layout.restore(plan, state["bucket_bytes"]):
                self._ready = None
            self.model.load_state_dict(state["state"], place)
