"""The inside of DistributedOptimizer: gradient ready -> bucket full -> algorithm -> synchronize.

A front end numbers its gradients 0, 1, ..., calls gradient_ready() for each that the backward pass has accumulated, and
synchronize() before the optimizer reads them. Buckets are posted as they fill, in whatever order: ranks match them by
name. A gradient that is not there at synchronize() is supplied by the front end as zeros, and a window of accumulation
that is not complete goes as it is; so ranks may use different parameters, and every rank posts every bucket once
between two steps.

Which gradients are sparse is not known before the first backward pass, and then only to the ranks that used them. So
the first synchronize() begins with one small allreduce in which the ranks tell each other, and before it nothing is
posted: buckets have the same members everywhere, always.

Lives on the thread of the backward pass; no lock. Nothing here touches tensor data.
"""
import warnings
from contextlib import contextmanager
from time import perf_counter_ns

from bagua_hvd.common import basics, native
from bagua_hvd.common.buckets import Bucket, partition, partition_groups
from bagua_hvd.common.exceptions import HorovodInternalError
from bagua_hvd.common.facts import extremes
from bagua_hvd.common.model import Model
from bagua_hvd.primitives import c_fp_s

DIFFERENT_VARIABLES = "Ranks have gradients for different variables, {counts}; this rank has them for {names}"
_NAMES_SHOWN = 8
TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally. (Gradient of {name}.)"
)


class Gradients:
    """What a front end supplies to a Reducer: its gradients, weights and optimizer, by index."""

    def view(self, index):
        """The in-place TensorView of what travels for gradient `index`, zeros when there is no gradient."""
        raise NotImplementedError

    def fingerprint(self):
        """A number from 0 to 2**31 - 2 that differs, most likely, where gradients are for other variables."""
        return 0

    def sparse_dim(self, index):
        """Of how many leading dimensions gradient `index` holds some entries only; 0: dense, as far as is known."""
        return 0

    def travels_alone(self, index, sparse_dim):
        """Whether a gradient that some rank has sparse goes by communicate() on all of them, and in no bucket."""
        return False

    def communicate(self, index, name):
        """Begins the communication of a gradient that travels by itself; returns something with wait().

        name: what its operations are to be called, unique in this process.
        """
        raise NotImplementedError

    def finish(self):
        """All views of this step hold results: undo compression and copies."""

    def discard(self):
        """Forget this step's views; after finish(), or because something failed."""

    def weight(self, index):
        """The in-place TensorView of weight `index`, where it lies now."""
        raise NotImplementedError

    def weight_written(self, index):
        """weight(index) has new values: bring them to where the model has them, if that is elsewhere."""

    def adam(self):
        """The optimizer as an Adam (common/model.py), or a sentence that says why it is none that can be served."""
        return "this front end has no Adam to share"


class _Numbers:
    """Numbers the optimizers of a process set, from 0 after each init(): all its ranks name their operations alike.

    Each set has its own numbers, for ranks outside of it may have no such optimizer. In an elastic job the numbers go
    on after a reset, for the optimizers live on; see share_numbers().
    """

    def __init__(self):
        self.inits = 0
        self.next = {}

    def take(self, process_set=0):
        if self.inits != basics.runtime.inits and not basics.runtime.options.elastic:
            self.next = {}
        self.inits = basics.runtime.inits
        number = self.next.get(process_set, 0)
        self.next[process_set] = number + 1
        return number


_numbers = _Numbers()
optimizer_number = _numbers.take


def share_numbers(optimizers, broadcast):
    """Gives optimizers of all ranks the numbers that they have on rank 0, and those that are made later equal ones.

    Collective. For elastic jobs, where a rank that came later has made fewer optimizers than the others.

    Args:
        optimizers: what has `number` and `renumber(number)`, in the same order on all ranks.
        broadcast: function that returns rank 0's object.
    """
    numbers, _numbers.next = broadcast(([optimizer.number for optimizer in optimizers], _numbers.next))
    for optimizer, number in zip(optimizers, numbers, strict=True):
        optimizer.renumber(number)


