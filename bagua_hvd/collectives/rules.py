"""The collectives, common to all front ends: checks of arguments, full names, handles and results.

Each function checks its arguments, posts one native operation and returns a Pending. Each form is then one line in a
front end: blocking is `.wait()`, asynchronous is `.handle()`, a number for poll() and synchronize().

Handle numbers count from 1 over all kinds, forms and threads, and restart at init(). Unnamed operations are numbered
within their process set, so its ranks must issue them in the same order, regardless of other sets. An operation that
was not posted takes no number. After a join(), all ranks continue with the same number.
"""
import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bagua_hvd.collectives.arguments import check_name
from bagua_hvd.collectives.objects import extremes
from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.native import TensorView
from bagua_hvd.core.util import get_average_backwards_compatibility_fun
from bagua_hvd.job import basics
from bagua_hvd.job.basics import Adasum, Average, Sum, runtime
from bagua_hvd.job.process_sets import ProcessSet, context_and_id, global_process_set

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(basics)


class Pending:
    """An operation in flight, and its output: a tensor, a tuple of them, or None.

    finish: makes the output from the ended operation, such as of memory that the core has allocated.
    """

    __slots__ = ("operation", "output", "number", "_finish")

    def __init__(self, operation: Any, output: Any = None, finish: Callable[[Any], Any] | None = None) -> None:
        self.operation = operation
        self.output = output
        self.number = next(runtime.handle_numbers)
        self._finish = finish

    def wait(self) -> Any:
        """Blocks until the operation has ended and returns its output; raises if it failed."""
        self.operation.wait()
        if self._finish is not None:
            self.output, self._finish = self._finish(self.operation), None
        return self.output

    def handle(self) -> Any:
        """Registers the operation for poll() and synchronize(); returns its handle."""
        runtime.handles[self.number] = self
        return self.number


