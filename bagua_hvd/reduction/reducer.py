"""The inside of DistributedOptimizer: gradient ready -> bucket full -> algorithm -> synchronize.

A front end numbers its gradients 0, 1, ..., calls gradient_ready() for each that the backward pass has accumulated, and
synchronize() before anyone reads them. Buckets are posted as they fill, in whatever order: ranks match them by name. A
gradient that is not there at synchronize() is supplied by the front end as zeros, and a window of accumulation that is
not complete goes as it is; so ranks may use different parameters, and every rank posts every bucket once in a window.

A window ends with synchronize(), usually with its last backward pass; most steps have one. A backward pass between that
and the step begins another: its gradients add to reduced ones, which are equal on all ranks, and their mean is what it
would have been. The buckets of such a window go by other names, so that ranks that disagree on the number of windows
wait, and the stall check says for whom; it must never be that one rank's second window meets another's next step.

Which gradients are sparse is not known before the first backward pass, and then only to the ranks that used them. So
the first synchronize() begins with one small allreduce in which the ranks tell each other, and before it nothing is
posted: buckets have the same members everywhere, always.

With delay=1 synchronize() waits for what was sent one window before, gives gradients what has arrived, and sends what
they were, from a copy (training/late.py). Nothing is posted in the backward pass then, and nothing waited for that has
had less than a step's time. Operations with several phases go on on a thread of their own, for this one may
be computing, or saving a checkpoint that the other ranks know nothing of.

Lives on the thread of the backward pass; no lock. Nothing else here touches tensor data.
"""
import functools
import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter_ns
from typing import Any

from bagua_hvd.algorithms.base import Algorithm
from bagua_hvd.collectives.facts import extremes
from bagua_hvd.core import native, variables
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.operations import account
from bagua_hvd.job import statistics
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import runtime
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.reduction.agreement import agree, listed
from bagua_hvd.reduction.layout import Layout
from bagua_hvd.reduction.numbers import optimizer_number
from bagua_hvd.reduction.weight import Weight, check_weighable
from bagua_hvd.reduction.window import Late, Window
from bagua_hvd.training import late, variance
from bagua_hvd.training.buckets import Member
from bagua_hvd.training.model import Model, is_of, with_own
from bagua_hvd.training.source import Source

TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally. (Gradient of {name}.)"
)

GROWS = (
    "{name} is used both within a reentrant checkpoint and outside of it, and its gradient was on its way when the "
    "checkpoint added to it: pass use_reentrant=False to torch.utils.checkpoint"
)

ADDED_TO_LATE = (
    "with delay=1 gradients hold the average of the step before, to which another backward pass has added its own: "
    "call zero_grad() or step() before it, or make it part of the window, by no_sync() or backward_passes_per_step"
)

_moments = itertools.count(1)


def _counted(method):
    """What a Reducer's method posts, or goes on with, counts as its algorithm's: see hvd.statistics()."""
    @functools.wraps(method)
    def on_account(self, *arguments):
        if self._counts_since != runtime.inits:
            self._counts_since = runtime.inits
            self._counter, self._account = statistics.counter_of(type(self.algorithm).__name__)
            _ = self.number
        token = account.set(self._account)
        try:
            return method(self, *arguments)
        finally:
            account.reset(token)

    return on_account