class Reducer:
    """Communicates the gradients of one optimizer.

    Args:
        gradients: the front end's Gradients.
        members: list of Member: gradient i is members[i]; the same on all ranks, parameters in forward order.
        algorithm: an Algorithm. group: the ProcessSet, of which this rank is a member.
        passes: backward passes for each gradient before it travels.
        groups: None, or lists of indices that travel together.
        prescale_factor, postscale_factor: see Bucket.
        number: of its optimizer; None: the next one.
    Raises:
        ValueError: the algorithm cannot serve this model.
    Attributes:
        model: the Model that the algorithm sees. buckets: its Buckets of gradients.
        pending: gradients have been computed and not yet synchronized.
        synchronized: all gradients have been communicated since the last backward pass, and no step has used them.
        accumulating: backward passes add to the gradients and count for nothing else; see no_sync().
        number: of its optimizer; see renumber().
        synchronizations, exposed_ns: how often, and how long in all, synchronize() made the caller wait.
    """

    def __init__(self, gradients, members, algorithm, group, passes=1, groups=None, prescale_factor=1.0,
                 postscale_factor=1.0, number=None):
        self.algorithm = algorithm
        self.group = group
        self.synchronizations = 0
        self.exposed_ns = 0
        self.accumulating = False
        self._gradients = gradients
        self._passes = passes
        self._factors = (prescale_factor, postscale_factor)
        self._members = []
        self._bucket_of = []        # by index; None: it travels by itself
        self._grouped = False       # the user has said what travels together
        self._ready = []            # gradients as they became ready; None: the ranks have agreed on an order
        self._noted = set()
        self._agreed = None         # for which init() and how many members the ranks know each other's facts
        self.model = Model("weights", gradients, group)
        self.buckets = self.model.gradients
        self.renumber(optimizer_number(group.process_set_id) if number is None else number)
        self.add(members, groups)
        algorithm.prepare(self.model)

    def renumber(self, number):
        """Changes its optimizer's number, by which ranks match what it communicates. Not while anything is pending."""
        # Nothing of the members is in the name: ranks whose models differ shall hear it, not wait for each other.
        self.number = number
        self._name = f"gradients.{number}"
        for place, bucket in enumerate(self.buckets):
            bucket.name = f"{self._name}.{place}"
        self.model.rename(f"weights.{number}")

    def add(self, members, groups=None):
        """More gradients, numbered on from those before, in buckets of their own. Not while anything is pending."""
        first = len(self._members)
        self._members.extend(members)
        numbered = dict(enumerate(members, first))
        self._grouped = self._grouped or groups is not None
        self._bucket_of.extend([None] * len(members))
        self._add_buckets(partition(numbered) if groups is None else partition_groups(numbered, groups))
        self.model.add(numbered)
        self.reset()

    def _add_buckets(self, plan):
        for indices in plan:
            bucket = Bucket(
                f"{self._name}.{len(self.buckets)}", {index: self._members[index] for index in indices},
                *self._factors, model=self.model,
            )
            self.buckets.append(bucket)
            for index in indices:
                self._bucket_of[index] = bucket

    def set_passes(self, passes):
        """Changes the backward passes for each gradient; counting begins anew."""
        self._passes = passes
        self._passes_left = [passes] * len(self._members)

    def reset(self):
        """Forgets what is pending: the next backward pass begins a new step. Operations in flight go on unobserved."""
        self.pending = False
        self.synchronized = False
        self._settled = False       # whether the ranks have agreed on an overflow in this step
        self._begun = False
        self._travel = True
        self._passes_left = [self._passes] * len(self._members)
        self._placed = [False] * len(self._members)
        self._unposted = list(self.buckets)
        self._operations = {}       # by a number that is the same on all ranks
        for bucket in self.buckets:
            bucket.clear()
        self._gradients.discard()

    @contextmanager
    def no_sync(self):
        """Within it, gradients accumulate locally: nothing is posted, and no window of accumulation advances."""
        outer, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = outer

    def gradient_ready(self, index):
        """A backward pass has accumulated gradient `index`.

        Raises:
            AssertionError: it had been accumulated as often as agreed, and is on its way already.
        """
        if self._passes_left[index] == 0 or self._placed[index]:
            raise AssertionError(TOO_MANY_PASSES.format(name=self._members[index].name))
        self.synchronized = self._settled = False
        if self.accumulating:
            return
        self.pending = True
        self._passes_left[index] -= 1
        if self._agreed != self._agreement():
            if self._ready is not None:
                self._ready.append(index)
            return
        self._begin()
        if self._passes_left[index] == 0 and self._travel:
            self._place(index)

    def _begin(self):
        """A step's communication begins, once."""
        if not self._begun:
            self._begun = True
            self.model.pending = {}
            self._travel = self.algorithm.gradients_travel(self.model)
            self.algorithm.backward_begins(self.model)

    def _agreement(self):
        # A new init() may bring ranks that know nothing; new members are known to none.
        # And a rank in join() has missed steps.
        return basics.runtime.inits, basics.runtime.joins, len(self._members)

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
        model, size, count = self.model, self.group.size(), len(self._members)
        had_state = model.kinds_of_state()[0]
        model.settle()
        present = [int(rank == self.group.rank()) for rank in range(size)]
        sparse = [self._gradients.sparse_dim(index) for index in range(count)]
        places = {index: place for place, index in enumerate(self._order())}
        try:
            facts = extremes([*present, *sparse, *(places[index] for index in range(count)), model.step,
                              *map(int, model.kinds_of_state()), self._gradients.fingerprint()],
                             f"{self._name}.facts", self.group)
        except HorovodInternalError as error:
            if error.status != native.ERR_MISMATCH:
                raise
            # There are more facts on some ranks than on others, and all ranks have heard it.
            raise self._different_variables() from error
        largest, smallest = facts.pop()
        if largest != smallest:
            raise self._different_variables()
        for index, (largest, _) in enumerate(facts[size:size + count]):
            if largest:
                self._set_sparse(index, largest)
        places, (step, own, kept) = facts[size + count:-3], facts[-3:]
        differ = any(largest != smallest for largest, smallest in (*places, step, kept))
        if differ or own[0] != own[1]:
            model.step = step[0]
            model.drop_state(shared=differ)
        self._arrange(sorted(range(count), key=lambda index: (places[index][0], index)))
        if had_state and not model.kinds_of_state()[0]:
            self._note("the ranks have changed: what it keeps of its own", "begins anew")
        if all(largest for largest, _ in facts[:size]):
            self._agreed = self._agreement()

    def _different_variables(self):
        """The error that says so, with what all ranks tell each other for it; collective."""
        mine = [len(self._members) if rank == self.group.rank() else 0 for rank in range(self.group.size())]
        counts = [largest for largest, _ in extremes(mine, f"{self._name}.counts", self.group)]
        known = [(count, rank) for count, rank in zip(counts, self.group.ranks, strict=True) if count > 0]
        (fewest, one), (most, other) = min(known), max(known)
        names = [member.name for member in self._members]
        if len(names) > _NAMES_SHOWN:
            names[_NAMES_SHOWN:] = [f"{len(names) - _NAMES_SHOWN} more"]
        error = HorovodInternalError(DIFFERENT_VARIABLES.format(
            counts=f"{most} on each" if fewest == most else f"{fewest} on rank {one} and {most} on rank {other}",
            names=", ".join(names),
        ))
        error.status = native.ERR_MISMATCH
        return error

    def _order(self):
        """All gradients, as the buckets are to hold them: as they became ready first, unless it is settled."""
        settled = self._ready is None or self.model.kinds_of_state()[1]
        first = dict.fromkeys(self._bucketed() if settled else self._ready)
        return [*first, *(index for index in reversed(range(len(self._members))) if index not in first)]

    def _bucketed(self):
        return [index for bucket in self.buckets for index in bucket.members]

    def _arrange(self, order):
        """Cuts the buckets anew if the order is another. Nothing may be pending; the user's groups stay as they are."""
        order = [index for index in order if self._bucket_of[index] is not None]
        if order != self._bucketed() and not self._grouped:
            self._cut(partition({index: self._members[index] for index in reversed(order)}))
        self._ready = None

    def _cut(self, plan):
        self.buckets.clear()
        self._add_buckets(plan)
        self._unposted = list(self.buckets)

    def _set_sparse(self, index, sparse_dim):
        bucket = self._bucket_of[index]
        if self._gradients.travels_alone(index, sparse_dim) and bucket is not None:
            if self.algorithm.dense_only:
                raise ValueError(
                    f"the gradient of {self._members[index].name} is sparse, which {type(self.algorithm).__name__} "
                    "cannot serve: pass sparse_as_dense=True to DistributedOptimizer"
                )
            self._note("sparse gradients", "are gathered")
            bucket.remove(index)
            self._bucket_of[index] = None

    def _place(self, index):
        """Gives a complete gradient to its bucket, and posts the bucket when that was the last."""
        bucket = self._bucket_of[index]
        if bucket is None:
            name = f"{self._name}.{self._members[index].name}"
            self._operations[len(self.buckets) + index] = self._gradients.communicate(index, name)
        else:
            bucket.place(index, self._gradients.view(index))
        self._placed[index] = True
        if bucket is not None and bucket.missing == 0:
            self._post(bucket)

    def _post(self, bucket):
        if bucket.members:
            if self.algorithm.takes(bucket.dtype):
                operation = self.algorithm.communicate(bucket, self.group)
            else:
                self._note(f"buckets such as {bucket.name}", "go by gradient_allreduce for their dtype")
                operation = c_fp_s(bucket, self.group, average=self.algorithm.average)
            self._operations[self.buckets.index(bucket)] = operation
        self._unposted.remove(bucket)

    def _note(self, what, how):
        """Says on the first rank, once, what the chosen algorithm does not do."""
        if self.algorithm.relaxed and how not in self._noted:
            self._noted.add(how)
            if self.group.rank() == 0:
                warnings.warn(f"{type(self.algorithm).__name__}: {what} {how}", stacklevel=2)

    def _post_rest(self):
        """Places what no backward pass has made ready, and posts what is left."""
        if self._agreed != self._agreement():
            self._agree()
        self._begin()
        if not self._travel:
            return
        for index, placed in enumerate(self._placed):
            if not placed:
                self._place(index)
        for bucket in list(self._unposted):     # those whose posting failed during the backward pass
            self._post(bucket)

    def synchronize(self):
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
        failure = None
        try:
            try:
                self._post_rest()
            except Exception as error:
                failure = error
            # In the same order everywhere: an operation's wait() may post another one, and wait for that.
            for _, operation in sorted(self._operations.items()):
                try:
                    operation.wait()
                except Exception as error:
                    # The others are waited for first: their memory is in the core's hands.
                    failure = failure or error
            if failure is None:
                self._gradients.finish()
                self.algorithm.before_step(self.model)
        finally:
            self.reset()
            self.synchronizations += 1
            self.exposed_ns += perf_counter_ns() - started
        if failure is not None:
            raise failure
        self.synchronized = True

    def agree_on_overflow(self, local):
        """Whether the gradients of any rank are not finite, where they do not travel and so differ; collective.

        All ranks must skip a step together: what comes after a step is communication. Unless that is asynchronous.

        Args:
            local: function without arguments: whether this rank's are not finite. Not called where gradients travel,
                nor again in the same step: then the answer is False.
        """
        if self._settled or self.algorithm.asynchronous or self.algorithm.gradients_travel(self.model):
            return False
        self._settled = True
        return bool(extremes([int(local())], f"{self._name}.overflow", self.group)[0][0])

    def step(self):
        """Lets the algorithm update the weights. False: the optimizer is to do it."""
        try:
            return self.algorithm.step(self.model)
        finally:
            self._gradients.discard()

    def stepped(self):
        """The weights have been updated."""
        self.synchronized = False
        started = perf_counter_ns()
        self.algorithm.after_step(self.model)
        self.model.step += 1
        basics.runtime.steps += 1
        self.exposed_ns += perf_counter_ns() - started

    def cleared(self):
        """The gradients have been zeroed: they are no longer those that were communicated."""
        self.synchronized = False

    def state_dict(self):
        """The algorithm's state on this rank, {} when it has none."""
        state = self.model.state_dict()
        if not any(state["states"]) and not self.algorithm.counts_steps:
            return {}
        # The state lies by buckets, and these are without the sparse gradients.
        sparse = {i: self._gradients.sparse_dim(i) for i, bucket in enumerate(self._bucket_of) if bucket is None}
        return {"algorithm": type(self.algorithm).__name__, "state": state, "sparse": sparse,
                "buckets": [list(bucket.members) for bucket in self.buckets]}

    def load_state_dict(self, state):
        """Takes up a state_dict(); to be called alike on all ranks. One of another algorithm is passed over."""
        self._agreed = None
        if state.get("algorithm") == type(self.algorithm).__name__:
            for index, sparse_dim in state["sparse"].items():
                self._set_sparse(index, sparse_dim)
            self._restore_buckets(state["buckets"])
            self.model.load_state_dict(state["state"])

    def _restore_buckets(self, plan):
        """Cuts the buckets as they were, where the members are those, and the user has not grouped them."""
        if not self._grouped and sorted(self._bucketed()) == sorted(index for indices in plan for index in indices):
            self._cut(plan)
            self._ready = None