def poll(handle: int) -> bool:
    """Whether the operation has ended, so that synchronize() will not block.

    Args:
        handle: the result of an asynchronous collective.
    Raises:
        ValueError: no such handle, or synchronized already.
    """
    pending = runtime.handles.get(handle)
    if pending is None:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return pending.operation.done()


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous collective and returns the result of its blocking form, once.

    Args:
        handle: the result of an asynchronous collective.
    Returns:
        A tensor, a tuple of tensors for grouped forms, (output, received splits) for alltoall; None for an unknown
        handle and for one synchronized before.
    Raises:
        HorovodInternalError: ranks disagreed, a rank was lost, or the job was shut down.
    """
    pending = runtime.handles.get(handle)
    if pending is None:
        return None
    try:
        output = pending.wait()
    except (HorovodInternalError, ValueError):
        runtime.handles.pop(handle, None)
        raise
    # Only now, so that an interrupted wait can be repeated.
    runtime.handles.pop(handle, None)
    return output


def _post(context, kind, word, name, id, views, **arguments):
    """Posts an operation, without a name under the next number. `word` is that of the kind, `id` that of the set."""
    check_name(name)
    if name:
        return context.post(kind, f"{word}.{name}", views, process_set=id, **arguments)
    number = next(runtime.unnamed[id])
    try:
        return context.post(kind, f"{word}.noname.{number}", views, process_set=id, **arguments)
    except (ValueError, TypeError, OverflowError):      # nothing was posted
        runtime.unnamed[id] = itertools.count(number)
        raise


def _check_reducible(frontend, tensor, view):
    if view.dtype not in frontend.reducible:
        raise ValueError(f"Tensor type {frontend.type_name(tensor)} is not supported. Convert it, to int32 for "
                         "instance.")


def check_op(op: int, id: int, context: Any) -> None:
    """Raises ValueError or NotImplementedError if `op` is wrong or unsupported on this set. context None: unknown."""
    if op not in (0, 1, 2, 3, 4, 5):
        raise ValueError(f"op={op!r}: expected one of hvd.Average, Sum, Adasum, Min, Max and Product.")
    if op == Adasum and context is not None:
        check_adasum(id, context.process_set_size(0))


def check_adasum(process_set_id: int, size: int) -> None:
    """Raises NotImplementedError where Adasum is not supported."""
    if process_set_id != 0:
        raise NotImplementedError("Adasum does not support non-global process sets.")
    if size & (size - 1):
        raise NotImplementedError(f"Running Adasum with {size} ranks is not supported: it needs a power of 2.")


def listed(tensors: Any) -> list[Any]:
    """The tensors of a grouped collective as a list. TypeError: they are a dict."""
    if isinstance(tensors, Mapping):
        raise TypeError("A grouped collective takes a list of tensors, not a dict, whose order may differ between "
                        "ranks: pass its values in the order of its sorted keys.")
    return list(tensors)


def _check_group(tensors):
    tensors = listed(tensors)
    if not tensors:
        raise ValueError("A grouped collective needs at least one tensor.")
    return tensors


def allreduce(frontend: Any, tensor: Any, in_place: bool = False, name: str | None = None, op: int = Average,
              prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
              blocking: bool = False) -> Pending:
    """Reduces the tensor over all ranks of the process set.

    The result is postscale_factor * op(prescale_factor * tensor on each rank). Average is Sum with a further factor
    1 / (size of the set). Integers are scaled in float64 and truncated towards zero.

    Args:
        tensor: contiguous, of a dtype in the front end's `reducible`; same dtype and shape on all ranks.
        average: deprecated: True for op=Average, False for op=Sum.
        name: ranks match operations by it; None: by the order of unnamed operations.
        op: Average (default), Sum, Min, Max, Product, or Adasum.
        prescale_factor, postscale_factor: multiply before and after the reduction; equal on all ranks.
        process_set: the ranks taking part.
    Raises:
        ValueError (tensorflow: InvalidArgumentError): wrong dtype, not contiguous, a name still in flight, or this rank
            is not in the set. Nothing was sent.
        NotImplementedError: Adasum over a subset, or over a number of ranks that is not a power of 2.
        HorovodInternalError (tensorflow: FailedPreconditionError, UnknownError): ranks disagree about the operation
            (the job continues), or a rank was lost.
    """
    context, id = context_and_id(process_set)
    if op != Average and op != Sum:
        check_op(op, id, context)
    output = tensor if in_place else frontend.allocate_like(tensor)
    view = frontend.view(tensor, output)
    if view[3] not in frontend.reducible:
        _check_reducible(frontend, tensor, view)
    if type(name) is str and name and "\0" not in name:      # inline: this call is the one whose microseconds count
        operation = context.post(
            native.ALLREDUCE, f"allreduce.{name}", (view,), process_set=id, op=op,
            prescale_factor=prescale_factor, postscale_factor=postscale_factor, blocking=blocking,
        )
        return Pending(operation, output)
    operation = _post(
        context, native.ALLREDUCE, "allreduce", name, id, (view,), op=op,
        prescale_factor=prescale_factor, postscale_factor=postscale_factor, blocking=blocking,
    )
    return Pending(operation, output)


def grouped_allreduce(frontend: Any, tensors: Any, in_place: bool = False, name: str | None = None, op: int = Average,
                      prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set, blocking: bool = False) -> Pending:
    """Reduces several tensors as one operation: all of them or none. Shapes and dtypes may differ between members.

    Args:
        tensors: a list of tensors that allreduce supports.
        average, name, op, prescale_factor, postscale_factor, process_set: as for allreduce.
    Returns:
        A tuple in the order of `tensors`.
    Raises:
        As allreduce; ValueError also for an empty list.
    """
    context, id = context_and_id(process_set)
    check_op(op, id, context)
    tensors = _check_group(tensors)
    outputs = tuple(tensors if in_place else map(frontend.allocate_like, tensors))
    views = list(map(frontend.view, tensors, outputs))
    for tensor, view in zip(tensors, views, strict=True):
        _check_reducible(frontend, tensor, view)
    operation = _post(
        context, native.ALLREDUCE, "grouped_allreduce", name, id, views, op=op,
        prescale_factor=prescale_factor, postscale_factor=postscale_factor, blocking=blocking,
    )
    return Pending(operation, outputs)


def _wrap(frontend, operation, index, view, like):
    rows = operation.device_rows(index) if view.placement is not None else None
    if rows is not None:
        tensor = frontend.allocate_like(like, rows)
        operation.copy_result(index, frontend.view(tensor, tensor).dst)
        return tensor
    nbytes, dim0, owner = operation.result(index)
    tensor = frontend.wrap_result(nbytes, (dim0, *view.shape[1:]), view.dtype, owner)
    if view.dtype == native.UINT8:
        tensor = frontend.typed(tensor, like)
    return tensor if view.placement is None else view.placement.adopt(tensor)


def results(frontend: Any, operation: Any, views: Sequence[TensorView], like: Any) -> Any:
    """The results that the core has allocated for an ended operation, as tensors like those that were posted."""
    return tuple(_wrap(frontend, operation, index, view, tensor)
                 for index, (view, tensor) in enumerate(zip(views, like, strict=True)))


def allgather(frontend: Any, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set,
              blocking: bool = False) -> Pending:
    """Concatenates the ranks' tensors along their first dimension, in rank order.

    Args:
        tensor: at least 1-D, contiguous; first dimensions may differ and be 0, the others and the dtype agree.
        name, process_set: as for allreduce.
    Returns:
        Shape (sum of first dimensions, ...), of the same dtype.
    Raises:
        As allreduce; HorovodInternalError also for a 0-d tensor.
    """
    return _gather(frontend, "allgather", (tensor,), name, process_set, blocking, lambda outputs: outputs[0])


def grouped_allgather(frontend: Any, tensors: Any, name: str | None = None,
                      process_set: ProcessSet = global_process_set, blocking: bool = False) -> Pending:
    """Gathers several tensors as one operation: all of them or none.

    Args:
        tensors: a list of tensors that allgather supports.
        name, process_set: as for allreduce.
    Returns:
        A tuple in the order of `tensors`.
    Raises:
        As allgather; ValueError also for an empty list.
    """
    return _gather(frontend, "grouped_allgather", tensors, name, process_set, blocking, lambda outputs: outputs)


def _view_of_rows(frontend, tensor):
    """frontend.view(tensor). Bytes have one more dimension; a 0-d tensor stays 0-d, so that all ranks refuse it."""
    view = frontend.view(tensor)
    return view._replace(shape=()) if view.dtype == native.UINT8 and not frontend.shape(tensor) else view


def _gather(frontend, word, tensors, name, process_set, blocking, output):
    """output: function of the tuple of results."""
    context, id = context_and_id(process_set)
    tensors = _check_group(tensors)
    views = [_view_of_rows(frontend, tensor) for tensor in tensors]
    operation = _post(context, native.ALLGATHER, word, name, id, views, blocking=blocking)
    return Pending(operation, finish=lambda ended: output(results(frontend, ended, views, tensors)))


def broadcast(frontend: Any, tensor: Any, root_rank: int, in_place: bool = False, name: str | None = None,
              process_set: ProcessSet = global_process_set, blocking: bool = False) -> Pending:
    """Copies the root's tensor to all ranks of the process set.

    Args:
        tensor: contiguous; same dtype and shape on all ranks; its values matter on the root only.
        root_rank: global rank of the root, also with a process set.
        name, process_set: as for allreduce.
    Raises:
        As allreduce; ValueError also when the root is not in the set.
    """
    context, id = context_and_id(process_set)
    output = tensor if in_place else frontend.allocate_like(tensor)
    view = frontend.view(tensor, output)
    operation = _post(context, native.BROADCAST, "broadcast", name, id, (view,), root_rank=root_rank,
                      blocking=blocking)
    return Pending(operation, output)


def _check_splits(splits, shape, size):
    if len(splits) != size:
        raise ValueError(f"alltoall got {len(splits)} splits for {size} ranks: expected one for each rank.")
    if any(split < 0 for split in splits):
        raise ValueError(f"alltoall got a negative split in {splits}.")
    if shape and sum(splits) > shape[0]:
        raise ValueError(
            f"Sum of splits entries is greater than the first dimension of tensor: {splits} for {shape[0]} rows."
        )


def alltoall(frontend: Any, tensor: Any, splits: Any = None, name: str | None = None,
             process_set: ProcessSet = global_process_set, blocking: bool = False,
             wants_received: bool = True) -> Pending:
    """Sends slice i of the tensor to rank i of the process set and concatenates the received slices in rank order.

    Args:
        tensor: at least 1-D, contiguous; same dtype and trailing shape on all ranks.
        splits: list, or 1-D int32 tensor, with the number of rows for each rank; the sum is at most the first dimension
            (rows past the sum are not sent). None: the same number for each.
        name, process_set: as for allreduce.
    Returns:
        The output, shape (sum of received splits, ...), and the received splits, int32, on the device of `splits`; the
        blocking form without `splits` returns the output alone.
    Raises:
        As allreduce; ValueError also for splits of the wrong type, length or sum, and without splits for a first
        dimension that the ranks cannot share evenly.
    """
    context, id = context_and_id(process_set)
    view = _view_of_rows(frontend, tensor)
    size = context.process_set_size(id)
    rows = None
    if splits is not None:
        rows = frontend.splits(splits)
        if context.process_set_rank(id) >= 0:
            _check_splits(rows, view.shape, size)
    operation = _post(context, native.ALLTOALL, "alltoall", name, id, (view,), splits=rows, blocking=blocking,
                      received=wants_received)

    def wrap(ended):
        # Making this tensor takes as long as sending 4 KiB: only for callers that read it.
        received = frontend.int32_tensor(ended.received_splits(0, size), like=splits) if wants_received else None
        return _wrap(frontend, ended, 0, view, tensor), received

    return Pending(operation, finish=wrap)


def _scatter_output(frontend, tensor, context, id):
    """The view of a reducescatter and its output: the first (rows % size) ranks receive one row more."""
    shape = frontend.shape(tensor)
    if not shape:
        raise ValueError("Reducescatter needs a tensor of at least one dimension, but got a 0-d one.")
    rank = context.process_set_rank(id)
    if rank < 0:
        return frontend.view(tensor), None      # the core refuses it
    rows, longer = divmod(shape[0], context.process_set_size(id))
    output = frontend.allocate_like(tensor, rows + (rank < longer))
    return frontend.view(tensor, output), output


SCATTER_OPS_ONLY = "Reducescatter currently only supports AVERAGE and SUM."


def reducescatter(frontend: Any, tensor: Any, name: str | None = None, op: int | None = Average,
                  process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0, blocking: bool = False) -> Any:
    """Reduces the tensor over the process set and gives each rank its slice of the first dimension, in rank order.

    Args:
        tensor: at least 1-D, contiguous; same dtype and shape on all ranks, dtypes as for allreduce.
        op: Average (default) or Sum.
        name, process_set, prescale_factor, postscale_factor: as for allreduce.
    Returns:
        Shape (d, ...): d is the first dimension divided by the size of the set, one more on the first
        (first dimension % size) ranks.
    Raises:
        As allreduce; ValueError also for a 0-d tensor; HorovodInternalError for another op.
    """
    pending = _scatter(frontend, "reducescatter", (tensor,), name, op, process_set, prescale_factor, postscale_factor,
                       blocking)
    [pending.output] = pending.output
    return pending


def grouped_reducescatter(frontend: Any, tensors: Any, name: str | None = None, op: int | None = Average,
                          process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0, blocking: bool = False) -> Pending:
    """Reduce-scatters several tensors as one operation: all of them or none.

    Args:
        tensors: a list of tensors that reducescatter supports.
        op: Average (default) or Sum.
        name, process_set, prescale_factor, postscale_factor: as for allreduce.
    Returns:
        A tuple in the order of `tensors`.
    Raises:
        As reducescatter; ValueError also for an empty list.
    """
    return _scatter(frontend, "grouped_reducescatter", tensors, name, op, process_set, prescale_factor,
                    postscale_factor, blocking)


def _scatter(frontend, word, tensors, name, op, process_set, prescale_factor, postscale_factor, blocking):
    context, id = context_and_id(process_set)
    if op != Average and op != Sum:
        raise HorovodInternalError(SCATTER_OPS_ONLY)
    tensors = _check_group(tensors)
    views, outputs = zip(*(_scatter_output(frontend, tensor, context, id) for tensor in tensors), strict=True)
    for tensor, view in zip(tensors, views, strict=True):
        _check_reducible(frontend, tensor, view)
    operation = _post(
        context, native.REDUCESCATTER, word, name, id, views, op=op,
        prescale_factor=prescale_factor, postscale_factor=postscale_factor, blocking=blocking,
    )
    return Pending(operation, outputs)


def barrier(process_set: ProcessSet = global_process_set) -> Pending:
    """Blocks until all ranks of the process set have called it.

    Args:
        process_set: the ranks that wait for each other.
    Raises:
        ValueError: this rank is not in the set. HorovodInternalError: a rank was lost, or has joined.
    """
    context, id = context_and_id(process_set)
    return Pending(context.post(native.BARRIER, "barrier", process_set=id, blocking=True))


def join() -> Pending:
    """Blocks until all ranks of the job have joined; until then this rank takes part in allreduces with zeros.

    Averages still divide by the full number of ranks. Other collectives fail on the ranks that call them meanwhile.
    Afterwards unnamed operations match again, regardless of how many each rank has issued before.

    A rank that waits here makes no steps, so the ranks' weights differ afterwards. Broadcast parameters and optimizer
    state from the returned rank before training continues or a checkpoint is saved.

    Returns:
        The rank that joined last, the same on all ranks.
    Raises:
        HorovodInternalError: a rank was lost, or the job was shut down.
    """
    context, _ = context_and_id(global_process_set)
    for sent in list(runtime.in_flight):        # else a joined rank would run their last phases
        sent.wait_all()
    runtime.changes += 1
    return Pending(context.post(native.JOIN, "join", blocking=True), finish=_after_join)


def _after_join(operation):
    """The rank that joined last."""
    # Ranks have issued different numbers of operations: from here on, all count from the same one again.
    mine = max(map(next, runtime.unnamed.values()), default=1)
    [(largest, _)] = extremes([mine], "join.numbers", global_process_set)
    runtime.unnamed = collections.defaultdict(lambda: itertools.count(largest))
    return operation.value
