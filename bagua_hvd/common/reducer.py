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
from bagua_hvd.primitives import c_fp_s

TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally. (Gradient of {name}.)"
)


class Gradients:
    """What a front end supplies to a Reducer: its gradients, by index."""

    def view(self, index):
        """The in-place TensorView of what travels for gradient `index`, zeros when there is no gradient."""
        raise NotImplementedError

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


class _Numbers:
    """Numbers the optimizers of a process set, from 0 after each init(): all its ranks name their operations alike.

    Each set has its own numbers, for ranks outside of it may have no such optimizer.
    """

    def __init__(self):
        self.inits = 0
        self.next = {}

    def take(self, process_set=0):
        if self.inits != basics.runtime.inits:
            self.inits, self.next = basics.runtime.inits, {}
        number = self.next.get(process_set, 0)
        self.next[process_set] = number + 1
        return number


_numbers = _Numbers()
optimizer_number = _numbers.take


class Reducer:
    """Communicates the gradients of one optimizer.

    Args:
        gradients: the front end's Gradients.
        members: list of Member: gradient i is members[i]; the same on all ranks, parameters in forward order.
        algorithm: an Algorithm that communicates gradients. group: the ProcessSet, of which this rank is a member.
        passes: backward passes for each gradient before it travels.
        groups: None, or lists of indices that travel together.
        prescale_factor, postscale_factor: see Bucket.
    Attributes:
        buckets: all Buckets.
        pending: gradients have been computed and not yet synchronized.
        synchronized: all gradients have been communicated since the last backward pass, and no step has used them.
        accumulating: backward passes add to the gradients and count for nothing else; see no_sync().
        synchronizations, exposed_ns: how often, and how long in all, synchronize() made the caller wait.
    """

    def __init__(self, gradients, members, algorithm, group, passes=1, groups=None, prescale_factor=1.0,
                 postscale_factor=1.0):
        self.algorithm = algorithm
        self.group = group
        self.buckets = []
        self.synchronizations = 0
        self.exposed_ns = 0
        self.accumulating = False
        self._gradients = gradients
        self._passes = passes
        self._factors = (prescale_factor, postscale_factor)
        # Nothing of the members is in the name: ranks whose models differ shall hear it, not wait for each other.
        self._name = f"gradients.{optimizer_number(group.process_set_id)}"
        self._members = []
        self._bucket_of = []        # by index; None: it travels by itself
        self._noted = set()
        self._agreed = None         # for which init() and how many members the ranks know each other's sparse ones
        self.add(members, groups)

    def add(self, members, groups=None):
        """More gradients, numbered on from those before, in buckets of their own. Not while anything is pending."""
        first = len(self._members)
        self._members.extend(members)
        numbered = dict(enumerate(members, first))
        plan = partition(numbered) if groups is None else partition_groups(numbered, groups)
        self._bucket_of.extend([None] * len(members))
        for indices in plan:
            bucket = Bucket(
                f"{self._name}.{len(self.buckets)}", {index: numbered[index] for index in indices}, *self._factors
            )
            self.buckets.append(bucket)
            for index in indices:
                self._bucket_of[index] = bucket
        self.reset()

    def set_passes(self, passes):
        """Changes the backward passes for each gradient; counting begins anew."""
        self._passes = passes
        self._passes_left = [passes] * len(self._members)

    def reset(self):
        """Forgets what is pending: the next backward pass begins a new step. Operations in flight go on unobserved."""
        self.pending = False
        self.synchronized = False
        self._passes_left = [self._passes] * len(self._members)
        self._placed = [False] * len(self._members)
        self._unposted = list(self.buckets)
        self._operations = []
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
        self.synchronized = False
        if self.accumulating:
            return
        self.pending = True
        self._passes_left[index] -= 1
        if self._passes_left[index] == 0 and self._agreed == self._agreement():
            self._place(index)

    def _agreement(self):
        # A new init() may bring ranks that know nothing; new members are known to none.
        return basics.runtime.inits, len(self._members)

    def _agree(self):
        """Learns which gradients any rank has sparse; the others are dense from then on, whatever comes.

        A rank that has joined says nothing: then it is done again in the next step, until all have taken part. So
        all ranks agree in the same step, and none waits for one that has agreed before.
        """
        size, count = self.group.size(), len(self._members)
        facts = native.ffi.new("int32_t[]", size + count)
        facts[self.group.rank()] = 1
        for index in range(count):
            facts[size + index] = self._gradients.sparse_dim(index)
        address = int(native.ffi.cast("uintptr_t", facts))
        view = native.TensorView(address, address, (size + count,), native.INT32, facts)
        basics.context().post(
            native.ALLREDUCE, f"{self._name}.sparse", [view], process_set=self.group.process_set_id, op=native.OP_MAX,
            blocking=True,
        ).wait()
        for index in range(count):
            if facts[size + index]:
                self._set_sparse(index, facts[size + index])
        if all(facts[0:size]):
            self._agreed = self._agreement()

    def _set_sparse(self, index, sparse_dim):
        bucket = self._bucket_of[index]
        if self._gradients.travels_alone(index, sparse_dim) and bucket is not None:
            self._note("sparse gradients", "are gathered")
            bucket.remove(index)
            self._bucket_of[index] = None

    def _place(self, index):
        """Gives a complete gradient to its bucket, and posts the bucket when that was the last."""
        bucket = self._bucket_of[index]
        if bucket is None:
            name = f"{self._name}.{self._members[index].name}"
            self._operations.append(self._gradients.communicate(index, name))
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
            self._operations.append(operation)
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
            for operation in self._operations:
                try:
                    operation.wait()
                except Exception as error:
                    # The others are waited for first: their memory is in the core's hands.
                    failure = failure or error
            if failure is None:
                self._gradients.finish()
        finally:
            self.reset()
            self.synchronizations += 1
            self.exposed_ns += perf_counter_ns() - started
        if failure is not None:
            raise failure
        self.algorithm.after_backward(self.buckets, self.group)
        self.synchronized = True

    def stepped(self):
        """The optimizer has used the gradients."""
        self.synchronized = False
        self.algorithm.after_step(self.buckets, self.group)

    def cleared(self):
        """The gradients have been zeroed: they are no longer those that were communicated."""
        self.synchronized = False

    def state_dict(self):
        """The algorithm's state, {} when it has none."""
        state = self.algorithm.state_dict(self.buckets)
        if not state:
            return {}
        # The state lies by buckets, and these are without the sparse gradients.
        sparse = {i: self._gradients.sparse_dim(i) for i, bucket in enumerate(self._bucket_of) if bucket is None}
        return {"algorithm": type(self.algorithm).__name__, "state": state, "sparse": sparse}

    def load_state_dict(self, state):
        """Takes up a state_dict() of the same rank; one of another algorithm is passed over."""
        if state.get("algorithm") == type(self.algorithm).__name__:
            for index, sparse_dim in state["sparse"].items():
                self._set_sparse(index, sparse_dim)
            self.algorithm.load_state_dict(state["state"], self.buckets, self.group)