class Reducer:
    """Communicates the gradients of one optimizer.

    Args:
        source: the front end's Source.
        members: list of Member: gradient i is members[i]; the same on all ranks, parameters in forward order.
        algorithm: an Algorithm. group: the ProcessSet, of which this rank is a member.
        passes: backward passes that make a window, before gradients travel.
        groups: None, or lists of indices that travel together.
        prescale_factor, postscale_factor: see Bucket.
        number: of its optimizer; None: the next one.
        delay: 1: gradients become the average of the window before.
    Raises:
        ValueError: the algorithm cannot serve this model.
    Attributes:
        model: the Model that the algorithm sees.
        pending: gradients have been computed and not yet synchronized.
        synchronized: all gradients have been communicated since the last backward pass, and no step has used them.
        accumulating: backward passes add to the gradients and count for nothing else; see no_sync().
        passes: see Args.
        following: numbers of the group's later optimizers whose windows end in the same backward pass and have as many
            passes. After the ranks have told each other their facts: on any rank.
        touched_at, stepped_at: when a backward pass last touched it, and when it last stepped; of one count.
        observer: None, or what hears of steps: step_begins() with the first gradient of a step, before any of it is
            communicated; weights_change() after all of it is; step_ended() when the weights have been updated. What the
            first two raise ends the step.
        synchronizations: how often synchronize() made the caller wait; for how long, hvd.statistics() has.
    """

    def __init__(self, source: Source, members: Sequence[Member], algorithm: Algorithm, group: ProcessSet,
                 passes: int = 1, groups: Any = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                 number: int | None = None, delay: Any = 0) -> None:
        self.algorithm = algorithm
        self.group = group
        self.synchronizations = 0
        self.observer: Any = None
        self.following: set[int] = set()
        self.touched_at = self.stepped_at = 0
        self._counts_since = None   # runtime.inits when there were these
        self._counter, self._account = statistics.AlgorithmStatistics(), 0
        # Hooks of the algorithm's own; the others do nothing, and are not called.
        self._has = {name for name in ("gradients_travel", "backward_begins", "takes", "before_step", "after_step",
                                       "bucket_bytes")
                     if getattr(type(algorithm), name) is not getattr(Algorithm, name)}
        self.accumulating = False
        self._source = source
        self.passes = passes
        # Gradients as they became ready; None: the ranks have agreed on an order.
        self._ready: list[int] | None = []
        self._noted: set[str] = set()
        self._overlaps = variables.read("BAGUA_OVERLAP") and not delay
        self._late: Late | None = None      # with delay=1: the window before
        self._agreed: int | None = None         # runtime.changes when the ranks told each other their facts
        self._weight: Weight | None = None      # of the window that comes
        self.model = Model("weights", source, group, algorithm)
        self._step_ends()
        self.model.delay = delay
        self.model.cut_by_user = groups is not None or bool(delay) or not variables.read("BAGUA_FUSION")
        self._layout = Layout(self.model, prescale_factor, postscale_factor)
        self.renumber(optimizer_number(group.process_set_id) if number is None else number)
        self.add(members, groups)
        algorithm.prepare(self.model)

    @property
    def buckets(self) -> Any:
        """Those of the gradients, which the model has."""
        return self.model.gradients

    @property
    def untouched(self) -> bool:
        """Whether no backward pass has made a gradient ready since they were last communicated and used."""
        return not (self.pending or self.synchronized or self.accumulating)

    @property
    def agreed(self) -> bool:
        """Whether the ranks have told each other their facts, since ranks came or went."""
        return self._agreed == runtime.changes

    @property
    def number(self) -> int:
        """That of its optimizer; another one after each init(), with which numbers begin anew: see _Numbers."""
        if self._numbered_in != runtime.inits and runtime.options is not None and not runtime.options.elastic:
            self.renumber(optimizer_number(self.group.process_set_id))
        return self._number

    def touched(self) -> None:
        """A backward pass has ended that touched it, on this rank or on others."""
        self.touched_at = next(_moments)

    def renumber(self, number: int) -> None:
        """Changes its optimizer's number, by which ranks match what it communicates. Not while anything is pending."""
        # Nothing of the members is in the name: ranks whose models differ shall hear it, not wait for each other.
        self._number, self._numbered_in = number, runtime.inits
        self._layout.rename(f"gradients.{number}")
        self.model.rename(f"weights.{number}")

    def add(self, members: Sequence[Member], groups: Any = None) -> None:
        """More gradients, numbered on from those before, in buckets of their own. Not while anything is pending.

        What has been communicated is then to be again, with the new ones; who knows better sets `synchronized`.
        """
        self._layout.add(members, groups)
        self._agreed = None
        self._begin_window()

    def reduce_added(self, first: int) -> None:
        """Reduces the gradients from `first` on in full precision: no hook has seen their first backward pass.

        Collective. Raises: HorovodInternalError: ranks disagreed, or one was lost.
        """
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
        """Changes the backward passes of a window; counting begins anew."""
        self.passes = self._window.passes_left = passes

    def reset(self) -> None:
        """Forgets what is pending: the next backward pass begins a new step. Operations in flight go on unobserved."""
        self._weight = None
        self._step_ends()
        self._begin_window()

    def _step_ends(self):
        self._observed = False      # the observer has heard that it begins
        self._begun = False         # the algorithm has heard of the step
        self._prepared = False      # before_step has been done
        self.model.window = 0
        self._cleared = False       # and its gradients have been zeroed

    def _begin_window(self):
        self.pending = False
        self.synchronized = False
        if not self.model.delay:
            self._clear_buckets()
        self._window = Window(len(self._layout.members), self.model.gradients, self.passes)
        self._source.discard()
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
        """The next window becomes a weighted average, in which this rank has that weight; collective.

        Raises:
            ValueError: the algorithm averages no gradients. A wrong weight is an error of the window, on all ranks.
            HorovodInternalError: ranks disagreed, or one was lost.
        """
        check_weighable(self.algorithm)
        if self._weight is not None:
            self._weight.wait()
        self._weight = Weight(weight, f"{self._layout.name}.weight", self.group)

    def gradient_ready(self, index: int, whole: bool = True) -> None:
        """A backward pass has accumulated gradient `index`.

        Args:
            whole: this pass adds nothing more to it. Else it travels when the window has ended.
        Raises:
            AssertionError: it was ready in the last pass of this window already, and may be on its way.
        """
        window = self._window
        if window.ready[index]:
            sentence = TOO_MANY_PASSES if whole else GROWS
            raise AssertionError(sentence.format(name=self._layout.members[index].name))
        if not self.gradients_come():
            return
        if self.model.timing is not None:
            self.model.timing.ready(index)
        last_pass = window.passes_left <= 1 and whole
        window.ready[index] = last_pass
        if self._agreed != runtime.changes:
            if self._ready is not None:
                self._ready.append(index)
            return
        if not self._overlaps:
            return
        if window.travels is None:
            self._begin()
        if last_pass and window.travels:
            self._place(index)

    def gradients_come(self) -> bool:
        """A backward pass has accumulated a gradient, if only one that is about to be added. False: accumulating."""
        if not self._observed:
            self._step_begins()
        self.synchronized = self._window.overflow_known = False
        self.pending = self.pending or not self.accumulating
        return not self.accumulating

    def pass_ended(self) -> bool:
        """A backward pass that has made gradients ready has ended. Returns whether the window has, too.

        For front ends with windows of several passes, or that do not know better when to call synchronize().
        """
        self.touched()
        if not self.pending or self.accumulating:
            return False
        self._window.passes_left = max(0, self._window.passes_left - 1)
        return self._window.passes_left == 0

    def _step_begins(self):
        if self.observer is not None:
            self.observer.step_begins()
        self._observed = True

    @_counted
    def _begin(self):
        """Communication begins: that of a window, and of the step if it is its first."""
        if not self._observed:      # this rank has no gradient
            self._step_begins()
        if self.model.delay and self.model.not_made:         # it was skipped
            self._step_ends()
        if self.model.may_be_scaled:
            self.model.communication_begins()
        self.model.continues = self.model.window > 0 and not self._cleared and self._source.holds_reduced()
        if self.model.delay and self.model.continues:
            raise ValueError(ADDED_TO_LATE)
        if self._weight is not None or self._source.factor != 1:
            self._weigh()
        if not self._begun:
            self.model.pending = {}
        travels = "gradients_travel" not in self._has or self.algorithm.gradients_travel(self.model)
        self._window.travels = travels
        if not self._begun and "backward_begins" in self._has:
            self.model.hook = "backward_begins"
            self.algorithm.backward_begins(self.model)
        self._begun = True
        self.model.hook = "communicate"
        if self.model.window and travels and not self.model.delay:
            self._layout.name_buckets(".again")

    def _weigh(self):
        weight, self._weight = self._weight, None
        try:
            self._source.factor = 1.0 if weight is None else weight.factor()
        except BaseException:
            self.reset()
            raise

    @_counted
    def _agree(self):
        """Learns which gradients any rank has sparse; the others are dense from then on, whatever comes.

        And the order of the gradients: buckets hold what becomes ready together, in the first backward pass.

        And whether all ranks are in the same step, with or without a state from before: a checkpoint may have been
        loaded by some only, and ranks of an elastic job come and go. If not, they go on from the latest step, all
        without.

        A rank that has joined says nothing: then it is done again in the next step, until all have taken part. So
        all ranks agree in the same step, and none waits for one that has agreed before.

        Raises:
            HorovodInternalError: on all ranks, that their gradients are for different variables.
        """
        model, layout = self.model, self._layout
        model.window = 0        # ranks that are new here know of no window before
        had_state = model.kinds_of_state()[0]
        model.settle()
        settled = self._ready is None or model.kinds_of_state()[1]
        agreed = agree(layout.name, self.group, layout.members, self._source,
                       layout.order(None if settled else self._ready), model,
                       {number - self.number for number in self.following})
        self.following = {number + self.number for number in agreed.following}
        for index, sparse_dim in agreed.sparse.items():
            self._set_sparse(index, sparse_dim)
        if agreed.differ or agreed.own_differs:
            model.step = agreed.step
            model.drop_state(shared=agreed.differ)
        if layout.arrange(agreed.order):
            self._window.unposted = list(self.buckets)
        self._ready = None
        if had_state and not model.kinds_of_state()[0]:
            self._note("the ranks have changed: what it keeps of its own", "begins anew")
        if agreed.complete:
            self._agreed = runtime.changes
            self.algorithm.agreed(model)
            self._resize()

    def _set_sparse(self, index, sparse_dim):
        if self._source.travels_alone(index, sparse_dim) and self._layout.bucket_of[index] is not None:
            if self.algorithm.dense_only or self.model.delay:
                name = self._layout.members[index].name
                what = "delay=1" if self.model.delay else type(self.algorithm).__name__
                raise ValueError(
                    f"the gradient of {name} is sparse, which {what} cannot "
                    "serve: pass sparse_as_dense=True to DistributedOptimizer"
                )
            self._note("sparse gradients", "are gathered")
            self._layout.remove(index)

    def _place(self, index):
        """Gives a complete gradient to its bucket, and posts the bucket when that was the last."""
        bucket = self._layout.bucket_of[index]
        if bucket is None:
            self._post_sparse(index)
        else:
            bucket.place(index, self._source.prepare(index))
        self._window.placed[index] = True
        if bucket is not None and bucket.missing == 0:
            self._post(bucket)

    @_counted
    def _post_sparse(self, index):
        name = f"{self._layout.name}.{self._layout.members[index].name}" + ".again" * (self.model.window > 0)
        self._window.post(len(self.buckets) + index, self._source.communicate(index, name))

    @_counted
    def _post(self, bucket):
        if bucket.members:
            if self.model.delay:
                self._exchange_for_late(bucket)
            self._counter.gradient_bytes += bucket.nbytes
            if "takes" not in self._has or self.algorithm.takes(bucket.dtype):
                operation = self.algorithm.communicate(bucket, self.group)
            else:
                self._note(f"buckets such as {bucket.name}", "go by gradient_allreduce for their dtype")
                operation = c_fp_s(bucket, self.group, average=self.algorithm.average)
            self._window.post(self.model.gradients.index(bucket), operation)
        self._window.unposted.remove(bucket)

    def _exchange_for_late(self, bucket):
        """Gives a bucket's gradients what has arrived of them; in the bucket is a copy of what they were."""
        views = bucket.views
        arrived = self.model.late.keep(str(self.buckets.index(bucket)), lambda: late.Late(views), shared=True,
                                       scaled=True, fits=lambda kept: kept.fits(views))
        indices = list(bucket.members)
        arrived.swap(views, lambda memory: self._source.hand_over(indices, memory))
        bucket.clear()
        for index, view in zip(bucket.members, arrived.views, strict=True):
            bucket.place(index, view)

    def _note(self, what, how):
        """Says on the first rank, once, what the chosen algorithm does not do."""
        if self.algorithm.relaxed and how not in self._noted:
            self._noted.add(how)
            if self.group.rank() == 0:
                warnings.warn(f"{type(self.algorithm).__name__}: {what} {how}", stacklevel=2)

    def _post_rest(self):
        """Places what no backward pass has made ready, and posts what is left."""
        if not self.agreed:
            self._agree()
        window = self._window
        if window.travels is None:
            self._begin()
        if not window.travels:
            return
        for index, placed in enumerate(window.placed):
            if not placed:
                self._place(index)
        for bucket in list(window.unposted):     # those whose posting failed during the backward pass
            self._post(bucket)

    def agree(self) -> None:
        """The ranks tell each other their facts, unless they have. Errors are raised by synchronize()."""
        if not self.agreed and not self.accumulating and self._window.failure is None:
            try:
                self.arrive()
                self._agree()
            except Exception as error:
                self._window.failure = error

    def post(self) -> None:
        """Posts what is missing, as zeros. Errors are raised by synchronize(), which is to follow."""
        window = self._window
        if self.synchronized or self.accumulating or window.failure is not None or window.sent:
            return
        try:
            if self._late is not None:
                self.arrive()
            self._post_rest()
            if self.model.delay:
                window.sent = True
                self._late = Late(window, self._account)
        except Exception as error:
            self._window.failure = error        # another one, after a reset()

    def arrive(self) -> None:
        """With delay=1: waits for what travels, which is state of the model then. Else, or if nothing does, nothing.

        What travelled when the job was shut down is lost; so it is on all ranks, and they begin anew with zeros.

        Raises:
            HorovodInternalError: ranks disagreed, or one was lost; what travelled is lost.
        """
        if self._late is None:
            return
        self._late.arrive()
        failure = self._wait(self._late)
        self._clear_buckets()
        lost = self._late.inits != runtime.inits
        self._late = None
        if failure is None and not lost:
            self.model.arrived()
            return
        self.model.late.drop(shared=True)
        if not lost and runtime.context is not None:
            raise failure

    @_counted
    def _wait(self, window):
        return window.wait(self._explained)

    def synchronize(self) -> None:
        """Posts what is missing and blocks until all gradients are reduced. Does nothing when they are already.

        Raises:
            RuntimeError: within no_sync().
            HorovodInternalError: ranks disagreed, or one was lost. ValueError: a gradient cannot travel. Gradients are
            unspecified then, nothing is pending, and unless a rank was lost the next step can go on.
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
            if not self.model.delay or failure is not None:
                failed = self._wait(self._window)
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
            self._exposed(started)
            if self.model.timing is not None:
                self.model.timing.waited(started)
        self.synchronized = True

    def _explained(self, error, number):
        """A disagreement about a bucket, in a sentence that names whose gradients it holds."""
        if getattr(error, "status", None) != native.ERR_MISMATCH or number >= len(self.buckets):
            return error
        bucket = self.buckets[number]
        names = listed([member.name for member in bucket.members.values()])
        explained = HorovodInternalError(f"{error} ({bucket.name} holds the gradients of {names}.)")
        explained.status = error.status
        return explained

    def changes_follow(self) -> None:
        """Gradients are about to be changed before the step: what was made of them as they are is not to be used."""
        if not self.model.scaled:
            self.model.scaled = True
            made = [self.model.pending.pop(bucket.name, None) for bucket in self.buckets]
            if any(entry is not None for entry in made):
                self.model.take_back()

    def agree_on_overflow(self, local: Any) -> bool:
        """Whether the gradients of any rank are not finite, where they do not travel and so differ; collective.

        All ranks must skip a step together: what comes after a step is communication. Unless that is asynchronous.

        Args:
            local: function without arguments: whether this rank's are not finite. Not called where gradients travel,
                nor again in the same step: then the answer is False.
        """
        if self._window.overflow_known or self.algorithm.asynchronous or self.algorithm.gradients_travel(self.model):
            return False
        self._window.overflow_known = True
        return bool(extremes([int(local())], f"{self._layout.name}.overflow", self.group)[0][0])

    def before_step(self) -> None:
        """Lets the algorithm write the weights, once a step: gradients are complete, the optimizer is about to step.

        Raises:
            HorovodInternalError: ranks disagreed, or one was lost.
        """
        if self._begun and not self._prepared:
            self._prepare()

    @_counted
    def _prepare(self):
        self._prepared = True
        self.model.step_begins()
        self.model.hook = "before_step"
        started = perf_counter_ns()
        try:
            if "before_step" in self._has:
                self.algorithm.before_step(self.model)
            if self.algorithm.shares_variance:
                variance.share(self.model, self.algorithm.full_step(self.model))
            if self.observer is not None:
                self.observer.weights_change()
        except BaseException:
            self.reset()
            raise
        finally:
            self._exposed(started)

    def step(self) -> Any:
        """Lets the algorithm update the weights, after before_step(). False: the optimizer is to do it."""
        self.before_step()
        try:
            return self.algorithm.replaces_step and self._step()
        finally:
            self.model.hook = None
            self._source.discard()

    @_counted
    def _step(self):
        self.model.hook = "step"
        return self.algorithm.step(self.model)

    @_counted
    def stepped(self) -> None:
        """The weights have been updated."""
        self.synchronized = False
        self.stepped_at = next(_moments)
        self._step_ends()
        if self.model.timing is not None:
            self.model.timing.stepped()
        started = perf_counter_ns()
        if "after_step" in self._has:
            self.model.hook = "after_step"
            self.algorithm.after_step(self.model)
        self.model.hook = None
        self.model.stepped()
        runtime.steps += 1
        self._counter.steps += 1
        self._exposed(started)
        self._resize()
        if self.observer is not None:
            self.observer.step_ended()

    def _resize(self):
        """Cuts the buckets to the size that the algorithm wants."""
        if "bucket_bytes" in self._has and not self.model.cut_by_user and self._layout.resize(
                self.algorithm.bucket_bytes(self.model)):
            self._window.unposted = list(self.buckets)

    def _exposed(self, started):
        """The caller has waited since `started`."""
        self._counter.exposed_ms += (perf_counter_ns() - started) / 1e6

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
        """The step, the buckets, and what of the state is equal on all ranks. Raises: see arrive()."""
        self.arrive()
        return self._state_dict(own=False)

    def _state_dict(self, own=True):
        # The state lies by buckets, and these are without the sparse gradients.
        sparse = {i: self._source.sparse_dim(i) for i, bucket in enumerate(self._layout.bucket_of) if bucket is None}
        return {"algorithm": type(self.algorithm).__name__, "state": self.model.state_dict(own), "sparse": sparse,
                "bucket_bytes": self._layout.limit}

    def agree_again(self) -> None:
        """The ranks tell each other their facts again, in the next step; to be called alike on all ranks."""
        self._agreed = None

    def adopt(self, shared: Any, place: Any) -> None:
        """Takes up the shared_state_dict() of another rank, and forgets what is pending; collective.

        What is of one rank only stays if the states of all ranks go with that, else none does.

        place: see load_state_dict().
        """
        mine = self.state_dict()
        state = with_own(shared["state"], mine["state"]) if mine else None
        self.reset()
        self.load_state_dict({**shared, "state": state or shared["state"]}, place)
        # Numbers may differ still: see share_numbers().
        if extremes([int(state is not None)], "optimizer_state.own", self.group)[0][1] == 0:
            self.model.drop_state(shared=False)

    def load_state_dict(self, state: Any, place: Any = lambda index: index) -> None:
        """Takes up a state_dict(); to be called alike on all ranks. Another algorithm's is passed over: see is_of().

        place: function of a gradient's index in the state: its index here.
        """
        if self.algorithm.relaxed or self.model.delay:      # others keep nothing, so ranks need not load alike
            self.agree_again()
        if self.model.delay:
            with suppress(HorovodInternalError):        # it is of the training that is left
                self.arrive()
            self.model.late.drop(shared=True)
        if is_of(state, self.algorithm, self.group):
            for index, sparse_dim in state["sparse"].items():
                self._set_sparse(place(index), sparse_dim)
            plan = [list(map(place, indices)) for indices, _ in state["state"]["gradients"]]
            if self._layout.restore(plan, state["bucket_bytes"]):
                self._window.unposted = list(self.buckets)
                self._ready = None
            self.model.load_state_dict(state["state"], place)
